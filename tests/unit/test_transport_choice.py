"""The transport is what every rank has; what is missing is said; nothing slower is taken in silence."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.unit.by_hand import THREAD, close, create, dispatch, on_all
from uccl_ep_train import EpConfig
from uccl_ep_train.core.native import probe_transports
from uccl_ep_train.errors import ConfigError, RankMismatchError
from uccl_ep_train.group import transport
from uccl_ep_train.group.transport import Choice, Place, choose, probe, probes

BASE: dict[str, Any] = {"num_experts": 8, "hidden": 256}
EFA = [True, "EFA rdmap0s6", "efa"]
CX7 = [True, "ConnectX mlx5_0, RoCE v2", "rdma"]
CXI = [True, "provider cxi", "rdma"]
TCP = [True, "provider tcp", "tcp"]
NO_VERBS = [False, "libibverbs.so.1 is not installed", "rdma"]
NO_NIC = [False, "this host has no RDMA NIC", "rdma"]
NO_OFI = [False, "libfabric.so.1 is not installed", "rdma"]


def hosts(*counts: int) -> list[Place]:
    """So many ranks on node0, node1, ..."""
    return [Place(f"node{host}", f"boot{host} 26") for host, count in enumerate(counts) for _ in range(count)]


def answers(verbs: list[Any], ofi: list[Any], *, num_ranks: int = 2) -> list[dict[str, Any]]:
    return [{"verbs": verbs, "ofi": ofi} for _ in range(num_ranks)]


def pick(
    said: list[dict[str, Any]],
    places: list[Place] | None = None,
    wanted: str = "auto",
    num_domains: int = 2,
    on_gpu: bool = False,
) -> Choice:
    places = places or hosts(*(1 for _ in said))
    return choose(wanted, places, said, num_domains=num_domains, on_gpu=on_gpu)


def refusal(*given: Any, **named: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        pick(*given, **named)
    return str(caught.value)


def test_ranks_of_one_host_copy_in_its_memory_whatever_nics_it_has() -> None:
    choice = pick(answers(CX7, CXI, num_ranks=4), hosts(4))
    assert choice.name == "loop"
    assert choice.why == "all 4 ranks are on one host, node0: copies in its memory beat the loopback of a NIC"


@pytest.mark.parametrize("wanted", ["auto", "loop"])
def test_nics_that_a_program_names_are_not_ignored(wanted: str) -> None:
    """One rank's are enough, and all ranks raise. Those of a variable are in the message of the choice."""
    places = hosts(4)
    said: list[dict[str, Any]] = [{}, {"nics": [True, "mlx5_0,mlx5_1", "argument"]}, {}, {}]
    text = refusal(said, places, wanted)
    assert f"nics = 'mlx5_0,mlx5_1' (rank 1 on node0): transport = {wanted!r} takes loop" in text
    assert "allowed is transport = 'verbs' or 'ofi'" in text
    assert pick(said, places, wanted, num_domains=1).name == "loop", "no row leaves the domain"
    said[1] = {"nics": [False, "mlx5_0", "environment UCCL_EP_NICS"]}
    why = pick(said, places, wanted).why
    assert why.endswith("nics = mlx5_0 has no effect (environment UCCL_EP_NICS, rank 1 on node0)")
    assert "nics" not in pick([{}, {}, {}, {}], places, wanted).why, "control"


def test_a_report_says_which_nics_were_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCCL_EP_NICS", raising=False)
    settings: dict[str, Any] = {"num_experts": 2, "hidden": 128}
    assert "nics" not in probe(EpConfig.from_env(**settings), hosts(2))
    given = EpConfig.from_env(**settings, nics=["a", "b"]).replace(backend="host")
    assert probe(given, hosts(2))["nics"] == [True, "a,b", "argument"]
    monkeypatch.setenv("UCCL_EP_NICS", "c")
    said = probe(EpConfig.from_env(**settings), hosts(2))
    assert said["nics"] == [False, "c", "environment UCCL_EP_NICS"]
    assert probes(said) == said, "which another rank reads"


