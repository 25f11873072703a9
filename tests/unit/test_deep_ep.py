"""The module of DeepEP's shape: what it sends and sums, on a group whose routing every rank knows.

Ranks are processes with a gloo group, as programs that call DeepEP have them.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from tests.process_ranks import Rank
from tests.unit.deep_ep_gpus import drawn_on_cpu, module_ranks
from uccl_ep_train import deep_ep
from uccl_ep_train.deep_ep import Buffer, Config, EventOverlap
from uccl_ep_train.deep_ep.sending import Handle, Route
from uccl_ep_train.errors import ClosedError, DeviceError, DtypeError, InputError, ShapeError

H, E, K = 256, 12, 4
RANKS = 3
ROOT = Path(__file__).parents[2]
LOCAL = E // RANKS


@drawn_on_cpu
def tokens_of(rank: int, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(num_tokens, H, generator=generator).to(torch.bfloat16)
    idx = torch.rand(num_tokens, E, generator=generator).argsort(dim=1)[:, :K].contiguous()
    idx[torch.rand(num_tokens, K, generator=generator) < 0.2] = -1
    return x, idx, torch.rand(num_tokens, K, generator=generator)


def sizes(rank: int) -> int:
    return (20, 0, 33)[rank]


def expected_rows(rank: int) -> list[tuple[int, int]]:
    """(source, token) of the rows that this rank gets."""
    found = []
    for source in range(RANKS):
        idx = tokens_of(source, sizes(source))[1]
        there = ((idx >= rank * LOCAL) & (idx < (rank + 1) * LOCAL)).any(1)
        found += [(source, int(token)) for token in there.nonzero()]
    return found


def check_received(rank: int, recv_x: Tensor, idx: Tensor, weights: Tensor) -> None:
    rows = expected_rows(rank)
    assert idx.shape == weights.shape == (len(recv_x), K)
    for i, (source, token) in enumerate(rows):
        x, all_idx, all_weights = tokens_of(source, sizes(source))
        here = (all_idx[token] >= rank * LOCAL) & (all_idx[token] < (rank + 1) * LOCAL)
        assert torch.equal(recv_x[i], x[token])
        assert torch.equal(idx[i], torch.where(here, all_idx[token] - rank * LOCAL, -1))
        assert torch.equal(weights[i], torch.where(here, all_weights[token], 0.0))
    assert (idx[len(rows) :] == -1).all() and (weights[len(rows) :] == 0).all()


@dataclass(frozen=True)
class Ready:
    """One rank with its inputs, and what a first dispatch gave it."""

    rank: int
    buffer: Buffer
    x: Tensor
    idx: Tensor
    weights: Tensor
    layout: dict[str, Tensor]
    recv_x: Tensor
    recv_idx: Tensor
    recv_weights: Tensor
    handle: Any

    @property
    def in_rank(self) -> Tensor:
        return self.layout["is_token_in_rank"]


def first_dispatch(rank: int, nvl_bytes: int) -> Ready:
    """A new routing; alignment; the handle's parts that DeepEP's own tests look into."""
    buffer = Buffer(dist.group.WORLD, nvl_bytes, 0)
    assert buffer.runtime.is_available() and buffer.runtime.get_num_rdma_ranks() == 1
    x, idx, weights = tokens_of(rank, sizes(rank))
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(idx, E)
    assert per_node is None and isinstance(event, EventOverlap)
    assert torch.equal(per_rank, in_rank.sum(0, dtype=torch.int32)) and per_rank.dtype == torch.int32
    assert torch.equal(per_expert, torch.bincount(idx[idx >= 0], minlength=E).to(torch.int32))
    layout = {
        "num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert,
    }  # fmt: skip
    recv_x, recv_idx, recv_weights, counts, handle, event = buffer.dispatch(
        x, **layout, topk_idx=idx, topk_weights=weights, expert_alignment=8, previous_event=event,
        async_finish=True,
    )  # fmt: skip
    event.current_stream_wait()
    rows = expected_rows(rank)
    assert len(recv_x) == len(rows)
    check_received(rank, recv_x, recv_idx, recv_weights)
    for e in range(LOCAL):
        exact = int((recv_idx == e).sum())
        assert counts[e] == -(-exact // 8) * 8
    ends = [sum(source <= r for source, _ in rows) for r in range(RANKS)]
    assert handle[0][:, rank].tolist() == ends and len(handle) == 6
    assert handle[3].tolist() == [token for _, token in rows]
    assert torch.equal(handle[4], in_rank)
    return Ready(rank, buffer, x, idx, weights, layout, recv_x, recv_idx, recv_weights, handle)


def check_sums(r: Ready) -> None:
    """Over ranks, of rows and of weights, with none, one or two biases, which are the first addends."""
    one, two = r.x.flip(0), r.x * 3
    for biases in ((), (one,), (one, two)):
        bias = biases[0] if len(biases) == 1 else biases or None
        summed, summed_weights, _ = r.buffer.combine(r.recv_x, r.handle, r.recv_weights, bias=bias)
        total = sum((addend.float() for addend in biases), torch.zeros(r.x.shape))
        for times in range(RANKS):
            total = torch.where(r.in_rank.sum(1, keepdim=True) > times, total + r.x.float(), total)
        assert torch.equal(summed, total.to(torch.bfloat16)), len(biases)
        assert summed_weights is not None
        assert torch.equal(summed_weights, torch.where(r.idx >= 0, r.weights, 0.0))
    every = torch.ones_like(r.recv_weights)  # of columns that are not this rank's, too
    assert torch.equal(
        r.buffer.combine(r.recv_x, r.handle, every)[1], r.in_rank.sum(1, keepdim=True).expand(-1, K).float()
    )


def check_same_routing_and_codes(r: Ready) -> None:
    """The same routing again; FP8 that the caller quantised, with scales in rows and in columns."""
    again = r.buffer.dispatch(r.x * 2, handle=r.handle)
    assert torch.equal(again[0], r.recv_x * 2) and again[1:5] == (None, None, [], None)
    codes = r.x.to(torch.float8_e4m3fn)
    scales = torch.arange(len(r.x) * (H // 128), dtype=torch.float32).view(len(r.x), H // 128)
    wanted = [[token * (H // 128) + b for b in range(H // 128)] for _, token in expected_rows(r.rank)]
    for given in (scales, scales.t().contiguous().t()):
        (got, got_scales), fp8_idx, *_ = r.buffer.dispatch(
            (codes, given), **r.layout, topk_idx=r.idx, topk_weights=r.weights
        )
        assert got.dtype == torch.float8_e4m3fn and torch.equal(fp8_idx, r.recv_idx)
        assert torch.equal(got.float(), r.recv_x.to(torch.float8_e4m3fn).float())
        assert got_scales.tolist() == wanted
    assert r.buffer.dispatch((codes, scales), handle=r.handle)[0][1].tolist() == wanted


def check_packed_scales(r: Ready) -> None:
    """int32: an exponent, of any value, for each of the two blocks; the bytes of no block come out as 0."""
    codes = r.x.to(torch.float8_e4m3fn)
    exponents = (torch.arange(len(r.x))[:, None] * 7 + torch.tensor([0, 255, 1, 1])) % 256
    words = exponents.to(torch.uint8).view(torch.int32)
    wanted = [[token * 7 % 256, (token * 7 + 255) % 256, 0, 0] for _, token in expected_rows(r.rank)]
    same, new = {"handle": r.handle}, {**r.layout, "topk_idx": r.idx}
    for given in (same, new, {**new, "num_worst_tokens": 64}):
        got, got_words = r.buffer.dispatch((codes, words), **given)[0]
        assert torch.equal(got[: len(wanted)].float(), r.recv_x.to(torch.float8_e4m3fn).float())
        assert got_words.dtype == torch.int32 and len(got_words) == len(got)
        assert got_words.view(torch.uint8)[: len(wanted)].tolist() == wanted
    for given in (same, new):
        with pytest.raises(ShapeError, match=r"x\.scales is \[\d+, 3\] int32; allowed is \[\d+, 1\]"):
            r.buffer.dispatch((codes, words.repeat(1, 3)), **given)
        # MXFP8: an exponent for each 32 columns.
        its = r.buffer.dispatch((codes, torch.cat([words, ~words], 1)), **given)[0][1]
        assert its.dtype == torch.int32 and torch.equal(its[: len(wanted), 0], ~its[: len(wanted), 1])
        assert its.view(torch.uint8)[: len(wanted), 0].tolist() == [row[0] for row in wanted]


def check_other_forms(r: Ready) -> None:
    """Worst-case rows; no experts, only ranks; an odd number of them; no weights; longer rows than before."""
    buffer, x, layout = r.buffer, r.x, r.layout
    worst = buffer.dispatch(x, **layout, topk_idx=r.idx, topk_weights=r.weights, num_worst_tokens=64)
    assert len(worst[0]) == 64 and worst[3] == []
    check_received(r.rank, *worst[:3])
    assert worst[4][0][-1, r.rank] == len(r.recv_x)
    sums = buffer.combine(r.recv_x, r.handle)
    assert torch.equal(buffer.combine(worst[0], worst[4])[0], sums[0]) and sums[1] is None
    plain = buffer.dispatch(x, **layout, expert_alignment=4)
    assert torch.equal(plain[0], r.recv_x) and plain[1] is None and plain[2] is None
    exact = [int((r.recv_idx == e).sum()) for e in range(LOCAL)]
    assert plain[3] == [-(-count // 4) * 4 for count in exact]
    assert torch.equal(buffer.combine(plain[0], plain[4])[0], sums[0])
    one_more = {"topk_idx": pad(r.idx, (0, 1), value=-1), "topk_weights": pad(r.weights, (0, 1), value=1.0)}
    odd = buffer.dispatch(x, **layout, **one_more)
    assert torch.equal(odd[0], r.recv_x) and torch.equal(odd[1], pad(r.recv_idx, (0, 1), value=-1))
    assert torch.equal(odd[2], pad(r.recv_weights, (0, 1)))
    wide = x.repeat(1, 4)
    got = buffer.dispatch(wide, **layout, topk_idx=r.idx)
    assert torch.equal(got[0], r.recv_x.repeat(1, 4)) and torch.equal(got[1], r.recv_idx) and got[2] is None
    assert torch.equal(buffer.combine(r.recv_x, r.handle)[0], sums[0])


def high_throughput(rank: Rank, nvl_bytes: int) -> str:
    r = first_dispatch(rank.rank, nvl_bytes)
    check_sums(r)
    check_same_routing_and_codes(r)
    check_packed_scales(r)
    check_other_forms(r)
    with pytest.raises(InputError, match="with a handle; allowed are None"):
        r.buffer.dispatch(r.x, handle=r.handle, topk_idx=r.idx)
    with pytest.raises(ShapeError, match="topk_weights is"):
        r.buffer.combine(r.recv_x, r.handle, r.recv_weights[:, :1])
    with pytest.raises(DtypeError, match=r"x\.scales is float64"):
        r.buffer.dispatch(
            (r.x.to(torch.float8_e4m3fn), torch.ones(len(r.x), H // 128, dtype=torch.float64)),
            handle=r.handle,
        )
    new, tokens = {"x": r.x, **r.layout, "topk_idx": r.idx, "topk_weights": r.weights}, len(r.x)
    no_weights: dict[str, Any] = {"topk_weights": None}
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"topk_weights": r.weights.bfloat16()}, DtypeError, r"allowed is torch\.float32"),
        ({"topk_weights": torch.ones(len(r.x), K + 1)}, ShapeError, "as topk_idx"),
        ({"topk_idx": None}, InputError, "topk_weights without topk_idx"),
        ({"topk_idx": r.idx.int()}, DtypeError, r"topk_idx is torch\.int32; allowed is torch\.int64"),
        (
            {**no_weights, "topk_idx": r.idx[:, 0]},
            ShapeError,
            rf"topk_idx is \[{tokens}\]; allowed is \[T, K\]",
        ),
        (
            {**no_weights, "topk_idx": r.idx.new_zeros(tokens + 1, K)},
            ShapeError,
            rf"allowed is \[{tokens}, {K}\]",
        ),
        ({**no_weights, "topk_idx": r.idx.to("meta")}, DeviceError, "topk_idx is on meta; allowed is"),
        ({"is_token_in_rank": r.in_rank[:, :1]}, ShapeError, "is_token_in_rank is"),
        ({"is_token_in_rank": None}, InputError, "get_dispatch_layout"),
        ({"expert_alignment": 0}, InputError, "expert_alignment = 0"),
        ({"num_worst_tokens": -1}, InputError, "num_worst_tokens = -1"),
    ]
    with pytest.raises(DtypeError, match=r"allowed is torch\.int64"):
        r.buffer.get_dispatch_layout(r.idx.int(), E)
    with pytest.raises(ShapeError, match=r"allowed is \[T, K\]"):
        r.buffer.get_dispatch_layout(r.idx[:, 0], E)
    for change, error, text in refused:
        with pytest.raises(error, match=text):
            r.buffer.dispatch(**{**new, **change})
    for wrong, sum_error in ((r.x[:, :1], ShapeError), (r.x.float(), DtypeError)):
        with pytest.raises(sum_error, match="bias"):
            r.buffer.combine(r.recv_x, r.handle, bias=(wrong, wrong))
    with pytest.raises(DtypeError, match="topk_weights is"):
        r.buffer.combine(r.recv_x, r.handle, r.recv_weights.bfloat16())
    # All ranks were refused alike, so the buffer goes on.
    assert len(r.buffer.dispatch(r.x, handle=r.handle)[0]) == len(r.recv_x)
    r.buffer.destroy()
    with pytest.raises(ClosedError):
        r.buffer.dispatch(r.x, handle=r.handle)
    with pytest.raises(ClosedError, match="destroyed"):
        r.buffer.dispatch(r.x, **r.layout)
    return "done"


@pytest.mark.parametrize("nvl_bytes", [0, int(2e9)])
def test_rows_sums_and_handles_are_deep_ep_s(nvl_bytes: int) -> None:
    with module_ranks(RANKS, high_throughput, (nvl_bytes,)) as ranks:
        for outcome in ranks.outcomes(timeout_s=110).values():
            assert outcome.value == "done", outcome.trace


def test_what_is_not_there_is_refused() -> None:
    group: Any = type("Group", (), {"rank": lambda self: 0, "size": lambda self: 1})()
    for name in ("enable_shrink", "comm"):
        with pytest.raises(InputError, match=name):
            Buffer(group, **{name: True})
    with pytest.raises(InputError, match="num_ranks = 3; allowed are 2, 4"):
        Buffer.get_dispatch_config(3)
    with pytest.raises(InputError, match="num_sms = 21"):
        Buffer.set_num_sms(21)
    with pytest.raises(InputError, match="get_dispatch_layout"):
        Buffer(group).dispatch(torch.zeros(1, H, dtype=torch.bfloat16))
    assert Buffer.get_combine_config(8) == Config(Buffer.num_sms)


def test_a_layout_raises_nothing_about_what_is_no_expert() -> None:
    """On a GPU it would be an error of the whole context. The dispatch refuses it."""
    group: Any = type("Group", (), {"rank": lambda self: 0, "size": lambda self: RANKS})()
    idx = torch.tensor([[0, 5, -1], [E, -2, E + 5], [11, 2**40, -(2**40)]])
    per_rank, _, per_expert, in_rank, _ = Buffer(group).get_dispatch_layout(idx, E)
    assert in_rank[0].tolist() == [True, True, False] and in_rank[2, 2]
    assert per_expert[0] == per_expert[5] == 1 and per_rank.shape == (RANKS,)
    only_none = Buffer(group).get_dispatch_layout(torch.full((2, 1), -1), E)
    assert not only_none[3].any() and only_none[2].tolist() == [0] * E


def test_a_handle_between_nodes_has_deep_ep_s_ten_tensors() -> None:
    source = torch.tensor([1, 1, 3, 9, 9, 9, 0, 0], dtype=torch.int32)
    metadata, plan = torch.stack([source, source * 7], 1), Any
    engine: Any = SimpleNamespace(rank=2, num_ranks=9, device=torch.device("cpu"))
    in_rank = torch.zeros(4, 9, dtype=torch.bool)
    handle = Handle(Route(engine, plan, 8, metadata, in_rank))
    assert len(handle) == 10 and handle[0] is in_rank
    assert handle[-4].tolist() == [2, 2, 3, 3, 3, 3, 3, 3, 6]


PROGRAM = """
import subprocess, sys
import torch
import deep_ep
from deep_ep.utils import EventHandle, EventOverlap
from deep_ep.utils.envs import init_dist
from deep_ep.utils.event import EventOverlap as the_same

