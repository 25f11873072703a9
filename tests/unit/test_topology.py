"""Domains: set or probed, numbered by their lowest rank, the same on every rank."""

import os
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.by_hand import find_domains
from uccl_ep_train import EpConfig, LocalBootstrap, Topology
from uccl_ep_train.core.native import load_native
from uccl_ep_train.errors import ConfigError, EpError, PeerFailed, RankMismatchError, TopologyError
from uccl_ep_train.group import answers, domains, transport
from uccl_ep_train.group.domains import agree_on_config
from uccl_ep_train.group.lifecycle import settle_config

BASE = {"num_experts": 24, "hidden": 256}


def on_every_rank(size, call):
    """What `call(bootstrap)` returned or raised on every rank, run as threads."""

    def run(entry):
        try:
            return call(entry)
        except EpError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, LocalBootstrap.create(size, timeout_s=20)))


def own_segments():
    return {path.name for path in Path("/dev/shm").glob(f"uccl_ep.{os.getpid()}.*")}


def replace_probe(monkeypatch, make):
    """What `make` returns stands in for the native core's probe."""
    native = types.SimpleNamespace(DomainProbe=make, domains_of=load_native().domains_of)
    monkeypatch.setattr(domains, "load_native", lambda: native)


def test_domains_are_dense_and_ordered_by_their_lowest_rank():
    layout = Topology.from_domains([7, 2, 7, 5, 2])
    assert layout.domain_of == (0, 1, 0, 2, 1)
    assert layout.members == ((0, 2), (1, 4), (3,))
    assert (layout.num_ranks, layout.num_domains) == (5, 3)


def test_split_gives_consecutive_domains_and_a_smaller_last_one():
    assert Topology.split(5, 2).members == ((0, 1), (2, 3), (4,))
    assert Topology.split(2, 8).members == ((0, 1),)
    assert Topology.split(3, 1).members == ((0,), (1,), (2,))


@pytest.mark.parametrize("make", [torch.tensor, np.array, tuple])
def test_ids_may_be_those_of_a_tensor(make):
    """Whose elements are objects of their own, each unequal to the others as a key."""
    assert Topology.from_domains(make([3, 5, 3])).members == ((0, 2), (1,))


@pytest.mark.parametrize("ids", [(), 5, None, [0, [1]], torch.zeros(0), torch.zeros(2, 1)])
def test_ids_that_name_no_domain_of_each_rank_are_refused(ids):
    with pytest.raises(ConfigError, match=r"(?s)domains = .*: allowed is an id per rank"):
        Topology.from_domains(ids)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ((0, 1), "num_ranks = 0"),
        (("4", 2), "num_ranks = '4'"),
        (((1 << 17) + 1, 2), "num_ranks = 131073"),
        ((10**12, 2), "num_ranks = 1000000000000"),
        ((4, 0), "domain_size = 0"),
        ((4, 2.0), "domain_size = 2.0"),
        ((4, True), "domain_size = True"),
        ((4, None), "domain_size = None"),
    ],
)
def test_numbers_of_ranks_that_cannot_be_are_refused(given, named):
    with pytest.raises(ConfigError, match=f"{named}: allowed is 1 .. 131072"):
        Topology.split(*given)


def test_local_rank_and_rail_follow_the_member_lists():
    layout = Topology.from_domains([0, 1, 0, 1, 0])  # {0, 2, 4}, {1, 3}
    assert [layout.local_rank(rank) for rank in range(5)] == [0, 0, 1, 1, 2]
    assert [layout.rail(src, 1) for src in (0, 2, 4)] == [1, 3, 1]
    assert [layout.rail(src, 0) for src in (1, 3)] == [0, 2]


def test_str_lists_the_domains():
    assert str(Topology.from_domains([0, 1, 0])) == "3 ranks in 2 domain(s): {0, 2}, {1}"


