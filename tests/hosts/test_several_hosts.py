"""Ranks on several hosts, namespaces of Linux: results, the doctor, a cut link, a host that is gone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipes.measure.metrics import read_metrics
from tests.hosts.exchange import DEADLINE_S, RANKS_PER_HOST
from tests.machine import lacks_tcp

ROOT = Path(__file__).resolve().parents[2]
NO_HOSTS = 77
NUM_RANKS = 2 * RANKS_PER_HOST
TORCHRUN = (
    f"{sys.executable} -m torch.distributed.run --nnodes=$NNODES --node_rank=$NODE_RANK "
    f"--nproc_per_node={RANKS_PER_HOST} --master_addr=$MASTER_ADDR --master_port=29500 -m "
)

pytestmark = pytest.mark.skipif(bool(lacks_tcp()), reason=lacks_tcp())


def on_two_hosts(*command: str, timeout_s: float = 90) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "scripts" / "several_hosts.sh")
    done = subprocess.run(
        [script, *command], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if done.returncode == NO_HOSTS:
        pytest.skip(done.stderr.splitlines()[-1])
    return done


def reports(said: str) -> list[dict[str, Any]]:
    lines = (line.partition(": ")[2] for line in said.splitlines())
    return [json.loads(line) for line in lines if line.startswith("{")]


def of_kind(told: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    return sorted((entry for entry in told if key in entry), key=lambda entry: entry["rank"])


def check_compared(found: list[dict[str, Any]]) -> None:
    assert [entry["rank"] for entry in found] == list(range(NUM_RANKS))
    for entry in found:
        assert entry["differences"] == [] and entry["control"]
        assert (entry["domains"], entry["transport"]) == ([0, 0, 1, 1], "ofi")
        assert entry["bytes_shipped"] > 0


def test_hosts_have_names_networks_and_memory_of_their_own() -> None:
    done = on_two_hosts(
        "bash", "-c",
        "touch /dev/shm/$(hostname); sleep 0.2; echo $(ls /dev/shm) $(cat /proc/sys/kernel/random/boot_id)",
    )  # fmt: skip
    own = sorted(line.split() for line in done.stdout.splitlines())
    assert [line[:2] for line in own] == [["node0:", "node0"], ["node1:", "node1"]]
    assert own[0][2] != own[1][2]


@pytest.mark.parametrize(("options", "status"), [((), 2), (("--hosts", "0", "true"), 2), (("false",), 1)])
def test_exit_codes_of_the_script(options: tuple[str, ...], status: int) -> None:
    assert on_two_hosts(*options).returncode == status


@pytest.mark.fault
def test_a_cut_link_is_an_error_on_both_sides_and_they_go_on_when_it_is_mended() -> None:
    done = on_two_hosts(sys.executable, "-m", "tests.hosts.exchange", "cut")
    told = reports(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    struck = of_kind(told, "struck")[0]["at"]
    raised = of_kind(told, "raised")
    assert [entry["rank"] for entry in raised] == list(range(NUM_RANKS))
    for entry in raised:
        assert DEADLINE_S / 4 < entry["at"] - struck < DEADLINE_S + 2, entry
        # The host's ranks share one error, which names a rank of the other host.
        assert entry["peer"] // RANKS_PER_HOST != entry["rank"] // RANKS_PER_HOST, entry
    compared = of_kind(told, "differences")
    check_compared([entry for entry in compared if entry["at"] < struck])
    check_compared([entry for entry in compared if entry["at"] > struck])


@pytest.mark.fault
def test_a_host_that_is_gone_is_an_error_on_the_other() -> None:
    done = on_two_hosts(sys.executable, "-m", "tests.hosts.exchange", "vanish")
    told = reports(done.stdout)
    struck = of_kind(told, "struck")[0]["at"]
    raised = of_kind(told, "raised")
    assert [entry["rank"] for entry in raised] == [0, 1], done.stdout + done.stderr
    for entry in raised:
        assert 0 <= entry["at"] - struck < DEADLINE_S + 2, entry
        assert entry["peer"] in (2, 3), entry
    assert [entry["rank"] for entry in of_kind(told, "closed")] == [0, 1]


def test_the_doctor_says_of_two_hosts_that_nothing_has_to_be_fixed() -> None:
    done = on_two_hosts("bash", "-c", TORCHRUN + "uccl_ep_train.doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    for line in (
        "uccl_ep_train.doctor: 4 ranks on 2 hosts",
        "ok       sockets        the store and gloo connect 2 hosts",
        "4 ranks in 2 domain(s): {0, 1}, {2, 3}",
        "equal to the oracle to the last bit (2 domains over ofi)",
    ):
        assert line in done.stdout, done.stdout


@pytest.mark.megatron
@pytest.mark.slow
def test_a_recipe_has_the_same_losses_on_two_hosts_as_on_one(tmp_path: Path) -> None:
    options = "recipes.launch --recipe tiny_host --device cpu --steps 6 --run-dir "
    done = on_two_hosts("bash", "-c", TORCHRUN + options + str(tmp_path / "two"))
    assert "rank 3 to domain 0" in done.stdout, done.stdout + done.stderr
    command = [sys.executable, "-m", *options.split(), str(tmp_path / "one")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=90)
    two, one = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("two", "one"))
    assert [(m.step, m.train_loss, m.val_loss) for m in two] == [
        (m.step, m.train_loss, m.val_loss) for m in one
    ]
    assert len(two) == 6