def spawned(number):
    print(number, deep_ep.Buffer.__module__, deep_ep.EventOverlap is the_same is EventOverlap, flush=True)

if __name__ == "__main__":
    print(deep_ep.Buffer.__module__, deep_ep.topk_idx_t, sys.argv[1:], flush=True)
    torch.multiprocessing.spawn(spawned, nprocs=1)
    subprocess.run([sys.executable, "-c", "import deep_ep; print(deep_ep.Config.__module__)"])
"""


def test_a_program_that_imports_deep_ep_runs(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    alone = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert alone.returncode != 0, "deep_ep is installed here: the test proves nothing"
    command = [sys.executable, "-m", "uccl_ep_train.deep_ep", str(program), "one", "--two"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "uccl_ep_train.deep_ep.buffer torch.int64 ['one', '--two']",
        "0 uccl_ep_train.deep_ep.buffer True",
        "uccl_ep_train.deep_ep.config",
    ], done.stderr


def test_an_installed_deep_ep_is_hidden_only_if_told(tmp_path: Path) -> None:
    (tmp_path / "deep_ep.py").write_text("here = True\n")
    (tmp_path / "program.py").write_text("import deep_ep\nprint(hasattr(deep_ep, 'here'))\n")
    base = [sys.executable, "-m", "uccl_ep_train.deep_ep"]
    env = {"PYTHONPATH": str(tmp_path), "PATH": ""}
    said = "error: deep_ep is installed; allowed with --replace, which hides it"
    for options, wanted, status in (([], said, 2), (["--replace"], "False", 0)):
        command = [*base, *options, str(tmp_path / "program.py")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        assert done.returncode == status and (done.stdout + done.stderr).splitlines()[-1].endswith(wanted)


@pytest.mark.parametrize("folder", ["uccl_ep_train/deep_ep/importable", "packaging/deep_ep"])
def test_where_its_name_is_on_the_path_it_is_imported(folder: str) -> None:
    env = {"PYTHONPATH": str(ROOT / folder), "PATH": ""}
    program = "import deep_ep, deep_ep.utils.math as m; print(deep_ep.Buffer.__module__, m.ceil_div(7, 2))"
    compiled = "from deep_ep_cpp import Config, EventHandle; print(Config.__module__, EventHandle.__module__)"
    for source, wanted in (
        (program, "uccl_ep_train.deep_ep.buffer 4\n"),
        (compiled, "uccl_ep_train.deep_ep.config uccl_ep_train.deep_ep.utils.event\n"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", source], capture_output=True, text=True, check=False, env=env, cwd=ROOT
        )
        assert done.stdout == wanted, done.stderr


def test_install_does_it_once() -> None:
    before = {name: module for name, module in sys.modules.items() if name.startswith("deep_ep")}
    try:
        deep_ep.install(replace=True)
        deep_ep.install()
        assert sys.modules["deep_ep"] is deep_ep
        # Names of several versions of DeepEP, and no second copy of a class.
        for name in ("deep_ep.buffer", "deep_ep.buffers.legacy"):
            assert importlib.import_module(name).Buffer is Buffer
        for name in ("deep_ep.elastic", "deep_ep.buffers.elastic"):
            assert importlib.import_module(name).ElasticBuffer is deep_ep.ElasticBuffer
        for name in ("deep_ep_cpp", "deep_ep._C", "deep_ep.utils.event"):
            assert importlib.import_module(name).EventHandle is deep_ep.EventHandle
    finally:
        for name in [name for name in sys.modules if name.startswith("deep_ep")]:
            del sys.modules[name]
        sys.modules.update(before)
