"""Bytes of dispatch and combine against enumeration and against what was measured."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from recipes import PRETRAININGS
from recipes.models.architecture import Model, Router
from recipes.models.layout import FULL, Layout
from recipes.plan import traffic
from recipes.plan.hardware import NODES
from uccl_ep_train.planner.shape import Spread, spread

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
H200 = NODES["h200"]


def model(num_experts: int, topk: int, groups: int | None = None, group_topk: int | None = None) -> Model:
    return Model(
        num_layers=1,
        hidden_size=7168,
        num_heads=1,
        expert_ffn_size=1,
        num_experts=num_experts,
        topk=topk,
        aux_loss_coeff=0.0,
        router=Router(num_groups=groups, group_topk=group_topk),
    )


def spread_of(of: Model, num_ranks: int, domain_size: int) -> Spread:
    shape = traffic.shape_of(of, layout(num_ranks), domain_size, "bf16")
    return spread(shape.router, shape.domains)


def layout(ep: int, tokens: int = 4096, recompute: tuple[str, ...] = ()) -> Layout:
    return Layout(num_ranks=ep, ep=ep, sequence_length=tokens, global_batch_size=ep, recompute=recompute)


def choices(of: Model) -> list[tuple[int, ...]]:
    """All that a token may choose, each as likely as another (some several times)."""
    groups = of.router.num_groups or 1
    size = of.num_experts // groups
    found = []
    for chosen in itertools.combinations(range(groups), of.router.group_topk or groups):
        open_experts = [e for e in range(of.num_experts) if e // size in chosen]
        found += list(itertools.combinations(open_experts, of.topk))
    return found


@pytest.mark.parametrize(
    "of", [model(8, 2), model(12, 3), model(12, 3, 3, 2), model(12, 2, 6, 3), model(8, 2, 4, 1)]
)
@pytest.mark.parametrize(("num_ranks", "domain_size"), [(4, 2), (4, 4), (2, 1), (4, 1)])
def test_rows_are_those_of_all_choices(of: Model, num_ranks: int, domain_size: int) -> None:
    """A row to each other domain, to the source's place in it, and from there to the others that want it."""
    rows_nic = rows_link = 0
    every = choices(of)
    for source, experts in itertools.product(range(num_ranks), every):
        ranks = {e * num_ranks // of.num_experts for e in experts}
        own = source // domain_size
        rows_nic += len({r // domain_size for r in ranks} - {own})
        rows_link += sum(r % domain_size != source % domain_size for r in ranks)
    found = spread_of(of, num_ranks, domain_size)
    assert found.rows_nic == pytest.approx(rows_nic / len(every) / num_ranks)
    assert found.rows_link == pytest.approx(rows_link / len(every) / num_ranks)


def test_a_group_limit_saves_rows_between_nodes() -> None:
    """DeepSeek-V3 over 64 ranks: at most 4 nodes a token, and a row more than 3 to others on average."""
    limited = PRETRAININGS["deepseek_v3"]().model
    free = dataclasses.replace(limited, router=Router())
    assert 3 < spread_of(limited, 64, 8).rows_nic < 4
    assert spread_of(free, 64, 8).rows_nic > 4.5


def measured(file: str, **wanted: Any) -> dict[str, Any]:
    records = json.loads((RESULTS / file).read_text())
    found = [r for r in records if all(r[name] == value for name, value in wanted.items())]
    assert found, wanted
    return found[0]


CASE = {"system": "uccl_ep", "layout": "expert_major", "routing": "uniform", "tokens": 4096}
ONE_DOMAIN = {**CASE, "num_sms": 64, "link_gbytes_per_s": 0.0}
TWO_DOMAINS = {**CASE, "num_sms": 24, "link_gbytes_per_s": 50.0}


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
@pytest.mark.parametrize("op", ["dispatch", "combine"])
@pytest.mark.parametrize(
    ("file", "case", "ep", "domain_size"),
    [("h200_x4_backward.json", ONE_DOMAIN, 4, 8), ("h200_x2_two_domains.json", TWO_DOMAINS, 2, 1)],
)
def test_bytes_are_those_measured(
    file: str, case: dict[str, Any], ep: int, domain_size: int, op: str, dtype: str
) -> None:
    """The benchmark reports the busiest rank: a little more than the mean."""
    record = measured(file, **case, dtype=dtype, op=op)
    found = traffic.of_layer(model(256, 8), layout(ep), domain_size, dtype)
    sent = getattr(found, op)
    assert sent.link + sent.nic == pytest.approx(record["wire_bytes"], rel=0.005)
    assert sent.nic == pytest.approx(record["link_bytes"], rel=0.005)


def test_the_stock_dispatchers_bytes_are_those_measured() -> None:
    """Control: a row for every pair, more than three times as many as ours."""
    record = measured(
        "h200_x4_backward.json", system="megatron_alltoall", op="dispatch", dtype="bf16", tokens=4096,
        routing="uniform",
    )  # fmt: skip
    found = traffic.of_stock_layer(model(256, 8), layout(4), 8)
    assert found.dispatch.link == pytest.approx(record["wire_bytes"], rel=0.01)
    ours = traffic.of_layer(model(256, 8), layout(4), 8, "bf16")
    assert ours.dispatch.link < found.dispatch.link / 2


@pytest.mark.parametrize(("hidden", "sent"), [(2880, 2880), (7168, 7168), (2890, 2912)])
def test_rows_are_filled_up_as_the_dispatcher_does(hidden: int, sent: int) -> None:
    """GPT-OSS: 2,880 is no multiple of 128."""
    of = dataclasses.replace(model(256, 8), hidden_size=hidden)
    assert traffic.shape_of(of, layout(4), 8, "bf16").hidden == sent
    wide, found = (traffic.of_layer(m, layout(4), 8, "bf16") for m in (model(256, 8), of))
    assert found.combine.link == pytest.approx(wide.combine.link * sent / 7168)


def test_recomputation_repeats_the_forward_pass() -> None:
    plain = traffic.of_layer(model(256, 8), layout(4), 8, "fp8")
    for recompute in (FULL, ("moe", "layernorm")):
        again = traffic.of_layer(model(256, 8), layout(4, recompute=recompute), 8, "fp8")
        assert again.total.link - plain.total.link == pytest.approx(plain.dispatch.link + plain.combine.link)
    other = traffic.of_layer(model(256, 8), layout(4, recompute=("layernorm",)), 8, "fp8")
    assert other.total == plain.total


@pytest.mark.parametrize(("file", "domain_size"), [("h200_x2_two_domains.json", 1)])
def test_times_are_those_of_the_planner(file: str, domain_size: int) -> None:
    """4,096 tokens in two domains, FP8 and BF16; a step adds them up."""
    for dtype in ("fp8", "bf16"):
        machine = H200.machine
        times = traffic.times_of_layer(
            model(256, 8), layout(2), machine, domain_size, (dtype, "bf16"), 512 << 20
        )
        for op, outcome in (("dispatch", times.found.dispatch), ("combine", times.found.combine)):
            record = measured(file, **TWO_DOMAINS, dtype=dtype, op=op)
            assert outcome.us == pytest.approx(record["median_us"], rel=0.05)
        assert times.total_us > times.found.dispatch.us + 2 * times.found.combine.us
