"""`ElasticBuffer` of the module of DeepEP's shape, against plain torch that knows every rank's tokens.

Ranks are processes with a gloo group, in one domain of four and in two of two.

Shapes: T tokens, H hidden, K experts per token, E experts, L experts of a rank, N received rows.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.process_ranks import Rank
from tests.unit.deep_ep_gpus import module_ranks
from tests.unit.deep_ep_ranks import (
    LOCAL,
    MOST,
    RANKS,
    SIZES,
    E,
    Expected,
    H,
    K,
    combined,
    outputs_of,
    rounded_sum,
    tokens_of,
)
from uccl_ep_train.deep_ep import ElasticBuffer, EPHandle, EventHandle
from uccl_ep_train.deep_ep.utils.math import align
from uccl_ep_train.errors import ClosedError, DtypeError, InputError, ShapeError

ALIGNMENT, BLOCKS = 8, H // 128
TIMEOUT_S = 110


# ---- one rank's checks


@dataclass(frozen=True)
class Run:
    rank: int
    domain_size: int
    buffer: ElasticBuffer

    @property
    def routing(self) -> dict[str, Any]:
        x, idx, weights = tokens_of(self.rank)
        return {"x": x, "topk_idx": idx, "topk_weights": weights, "num_experts": E}

    @property
    def expected(self) -> Expected:
        return Expected(self.rank)


def check_handle(r: Run, handle: EPHandle, alignment: int, *, synced: bool = True) -> None:
    """What callers read in it, but `recv_src_metadata`."""
    want = r.expected
    aligned = [align(count, alignment) for count in want.counts]
    assert handle.num_recv_tokens_per_expert_list == (aligned if synced else [])
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == want.counts
    ends = torch.tensor(aligned).cumsum(0)
    if handle.do_expand:
        ends = ends - torch.tensor(aligned) + torch.tensor(want.counts)
    assert torch.equal(handle.psum_num_recv_tokens_per_expert, ends.to(torch.int32))
    sources = [sum(source <= rank for source, _ in want.tokens) for rank in range(RANKS)]
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == sources
    assert handle.num_recv_tokens == (len(want.tokens) if synced else RANKS * MOST)
    most = align(RANKS * MOST * min(K, LOCAL) + (alignment - 1) * LOCAL, alignment)
    assert handle.num_expanded_tokens == (sum(aligned) if synced else most)
    assert torch.equal(handle.topk_idx, tokens_of(r.rank)[1])


def check_sources(r: Run, handle: EPHandle, alignment: int) -> None:
    """`recv_src_metadata`, with the row of each column where rows are expanded."""
    want, slots = r.expected, torch.full((len(r.expected.tokens), K), -1)
    for slot, (expert, source, token) in zip(want.slots(alignment), want.pairs, strict=True):
        if handle.do_expand:
            slots[want.tokens.index((source, token)), want.column(expert, source, token)] = slot
    found, num_tokens = handle.recv_src_metadata, len(want.tokens)
    assert found.dtype == torch.int32 and found.shape == (handle.num_recv_tokens, 2 + K)
    assert found[:num_tokens, 0].tolist() == [source * MOST + token for source, token in want.tokens]
    first = [int((want.here(source)[token] >= 0).nonzero()[0]) for source, token in want.tokens]
    assert found[:num_tokens, 1].tolist() == [
        source * K + column for (source, _), column in zip(want.tokens, first, strict=True)
    ]
    assert torch.equal(found[:num_tokens, 2:], slots.to(torch.int32))
    assert (found[num_tokens:] == -1).all()


def check_rows(r: Run, got: tuple[Any, ...], *, weighted: bool = True) -> None:
    """Rows that are not expanded; what is behind them has no experts."""
    recv_x, idx, weights = got[:3]
    want = r.expected
    assert (weights is not None) == weighted and idx.shape == (len(recv_x), K)
    for row, (source, token) in enumerate(want.tokens):
        x, _, all_weights = tokens_of(source)
        here = want.here(source)[token]
        assert torch.equal(recv_x[row], x[token]) and torch.equal(idx[row], here)
        if weighted:
            assert torch.equal(weights[row], torch.where(here >= 0, all_weights[token], 0.0))
    assert (idx[len(want.tokens) :] == -1).all()


def check_expanded(r: Run, recv_x: Tensor, weights: Tensor | None, alignment: int) -> None:
    """Zeros between experts."""
    want = r.expected
    end = sum(align(count, alignment) for count in want.counts)
    x = torch.zeros(end, H, dtype=torch.bfloat16)
    values = torch.zeros(end)
    for slot, (expert, source, token) in zip(want.slots(alignment), want.pairs, strict=True):
        x[slot] = tokens_of(source)[0][token]
        values[slot] = tokens_of(source)[2][token, want.column(expert, source, token)]
    assert torch.equal(recv_x[:end], x)
    assert weights is None or torch.equal(weights[:end], values)


def rows_to_combine(r: Run, handle: EPHandle, num_rows: int) -> Tensor:
    """[N, H]: of a compact row the sum over its experts. What belongs to no token is NaN: nobody reads it."""
    want, rows = r.expected, torch.full((num_rows, H), torch.nan, dtype=torch.bfloat16)
    if handle.do_expand:
        for slot, (expert, source, token) in zip(
            want.slots(handle.expert_alignment), want.pairs, strict=True
        ):
            rows[slot] = outputs_of(source)[token, r.rank * LOCAL + expert]
        return rows
    for row, (source, token) in enumerate(want.tokens):
        experts = [expert for expert in range(LOCAL) if expert in want.here(source)[token]]
        of_token = [outputs_of(source)[token, r.rank * LOCAL + expert] for expert in experts]
        rows[row] = rounded_sum(of_token, torch.bfloat16)
    return rows


def check_combine(r: Run, handle: EPHandle, num_rows: int, weights: Tensor) -> None:
    """Sums with none, one and two biases; weights come back to their columns."""
    x, idx, given = tokens_of(r.rank)
    rows = rows_to_combine(r, handle, num_rows)
    wire = torch.bfloat16 if r.buffer.allow_multiple_reduction else torch.float32
    for biases in ((), (x,), (x, x * 3)):
        bias = biases[0] if len(biases) == 1 else biases or None
        out, back, _ = r.buffer.combine(rows, handle, weights, bias)
        assert back is not None and torch.equal(back, torch.where(idx >= 0, given, 0.0))
        assert torch.equal(out, combined(r.rank, r.domain_size, wire, biases)), biases
        plain, nothing, _ = r.buffer.combine(rows, handle, bias=bias)
        assert torch.equal(plain, out) and nothing is None
    # The comparison sees rows in another order.
    moved, _, _ = r.buffer.combine(rows.nan_to_num(0).roll(1, 0), handle)
    assert len(x) == 0 or not torch.equal(moved, combined(r.rank, r.domain_size, wire))


def check_modes(r: Run) -> None:
    """New and cached routing, expanded or not, with and without counts on the host."""
    buffer, routing = r.buffer, r.routing
    for expand, synced, alignment in (
        (False, True, ALIGNMENT), (False, False, ALIGNMENT), (True, True, ALIGNMENT), (True, True, 1),
        (True, False, ALIGNMENT), (True, False, 1),
    ):  # fmt: skip
        stats = torch.full((LOCAL,), 7, dtype=torch.int32)
        got = buffer.dispatch(
            **routing, expert_alignment=alignment, do_cpu_sync=synced, do_expand=expand,
            do_zero_padding=expand, cumulative_local_expert_recv_stats=stats,
        )  # fmt: skip
        recv_x, idx, weights, handle, _ = got
        assert (stats - 7).tolist() == r.expected.counts
        ends = [align(count, alignment) for count in r.expected.counts]
        rows = sum(ends) if expand else len(r.expected.tokens)
        most = handle.num_expanded_tokens if expand else RANKS * MOST
        assert len(recv_x) == (rows if synced else most)
        check_handle(r, handle, alignment, synced=synced)
        check_sources(r, handle, alignment)
        cached = buffer.dispatch(routing["x"], handle=handle, do_expand=expand)
        weighted = buffer.dispatch(
            routing["x"], None, routing["topk_weights"], handle=handle, do_expand=expand
        )
        assert cached[3] is weighted[3] is handle and cached[2] is None
        if expand:
            assert idx is cached[1] is weighted[1] is None
            for each in (got, cached, weighted):
                check_expanded(r, each[0], each[2], alignment)
        else:
            check_rows(r, got)
            check_rows(r, cached, weighted=False)
            check_rows(r, weighted)
        check_combine(r, handle, len(recv_x), weights)


def check_codes(r: Run) -> None:
    """FP8 with scales of both kinds; scales in aligned columns; padding is codes of 0 and scales of 1."""
    x, idx, _ = tokens_of(r.rank)
    want = r.expected
    scales = torch.arange(len(x) * BLOCKS).view(len(x), BLOCKS) + 1 + r.rank
    exponents = torch.nn.functional.pad(scales, (0, 4 - BLOCKS)).to(torch.uint8).view(torch.int32)
    for given in (scales.to(torch.float32), exponents):
        for expand in (False, True):
            (codes, plain), *_, handle, _ = r.buffer.dispatch(
                (x.to(torch.float8_e4m3fn), given), idx, num_experts=E, do_expand=expand,
                expert_alignment=ALIGNMENT,
            )  # fmt: skip
            (again, columns), *_ = r.buffer.dispatch(
                (x.to(torch.float8_e4m3fn), given), handle=handle, do_expand=expand,
                use_tma_aligned_col_major_sf=True,
            )  # fmt: skip
            rows = want.slots(ALIGNMENT) if expand else list(range(len(want.tokens)))
            of = [pair[1:] for pair in want.pairs] if expand else want.tokens
            wanted = torch.tensor([[s + 1 + source + t * BLOCKS for s in range(BLOCKS)] for source, t in of])
            wide = torch.full((len(codes), H), 0.0)
            wide[rows] = torch.stack([tokens_of(source)[0][token].float() for source, token in of])
            assert torch.equal(codes.float(), wide.to(torch.float8_e4m3fn).float())
            assert torch.equal(again.float(), codes.float()) and torch.equal(columns, plain)
            assert columns.stride() == (1, align(len(codes), 4)) and plain.is_contiguous()
            got = plain if given.dtype == torch.float32 else plain.view(torch.uint8)[:, :BLOCKS]
            assert torch.equal(got[rows].long(), wanted % 256)
            padding = torch.ones(len(codes), dtype=torch.bool).index_fill(0, torch.tensor(rows), False)
            assert (got[padding] == (1 if given.dtype == torch.float32 else 127)).all()


def check_events(r: Run) -> None:
    """A copy of the routing, or none; events; what a group does beside dispatches."""
    buffer, routing = r.buffer, r.routing
    before = {"previous_event": buffer.capture(), "previous_event_before_epilogue": EventHandle()}
    aside = {**before, "async_with_compute_stream": True, "allocate_on_comm_stream": True}
    *got, event = buffer.dispatch(**routing, **aside, do_handle_copy=False, num_sms=24, num_qps=1)
    event.current_stream_wait()
    check_rows(r, tuple(got))
    assert got[3].topk_idx is routing["topk_idx"] and got[3].num_sms == 24
    out, _, event = buffer.combine(rows_to_combine(r, got[3], len(got[0])), got[3], got[2], **aside)
    event.current_stream_wait()
    assert torch.equal(out, combined(r.rank, r.domain_size, torch.bfloat16))
    copied = buffer.dispatch(**routing)[3]
    assert copied.topk_idx.data_ptr() != routing["topk_idx"].data_ptr() or not len(copied.topk_idx)
    buffer.barrier()
    buffer.agrs_set_config(1 << 20, 2)
    with buffer.agrs_new_session():
        every, more, wait = buffer.all_gather((torch.full((3,), r.rank), torch.ones(2, 2) * r.rank))
        wait()
    assert every.tolist() == [[rank] * 3 for rank in range(RANKS)] and more.shape == (RANKS, 2, 2)
    alone, wait = buffer.all_gather(every[1])
    wait()
    assert torch.equal(alone, torch.ones_like(every))


def check_refusals(r: Run) -> None:
    buffer, routing = r.buffer, r.routing
    handle = buffer.dispatch(**routing)[3]
    same: dict[str, Any] = {"x": routing["x"], "handle": handle}
    ones = torch.ones(LOCAL, dtype=torch.int32)
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({**routing, "num_experts": None}, InputError, "num_experts = None; allowed are multiples of 4"),
        ({**routing, "num_experts": 10}, InputError, "num_experts = 10; allowed are multiples of 4"),
        ({**routing, "num_max_tokens_per_rank": -1}, InputError, "num_max_tokens_per_rank = -1; allowed"),
        ({**routing, "expert_alignment": 0}, InputError, "expert_alignment = 0; allowed is 1 .."),
        ({**routing, "do_zero_padding": True}, InputError, "without do_expand; allowed is False"),
        ({**routing, "topk_idx": None}, InputError, "topk_idx = None without a handle"),
        ({**routing, "topk_idx": routing["topk_idx"].int()}, DtypeError, r"topk_idx is torch\.int32"),
        ({**routing, "topk_idx": torch.zeros(41, K, dtype=torch.int64)}, ShapeError, "topk_idx is"),
        ({**routing, "topk_weights": routing["topk_weights"][:, 1:]}, ShapeError, "topk_weights is"),
        ({**routing, "cumulative_local_expert_recv_stats": ones.long()}, DtypeError, "recv_stats is"),
        ({**routing, "cumulative_local_expert_recv_stats": ones[1:]}, ShapeError, "recv_stats is"),
        ({**routing, "topk_idx": routing["topk_idx"][:, 0]}, ShapeError, "topk_idx is"),
        ({**routing, "topk_idx": 3}, DtypeError, "topk_idx is int; allowed is a torch.Tensor"),
        ({**routing, "x": [1.0]}, DtypeError, "x is list; allowed is a torch.Tensor"),
        ({**same, "topk_idx": routing["topk_idx"]}, InputError, "with a handle; allowed is None"),
        ({**same, "do_cpu_sync": True}, InputError, "do_cpu_sync = True with a handle"),
        ({**same, "do_expand": True}, InputError, "do_expand = True with a handle; allowed is False"),
        ({**same, "expert_alignment": 2}, InputError, "expert_alignment = 2 with a handle; allowed are 1"),
        ({**same, "topk_weights": torch.ones(50, K)}, ShapeError, "topk_weights is"),
    ]
    for arguments, error, text in refused:
        with pytest.raises(error, match=text):
            buffer.dispatch(**arguments)
    rows = rows_to_combine(r, handle, len(r.expected.tokens))
    for change, error in (
        ({"x": rows[1:]}, ShapeError), ({"topk_weights": torch.ones(1, K)}, ShapeError),
        ({"bias": torch.ones(1, 1).bfloat16()}, ShapeError), ({"bias": (1, 2)}, DtypeError),
    ):  # fmt: skip
        with pytest.raises(error):
            buffer.combine(**{"x": rows, "handle": handle, **change})  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="handle is tuple; allowed is an EPHandle"):
        buffer.combine(rows, ())  # type: ignore[arg-type]
    # All ranks were refused alike, so the buffer goes on.
    check_rows(r, buffer.dispatch(**same), weighted=False)


def every_check(rank: Rank, domain_size: int) -> str:
    os.environ["UCCL_EP_DOMAIN_SIZE"] = str(domain_size)
    buffer = ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=MOST, hidden=H, num_topk=K)
    r = Run(rank.rank, domain_size, buffer)
    check_modes(r)
    check_codes(r)
    check_events(r)
    check_refusals(r)
    # Other domains give other bits, so the sums above saw these.
    of_domains = [combined(r.rank, size, torch.bfloat16) for size in (4, 2)]
    assert SIZES[r.rank] == 0 or not torch.equal(*of_domains)
    buffer.destroy()
    with pytest.raises(ClosedError, match="destroyed"):
        buffer.dispatch(**r.routing)
    return "done"


@pytest.mark.parametrize("domain_size", [4, 2])
def test_rows_sums_and_handles_are_the_second_interface_s(domain_size: int) -> None:
    with module_ranks(RANKS, every_check, (domain_size,)) as ranks:
        for outcome in ranks.outcomes(timeout_s=TIMEOUT_S).values():
            assert outcome.value == "done", outcome.trace


def one_rounding(rank: Rank, domain_size: int) -> bool:
    """Returns whether a sum with more roundings has other bits."""
    os.environ["UCCL_EP_DOMAIN_SIZE"] = str(domain_size)
    buffer = ElasticBuffer(
        dist.group.WORLD, num_max_tokens_per_rank=MOST, hidden=H, allow_multiple_reduction=False
    )
    r = Run(rank.rank, domain_size, buffer)
    recv_x, _, weights, handle, _ = buffer.dispatch(**r.routing, do_expand=True)
    assert weights is not None
    check_combine(r, handle, len(recv_x), weights)
    x = tokens_of(r.rank)[0]
    once, more = (combined(r.rank, domain_size, wire, (x,)) for wire in (torch.float32, torch.bfloat16))
    buffer.destroy()
    return not torch.equal(once, more)


@pytest.mark.parametrize("domain_size", [4, 2])
def test_without_multiple_reductions_sums_and_biases_are_rounded_once(domain_size: int) -> None:
    with module_ranks(RANKS, one_rounding, (domain_size,)) as ranks:
        assert ranks.results(TIMEOUT_S) == [num_tokens > 0 for num_tokens in SIZES]


def test_what_is_not_there_is_refused() -> None:
    group: Any = type("Group", (), {"rank": lambda self: 0, "size": lambda self: 1})()
    with pytest.raises(InputError, match="num_cpu_bytes = 64; allowed is 0"):
        ElasticBuffer(group, num_cpu_bytes=64)
    buffer = ElasticBuffer(
        group, num_allocated_qps=9, prefer_overlap_with_compute=False, allow_hybrid_mode=False
    )
    for name in ("engram_write", "engram_fetch", "pp_set_config", "pp_send", "agrs_get_inplace_tensor"):
        with pytest.raises(InputError, match=rf"{name}\(\) is not there; allowed are dispatch"):
            getattr(buffer, name)(torch.ones(1), 0)
    with pytest.raises(InputError, match="num_scaleout_topk = 2; allowed is 0"):
        buffer.get_theoretical_num_sms(8, 2, 2)
    assert buffer.get_theoretical_num_sms(8, 2, rdma_gbs=50) == 48 and buffer.get_theoretical_num_qps(4) == 9
    assert buffer.get_logical_domain_size() == buffer.get_physical_domain_size() == (1, 1)
    assert ElasticBuffer.get_buffer_size_hint(group, 4096, 7168) == 1 << 30
