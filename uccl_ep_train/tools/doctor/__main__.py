"""Checks this machine, or all ranks of a job that is about to start, and says what to fix.

    python -m uccl_ep_train.doctor                             # this machine
    torchrun <as the job> -m uccl_ep_train.doctor              # every rank, and all together

Rank 0 prints one table. Exit status: 0, nothing to fix; 1, something to fix; 2, wrong usage. It is the
same on all ranks, so `doctor && train` does the same on all hosts.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import torch.distributed as dist

from uccl_ep_train.common.command_line import run, seconds, whole
from uccl_ep_train.common.limits import start_thread
from uccl_ep_train.group.transport import Place
from uccl_ep_train.settings.checks import HIDDEN_UNIT, MAX_EXPERTS, MAX_HIDDEN, MAX_RANKS
from uccl_ep_train.tools.doctor.checks import STAGES
from uccl_ep_train.tools.doctor.findings import FIX, Finding, Group, Report
from uccl_ep_train.tools.doctor.meeting import (
    GRACE_S,
    Identity,
    LostError,
    Meeting,
    UsageError,
    identity,
    open_store,
    unreachable,
)
from uccl_ep_train.tools.doctor.session import Here, Options, Session, lost

USAGE = 2
_INTERRUPTED = 130
_MOST_TIMEOUT_S = 1e6


class Stopped(BaseException):
    """The launcher ends this process, as torchrun does when another rank has ended."""


def parse(arguments: Sequence[str] | None = None) -> tuple[Options, bool]:
    """What to check, and whether to print JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m uccl_ep_train.doctor",
        description=(__doc__ or "").partition("\n\n")[0],
        epilog="settings are those of the environment: python -m uccl_ep_train.env",
    )
    parser.add_argument(
        "--timeout",
        type=seconds(_MOST_TIMEOUT_S),
        default=60.0,
        metavar="S",
        help="of each check, seconds (60)",
    )
    hidden = whole(HIDDEN_UNIT, MAX_HIDDEN, multiple=HIDDEN_UNIT)
    parser.add_argument("--hidden", type=hidden, default=7168, help="of the job's model, elements (7168)")
    parser.add_argument(
        "--experts", type=whole(1, MAX_EXPERTS), default=256, help="of the job's expert-parallel group (256)"
    )
    parser.add_argument(
        "--group-size",
        type=whole(1, MAX_RANKS),
        default=64,
        help="ranks of such a group, consecutive ones; all if fewer (64)",
    )
    parser.add_argument("--json", action="store_true", help="for machines: findings and what they rest on")
    given = parser.parse_args(arguments)
    return Options(given.timeout, given.hidden, given.experts, given.group_size), given.json


def show(report: Report, as_json: bool) -> None:
    print(report.json() if as_json else report.text(), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    options, as_json = parse(arguments)
    # Warnings about the environment are findings here.
    warnings.filterwarnings("ignore", module=r"uccl_ep_train\.")
    try:
        me = identity()
    except UsageError as error:
        print(f"uccl_ep_train.doctor: {error}", file=sys.stderr)
        return USAGE
    signal.signal(signal.SIGTERM, _stop)
    try:
        store = open_store(me, 2 * options.timeout_s) if me.size > 1 else None
    except Exception as error:  # whatever torch raises, by version
        text, remedy = unreachable(me, error)
        finding = Finding("store", FIX, f"rank {me.rank}: {text}", remedy)
        show(Report(Group((Place.here(),)), (finding,)), as_json)
        return 1
    session = Session(Here(Meeting(me, store, options.timeout_s), options), STAGES)
    if store is not None:
        start_thread(
            threading.Thread(target=_watch, args=(session, me, as_json), name="the watch", daemon=True)
        )
    status = _run(session, me, as_json)
    if session.hung:
        _end_now(status)
    return status


def _run(session: Session, me: Identity, as_json: bool) -> int:
    def show_once(report: Report) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as happens when others exit with an error
        show(report, as_json)

    try:
        status = session.run(show_once)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        session.here.meeting.leave()
        return status
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Stopped:
        _speak(session, me, "the launcher stopped this run", as_json, without_0=False)
    except (LostError, dist.DistError) as error:
        _speak(session, me, lost(error), as_json, without_0=True)
    session.hung = True  # a thread may be in the middle of something
    return 1


def _speak(session: Session, me: Identity, by: str, as_json: bool, *, without_0: bool) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the report has arrived
    report = session.stopped(by, lambda: open_store(me, 5.0), without_0=without_0)
    if report is not None:
        show(report, as_json)


def _watch(session: Session, me: Identity, as_json: bool) -> None:
    """Ends this process where the store never answers: no call to it has a deadline of its own."""
    meeting = session.here.meeting
    store = meeting.store
    while store.waited_s() < meeting.timeout_s + GRACE_S:
        time.sleep(0.2)
    by = meeting.silence(0, meeting.timeout_s + GRACE_S)
    meeting.store = None  # no rank may ask it again
    report = session.stopped(by, _no_store, without_0=True)
    if report is not None:
        show(report, as_json)
    _end_now(1)


def _no_store() -> NoReturn:
    raise LostError("the store does not answer")


def _stop(*_: Any) -> NoReturn:
    raise Stopped


def _end_now(status: int) -> NoReturn:
    """Without the interpreter's clean-up, which would wait for what a thread is stuck in."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(run(main))