def test_domains_override_domain_size():
    config = EpConfig(**BASE, domain_size=1, domains=(0, 1, 0, 1))
    assert Topology.from_config(config, 4).members == ((0, 2), (1, 3))
    assert Topology.from_config(EpConfig(**BASE, domain_size=2), 4).members == ((0, 1), (2, 3))
    assert Topology.from_config(EpConfig(**BASE), 4) is None


def test_domains_of_another_length_than_the_group_are_refused():
    with pytest.raises(ConfigError, match="4 ranks"):
        Topology.from_config(EpConfig(**BASE, domains=(0, 1)), 4)


def test_threads_of_one_process_are_probed_as_one_domain_and_nothing_is_left():
    before = own_segments()
    assert on_every_rank(3, find_domains) == [Topology.split(3, 3)] * 3
    assert own_segments() == before


def test_ranks_with_another_boot_id_are_another_domain(monkeypatch):
    """Two hosts, imitated: ranks alternate between them."""
    hosts = iter(["a", "b", "a", "b"])
    monkeypatch.setattr(domains, "boot_id", lambda: next(hosts))
    layouts = on_every_rank(4, find_domains)
    assert len(set(layouts)) == 1
    assert layouts[0].num_domains == 2
    assert sorted(map(len, layouts[0].members)) == [2, 2]


def test_equal_boot_ids_do_not_make_a_domain_where_the_memory_is_not_shared(monkeypatch):
    """Two containers of one host, imitated: each rank finds another nonce than was offered."""

    class Elsewhere:
        def __init__(self, kernel):
            self._probe = load_native().DomainProbe(kernel)
            self.reach = self._probe.reach

        def offer(self):
            said = self._probe.offer()
            return said[:-1] + bytes([said[-1] ^ 1])

    replace_probe(monkeypatch, Elsewhere)
    assert on_every_rank(3, find_domains) == [Topology.split(3, 1)] * 3


def test_a_rank_that_cannot_create_shared_memory_fails_all_and_leaves_nothing(monkeypatch):
    before = own_segments()
    turns = iter(range(3))

    def refuse(kernel):
        if next(turns) == 1:
            raise TopologyError("no shared memory here")
        return load_native().DomainProbe(kernel)

    replace_probe(monkeypatch, refuse)
    results = on_every_rank(3, find_domains)
    assert sorted(type(result).__name__ for result in results) == [
        "PeerFailed",
        "PeerFailed",
        "TopologyError",
    ]
    assert "no shared memory here" in str(next(entry for entry in results if isinstance(entry, PeerFailed)))
    assert own_segments() == before


def test_domains_that_are_set_are_not_probed(monkeypatch):
    monkeypatch.setattr(domains.Handshake, "offer", lambda self: pytest.fail("probed"))
    config = EpConfig(**BASE, domains=(0, 1, 1), backend="host")
    assert on_every_rank(3, lambda entry: settle_config(entry, config))[2].topology.members == ((0,), (1, 2))


def test_domains_that_only_one_rank_sets_are_told_to_all():
    configs = [EpConfig(**BASE, backend="host"), EpConfig(**BASE, backend="host", domain_size=1)]
    for error in on_every_rank(2, lambda entry: settle_config(entry, configs[entry.rank])):
        assert type(
            error
        ) is TopologyError and "rank 0 has domain_size = None, rank 1 has domain_size = 1" in str(error)


def test_hosts_are_those_whose_memory_is_one_and_no_domain_spans_two(monkeypatch):
    """Two hosts, imitated. A domain that lies in one host is no error, whatever its size."""
    places = [transport.Place(f"node{rank // 2}", f"memory {rank // 2}") for rank in range(4)]
    config = EpConfig(**BASE, domain_size=2)
    topology = Topology.split(4, 2).on_hosts([place.memory for place in places])
    assert topology.host_of == (0, 0, 1, 1)
    transport.check_domains(config, topology, places)
    with pytest.raises(ConfigError, match=r"domain_size = 4: ranks \[0, 1, 2, 3\] would be a domain"):
        wide = Topology.split(4, 4).on_hosts([place.memory for place in places])
        transport.check_domains(EpConfig(**BASE, domain_size=4), wide, places)