def test_one_domain_needs_no_network() -> None:
    assert pick(answers(NO_NIC, NO_OFI), num_domains=1).name == "loop"
    assert pick(answers(NO_NIC, NO_OFI), num_domains=1, wanted="loop").name == "loop"


@pytest.mark.parametrize(
    ("verbs", "ofi", "on_gpu", "name", "provider"),
    [
        (EFA, TCP, True, "verbs", None),
        (CX7, CXI, True, "verbs", None),
        (NO_NIC, CXI, True, "ofi", None),
        (NO_NIC, CXI, False, "ofi", None),
        (NO_NIC, TCP, False, "ofi", "tcp"),
        (CX7, NO_OFI, False, "verbs", None),
    ],
)
def test_between_hosts_the_best_that_all_have_is_taken(
    verbs: list[Any], ofi: list[Any], on_gpu: bool, name: str, provider: str | None
) -> None:
    choice = pick(answers(verbs, ofi), on_gpu=on_gpu)
    assert (choice.name, choice.provider) == (name, provider)
    assert ("EFA on every rank" in choice.why) == (verbs is EFA)


def test_a_network_that_one_rank_lacks_is_not_taken_and_the_line_says_so() -> None:
    said = [{"verbs": CX7, "ofi": TCP}, {"verbs": NO_NIC, "ofi": TCP}]
    choice = pick(said)
    assert (choice.name, choice.provider) == ("ofi", "tcp")
    assert choice.why == (
        "over TCP, which every rank has (rank 0: provider tcp); "
        "not verbs: rank 1 on node1: this host has no RDMA NIC"
    )


def test_tcp_on_one_rank_is_tcp_on_all() -> None:
    """Or each would take the provider that is its own first choice."""
    choice = pick([{"ofi": CXI}, {"ofi": TCP}])
    assert (choice.name, choice.provider) == ("ofi", "tcp")
    applied = choice.apply(EpConfig(**BASE))
    assert (applied.transport, applied.ofi_provider) == ("ofi", "tcp")
    assert choice.apply(EpConfig(**BASE, ofi_provider="tcp;ofi_rxm")).ofi_provider == "tcp;ofi_rxm"
    assert "cannot talk" in refusal([{"ofi": CXI}, {"ofi": TCP}], wanted="ofi")


def test_efa_on_some_ranks_only_connects_nobody() -> None:
    said = [{"verbs": EFA, "ofi": NO_OFI}, {"verbs": CX7, "ofi": NO_OFI}]
    for wanted in ("auto", "verbs"):
        message = refusal(said, wanted=wanted)
        assert "EFA reaches EFA only, and rank 0 on node0 would use it, rank 1 on node1 another" in message


def test_gpu_memory_does_not_go_over_tcp() -> None:
    for wanted in ("auto", "ofi"):
        message = refusal(answers(NO_NIC, TCP), on_gpu=True, wanted=wanted)
        assert "ranks 0-1 on node0 and node1: TCP cannot read the memory of a GPU (provider tcp)" in message


def test_where_nothing_works_the_error_lists_what_each_rank_lacks() -> None:
    said = [
        {"verbs": NO_VERBS, "ofi": NO_OFI},
        {"verbs": NO_VERBS, "ofi": TCP},
        {"verbs": CX7, "ofi": NO_OFI},
        {"verbs": NO_NIC},
    ]
    assert refusal(said, hosts(2, 2)) == (
        "transport = 'auto': nothing connects the hosts of the group "
        "(ranks 0-1 on node0; ranks 2-3 on node1); "
        "verbs: ranks 0-1 on node0: libibverbs.so.1 is not installed; "
        "rank 3 on node1: this host has no RDMA NIC; "
        "ofi: ranks 0, 2 on node0 and node1: libfabric.so.1 is not installed; "
        "rank 3 on node1: this rank says nothing of it: does it run another version?; "
        "loop: it copies inside one host"
    )


