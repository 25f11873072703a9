"""Check `nics` on made-up hosts: what is wrong with a link, an address or a packet size is said so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.made_up_sysfs import INFINIBAND, UNUSED, V1_IPV4, V1_LINK, V2_IPV4, add_nic
from uccl_ep_train import EpConfig
from uccl_ep_train.group.transport import Place
from uccl_ep_train.tools.doctor import nics
from uccl_ep_train.tools.doctor.findings import FIX, OK, WARNING, Facts, Finding, Group
from uccl_ep_train.tools.doctor.meeting import Identity, Meeting
from uccl_ep_train.tools.doctor.session import Here, Options

pytestmark = pytest.mark.usefixtures("clean_environment")
TWO_HOSTS = Group((Place("node0", "boot0 1"), Place("node1", "boot1 1")))
ONE_HOST = Group((Place("node0", "boot0 1"),) * 2)


def seen(root: Path, **settings: Any) -> dict[str, Any]:
    meeting = Meeting(Identity(), None, 1.0)
    config = EpConfig(num_experts=8, hidden=256, backend="host", **settings)
    return nics.see(Here(meeting, Options(), config=config), root)


def judged(facts: Mapping[int, Facts], group: Group = TWO_HOSTS) -> list[Finding]:
    return nics.judge(group, facts, Options())


def only(root: Path, group: Group = TWO_HOSTS, **settings: Any) -> Finding:
    """Both ranks see the same: one finding."""
    facts = seen(root, **settings)
    (finding,) = judged({0: facts, 1: facts}, group)
    return finding


def test_good_nics_are_named_with_their_speed(tmp_path: Path) -> None:
    add_nic(tmp_path, "mlx5_0")
    finding = only(tmp_path)
    assert finding.level == OK
    assert finding.text == "mlx5_0 of 1 (ConnectX, Ethernet, 400 Gb/s), up"


def test_infiniband_needs_neither_ipv4_nor_large_frames(tmp_path: Path) -> None:
    add_nic(tmp_path, "mlx5_0", link_layer="InfiniBand", gids={0: INFINIBAND}, mtu=2044)
    assert only(tmp_path).level == OK


@pytest.mark.parametrize(
    ("group", "level"), [(TWO_HOSTS, FIX), (ONE_HOST, WARNING)], ids=["two hosts", "one"]
)
def test_a_host_whose_links_are_all_down_needs_mending_if_rows_leave_it(
    tmp_path: Path, group: Group, level: str
) -> None:
    add_nic(tmp_path, "mlx5_0", state="1: DOWN")
    finding = only(tmp_path, group)
    assert finding.level == level
    assert (
        "no RDMA NIC has an ACTIVE port" in finding.text
        and "mlx5_0 (ConnectX, Ethernet, DOWN" in finding.text
    )
    assert "cable" in finding.remedy


def test_one_link_of_two_that_is_down_is_a_warning_that_names_it(tmp_path: Path) -> None:
    add_nic(tmp_path, "mlx5_0")
    add_nic(tmp_path, "mlx5_1", state="2: INIT", slot=2)
    finding = only(tmp_path)
    assert (finding.level, finding.text) == (WARNING, "a link is not up: mlx5_1 is INIT")


def test_a_nic_that_is_named_and_absent_is_refused_as_a_buffer_would(tmp_path: Path) -> None:
    add_nic(tmp_path, "mlx5_0")
    finding = only(tmp_path, nics=("mlx5_7",))
    assert finding.level == FIX and "nics = mlx5_7: there is no such NIC" in finding.text


@pytest.mark.parametrize(
    ("gids", "index", "level", "text"),
    [
        ({3: V2_IPV4}, 3, OK, "up"),
        ({3: V2_IPV4}, 5, FIX, "is 5, and mlx5_0 has 3 (RoCE v2); RoCE v2 with an IPv4 address: 3"),
        (
            {1: V1_IPV4, 3: V2_IPV4},
            1,
            FIX,
            "is 1, which on mlx5_0 is IB/RoCE v1; RoCE v2 with an IPv4 address: 3",
        ),
        ({0: V1_LINK}, -1, FIX, "has no GID of RoCE v2 with an IPv4 address, only 0 (IB/RoCE v1)"),
        ({0: UNUSED}, -1, FIX, "only no GID at all"),
    ],
    ids=["right", "absent", "version 1", "none that is routed", "empty table"],
)
def test_the_gid_has_to_be_in_the_table_and_of_roce_v2(
    tmp_path: Path, gids: dict[int, tuple[str, str]], index: int, level: str, text: str
) -> None:
    add_nic(tmp_path, "mlx5_0", gids=gids)
    finding = only(tmp_path, ib_gid_index=index)
    assert finding.level == level and text in finding.text


def test_small_packets_on_roce_are_a_warning(tmp_path: Path) -> None:
    add_nic(tmp_path, "mlx5_0", mtu=1500)
    finding = only(tmp_path)
    assert finding.level == WARNING and "small packets: the MTU is mlx5_0 1500" in finding.text


def test_hosts_that_differ_in_number_speed_or_mtu_are_told_apart(tmp_path: Path) -> None:
    add_nic(tmp_path / "a", "mlx5_0")
    for slot in (1, 2):
        add_nic(tmp_path / "b", f"mlx5_{slot}", rate="200 Gb/sec (4X HDR)", mtu=4500, slot=slot)
    facts = {0: seen(tmp_path / "a"), 1: seen(tmp_path / "b")}
    found = {finding.text: finding.level for finding in judged(facts) if finding.level != OK}
    assert found == {
        "ranks differ in the number of NICs they use: 1 (rank 0); 2 (rank 1)": FIX,
        "ranks differ in the speed of their NICs: 400 Gb/s (rank 0); 200 Gb/s (rank 1)": WARNING,
        "ranks differ in the MTU of their NICs: 9000 (rank 0); 4500 (rank 1)": WARNING,
    }
    assert not [f for f in judged({0: facts[0], 1: facts[0]}) if f.level != OK]


def test_a_nic_on_another_socket_than_the_gpu_is_a_warning(tmp_path: Path) -> None:
    add_nic(tmp_path, "mlx5_0", numa_node=1)
    facts = {**seen(tmp_path), "on_gpu": True, "gpu_numa": 0}
    (finding,) = judged({0: facts, 1: facts})
    assert finding.level == WARNING and "mlx5_0 is on another socket" in finding.text
    near = {**facts, "gpu_numa": 1}
    assert [finding.level for finding in judged({0: near, 1: near})] == [OK]


@pytest.mark.parametrize(
    ("group", "transport", "level", "text"),
    [
        (TWO_HOSTS, "auto", WARNING, "no RDMA NIC: /sys/class/infiniband is empty"),
        (TWO_HOSTS, "ofi", OK, "no RDMA NIC, and none is needed for transport ofi"),
        (ONE_HOST, "auto", OK, "no RDMA NIC, and none is needed on one host"),
    ],
)
def test_no_nic_at_all_matters_between_hosts(
    tmp_path: Path, group: Group, transport: str, level: str, text: str
) -> None:
    finding = only(tmp_path, group, transport=transport)
    assert (finding.level, finding.text) == (level, text)


def test_the_finding_names_the_rank_whose_host_is_at_fault(tmp_path: Path) -> None:
    add_nic(tmp_path / "good", "mlx5_0")
    add_nic(tmp_path / "bad", "mlx5_0", state="1: DOWN")
    facts = {0: seen(tmp_path / "good"), 1: seen(tmp_path / "bad")}
    assert [finding.ranks for finding in judged(facts) if "ACTIVE" in finding.text] == [(1,)]
    assert replace(TWO_HOSTS).named((1,)) == "rank 1 on node1"