def test_a_creation_knows_the_host_of_each_rank():
    config = EpConfig(**BASE, domains=(0, 1, 1), backend="host")
    settled = on_every_rank(3, lambda entry: settle_config(entry, config))
    assert [entry.topology.host_of for entry in settled] == [(0, 0, 0)] * 3


def agree(configs, verify=lambda rank: None):
    return on_every_rank(
        len(configs),
        lambda entry: (
            agree_on_config(
                entry, configs[entry.rank], lambda: verify(entry.rank), lambda said: said
            ).generation
        ),
    )


def test_each_rank_learns_what_all_say():
    said = on_every_rank(
        3,
        lambda entry: agree_on_config(entry, EpConfig(**BASE), lambda: [entry.rank], lambda said: said).said,
    )
    assert said == [[[0], [1], [2]]] * 3


def test_memory_is_shared_inside_one_kernel_and_one_mount(monkeypatch):
    here = domains.memory_id()
    assert here == domains.memory_id() and domains.boot_id() in here
    monkeypatch.setattr(domains.limits, "SHARED_MEMORY", Path("/proc"))
    assert domains.memory_id() != here
    monkeypatch.setattr(domains.limits, "SHARED_MEMORY", Path("/nowhere"))
    assert domains.memory_id() != here
    monkeypatch.undo()
    monkeypatch.setattr(domains, "boot_id", lambda: "another")
    assert domains.memory_id() != here


def test_ranks_that_agree_share_one_fresh_generation():
    config = EpConfig(**BASE)
    first, second = agree([config] * 3), agree([config] * 3)
    assert len(set(first)) == 1 and len(set(second)) == 1
    assert first[0] != second[0]
    assert 0 < first[0] < 1 << 64


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"domain_size": 2}, TopologyError),
        ({"domains": (0, 1, 1)}, TopologyError),
        ({"hidden": 512}, RankMismatchError),
        ({"dispatch_dtype": "bf16"}, RankMismatchError),
        ({"source_order": (2, 1, 0)}, RankMismatchError),
    ],
)
def test_ranks_that_disagree_on_a_setting_all_raise_naming_both_ranks_and_values(change, error):
    config = EpConfig(**BASE)
    other = config.replace(**change)
    results = agree([config, config, other])
    (name,) = change
    ours, theirs = (entry.agreed_values()[name] for entry in (config, other))
    if isinstance(theirs, tuple):
        theirs = list(theirs)
    for result in results:
        assert type(result) is error
        assert f"rank 0 has {name} = {ours!r}, rank 2 has {name} = {theirs!r}" in str(result)


@pytest.mark.parametrize(("others", "said"), [(0, 1), (1, 1), (2, 1), (0, 3)])
def test_what_ranks_say_alike_is_read_once(monkeypatch, others, said):
    """Each rank reads rank 0's key, what ranks say, and the settings of rank 0 and of those with others."""
    read = []
    decode = domains.decode

    def count(rank, *arguments):
        read.append(rank)
        return decode(rank, *arguments)

    for module in (domains, answers):
        monkeypatch.setattr(module, "decode", count)
    configs = [EpConfig(**BASE)] * (6 - others) + [EpConfig(**BASE, dispatch_dtype="bf16")] * others
    agree(configs, lambda rank: rank % said)
    assert read.count(0) == 1 + said + 1 + min(others, 1)  # the first that differs is an error


def test_settings_for_tests_of_one_rank_may_differ():
    config = EpConfig(**BASE)
    assert isinstance(agree([config, config.replace(loop_drop_peer=0, progress_timeout_s=1)])[0], int)


def test_a_rank_whose_configuration_cannot_work_fails_all():
    def verify(rank):
        if rank == 1:
            raise ConfigError("num_experts = 7")

    results = agree([EpConfig(**BASE)] * 2, verify)
    assert isinstance(results[0], PeerFailed) and "num_experts = 7" in str(results[0])
    assert isinstance(results[1], ConfigError)
