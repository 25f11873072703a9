"""What the doctor says of the faults of one machine: each is made, or put into what a rank has seen."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.unit.doctor_cases import APART, MIB, NODE0, OPTIONS, PAIR, alone, both, levels, the
from uccl_ep_train import memory_plan
from uccl_ep_train.common import limits as common_limits
from uccl_ep_train.tools.doctor import environment, gpus, layout, limits, memory, versions
from uccl_ep_train.tools.doctor.findings import FIX, OK, WARNING, Group

pytestmark = pytest.mark.usefixtures("clean_environment")


# ---------------------------------------------------------------------------------------------- layout

RANK = {
    "launcher": "torchrun", "local_rank": 0, "visible": "", "num_gpus": 0, "gpu": -1, "gpu_id": "",
    "may_share": False,
}  # fmt: skip
WITH_GPU = {**RANK, "num_gpus": 2, "gpu": 0, "gpu_id": "GPU-a"}


def test_two_ranks_that_use_one_gpu_are_named_and_ray_is_thought_of() -> None:
    finding = the(layout.judge(PAIR, both(WITH_GPU), OPTIONS))
    assert finding.ranks == (0, 1)
    assert finding.text.startswith(
        "they use one GPU, GPU-a (LOCAL_RANK 0, 0; CUDA_VISIBLE_DEVICES is not set)"
    )
    assert "LOCAL_RANK is 0 everywhere" in finding.remedy


def test_two_ranks_that_may_use_one_gpu_are_told_that_they_take_turns() -> None:
    allowed = {**WITH_GPU, "may_share": True}
    finding = the(layout.judge(PAIR, both(allowed, local_rank=2), OPTIONS), WARNING)
    assert "one GPU, GPU-a" in finding.text and "take turns" in finding.remedy
    # Only where all ranks were told so.
    assert levels(layout.judge(PAIR, both(allowed, may_share=False), OPTIONS)) == [FIX]


def test_each_rank_shown_one_gpu_of_its_own_is_fine_though_local_rank_is_0_everywhere() -> None:
    """As Ray's actors are."""
    own = {**WITH_GPU, "num_gpus": 1, "visible": "0"}
    assert levels(layout.judge(PAIR, both(own, gpu_id="GPU-b", visible="1"), OPTIONS)) == [OK]


def test_equal_gpus_of_two_hosts_are_two() -> None:
    assert levels(layout.judge(APART, both(WITH_GPU), OPTIONS)) == [OK]


def test_a_local_rank_beyond_the_gpus_is_refused() -> None:
    finding = the(layout.judge(APART, both(WITH_GPU, local_rank=2), OPTIONS))
    assert finding.ranks == (1,) and "LOCAL_RANK is 2 and there are 2 GPUs" in finding.text


def test_equal_local_ranks_on_one_host_are_a_warning_without_gpus() -> None:
    assert levels(layout.judge(PAIR, both(RANK), OPTIONS)) == [WARNING]
    assert levels(layout.judge(PAIR, both(RANK, local_rank=1), OPTIONS)) == [OK]


# -------------------------------------------------------------------------------------------- versions


def test_versions_that_differ_are_named_with_their_ranks() -> None:
    here = versions.look(alone())
    assert not here["native"]
    assert FIX not in levels(versions.judge(PAIR, both(here), OPTIONS))
    for name, value in (
        ("torch", "1.0"),
        ("megatron", "0.1"),
        ("with_cuda", "perhaps"),
    ):
        finding = the(versions.judge(PAIR, both(here, **{name: value}), OPTIONS))
        assert f"{value} (rank 1)" in finding.text and finding.ranks == (1,)
    assert the(versions.judge(PAIR, both(here, digest="0"), OPTIONS), WARNING).ranks == (1,)


def test_a_missing_extension_is_the_first_thing_to_mend() -> None:
    here = versions.look(alone())
    finding = the(versions.judge(PAIR, both(here, native="the extension cannot be imported"), OPTIONS))
    assert finding.ranks == (1,)


# ---------------------------------------------------------------------------------------------- limits

ROOMY: dict[str, Any] = {
    "locked_bytes": -1,
    "files": 65536,
    "processes": -1,
    "cores": list(range(16)),
    "proxies": 1,
    "budget_bytes": 512 * MIB,
    "has_nic": True,
    "memory_left_bytes": -1,
    "tasks_left": -1,
    "quota": -1.0,
}


