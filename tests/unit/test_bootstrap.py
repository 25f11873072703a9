"""What ranks exchange while a buffer is created: over threads, over a store, over torch.distributed."""

import multiprocessing
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from uccl_ep_train.errors import ArrivalTimeout, ConfigError, PeerFailed, RankMismatchError, TransportError
from uccl_ep_train.group.bootstrap import Bootstrap, LocalBootstrap, StoreBootstrap, TorchBootstrap, exchange


def local(size, timeout_s=20.0):
    return LocalBootstrap.create(size, timeout_s=timeout_s)


def over_store(size, timeout_s=20.0):
    store = dist.HashStore()
    return [StoreBootstrap(store, rank, size, name="test", timeout_s=timeout_s) for rank in range(size)]


both = pytest.mark.parametrize("create", [local, over_store])


def outcome(call):
    try:
        return call()
    except Exception as error:
        return error


def on_every_rank(bootstraps, call):
    """What `call(bootstrap)` returned or raised on every rank, run as threads."""
    with ThreadPoolExecutor(len(bootstraps)) as pool:
        futures = [pool.submit(outcome, lambda entry=entry: call(entry)) for entry in bootstraps]
        return [future.result() for future in futures]


@both
@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_gather_returns_payloads_by_rank(create, size):
    payloads = [bytes([rank]) * rank + b"\0\xff" for rank in range(size)]
    results = on_every_rank(create(size), lambda entry: entry.all_gather(payloads[entry.rank], "x"))
    assert results == [payloads] * size


@both
def test_steps_do_not_mix(create):
    def many(entry):
        return [entry.all_gather(f"{step}.{entry.rank}".encode(), f"step {step}") for step in range(50)]

    expected = [[f"{step}.{rank}".encode() for rank in range(3)] for step in range(50)]
    assert on_every_rank(create(3), many) == [expected] * 3


@both
def test_nobody_leaves_a_barrier_before_everybody_entered(create):
    entered = []

    def late(entry):
        time.sleep(0.05 * entry.rank)
        entered.append(entry.rank)
        entry.barrier("meet")
        return len(entered)

    assert on_every_rank(create(3), late) == [3, 3, 3]


@both
def test_a_timeout_names_the_missing_ranks(create):
    ranks = create(4, timeout_s=0.2)
    results = on_every_rank([ranks[0], ranks[2]], lambda entry: entry.all_gather(b"", "allocate"))
    for error in results:
        assert isinstance(error, ArrivalTimeout)
        assert "allocate" in str(error) and "ranks 1, 3 of 4" in str(error)
        assert error.peer == 1


@both
def test_ranks_at_different_steps_are_told_both_steps(create):
    results = on_every_rank(
        create(2), lambda entry: entry.all_gather(b"", "allocate" if entry.rank else "connect")
    )
    for error in results:
        assert isinstance(error, RankMismatchError)
        assert "'allocate'" in str(error) and "'connect'" in str(error)


@both
def test_a_failure_on_one_rank_is_raised_on_all_at_once(create):
    def produce(rank):
        if rank == 1:
            raise ValueError("no memory left")
        return b"fine"

    started = time.monotonic()
    results = on_every_rank(create(3), lambda entry: exchange(entry, "allocate", lambda: produce(entry.rank)))
    assert time.monotonic() - started < 15  # Not the 20 s that a missing rank takes.
    assert isinstance(results[1], ValueError)
    for rank in (0, 2):
        assert isinstance(results[rank], PeerFailed)
        assert str(results[rank]) == "creation, allocate: rank 1 failed with ValueError: no memory left"
        assert results[rank].peer == 1 and results[rank].rank == rank


