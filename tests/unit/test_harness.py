"""The harness itself: what it promises to tests must hold when ranks fail, hang, die or freeze.

Buffers are replaced by stand-ins where that is possible, so that these claims do not depend on the engine.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

from tests import cases, harness
from tests.bits import bit_difference
from tests.cases import LAYOUTS, EngineSpec, expect, make_case
from tests.harness import RankGroup, RanksHung, run_ranks
from tests.process_ranks import ProcessRanks, Rank
from uccl_ep_train.errors import PeerFailed, TransportError


class StandInBuffer:
    """Ranks of one group meet at a barrier, as the operations of a real buffer make them."""

    barriers: dict[int, threading.Barrier] = {}  # noqa: RUF012

    def __init__(self, group: Any, config: Any, *, bootstrap: Any) -> None:
        bootstrap.barrier("stand-in")
        self.config = config
        self.rank = bootstrap.rank
        self.barrier = self.barriers.setdefault(id(bootstrap._room), threading.Barrier(bootstrap.size))
        self.closes: list[bool] = []

    def meet(self) -> None:
        try:
            self.barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerFailed("another rank gave up", rank=self.rank) from None

    def close(self, *, abort: bool = False) -> None:
        self.closes.append(abort)
        if abort:
            self.barrier.abort()


CONFIG = {"num_experts": 4, "hidden": 128}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "Buffer", StandInBuffer)


@pytest.fixture
def no_thread_is_left() -> Any:
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before and thread.is_alive()]
    assert not left


@pytest.mark.usefixtures("stand_in", "no_thread_is_left")
class TestThreads:
    def test_results_come_by_rank(self) -> None:
        def step(rank: int, buffer: Any) -> int:
            time.sleep(0.02 * (3 - rank))
            buffer.meet()
            return 10 * rank

        assert run_ranks(4, CONFIG, step) == [0, 10, 20, 30]

    def test_a_configuration_per_rank_reaches_that_rank(self) -> None:
        sizes = run_ranks(
            2, lambda rank: CONFIG | {"hidden": 128 << rank}, lambda rank, buffer: buffer.config.hidden
        )
        assert sizes == [128, 256]

    def test_a_rank_that_raises_frees_the_others_and_is_named_first(self) -> None:
        def step(rank: int, buffer: Any) -> None:
            if rank == 2:
                raise ValueError("mine")
            buffer.meet()

        with pytest.raises(BaseExceptionGroup) as caught:
            run_ranks(4, CONFIG, step, timeout_s=10)
        names = [type(error).__name__ for error in caught.value.exceptions]
        assert names == ["ValueError", "PeerFailed", "PeerFailed", "PeerFailed"]
        assert caught.value.exceptions[0].__notes__ == ["on rank 2"]

    def test_outcomes_keep_what_each_rank_did(self) -> None:
        def step(rank: int, buffer: Any) -> str:
            if rank == 1:
                raise ValueError("mine")
            return "well"

        with RankGroup(2, CONFIG) as group:
            first, second = group.outcomes(step)
            assert first.value == "well" and first.error is None
            assert isinstance(second.error, ValueError) and group.broken
            with pytest.raises(AssertionError, match="has failed before"):
                group.run(step)

    def test_ranks_that_hang_are_aborted_and_their_stacks_shown(self) -> None:
        def waits_for_nobody(rank: int, buffer: Any) -> None:
            if rank == 0:
                buffer.meet()

        with pytest.raises(RanksHung, match=r"ranks \[0\] did not end.*all stopped(?s:.)*waits_for_nobody"):
            run_ranks(2, CONFIG, waits_for_nobody, timeout_s=0.3)

    def test_a_group_serves_many_runs_and_closes_once_on_all_ranks(self) -> None:
        with RankGroup(3, CONFIG) as group:
            for turn in range(5):

                def step(rank: int, buffer: Any, turn: int = turn) -> int:
                    buffer.meet()
                    return rank + turn

                assert group.run(step) == [turn, 1 + turn, 2 + turn]
            buffers: list[Any] = [group.buffer(rank) for rank in range(3)]
        assert [buffer.closes for buffer in buffers] == [[False]] * 3


class TestCases:
    def test_a_seed_gives_the_same_case_twice_and_another_seed_another(self) -> None:
        spec = EngineSpec()
        first, again, other = (make_case(seed, spec, num_tokens=[9] * 4, hidden=128) for seed in (5, 5, 6))
        same = [not bit_difference(a.x, b.x) for a, b in zip(first.inputs, again.inputs, strict=True)]
        assert all(same) and first.dispatch_dtype == again.dispatch_dtype
        assert any(bit_difference(a.x, b.x) for a, b in zip(first.inputs, other.inputs, strict=True))

    def test_what_is_fixed_is_fixed(self) -> None:
        for seed in range(30):
            spec = EngineSpec(domains=LAYOUTS["3x2"], num_experts=12, hidden=1024)
            case = make_case(
                seed, spec, num_tokens=[0, 1, 2, 3, 4, 5], hidden=384, form="topk", top_k=8, drop_rate=0.0,
                dtype=torch.float32, weighted=True, focus="spread", expert_alignment=4,
            )  # fmt: skip
            for count, entry in enumerate(case.inputs):
                assert entry.x.shape == (count, 384) and entry.x.dtype == torch.float32
                assert entry.topk_idx is not None and entry.topk_idx.shape == (count, 8)
            # FP8 is for BF16 rows alone: no case asks for what must be refused.
            assert case.dispatch_dtype == case.grad_dtype == "bf16" and case.expert_alignment == 4

    def test_many_seeds_reach_the_corners(self) -> None:
        spec = EngineSpec(num_experts=64)
        seen = set()
        for seed in range(300):
            case = make_case(seed, spec)
            reached = [entry.routing(64).routed_TE.sum(dim=1) for entry in case.inputs]
            seen |= {"empty rank" for entry in case.inputs if len(entry.x) == 0}
            seen |= {"map" if case.inputs[0].topk_idx is None else "topk", case.dispatch_dtype}
            seen |= {"token without experts" for counts in reached if (counts == 0).any()}
            seen |= {"token with more than 32" for counts in reached if (counts > 32).any()}
            seen |= {"no weights"} if case.inputs[0].weights is None else set()
            seen |= {"non-finite"} if any(not entry.x.isfinite().all() for entry in case.inputs) else set()
            experts = torch.cat([entry.routing(64).routed_TE for entry in case.inputs]).any(dim=0).sum()
            seen |= {"one expert"} if experts == 1 else set()
        assert seen == {
            "empty rank", "map", "topk", "fp8", "bf16", "token without experts", "token with more than 32",
            "no weights", "non-finite", "one expert",
        }  # fmt: skip

    def test_on_gpus_domains_stay_and_ranks_without_a_gpu_are_skipped(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cases, "ON_GPUS", True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
        monkeypatch.setattr(cases, "RankGroup", lambda num_ranks, config: (num_ranks, config["domains"]))
        assert EngineSpec(domains=LAYOUTS["2x1"]).group() == (2, (0, 1))
        assert EngineSpec(domains=(0, 1, 1)).group() == (3, (0, 1, 1))
        with pytest.raises(pytest.skip.Exception, match="4 ranks need as many GPUs, there are 3"):
            EngineSpec(domains=LAYOUTS["2x2"]).group()

    def test_the_oracle_takes_every_case(self) -> None:
        for seed in range(10):
            for domains in LAYOUTS.values():
                case = make_case(seed, EngineSpec(domains=domains, num_experts=12), max_tokens=6)
                expected = expect(case)
                assert len(expected.expert_rows) == len(domains)

    def test_a_difference_of_one_bit_is_seen(self) -> None:
        rows = torch.tensor([[0.0, 1.0], [float("nan"), 2.0]])
        assert not bit_difference(rows, rows.clone())
        negative_zero = rows.clone()
        negative_zero[0, 0] = -0.0
        assert "first at (0, 0)" in bit_difference(negative_zero, rows)
        other_nan = rows.view(torch.int32).clone()
        other_nan[1, 0] += 1
        assert "first at (1, 0)" in bit_difference(other_nan.view(torch.float32), rows)
        assert bit_difference(rows.bfloat16(), rows) and bit_difference(rows[:1], rows)
        assert bit_difference(None, rows) and not bit_difference(None, None)


# --------------------------------------------------------------------------------------- processes


def _reduces(rank: Rank, offset: int) -> tuple[int, int, int]:
    import torch.distributed as dist

    total = torch.tensor([rank.rank + offset])
    dist.all_reduce(total, group=rank.group)
    return rank.rank, int(total), os.getpid()


def _fails_on_one(rank: Rank) -> str:
    if rank.rank == 1:
        raise TransportError("link down", rank=1, epoch=7, step="ship", peer=0)
    return "well"


def _waits(rank: Rank) -> str:
    rank.mark("ready", os.getpid())
    rank.wait_for("go")
    # The store must answer, whoever has died.
    store = torch.distributed.distributed_c10d._get_default_store()
    store.set(f"here {rank.rank}", "yes")
    rank.mark("past")
    return store.get(f"here {rank.rank}").decode()


@pytest.mark.fault
class TestProcesses:
    def test_ranks_are_processes_of_one_group(self) -> None:
        with ProcessRanks(3, _reduces, (1,)) as ranks:
            results = ranks.results()
        assert [entry[:2] for entry in results] == [(0, 6), (1, 6), (2, 6)]
        assert len({entry[2] for entry in results} | {os.getpid()}) == 4

    def test_an_exception_arrives_with_class_fields_and_time(self) -> None:
        started = time.monotonic()
        with ProcessRanks(2, _fails_on_one) as ranks:
            outcomes = ranks.outcomes()
            with pytest.raises(AssertionError, match="link down"):
                ranks.results()
        assert outcomes[0].value == "well" and not outcomes[0].error
        assert (outcomes[1].error, outcomes[1].message) == ("TransportError", "link down")
        assert outcomes[1].fields["epoch"] == 7 and outcomes[1].fields["step"] == "ship"
        assert started < outcomes[1].at < time.monotonic() and "_fails_on_one" in outcomes[1].trace

    def test_a_killed_rank_is_dead_and_the_store_outlives_rank_0(self) -> None:
        with ProcessRanks(2, _waits) as ranks:
            pids = ranks.wait_mark("ready")
            ranks.kill(0)
            with pytest.raises(ProcessLookupError):
                os.kill(pids[0], 0)
            ranks.tell("go")
            outcomes = ranks.outcomes()
        assert outcomes[0].error == "Died" and outcomes[0].signal == signal.SIGKILL
        assert outcomes[1].value == "yes"

    def test_a_frozen_rank_does_nothing_until_thawed(self) -> None:
        with ProcessRanks(2, _waits) as ranks:
            ranks.wait_mark("ready")
            ranks.freeze(1)
            ranks.tell("go")
            assert ranks.outcomes()[0].value == "yes"
            with pytest.raises(AssertionError, match=r"ranks \[1\] did not reach"):
                ranks.wait_mark("past", [1], timeout_s=0.3)
            ranks.thaw(1)
            assert ranks.outcomes()[1].value == "yes"

    def test_nothing_outlives_the_block_not_even_a_frozen_rank(self) -> None:
        with ProcessRanks(3, _waits) as ranks:
            pids = ranks.wait_mark("ready")
            ranks.freeze(2)
            with pytest.raises(AssertionError, match="still run"):
                ranks.outcomes(timeout_s=0.2)
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


VARIABLE = "UCCL_EP_OF_A_TEST"


def _reads(rank: Rank) -> str | None:
    return os.environ.get(VARIABLE)


@pytest.mark.parametrize("value", ["first", "second", None])  # their server keeps that of the first
def test_ranks_have_the_environment_of_their_test(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    with ProcessRanks(1, _reads) as ranks:
        assert ranks.outcomes(timeout_s=60)[0].value == value
