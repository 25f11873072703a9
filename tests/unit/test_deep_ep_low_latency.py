"""The low-latency calls of the module of DeepEP's shape, over a gloo group.

What rows and sums are is claimed in `test_low_latency.py`; here they are compared with plain torch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.process_ranks import Rank
from tests.unit.deep_ep_gpus import module_ranks
from tests.unit.test_deep_ep import LOCAL, RANKS, E, H, K, sizes, tokens_of
from uccl_ep_train.deep_ep import Buffer
from uccl_ep_train.errors import ClosedError, InputError, ShapeError

M = 33


def rows_of(rank: int, expert: int) -> list[tuple[int, int]]:
    """(source, token) of the rows that an expert of this rank gets."""
    found = []
    for source in range(RANKS):
        idx = tokens_of(source, sizes(source))[1]
        found += [(source, int(token)) for token in (idx == rank * LOCAL + expert).any(1).nonzero()]
    return found


def check_rows(rank: int, got: tuple[Any, ...]) -> None:
    recv_x, recv_count, handle, *_ = got
    src_info, layout_range, max_tokens, hidden, num_experts = handle
    assert (max_tokens, hidden, num_experts) == (M, H, E)
    for expert in range(LOCAL):
        wanted = rows_of(rank, expert)
        assert int(recv_count[expert]) == len(wanted)
        ends = 0
        for source in range(RANKS):
            begin, count = (
                int(layout_range[expert, source]) >> 32,
                int(layout_range[expert, source]) & 0xFFFFFFFF,
            )
            assert begin == ends and count == sum(its == source for its, _ in wanted)
            ends += count
        for slot, (source, token) in enumerate(wanted):
            assert int(src_info[expert, slot]) == token
            x = tokens_of(source, sizes(source))[0][token]
            if isinstance(recv_x, tuple):
                codes, scales = recv_x
                assert scales.stride()[-2:] == (1, RANKS * M)
                if scales.dtype == torch.int32:
                    exponents = (scales[expert, slot] + 0).view(torch.uint8)[: H // 128]
                    factors = torch.pow(2.0, exponents.float() - 127)
                else:
                    factors = scales[expert, slot]
                value = (codes[expert, slot].float().view(-1, 128) * factors[:, None]).view(-1)
                assert torch.allclose(value, x.float(), rtol=0.07, atol=1e-2)
            else:
                assert torch.equal(recv_x[expert, slot], x)


def weighted(rank: int) -> Tensor:
    """What a combine gives if experts change nothing."""
    x, idx, weights = tokens_of(rank, sizes(rank))
    return x.float() * weights.masked_fill(idx < 0, 0.0).sum(1, keepdim=True)


def low_latency(seat: Rank, hinted: bool) -> str:
    bytes_asked = Buffer.get_low_latency_rdma_size_hint(M, H, RANKS, E) if hinted else 0
    buffer = Buffer(
        dist.group.WORLD, num_rdma_bytes=bytes_asked, low_latency_mode=True, num_qps_per_rank=LOCAL
    )
    x, idx, weights = tokens_of(seat.rank, sizes(seat.rank))
    stats, waited = torch.zeros(LOCAL, dtype=torch.int32), torch.zeros(RANKS, RANKS, dtype=torch.int64)
    forms: list[dict[str, Any]] = [
        {"use_fp8": False},
        {"use_fp8": False, "return_recv_hook": True},
        {},
        {"round_scale": True},
        {"round_scale": True, "use_ue8m0": True, "async_finish": True},
    ]
    for form in forms:
        before = stats.clone()
        got = buffer.low_latency_dispatch(
            x,
            idx,
            M,
            E,
            cumulative_local_expert_recv_stats=stats,
            dispatch_wait_recv_cost_stats=waited,
            **form,
        )
        recv_x, recv_count, handle, event, hook = got
        hook() if form.get("return_recv_hook") else event.current_stream_wait()
        assert torch.equal(stats - before, recv_count)
        check_rows(seat.rank, got)
        if isinstance(recv_x, tuple):
            continue
        for zero_copy in (False, True):
            out = torch.empty_like(x)
            if zero_copy:
                buffer.get_next_low_latency_combine_buffer(handle).copy_(recv_x)
            combined, event, hook = buffer.low_latency_combine(
                torch.full_like(recv_x, torch.nan) if zero_copy else recv_x,
                *(idx, weights, handle),
                zero_copy=zero_copy,
                out=out,
                return_recv_hook=True,
                **{"overlap": False, "block_m": 64, "comp_signal": None}
                if zero_copy
                else {},  # as of UCCL-EP
            )
            assert hook is not None
            hook()
            assert combined is out
            assert torch.allclose(out.float(), weighted(seat.rank), rtol=2**-7, atol=2**-6)
    refuse(buffer, x, idx)
    buffer.clean_low_latency_buffer(M, H, E)
    masked = torch.ones(RANKS, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(masked)
    assert masked.tolist() == [0] * RANKS
    buffer.destroy()
    return "done"


def taken_back(seat: Rank) -> str:
    """All ranks meet again on another engine; a handle of the earlier one says that it is closed."""
    buffer = Buffer(dist.group.WORLD, 0, 0, low_latency_mode=True, enable_shrink=True)
    x, idx, weights = tokens_of(seat.rank, sizes(seat.rank))
    before = buffer.low_latency_dispatch(x, idx, M, E, use_fp8=False)
    buffer.low_latency_clean_mask_buffer()
    after = buffer.low_latency_dispatch(x, idx, M, E, use_fp8=False)
    check_rows(seat.rank, after)
    rows = before[0]
    assert isinstance(rows, Tensor)
    with pytest.raises(ClosedError):
        buffer.low_latency_combine(rows, idx, weights, before[2])
    buffer.destroy()
    return "done"


def refuse(buffer: Buffer, x: Tensor, idx: Tensor) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"async_finish": True, "return_recv_hook": True}, "allowed is one of them"),
        ({"use_ue8m0": True}, "use_ue8m0 without round_scale"),
    ]
    for form, text in wrong:
        with pytest.raises(InputError, match=text):
            buffer.low_latency_dispatch(x, idx, M, E, **form)
    for given, error, text in (
        ({"overlap": True}, InputError, "overlap = True; allowed is False"),
        ({"blocks": 1}, TypeError, "unexpected keyword argument 'blocks'"),
    ):
        with pytest.raises(error, match=text):
            buffer.low_latency_combine(x, idx, idx.float(), None, **given)
    with pytest.raises(InputError, match="low_latency_update_mask_buffer"):
        buffer.low_latency_update_mask_buffer(1, True)
    with pytest.raises(ShapeError, match="rows"):
        buffer.low_latency_dispatch(x.new_zeros(M + 1, H), idx.new_zeros(M + 1, K), M, E)


@pytest.mark.parametrize("hinted", [False, True])
def test_slots_hold_every_row_and_sums_are_weighted(hinted: bool) -> None:
    with module_ranks(RANKS, low_latency, (hinted,)) as ranks:
        for outcome in ranks.outcomes(timeout_s=110).values():
            assert outcome.value == "done", outcome.trace


def test_low_latency_calls_need_its_mode() -> None:
    group: Any = type("Group", (), {"rank": lambda self: 0, "size": lambda self: 1})()
    with pytest.raises(InputError, match="low_latency_mode = False; allowed is True"):
        Buffer(group).low_latency_dispatch(torch.zeros(1, H), torch.zeros(1, K), M, E)


def test_masked_ranks_come_back_together() -> None:
    with module_ranks(RANKS, taken_back) as ranks:
        for outcome in ranks.outcomes(timeout_s=110).values():
            assert outcome.value == "done", outcome.trace