@both
def test_after_a_failure_the_next_exchange_works(create):
    def twice(entry):
        first = outcome(lambda: exchange(entry, "first", lambda: 1 // entry.rank and b""))
        return isinstance(first, Exception), exchange(entry, "second", lambda: b"ok")

    assert on_every_rank(create(2), twice) == [(True, [b"ok", b"ok"])] * 2


def test_a_rank_that_failed_raises_its_own_error_even_if_the_others_never_come():
    first, _ = local(2, timeout_s=0.1)
    with pytest.raises(ZeroDivisionError):
        exchange(first, "alone", lambda: bytes(1 // 0))


def test_the_implementations_satisfy_the_protocol():
    for entry in (*local(1), *over_store(1)):
        assert isinstance(entry, Bootstrap)


def test_local_bootstrap_keeps_no_frames():
    ranks = local(3)
    on_every_rank(ranks, lambda entry: [entry.all_gather(b"x", str(step)) for step in range(10)])
    assert ranks[0]._room.frames == {}


def test_ranks_that_wait_wake_when_all_have_come_not_for_each():
    ranks = local(8)
    changed = ranks[0]._room.changed
    notified = []
    notify_all = changed.notify_all
    changed.notify_all = lambda: notified.append(1) or notify_all()
    on_every_rank(ranks, lambda entry: [entry.all_gather(b"x", str(step)) for step in range(5)])
    assert len(notified) == 5


def test_finish_leaves_only_the_counters_in_the_store():
    store = dist.HashStore()
    ranks = [StoreBootstrap(store, rank, 3, name="g") for rank in range(3)]
    on_every_rank(ranks, lambda entry: [entry.all_gather(b"x", str(step)) for step in range(4)])
    assert store.num_keys() > 3
    on_every_rank(ranks, lambda entry: entry.finish())
    assert store.num_keys() == 3


def test_a_second_bootstrap_on_a_store_does_not_read_frames_of_a_first_that_broke_off():
    store = dist.HashStore()

    def create(timeout_s):
        return [StoreBootstrap(store, rank, 2, name="g", timeout_s=timeout_s) for rank in range(2)]

    first = create(0.05)
    assert isinstance(outcome(lambda: first[0].all_gather(b"old", "x")), ArrivalTimeout)
    results = on_every_rank(create(10), lambda entry: entry.all_gather(b"new", "x"))
    assert results == [[b"new", b"new"]] * 2


def test_ranks_that_never_meet_because_one_was_alone_before_are_told_so():
    store = dist.HashStore()

    def create(rank):
        # Shorter than it takes until a rank looks at what ended a creation: here an earlier one.
        return StoreBootstrap(store, rank, 2, name="g", timeout_s=0.1)

    alone = outcome(lambda: create(0).all_gather(b"", "x"))
    assert isinstance(alone, ArrivalTimeout) and "Make a new group" not in str(alone)
    errors = on_every_rank(
        [create(0), create(1)], lambda entry: [entry.all_gather(b"", "x") for _ in range(2)]
    )
    assert [type(error) for error in errors] == [ArrivalTimeout] * 2
    assert "this rank's 2. creation on the group, rank 1 its 1." in str(errors[0])
    assert "Make a new group" in str(errors[1])


def test_a_store_that_cannot_be_reached_is_a_transport_error():
    class Gone:
        def add(self, *_):
            raise OSError("connection reset")

    with pytest.raises(TransportError, match="connection reset"):
        StoreBootstrap(Gone(), 0, 2, name="g")


def test_without_torch_distributed_the_error_says_what_to_call():
    with pytest.raises(ConfigError, match="init_process_group"):
        TorchBootstrap()


def _torch_rank(rank, size, path, results):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    try:
        odd = dist.new_group([1, 2])
        gathered = [TorchBootstrap().all_gather(bytes([rank]), "world")]
        if rank:
            for _ in range(2):
                entry = TorchBootstrap(odd)
                gathered.append(entry.all_gather(bytes([entry.rank, rank]), "sub"))
                entry.finish()
        else:
            with pytest.raises(ConfigError, match="not a member"):
                TorchBootstrap(odd)
        results.put((rank, gathered))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def test_what_is_no_group_is_refused_with_its_type():
    program = """
import torch.distributed as dist
from uccl_ep_train import Buffer, EpConfig
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
config = EpConfig(num_experts=2, hidden=128, backend="host", budget_bytes=16 << 20)
for group in ("world", 3, mesh):
    try:
        Buffer(group, config)
    except TypeError as error:
        print(error)
Buffer(mesh.get_group(), config).close()
try:
    Buffer(dist.GroupMember.NON_GROUP_MEMBER, config)
except ValueError as error:
    print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    *wrong, outside = run.stdout.splitlines()
    kinds = ["str", "int", "DeviceMesh"]
    allowed = "a ProcessGroup (get_group() of a DeviceMesh), or None"
    assert wrong == [f"group is {kind}; allowed is {allowed}" for kind in kinds]
    assert outside == "this process is not a member of the group"


def test_torch_bootstrap_over_processes_and_subgroups(tmp_path):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [
        context.Process(target=_torch_rank, args=(rank, 3, tmp_path / "store", results)) for rank in range(3)
    ]
    for process in ranks:
        process.start()
    answers = dict(results.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    world = [b"\0", b"\1", b"\2"]
    sub = [b"\0\1", b"\1\2"]
    assert answers == {0: [world], 1: [world, sub, sub], 2: [world, sub, sub]}


def test_waiting_does_not_block_other_threads():
    first, second = over_store(2)
    seen = []
    waiter = threading.Thread(target=lambda: seen.append(first.all_gather(b"a", "x")))
    waiter.start()
    time.sleep(0.1)
    assert second.all_gather(b"b", "x") == [b"a", b"b"]
    waiter.join()
    assert seen == [[b"a", b"b"]]