@pytest.mark.parametrize("num_domains", [1, 2])
@pytest.mark.parametrize("places", [hosts(2), hosts(1, 1)], ids=["one host", "two hosts"])
def test_a_forced_transport_that_one_rank_lacks_is_an_error_naming_it(
    num_domains: int, places: list[Place]
) -> None:
    said = [{"verbs": CX7}, {"verbs": NO_NIC}]
    message = refusal(said, places, wanted="verbs", num_domains=num_domains)
    assert message == f"transport = 'verbs': rank 1 on {places[1].host}: this host has no RDMA NIC"
    assert pick([{"verbs": CX7}] * 2, places, wanted="verbs", num_domains=num_domains).name == "verbs"


def test_loop_across_hosts_is_refused() -> None:
    message = refusal(answers(CX7, TCP), wanted="loop")
    assert "transport = 'loop'" in message and "rank 0 on node0; rank 1 on node1" in message
    # Containers of one host that share no memory.
    apart = [Place("node0", "boot0 26"), Place("node0", "boot0 31")]
    assert "share no memory" in refusal(answers(CX7, TCP), apart, wanted="loop")
    assert pick(answers(CX7, TCP), hosts(2), wanted="loop").name == "loop"


def test_every_combination_is_decided_or_refused_with_a_reason() -> None:
    """And never comes to loop between hosts, to what a rank lacks, nor to TCP for GPU memory."""
    options = [EFA, CX7, NO_NIC], [CXI, TCP, NO_OFI]
    each = list(itertools.product(*options))
    for first, second, on_gpu in itertools.product(each, each, (False, True)):
        said = [dict(zip(("verbs", "ofi"), rank, strict=True)) for rank in (first, second)]
        try:
            choice = pick(said, on_gpu=on_gpu)
        except ConfigError as error:
            assert "verbs: " in str(error) and "ofi: " in str(error)
            continue
        probes = [rank[choice.name] for rank in said]
        assert all(usable for usable, _, _ in probes)
        over_tcp = any(link == "tcp" for _, _, link in probes)
        assert not (over_tcp and on_gpu) and (choice.provider == "tcp") == over_tcp


# ----------------------------------------------------------------------------------- with real buffers


def two_hosts(monkeypatch: pytest.MonkeyPatch, **told: list[Any]) -> None:
    """Every rank is on a host of its own, and has what is told, or else what this one has."""

    class Elsewhere(Place):
        @classmethod
        def here(cls) -> Place:
            return Place(f"node{THREAD.rank}", f"boot{THREAD.rank}")

    monkeypatch.setattr(transport, "Place", Elsewhere)
    if not told:
        return
    monkeypatch.setattr(
        transport, "probe_transports", lambda config, names: [(name, *told[name]) for name in names]
    )


def test_auto_runs_over_loop_on_one_host_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transport, "_said", set())
    for _ in range(2):  # The second says nothing.
        buffers = create(2)
        assert [buffer.transport for buffer in buffers] == ["loop"] * 2
        assert [buffer.config.transport for buffer in buffers] == ["auto"] * 2
        assert all(len(result.rows) for result in on_all(buffers, dispatch))
        plan = buffers[0].memory_plan()
        assert buffers[0].stats()["memory.allocated_bytes"] == plan.total_bytes
        close(buffers)
    lines = [line for line in capfd.readouterr().err.splitlines() if "uccl_ep_train" in line]
    assert len(lines) == 1
    assert lines[0].startswith("uccl_ep_train: transport loop: all 2 ranks are on one host, ")


@pytest.mark.parametrize(
    "settings", [{"transport": "loop"}, {"domain_size": 2}], ids=["forced", "one domain"]
)
def test_nothing_is_said_where_nothing_was_chosen(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transport, "_said", set())
    close(create(2, **settings))
    assert "transport" not in capfd.readouterr().err


