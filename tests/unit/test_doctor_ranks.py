"""The doctor as real processes: it ends within its deadline, names the rank at fault, and all ranks agree."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from uccl_ep_train import EpConfig
from uccl_ep_train.core.native import probe_transports

ROOT = Path(__file__).resolve().parents[2]
RANK = Path(__file__).with_name("doctor_rank.py")
LIMIT_S = 110
TIMEOUT_S = 8
"""Of a check. Importing torch on busy cores takes seconds, but is not in it."""
TWO_DOMAINS = {"UCCL_EP_DOMAIN_SIZE": "1"}


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("UCCL_", "NCCL_"))}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | changes


def torchrun(*program: str, ranks: int = 2, **changes: str) -> tuple[int, str]:
    """Exit status, and what was printed on both streams."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    done = subprocess.run(
        [*command, *program], env=environment(**changes), text=True, timeout=LIMIT_S, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout


def faulty(what: str, at: str, rank: int, **changes: str) -> tuple[int, str]:
    return torchrun(str(RANK), what, at, str(rank), f"--timeout={TIMEOUT_S}", **changes)


def row(text: str, check: str, level: str) -> str:
    """The line of the table; AssertionError if there is not exactly one."""
    rows = [line for line in text.splitlines() if re.match(rf"{level} +{check} ", line)]
    assert len(rows) == 1, text
    return rows[0]


@pytest.mark.parametrize(
    "settings",
    [pytest.param({}, marks=pytest.mark.slow, id="one domain"), pytest.param(TWO_DOMAINS, id="two")],
)
def test_all_is_well_on_two_ranks(settings: dict[str, str]) -> None:
    status, text = torchrun("-m", "uccl_ep_train.doctor", "--json", **settings)
    assert status == 0, text
    report: dict[str, Any] = json.loads(text[text.index("{\n") : text.rindex("}") + 1])
    assert report["exit_status"] == 0 and len(report["ranks"]) == 2
    levels = {finding["check"]: finding["level"] for finding in report["findings"]}
    # Cores are few here, and tests that were killed leave segments.
    assert {check for check, level in levels.items() if level == "warning"} <= {"limits", "leftovers"}
    assert levels["dispatch"] == levels["sockets"] == levels["registration"] == "ok"
    for seen in report["facts"]["dispatch"].values():
        assert seen["wrong"] == [] and (seen["wire_bytes"] > 0) == bool(settings)


def test_alone_it_checks_this_machine() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "uccl_ep_train.doctor"], env=environment(UCCL_EP_TRANSPROT="verbs"),
        text=True, capture_output=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    line = row(done.stdout, "environment", "warning")
    assert "unknown environment variable UCCL_EP_TRANSPROT" in line
    assert "did you mean UCCL_EP_TRANSPORT?" in line
    assert done.stdout.splitlines()[-1].startswith("nothing has to be fixed; ")


@pytest.mark.fault
@pytest.mark.parametrize(
    ("what", "at", "rank"),
    [
        ("die", "dispatch", 1),
        pytest.param("die", "gpus", 1, marks=pytest.mark.slow),
        pytest.param("die", "sockets", 0, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_is_named_with_what_it_was_doing(what: str, at: str, rank: int) -> None:
    """torchrun then ends the others: rank 0, or the lowest that is left, still speaks."""
    status, text = faulty(what, at, rank)
    assert status == 1
    line = row(text, "ranks", "FIX")
    assert re.search(rf"rank {rank} has ended \(process \d+ on .+\); it was last seen at check '{at}'", line)


@pytest.mark.fault
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_check_that_never_returns_is_a_finding_of_its_rank(rank: int) -> None:
    status, text = faulty("sleep", "nics", rank)
    assert status == 1
    assert re.search(rf"rank {rank} on .+: did not end within {TIMEOUT_S} s", row(text, "nics", "FIX"))
    assert "not done, because of what is above: sockets, clocks, transport" in row(
        text, "the rest", "warning"
    )


@pytest.mark.fault
def test_a_rank_that_is_stopped_is_named_within_the_deadline() -> None:
    started = time.monotonic()
    processes = by_hand("stop", "transport", "1", f"--timeout={TIMEOUT_S}")
    try:
        text, _ = processes[0].communicate(timeout=LIMIT_S)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert processes[0].returncode == 1
    assert time.monotonic() - started < 12 * TIMEOUT_S
    line = row(text, "ranks", "FIX")
    assert "rank 1 has not answered" in line and "its process is stopped" in line
    assert "it was last seen at check 'transport'" in line


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize(("what", "said"), [("die", "has ended"), ("stop", "has not answered for ")])
def test_without_rank_0_who_holds_the_store_another_rank_speaks(what: str, said: str) -> None:
    processes = by_hand(what, "transport", "0", f"--timeout={TIMEOUT_S}")
    try:
        text, _ = processes[1].communicate(timeout=LIMIT_S)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert processes[0].returncode == -signal.SIGKILL and processes[1].returncode == 1
    assert f"rank 0 {said}" in row(text, "ranks", "FIX")


def by_hand(*arguments: str) -> list[subprocess.Popen[str]]:
    """Two ranks without a launcher that would end the others, nor hold the store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        subprocess.Popen(
            [sys.executable, str(RANK), *arguments],
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **meet),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]


def test_a_rank_of_another_version_is_told_apart() -> None:
    status, text = faulty("older", "versions", 1)
    assert status == 1
    assert "ranks differ in the version of uccl_ep_train: 0.1.0 (rank 0); 0.0.9 (rank 1)" in row(
        text, "versions", "FIX"
    )


@pytest.mark.slow
def test_a_check_that_fails_itself_is_a_finding_and_the_others_go_on() -> None:
    status, text = faulty("raise", "limits", 1)
    assert status == 1
    assert re.search(r"rank 1 on .+: ZeroDivisionError: ", row(text, "limits", "FIX"))
    assert "equal to the oracle" in row(text, "dispatch", "ok")


@pytest.mark.slow
def test_a_transport_that_cannot_work_is_a_finding_on_all_ranks() -> None:
    probes = {
        name: usable for name, usable, *_ in probe_transports(EpConfig(num_experts=8, hidden=256), ["verbs"])
    }
    if probes.get("verbs"):
        pytest.skip("this machine has an RDMA NIC")
    status, text = torchrun("-m", "uccl_ep_train.doctor", UCCL_EP_TRANSPORT="verbs")
    assert status == 1
    line = row(text, "transport", "FIX")
    assert "transport = 'verbs'" in line and "has no RDMA NIC" in line
    assert "no transport was chosen" in row(text, "dispatch", "warning")


def test_loading_libfabric_leaves_the_programs_signals_alone() -> None:
    """Debian's takes SIGTERM and SIGINT when it is loaded, and ends the process: trainers save on them."""
    program = """
import os, signal
from uccl_ep_train import EpConfig
from uccl_ep_train.core.native import probe_transports
heard = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: heard.append(number))
print(probe_transports(EpConfig(num_experts=8, hidden=256), ["ofi"]))
for number in (signal.SIGTERM, signal.SIGINT):
    os.kill(os.getpid(), number)
print("heard", *map(int, heard))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), text=True, capture_output=True, timeout=LIMIT_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "heard 15 2" in done.stdout, done.stdout + done.stderr
