"""The planner's event model: symmetry, a closed form where nothing waits, stragglers, skew, time,
refusals."""

from __future__ import annotations

import functools
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.machine import needs_kernels
from uccl_ep_train.errors import EpError, InputError, ShapeError
from uccl_ep_train.planner import events, report
from uccl_ep_train.planner.__main__ import main
from uccl_ep_train.planner.clock import RealClock, SimulatedClock
from uccl_ep_train.planner.events import PLANS, simulate
from uccl_ep_train.planner.machine import MACHINES, Kernels
from uccl_ep_train.planner.protocol import Protocol, protocol_of, unlimited
from uccl_ep_train.planner.shape import Router, Shape, read_trace

ROOT = Path(__file__).resolve().parents[2]
H200 = MACHINES["h200"]
ROUTER = Router(num_experts=256, topk=8)
LIMITED = Router(num_experts=256, topk=8, num_groups=8, group_topk=4)


def shape(ranks: int, size: int, **more: Any) -> Shape:
    return Shape.split(ranks, size, **{"router": ROUTER, **more})


def windowed(of: Shape, tokens: int) -> Protocol:
    """Rings hold a window of dispatch, or two of combine, as on GPUs."""
    slots = max(-(-tokens // unlimited(of).chunk_rows[0]), 2 * -(-tokens // unlimited(of).chunk_rows[1]))
    return replace(unlimited(of), dispatch_window=tokens, combine_window=tokens, slots=slots)


@pytest.mark.parametrize("op", ["dispatch", "combine"])
@pytest.mark.parametrize(
    "of",
    [shape(4, 4), shape(4, 1), shape(8, 2), shape(16, 4, dtype="bf16"), shape(64, 8, router=LIMITED)],
    ids=lambda s: f"{len(s.domains)}x{s.domains[0]}",
)
def test_one_actor_stands_for_all_under_uniform_load(of: Shape, op: str) -> None:
    for plan in PLANS if op == "dispatch" else ("cached",):
        for sizes, close in ((unlimited(of), 2e-3), (windowed(of, 1024), 2e-2)):
            one = simulate(H200, of, sizes, op, plan)
            every = simulate(H200, of, sizes, op, plan, every=True)
            assert every.us == pytest.approx(one.us, rel=close)
            assert every.busy_us == pytest.approx(one.busy_us, rel=1e-6)


def test_streams_in_batches_take_longer_for_one_actor_as_for_all() -> None:
    of = shape(32, 2)
    at_once = windowed(of, 32)
    batches = replace(at_once, batch_streams=5, stream_batches=3)
    one, every = (simulate(H200, of, batches, "combine", every=all_of) for all_of in (False, True))
    assert every.us == pytest.approx(one.us, rel=2e-2)
    assert one.num_windows == 3 * simulate(H200, of, at_once, "combine").num_windows
    assert one.us > 1.2 * simulate(H200, of, at_once, "combine").us
    assert simulate(H200, of, batches, "dispatch") == simulate(H200, of, at_once, "dispatch")


def test_an_uneven_load_would_be_noticed() -> None:
    """Control: with skew the busiest of all actors takes clearly longer than the mean one."""
    of = shape(16, 4, skew=1.0)
    even = simulate(H200, shape(16, 4), unlimited(of), "dispatch")
    assert simulate(H200, of, unlimited(of), "dispatch").us > 1.03 * even.us
    with pytest.raises(InputError, match="every = False"):
        simulate(H200, of, unlimited(of), "dispatch", every=False)


def free(**costly: float) -> Kernels:
    """Kernels that take no time but for what is named."""
    tiny = {entry.name: 1e-9 for entry in fields(Kernels)} | {"link_share": 1.0}
    return Kernels(**(tiny | costly))


def test_the_model_is_a_sum_where_nothing_waits() -> None:
    """A chunk in flight: its call, post, bytes, wire, poll and flag, one after the other."""
    of = shape(2, 1, tokens=32, router=Router(num_experts=2, topk=2), dtype="bf16")
    machine = replace(
        H200, kernels=free(dispatch_us=20.0, hop_us=7.0, place_ns=0.5), stage_several_ns=1e-9, link_gbps=1e9
    )
    row, placed = 14336, 64 * 14336 / 1e3 * 0.5e-3
    chunk = 32 * row / 50e3
    weights = (64 + 4 * 32) / 50e3
    poll = 1.5 / 2
    # The rows placed for our own tokens are written while the other rank's travel.
    wanted = 20 + 0.2 + weights + 0.2 + chunk + 5 + poll + 7 + placed / 2
    got = simulate(machine, of, unlimited(of), "dispatch").us
    assert got == pytest.approx(wanted, abs=0.25)
    slower = simulate(replace(machine, nic_gbps=25.0), of, unlimited(of), "dispatch").us
    assert slower - got == pytest.approx(chunk + weights, rel=0.01), "control: half the rate, twice the time"


def test_a_window_waits_for_the_credits_of_the_one_before() -> None:
    """A ring that holds one window: between two windows a credit and a chunk are under way."""
    of = shape(2, 1, tokens=1024, router=Router(num_experts=2, topk=2), dtype="bf16")
    machine = replace(H200, kernels=free(), stage_several_ns=1e-9, link_gbps=1e9)
    chunk = unlimited(of).chunk_rows[0]

    def us(windows: int, slots: int) -> float:
        sizes = replace(unlimited(of), dispatch_window=1024 // windows, slots=slots)
        return simulate(machine, of, sizes, "dispatch").us

    ring = -(-256 // chunk)
    trip = 2 * (machine.wire_us + machine.post_us) + machine.pass_us / 2
    assert us(4, ring) - us(1, 4 * ring) == pytest.approx(3 * trip, rel=0.02)
    assert us(4, 2 * ring) - us(1, 4 * ring) < 0.2 * trip, "control: a ring of two windows"


@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_one_window_is_made_while_the_last_one_is_used(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of = shape(4, 2)
    sizes = windowed(of, 512)
    overlapped = simulate(H200, of, sizes, op).us
    assert overlapped < 1.3 * simulate(H200, of, unlimited(of), op).us
    monkeypatch.setattr(events, "HALVES", 1)
    assert simulate(H200, of, sizes, op).us > 1.1 * overlapped


@pytest.mark.parametrize("late_us", [300.0, 1000.0])
def test_a_straggler_adds_about_its_delay(late_us: float) -> None:
    of = shape(8, 2)
    delays = [0.0] * 8
    alone = simulate(H200, of, unlimited(of), "dispatch").us
    delays[5] = late_us
    late = simulate(H200, of, unlimited(of), "dispatch", delays_us=delays).us
    assert 0.9 * late_us <= late - alone <= 1.1 * late_us


def test_uneven_domains_and_a_trace_are_simulated(tmp_path: Path) -> None:
    of = Shape(domains=(4, 2), router=Router(num_experts=12, topk=2), tokens=64, hidden=256, dtype="bf16")
    assert not of.is_even and simulate(H200, of, unlimited(of), "combine").us > 0
    rng = np.random.default_rng(0)
    idx = rng.random((2, 3, 384, 12)).argsort(-1)[..., :2].astype(np.int16)
    np.savez(tmp_path / "t.npz", topk_idx=idx, num_experts=np.array(12), steps=np.arange(2))
    trace = read_trace(tmp_path / "t.npz", 384, of.router, layer=1)
    assert (trace == idx[0, 1]).all()
    counted = replace(of, trace=trace).counts
    assert counted.pairs_SR.sum() == 2 * 384
    assert counted.to_domain_SD[0, 0] == (trace[:64] // 2 < 4).any(1).sum()
    for wrong, words in ((of.router, "tokens of a layer"), (ROUTER, "not top-8")):
        with pytest.raises(InputError, match=words):
            read_trace(tmp_path / "t.npz", 10**6, wrong)
    with pytest.raises(InputError, match="no router trace"):
        read_trace(tmp_path / "gone.npz", 1, of.router)


def test_expected_counts_are_those_of_many_draws() -> None:
    wide = shape(8, 4, router=LIMITED)
    drawn = replace(wide, skew=1e-9).counts
    for name in ("to_domain_SD", "to_rank_SR", "pairs_SR"):
        assert getattr(drawn, name).mean(0) == pytest.approx(getattr(wide.counts, name)[0], rel=0.03), name


def test_both_clocks_run_actions_in_one_order() -> None:
    orders = []
    for clock in (SimulatedClock(), RealClock()):
        seen: list[str] = []

        def early(seen: list[str] = seen, clock: SimulatedClock = clock) -> None:
            seen.append("early")
            clock.at(2000, lambda: seen.append("next"))

        clock.at(3000, functools.partial(seen.append, "late"))
        clock.at(1000, early)
        end = clock.run()
        assert end >= 3000
        orders.append(seen)
    assert orders[0] == orders[1] == ["early", "next", "late"]
    of = shape(2, 1, tokens=64)
    simulated = simulate(H200, of, unlimited(of), "dispatch").us
    assert simulate(H200, of, unlimited(of), "dispatch", clock=RealClock()).us >= simulated


def test_every_figure_of_a_machine_names_its_source() -> None:
    for machine in MACHINES.values():
        names = [entry.name for entry in fields(machine) if isinstance(getattr(machine, entry.name), float)]
        for name in [*names, *machine.kernels.as_dict()]:
            source = machine.source(name)
            assert source
            for word in source.replace(":", " ").split():
                assert not word.startswith("bench/") or (ROOT / word).is_file(), word


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ranks": 0}, "0 ranks in domains"),
        ({"router": Router(num_experts=256, topk=300)}, "topk = 300"),
        ({"router": Router(num_experts=255, topk=8)}, "num_experts = 255"),
        ({"router": Router(num_experts=256, topk=8, num_groups=7)}, "num_groups = 7"),
        ({"router": Router(num_experts=256, topk=8, num_groups=128, group_topk=2)}, "fewer experts"),
        ({"tokens": 0}, "tokens = 0"),
        ({"hidden": 100}, "hidden = 100"),
        ({"dtype": "int4"}, "dtype = 'int4'"),
        ({"skew": -1.0}, "skew = -1.0"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(change: dict[str, Any], words: str) -> None:
    given = {"ranks": 8, "size": 4, **change}
    with pytest.raises(InputError, match=words):
        shape(given.pop("ranks"), given.pop("size"), **given)


def test_calls_that_cannot_be_are_refused() -> None:
    of = shape(4, 2)
    for call, words in (
        ({"op": "reduce"}, "op = 'reduce'"),
        ({"plan": "old"}, "plan = 'old'"),
        ({"delays_us": [0.0]}, "4 times"),
    ):
        with pytest.raises(InputError, match=words):
            simulate(H200, of, unlimited(of), **{"op": "dispatch", **call})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="slots = 4: allowed is at least 29, the chunks of a window of 1024"):
        simulate(H200, of, replace(windowed(of, 1024), slots=4), "combine")
    with pytest.raises(InputError, match="nic_gbps = 0"):
        replace(H200, nic_gbps=0.0)


@needs_kernels
def test_windows_are_those_of_the_native_layout() -> None:
    """Tokens of BF16 windows with 512 MiB, and its chunks: a counter for each."""
    for ranks, wanted, combined in ((2, 4896, 4896), (4, 2144, 1056)):  # 4096 tokens: of four ranks in halves
        of = shape(ranks, 1, dtype="bf16")
        sizes = protocol_of(of)
        assert (sizes.dispatch_window, sizes.combine_window) == (wanted, combined)
        assert sizes.memory is not None
        assert sizes.memory["sent_counts"] == -(-4 * ranks * sizes.slots // 256) * 256
    assert (protocol_of(shape(64, 8)).event_rings, protocol_of(shape(64, 8)).passes) == (9, 1)
    assert protocol_of(shape(4, 1)).windows("combine", 4096) == [1056, 1056, 1056, 928]


@needs_kernels
def test_tokens_whose_routing_a_buffer_does_not_hold_are_refused() -> None:
    for ranks in (128, 256):
        assert protocol_of(shape(ranks, 8, tokens=65536)).memory is not None
    of = shape(512, 8, tokens=60000, router=Router(num_experts=512, topk=8))
    with pytest.raises(
        ShapeError, match=r"60000 tokens .* window_tokens = None .* holds the routing of \d+ tokens"
    ):
        protocol_of(of)
    assert protocol_of(of, window_tokens=60000).memory is not None


@needs_kernels
def test_the_planner_knows_batches_of_the_native_layout() -> None:
    of = shape(256, 8)
    some, all_streams = (protocol_of(of, mib << 20, window_tokens=4096) for mib in (256, 512))
    assert (all_streams.stream_batches, all_streams.batch_streams) == (1, 31)
    assert some.stream_batches > 1 and some.stream_batches * some.batch_streams >= 31
    for sizes in (some, all_streams):
        streams = 1 + sizes.batch_streams  # each: a token block's pieces in both halves, and a row
        assert sizes.memory is not None
        assert sizes.memory["pieces"] == -(-streams * (2 * 32 * 8 + 1) * 14336 // 256) * 256
    assert (some.combine_window, all_streams.combine_window) == (32, 96)  # at most 17 rows of a block
    texts = ["\n".join(report.lines(report.predict(H200, of, mib << 20, 4096))) for mib in (256, 512)]
    told = [f"a combine takes {some.stream_batches} windows for the same tokens" in text for text in texts]
    assert told == [True, False]


@needs_kernels
def test_the_planner_refuses_what_a_buffer_refuses() -> None:
    with pytest.raises(EpError, match="shared memory"):
        protocol_of(shape(2048, 8, router=Router(num_experts=16384, topk=8)))
    with pytest.raises(EpError, match="needs at least"):
        protocol_of(shape(256, 8), budget_bytes=64 << 20, window_tokens=4096)


def test_a_sweep_prints_a_line_for_each_group(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "sweep.png"
    assert main(["--sweep", "--ep", "8", "64", "48", "--domain-size", "8", f"--picture={picture}"]) == 0
    out = capsys.readouterr().out
    assert "num_experts = 256: allowed is a multiple of the number of ranks, 48: 240 or 288" in out
    assert "extrapolated" in out and picture.read_bytes()[:4] == b"\x89PNG"
    assert main(["--sweep", "--experts", "8", "--topk", "9"]) == 2
    assert "topk = 9: allowed is 1 .. 8" in capsys.readouterr().err


def test_a_report_says_what_binds() -> None:
    found = report.predict(H200, shape(64, 8), 3 << 30, 4096)
    text = "\n".join(report.lines(found))
    assert "NIC, sending, for" in text and found.dispatch.binds[0] == "nic out"
    assert "extrapolated" in text and "a node of" not in text
    of_72 = report.predict(H200, shape(128, 72), 3 << 30, 4096)
    for words in ("a node of h200 has 8 GPUs: domains of 72", "domains differ: ranks of that with 56"):
        assert words in "\n".join(report.lines(of_72)) and words not in text
    assert found.dispatch.us > found.floor_us["dispatch"]


@pytest.mark.parametrize(("size", "tokens", "told"), [(1, 192, True), (1, 1024, False), (4, 192, False)])
def test_a_report_says_where_windows_carry_little(size: int, tokens: int, told: bool) -> None:
    """4 domains, top-8, BF16: 192 tokens are 7 MB, 1024 are 40 MB. A single domain sends nothing."""
    of = shape(4, size, tokens=4096)
    sizes = windowed(of, tokens)
    found = report.Prediction(
        H200, of, sizes, *(simulate(H200, of, sizes, op) for op in ("dispatch", "combine"))
    )
    assert any("two windows of a combine send" in line for line in report.caveats(found)) == told
    assert report.predict(H200, shape(8, 8), 3 << 30, 4096).combine.binds[0] != found.combine.binds[0]