def test_on_one_host_nothing_is_probed_unless_it_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(transport, "probe_transports", lambda config, names: asked.append(names) or [])
    config = EpConfig(**BASE)
    for places, wanted in itertools.product([hosts(2), hosts(1, 1)], ["auto", "loop", "verbs", "ofi"]):
        probe(config.replace(transport=wanted), places)
    assert asked == [[], [], ["verbs"], ["ofi"], ["verbs", "ofi"], [], ["verbs"], ["ofi"]]


def test_across_hosts_without_a_network_every_rank_is_told_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two_hosts(monkeypatch, verbs=NO_NIC, ofi=NO_OFI)
    results = create(2)
    assert [type(result) for result in results] == [ConfigError] * 2
    assert str(results[0]) == str(results[1])
    assert "verbs: ranks 0-1 on node0 and node1: this host has no RDMA NIC" in str(results[0])


@pytest.mark.parametrize("settings", [{"domain_size": 2}, {"domains": (0, 0)}], ids=["size", "ids"])
def test_a_domain_across_hosts_fails_on_every_rank(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (name, value), *_ = settings.items()
    two_hosts(monkeypatch)
    for result in create(2, **settings):
        assert isinstance(result, ConfigError)
        assert str(result).startswith(f"{name} = {value}: ranks [0, 1] would be a domain and share no")
        assert "rank 0 on node0; rank 1 on node1; allowed are smaller domains, or none set" in str(result)


def test_loop_forced_across_hosts_fails_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    two_hosts(monkeypatch, verbs=CX7, ofi=TCP)
    for result in create(2, transport="loop"):
        assert isinstance(result, ConfigError) and "it copies inside one host" in str(result)


def test_a_forced_transport_that_works_nowhere_fails_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "probe_transports", lambda config, names: [("verbs", *NO_NIC)])
    for result in create(2, transport="verbs"):
        assert isinstance(result, ConfigError)
        assert str(result).startswith("transport = 'verbs': ranks 0-1 on ")
        assert str(result).endswith(": this host has no RDMA NIC")


def test_ranks_that_force_different_ones_are_told_both() -> None:
    for result in create(2, {"transport": "loop"}, {"transport": "auto"}):
        assert isinstance(result, RankMismatchError)
        assert "rank 0 has transport = 'loop', rank 1 has transport = 'auto'" in str(result)


@pytest.mark.parametrize("settings", [{}, {"transport": "ofi"}], ids=["auto", "forced"])
def test_between_hosts_without_nics_rows_travel_over_tcp(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The hosts are made up, their probes and what runs are not."""
    verbs, ofi = (said for _, *said in sorted(probe_transports(EpConfig(**BASE), ["verbs", "ofi"]))[::-1])
    if verbs[0] or not (ofi[0] and ofi[1].startswith("tcp")):
        pytest.skip(f"needs libfabric's tcp and no NIC: {verbs}, {ofi}")
    assert ofi[2] == "tcp"
    on_one = create(2)
    expected = on_all(on_one, dispatch)
    close(on_one)
    two_hosts(monkeypatch)
    monkeypatch.setattr(transport, "_said", set())
    capfd.readouterr()
    buffers = create(2, **settings)
    assert [getattr(buffer, "transport", buffer) for buffer in buffers] == ["ofi", "ofi"]
    for got, wanted in zip(on_all(buffers, dispatch), expected, strict=True):
        assert torch.equal(got.rows, wanted.rows)
    assert buffers[0].stats()["memory.allocated_bytes"] == buffers[0].memory_plan().total_bytes
    close(buffers)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("uccl_ep_train: ")]
    assert len(lines) == (0 if settings else 1)
    if not settings:
        assert lines[0].startswith(
            "uccl_ep_train: transport ofi: over TCP, which every rank has (rank 0: tcp"
        )
        assert "; not verbs: ranks 0-1 on node" in lines[0]


def test_the_core_says_what_it_has() -> None:
    ((name, usable, text, link),) = probe_transports(EpConfig(**BASE), ["loop", "carrier pigeon"])
    assert (name, usable, link) == ("loop", True, "memory") and "shared memory of host" in text
