"""The doctor's table, its meeting of ranks, and what ranks check together (test_doctor_machine.py: alone)."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.bits import flip_bit
from tests.unit.by_hand import together
from tests.unit.doctor_cases import APART, MIB, NODE0, OPTIONS, PAIR, both, levels, the
from uccl_ep_train import Buffer, EpConfig, LocalBootstrap
from uccl_ep_train.tools.doctor import __main__ as doctor
from uccl_ep_train.tools.doctor import dispatch, network
from uccl_ep_train.tools.doctor.findings import FIX, OK, WARNING, Finding, Group, Report
from uccl_ep_train.tools.doctor.meeting import Identity, Presence, identity

pytestmark = pytest.mark.usefixtures("clean_environment")


# ------------------------------------------------------------------------------------------- the table


def test_the_table_says_who_what_and_what_to_do() -> None:
    findings = (
        Finding("gpus", OK, "there", ranks=(0, 1)),
        Finding("memory", FIX, "too small", "make it larger\nor smaller", (1,)),
        Finding("clocks", WARNING, "late"),
    )
    report = Report(APART, findings, {"gpus": {0: {"count": 1}}})
    assert report.text() == (
        "uccl_ep_train.doctor: 2 ranks on 2 hosts\n"
        "ok       gpus           there\n"
        "FIX      memory         rank 1 on node1: too small\n"
        "                        -> make it larger\n"
        "                           or smaller\n"
        "warning  clocks         late\n"
        "1 thing has to be fixed; 1 warning"
    )
    assert report.exit_status == 1
    told = json.loads(report.json())
    assert told["exit_status"] == 1 and told["findings"][1]["ranks"] == [1]
    assert told["facts"] == {"gpus": {"0": {"count": 1}}}


def test_warnings_alone_do_not_stop_a_job() -> None:
    report = Report(APART, (Finding("clocks", WARNING, "late"),))
    assert report.exit_status == 0
    assert report.text().endswith("nothing has to be fixed; 1 warning")


# ---------------------------------------------------------------------------------- sockets and clocks


def test_a_clock_that_is_off_is_a_warning_beyond_what_could_be_measured() -> None:
    def judged(offset_s: float, error_s: float = 0.001) -> list[Finding]:
        return network.judge_clocks(APART, {0: {}, 1: {"offset_s": offset_s, "error_s": error_s}}, OPTIONS)

    assert levels(judged(0.002)) == levels(judged(0.5, 0.6)) == [OK]
    finding = the(judged(-0.25), WARNING)
    assert "250 ms behind that of rank 0's host" in finding.text and finding.ranks == (1,)


def test_hosts_that_gloo_does_not_connect_are_told_which_interface_to_name() -> None:
    facts = {"ran": True, "error": "", "interface": "", "address": "127.0.1.1", "interfaces": ["eth0", "ib0"]}
    assert levels(network.judge_sockets(APART, both(facts), OPTIONS)) == [OK]
    finding = the(network.judge_sockets(APART, both(facts, error="timed out", ran=False), OPTIONS))
    assert "this host's own name has the address 127.0.1.1" in finding.text
    assert "GLOO_SOCKET_IFNAME" in finding.remedy and "eth0, ib0" in finding.remedy


# -------------------------------------------------------------------------------------------- dispatch

CONFIG: dict[str, Any] = {
    "num_experts": 6, "hidden": dispatch.HIDDEN, "backend": "host", "budget_bytes": 64 * MIB,
    "arrival_timeout_s": 30.0, "progress_timeout_s": 10.0,
}  # fmt: skip


def rehearsed(num_ranks: int, **settings: Any) -> dict[int, dict[str, Any]]:
    config = EpConfig(**{**CONFIG, "num_experts": 2 * num_ranks, **settings})
    ranks = LocalBootstrap.create(num_ranks, timeout_s=30)
    results = together([lambda entry=entry: dispatch.rehearse(entry, config) for entry in ranks])
    return dict(enumerate(results))


@pytest.mark.parametrize("domain_size", [1, 2, 3], ids=["3 domains", "2 + 1", "1 domain"])
def test_a_right_dispatch_is_right_in_any_layout(domain_size: int) -> None:
    facts = rehearsed(3, domain_size=domain_size)
    found = dispatch.judge(Group((NODE0,) * 3), facts, OPTIONS)
    assert levels(found) == [OK] and "equal to the oracle to the last bit" in found[0].text


def with_flipped_rows(result: Any) -> Any:
    result.rows.copy_(flip_bit(result.rows))
    return result


@pytest.mark.parametrize("what", ["rows at the experts", "sums at the source"])
def test_one_wrong_bit_on_one_rank_is_found(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    real = Buffer.dispatch if what.startswith("rows") else Buffer.combine

    def wrong(buffer: Buffer, *given: Any, **named: Any) -> Any:
        result = real(buffer, *given, **named)
        if buffer.rank == 1:
            return flip_bit(result) if isinstance(result, torch.Tensor) else with_flipped_rows(result)
        return result

    monkeypatch.setattr(Buffer, real.__name__, wrong)
    facts = rehearsed(2, domain_size=1)
    finding = the(dispatch.judge(PAIR, facts, OPTIONS))
    assert 1 in finding.ranks and f"{what}: 1 of " in facts[1]["wrong"][0]
    assert "do not train on this" in finding.remedy


# --------------------------------------------------------------------------------------------- meeting


def test_who_we_are_comes_from_torchrun_or_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    assert identity() == Identity()
    # sbatch's own shell is no step of several tasks.
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert identity().size == 1
    for name, value in {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    me = identity()
    assert (me.rank, me.size, me.local_rank, me.launcher) == (3, 4, 1, "srun")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (identity().rank, identity().size) == (1, 2)


def test_a_process_is_known_to_be_gone_only_where_its_number_means_the_same() -> None:
    own = Presence.here()
    assert not own.has_ended() and not own.has_stopped()
    assert Presence(own.place, 2**22 + 1, own.pid_space).has_ended()
    assert not Presence(own.place, 2**22 + 1, "another host").has_ended()


def port(text: str) -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": text}


@pytest.mark.parametrize(
    ("arguments", "variables", "text"),
    [
        (["--hidden", "100"], {}, "allowed is"),
        (["--timeout", "0"], {}, "allowed is"),
        (["--wrong"], {}, "unrecognized arguments"),
        ([], {"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR or MASTER_PORT is not set"),
        ([], {"RANK": "2", "WORLD_SIZE": "2"}, "RANK = 2 with WORLD_SIZE = 2: allowed is 0 .. 1"),
        ([], {"RANK": "first", "WORLD_SIZE": "2"}, "RANK = 'first': allowed is an integer"),
        ([], {"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE = 0: allowed is 1 .. 65536"),
        ([], {"RANK": "0", "WORLD_SIZE": "1000000"}, "WORLD_SIZE = 1000000: allowed is 1 .. 65536"),
        ([], {"RANK": "0", "WORLD_SIZE": "2"} | port("-1"), "MASTER_PORT = -1: allowed is 1 .. 65535"),
        ([], {"RANK": "0", "WORLD_SIZE": "2"} | port("99999"), "MASTER_PORT = 99999: allowed is 1 .. 65535"),
        ([], {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}, "MASTER_ADDR or MASTER_PORT is not set"),
    ],
)
def test_wrong_usage_is_status_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    variables: dict[str, str],
    text: str,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    try:
        status = doctor.main(arguments)
    except SystemExit as stop:
        status = int(stop.code or 0)
    assert status == 2 and text in capsys.readouterr().err


def test_a_store_that_nobody_serves_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import signal

    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert doctor.main(["--timeout", "1"]) == 1
        monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
        assert doctor.main(["--timeout", "1"]) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    printed = capsys.readouterr().out
    assert "the store at 127.0.0.1:9 (127.0.0.1) cannot be reached" in printed
    assert "the name in MASTER_ADDR, no-such-host.invalid, has no address here" in printed
