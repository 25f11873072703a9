"""One rank of a doctor whose check `AT` is broken on one rank: what tests start by torchrun.

python doctor_rank.py WHAT AT RANK [arguments of the doctor]
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from uccl_ep_train.tools.doctor import __main__ as doctor
from uccl_ep_train.tools.doctor.checks import STAGES
from uccl_ep_train.tools.doctor.session import Check, Here


def _older(facts: Any) -> Any:
    return {**facts, "package": "0.0.9"}


FAULTS: dict[str, Callable[[Here, Check], Any]] = {
    "die": lambda here, check: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda here, check: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda here, check: time.sleep(600),
    "raise": lambda here, check: 1 / 0,
    "older": lambda here, check: _older(check.look(here)),
}


def broken(check: Check, what: str, at: str, rank: int) -> Check:
    def look(here: Here) -> Any:
        return FAULTS[what](here, check) if here.me.rank == rank else check.look(here)

    return replace(check, look=look) if check.name == at else check


if __name__ == "__main__":
    what, at, rank, *arguments = sys.argv[1:]
    doctor.STAGES = tuple(tuple(broken(check, what, at, int(rank)) for check in stage) for stage in STAGES)
    sys.exit(doctor.main(arguments))