@pytest.mark.parametrize(
    ("changes", "level", "text", "remedy"),
    [
        ({"locked_bytes": 64 << 10}, FIX, "locked memory is limited to 0 MiB", "ulimit -l unlimited"),
        ({"files": 512}, WARNING, "may open 512 files", "ulimit -n"),
        ({"tasks_left": 50}, WARNING, "cgroup (pids.max) leaves 50 threads", "--pids-limit"),
        ({"processes": 20}, WARNING, "ulimit -u leaves 20 threads", "ulimit -u"),
        ({"cores": [3]}, WARNING, "1 ranks share 1 cores", "--cpus-per-task"),
        ({"quota": 1.5}, WARNING, "1 ranks share 1 cores", "resources.limits.cpu"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_limit_that_is_too_low_is_said(changes: dict[str, Any], level: str, text: str, remedy: str) -> None:
    assert levels(limits.judge(APART, both(ROOMY), OPTIONS)) == [OK]
    finding = the(limits.judge(APART, both(ROOMY, **changes), OPTIONS), level)
    assert text in finding.text and remedy in finding.remedy and finding.ranks == (1,)


def test_locked_memory_matters_where_a_nic_carries_rows() -> None:
    little = {**ROOMY, "locked_bytes": 64 << 10}
    assert levels(limits.judge(PAIR, both(little), OPTIONS)) == [WARNING]
    assert levels(limits.judge(APART, both({**little, "has_nic": False}), OPTIONS)) == [OK]


def test_ranks_of_one_host_share_its_cores() -> None:
    four = {**ROOMY, "cores": [0, 1, 2]}
    assert levels(limits.judge(PAIR, both(four), OPTIONS)) == [WARNING]
    assert levels(limits.judge(PAIR, both(four, cores=[4, 5, 6]), OPTIONS)) == [OK]


def test_the_tightest_cgroup_above_us_counts(tmp_path: Path) -> None:
    """Version 2, then the same in version 1."""
    job = tmp_path / "job"
    for path, text in {
        job / "step/memory.max": "max",
        job / "step/memory.current": "7",
        job / "memory.max": "1000",
        job / "memory.current": "400",
        job / "pids.max": "50",
        job / "pids.current": "20",
        job / "cpu.max": "150000 100000",
        tmp_path / "memory/job/memory.limit_in_bytes": "900",
        tmp_path / "memory/job/memory.usage_in_bytes": "500",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    own = tmp_path / "own"
    own.write_text("0::/job/step\n")
    assert limits.cgroup_limits(tmp_path, own) == {"memory_left_bytes": 600, "tasks_left": 30, "quota": 1.5}
    own.write_text("4:memory:/job\n")
    assert limits.cgroup_limits(tmp_path, own)["memory_left_bytes"] == 400
    assert limits.cgroup_limits(tmp_path / "none", own)["memory_left_bytes"] == limits.UNLIMITED


def test_a_process_that_may_lock_anything_has_no_limit(tmp_path: Path) -> None:
    for mask, may in (("000001ffffffffff", True), ("0000000000004000", True), ("00000000a80425fb", False)):
        (tmp_path / "status").write_text(f"Name:\tx\nCapEff:\t{mask}\n")
        assert limits.may_lock_all(tmp_path / "status") is may


# ---------------------------------------------------------------------------------------------- memory


def test_a_dev_shm_that_is_too_small_for_all_ranks_of_the_host_is_told_with_the_size_it_needs() -> None:
    here = alone(domain_size=1)
    facts = memory.look(here)
    assert levels(memory.judge(PAIR, both(facts), OPTIONS)) == [OK]
    plan = memory_plan(here.usable_config(), 1)
    assert facts["shm_bytes"] == plan.total_bytes
    # A container's 64 MiB: enough for one, not for both.
    small = {**facts, "shm_bytes": 40 * MIB, "shm_free_bytes": 64 * MIB, "shm_total_bytes": 64 * MIB}
    finding = the(memory.judge(PAIR, both(small), OPTIONS))
    assert "64 of 64 MiB free; a buffer of the 2 ranks here takes 80 MiB" in finding.text
    assert "--shm-size=1g" in finding.remedy and "UCCL_EP_BUDGET_BYTES=32M" in finding.remedy
    assert levels(memory.judge(APART, both(small), OPTIONS)) == [OK]


def test_the_real_dev_shm_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As by a mount of 64 KiB."""
    real = os.statvfs(tmp_path)
    values = list(real)
    values[1], values[2], values[4] = 4096, 16, 16
    monkeypatch.setattr(memory.os, "statvfs", lambda _: os.statvfs_result(values))
    facts = memory.look(alone())
    assert facts["shm_free_bytes"] == 64 << 10
    assert levels(memory.judge(Group((NODE0,)), {0: facts}, OPTIONS)) == [FIX]


def test_a_machine_without_dev_shm_is_told_to_mount_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in (memory, common_limits):
        monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path / "none")
    facts = json.loads(json.dumps(memory.look(alone())))
    finding = the(memory.judge(Group((NODE0,)), {0: facts}, OPTIONS))
    assert finding.level == FIX and finding.text == f"{tmp_path / 'none'}: No such file or directory"
    assert finding.remedy.startswith("Mount it: mount -t tmpfs")


def test_a_cgroup_or_a_gpu_without_room_is_said() -> None:
    facts = memory.look(alone())
    finding = the(memory.judge(PAIR, both({**facts, "memory_left_bytes": MIB}), OPTIONS))
    assert "the cgroup leaves 1 MiB" in finding.text and "--mem=0" in finding.remedy
    full = {**facts, "gpu_bytes": 512 * MIB, "gpu_free_bytes": 10 * MIB}
    assert (
        "the GPU has 10 MiB free; a buffer takes 512 MiB" in the(memory.judge(PAIR, both(full), OPTIONS)).text
    )


# ------------------------------------------------------------------------------------------------ gpus

GPU: dict[str, Any] = {
    "of_driver": 2, "num_gpus": 2, "gpu": 0, "torch_cuda": "12.8", "backend": "auto", "with_cuda": True,
    "name": "H200", "id": "GPU-a", "peers": {"1": True}, "pci": "", "vmm": "", "dmabuf": True,
}  # fmt: skip
OTHER = {"gpu": 1, "id": "GPU-b", "peers": {"0": True}}


@pytest.mark.parametrize(
    ("changes", "level", "text"),
    [
        ({"with_cuda": False}, FIX, "built without CUDA kernels"),
        ({"vmm": "cuMemCreate failed (801)"}, FIX, "its memory cannot be shared: cuMemCreate failed (801)"),
        ({"id": "MIG-c"}, WARNING, "is a slice of a GPU"),
        ({"name": "H100"}, WARNING, "ranks differ in their GPUs"),
        ({"peers": {"0": False}}, FIX, "GPU 1 does not reach the memory of those of rank 0"),
        ({"gpu": -1, "num_gpus": 0}, FIX, "no GPU here, and the other ranks have one"),
    ],
    ids=["no nvcc", "no VMM", "MIG", "mixed", "no peer access", "missing"],
)
def test_a_gpu_that_will_not_do_is_said(changes: dict[str, Any], level: str, text: str) -> None:
    assert levels(gpus.judge(PAIR, both(GPU, **OTHER), OPTIONS)) == [OK]
    found = gpus.judge(PAIR, both(GPU, **{**OTHER, **changes}), OPTIONS)
    assert [f.ranks for f in found if f.level == level and text in f.text] == [(1,)], found


def test_gpus_that_the_driver_has_and_torch_does_not_see_are_missed(tmp_path: Path) -> None:
    hidden = {**GPU, "gpu": -1, "num_gpus": 0}
    found = gpus.judge(PAIR, both(hidden), OPTIONS)
    assert "the driver has 2 GPUs, and torch sees none: CUDA_VISIBLE_DEVICES" in the(found).text
    assert "built without CUDA" in the(gpus.judge(PAIR, both({**hidden, "torch_cuda": ""}), OPTIONS)).text
    assert levels(gpus.judge(PAIR, both({**hidden, "backend": "host"}), OPTIONS)) == [OK]
    assert levels(gpus.judge(PAIR, both({**hidden, "of_driver": 0}), OPTIONS)) == [OK]
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    assert gpus.num_gpus_of_driver(tmp_path) == 2 and gpus.num_gpus_of_driver(tmp_path / "none") == 0


# --------------------------------------------------------------------------- environment and leftovers


def seen_environment(monkeypatch: pytest.MonkeyPatch, **variables: str) -> dict[str, Any]:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    facts = environment.look(alone())
    for name in variables:
        monkeypatch.delenv(name)
    return facts


@pytest.mark.parametrize(
    ("variables", "level", "text"),
    [
        ({"UCCL_EP_TRANSPROT": "verbs"}, WARNING, "unknown environment variable UCCL_EP_TRANSPROT"),
        ({"UCCL_RDMA_ADAPTIVE_SLEEP": "1"}, WARNING, "has no effect here"),
        ({"UCCL_EP_TRANSPORT": "pigeon"}, FIX, "transport = 'pigeon': allowed is"),
        ({"UCCL_IB_GID_INDEX": "3", "UCCL_EP_IB_GID_INDEX": "4"}, FIX, "both set ib_gid_index"),
        ({"UCCL_EP_LOOP_REFUSE_RATE": "0.5"}, WARNING, "what makes the loop transport slow or faulty"),
        (
            {"UCCL_EP_IB_GID_INDEX": "3", "NCCL_IB_GID_INDEX": "5"},
            WARNING,
            "NCCL_IB_GID_INDEX is 5, ours is 3",
        ),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_a_variable_that_misleads_is_said(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], level: str, text: str
) -> None:
    facts = seen_environment(monkeypatch, **variables)
    assert text in the(environment.judge(PAIR, both(facts), OPTIONS), level).text
    assert levels(environment.judge(PAIR, both(seen_environment(monkeypatch)), OPTIONS)) == [OK]


def test_a_variable_that_was_not_passed_on_to_all_hosts_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = seen_environment(monkeypatch, UCCL_EP_TRANSPORT="ofi", UCCL_EP_NICS="a")
    found = environment.judge(APART, {0: passed, 1: seen_environment(monkeypatch)}, OPTIONS)
    finding = the(found, WARNING)
    assert finding.text.startswith("UCCL_EP_TRANSPORT is not set here") and finding.ranks == (1,)


def test_segments_of_dead_jobs_are_said() -> None:
    found = environment.judge_leftovers(PAIR, both({"stale": ["/dev/shm/uccl_ep.1.ab"]}), OPTIONS)
    assert "1 segments in /dev/shm that no process uses: uccl_ep.1.ab" in the(found, WARNING).text
    assert levels(environment.judge_leftovers(PAIR, both({"stale": []}), OPTIONS)) == [OK]
