"""vLLM, SGLang, torchtitan and NeMo Automodel on the module of DeepEP's shape.

Each makes its calls as its own code does, and gets the results of the same layer on one device, bit for bit.
Every check is also shown to notice one wrong weight (`changed` in deep_ep_dense).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.process_ranks import Rank
from tests.unit import deep_ep_automodel, deep_ep_titan
from tests.unit.deep_ep_dense import Case, check_grads, check_out, quantised
from tests.unit.deep_ep_gpus import module_ranks
from tests.unit.deep_ep_inference import (
    SGLANG_CONFIG,
    SglangDispatcher,
    SglangSettings,
    SglangShared,
    VllmLayer,
)

TIMEOUT_S = 60
# Three ranks: DeepEP has no configuration for them, so vLLM passes none.
VLLM_CASES = {2: Case((21, 30)), 3: Case((20, 0, 33), idle=2)}
TWO = [Case((17, 23)), Case((9, 31), seed=1)]


def cpu_group(rank: Rank) -> Any:
    """A gloo group beside the default one, as vLLM's and SGLang's."""
    return dist.new_group(list(range(rank.num_ranks)), backend="gloo")


# ---- vLLM


@torch.inference_mode()
def vllm_one_batch(rank: Rank, case: Case, rows: str) -> int:
    """Returns the rows that came."""
    run, tokens = VllmLayer(case, cpu_group(rank)), case.tokens(rank.rank)
    x, on_input = tokens.x, rows == "weights on input"
    if on_input:
        x = x * tokens.weights.to(x.dtype)
    for _ in range(2):
        given = quantised(x) if rows == "fp8" else x
        got = run.prepare_async(given, tokens.idx, tokens.weights)()
        assert (got.scales is not None) == (rows == "fp8")
        out = run.finalize_async(run.experts(got), got, on_input=on_input)()
        check_out(case, rank.rank, out)
    run.buffer.destroy()
    return len(got.x)


@pytest.mark.parametrize("rows", ["bf16", "fp8"])
@pytest.mark.parametrize("num_ranks", VLLM_CASES)
def test_vllm(num_ranks: int, rows: str) -> None:
    """A rank without tokens; one that gets no rows, and combines none."""
    case = VLLM_CASES[num_ranks]
    with module_ranks(num_ranks, vllm_one_batch, (case, rows)) as ranks:
        received = ranks.results(TIMEOUT_S)
    assert [num_rows == 0 for num_rows in received] == [rank == case.idle for rank in range(num_ranks)]


def test_vllm_with_weights_on_input() -> None:
    with module_ranks(2, vllm_one_batch, (Case((19, 26), topk=1), "weights on input")) as ranks:
        assert all(ranks.results(TIMEOUT_S))


@torch.inference_mode()
def vllm_micro_batches(rank: Rank) -> None:
    run = VllmLayer(TWO[0], cpu_group(rank))
    tokens = [case.tokens(rank.rank) for case in TWO]
    receive = [run.prepare_async(t.x, t.idx, t.weights, batch) for batch, t in enumerate(tokens)]
    got = [each() for each in receive]
    done = []
    for batch, (case, prepared) in enumerate(zip(TWO, got, strict=True)):
        run.case = case
        done.append(run.finalize_async(run.experts(prepared), prepared, batch))
    for case, each in zip(TWO, done, strict=True):
        check_out(case, rank.rank, each())


def test_vllm_s_micro_batches_overlap() -> None:
    with module_ranks(2, vllm_micro_batches) as ranks:
        ranks.results(TIMEOUT_S)


# ---- SGLang


@torch.inference_mode()
def sglang_two_batches(rank: Rank, cases: list[Case], settings: SglangSettings) -> None:
    """Two micro-batches, each with its dispatcher: both are out before the first comes back."""
    shared = SglangShared(cpu_group(rank), settings)
    runs = [SglangDispatcher(case, rank.rank, shared) for case in cases]
    for run in runs:
        tokens = run.case.tokens(rank.rank)
        run.dispatch_a(tokens.x, tokens.idx.to(torch.int32), tokens.weights)
    got = [run.dispatch_b() for run in runs]
    for run, received in zip(runs, got, strict=True):
        wanted = [-(-count // 128) * 128 for count in run.case.counts(rank.rank)]
        assert received[3] == wanted
        run.combine_a(run.experts(*received))
    for run in runs:
        check_out(run.case, rank.rank, run.combine_b())


@pytest.mark.parametrize(
    "settings",
    [
        SglangSettings(None, False, "bf16"),
        SglangSettings(None, True, "fp8"),
        SglangSettings(SGLANG_CONFIG, False, "ue8m0"),
        SglangSettings(SGLANG_CONFIG, True, "ue8m0"),
    ],
    ids=lambda settings: f"{settings.rows} {settings.async_finish} {settings.config is not None}",
)
def test_sglang(settings: SglangSettings) -> None:
    with module_ranks(2, sglang_two_batches, (TWO, settings)) as ranks:
        ranks.results(TIMEOUT_S)


@pytest.mark.parametrize("rows", ["bf16", "ue8m0"])
def test_sglang_with_idle_ranks(rows: str) -> None:
    """Of four: one has no tokens, another gets no rows."""
    cases = [Case((12, 0, 25, 7), idle=3), Case((3, 8, 0, 11), idle=0, seed=2)]
    with module_ranks(4, sglang_two_batches, (cases, SglangSettings(SGLANG_CONFIG, True, rows))) as ranks:
        ranks.results(TIMEOUT_S)


# ---- torchtitan


def titan(rank: Rank, cases: list[Case], checkpoints: str) -> None:
    for _ in range(2):
        for case, (out, grads) in zip(
            cases, deep_ep_titan.train(cases, rank.group, checkpoints), strict=True
        ):
            check_out(case, rank.rank, out)
            check_grads(case, rank.rank, grads)
    # Only full checkpoints dispatch again; selective ones keep what came.
    assert deep_ep_titan.Process.last == 2 * len(cases) * (2 if checkpoints == "full" else 1)
    with torch.inference_mode():
        tokens = cases[0].tokens(rank.rank)
        scores = torch.where(tokens.idx < 0, 0.0, tokens.weights)
        factors = cases[0].factors(rank.rank)
        check_out(cases[0], rank.rank, deep_ep_titan.layer(cases[0], rank.group, tokens.x, scores, factors))
    assert not deep_ep_titan.Process.handles


@pytest.mark.parametrize("checkpoints", ["none", "full", "selective"])
def test_torchtitan(checkpoints: str) -> None:
    """Two layers, forward and then backward, twice; and once in inference mode."""
    with module_ranks(2, titan, (TWO, checkpoints)) as ranks:
        ranks.results(TIMEOUT_S)


def test_torchtitan_with_idle_ranks() -> None:
    with module_ranks(4, titan, ([Case((12, 0, 25, 7), idle=3)], "none")) as ranks:
        ranks.results(TIMEOUT_S)


# ---- NeMo Automodel


def automodel(rank: Rank, cases: list[Case], async_finish: bool, checkpoints: str) -> None:
    """Each expert-parallel group of a mesh has its own case. Then the buffer is freed, and made again."""
    size = cases[0].ranks
    mesh = init_device_mesh("cpu", (rank.num_ranks // size, size), mesh_dim_names=("dp", "ep"))
    group, case = mesh["ep"].get_group(), cases[rank.rank // size]
    for _ in range(2):
        for _ in range(2):
            out, grads = deep_ep_automodel.train(
                case, group, async_finish=async_finish, checkpoints=checkpoints
            )
            check_out(case, group.rank(), out)
            check_grads(case, group.rank(), grads)
        deep_ep_automodel.free_buffer()
    assert deep_ep_automodel.Process.dispatches == 4 * (1 if checkpoints == "none" else 2)


@pytest.mark.parametrize("async_finish", [False, True])
@pytest.mark.parametrize("checkpoints", ["none", "full", "selective"])
def test_automodel(checkpoints: str, async_finish: bool) -> None:
    with module_ranks(2, automodel, (TWO[:1], async_finish, checkpoints)) as ranks:
        ranks.results(TIMEOUT_S)


def test_automodel_with_two_groups_of_two() -> None:
    """One of the groups has a rank without rows."""
    cases = [Case((17, 23)), Case((9, 31), idle=0, seed=1)]
    with module_ranks(4, automodel, (cases, True, "none")) as ranks:
        ranks.results(TIMEOUT_S)
