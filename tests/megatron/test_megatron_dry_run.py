"""Recipes build and fit: parameters counted in Megatron's modules are the published ones."""

from __future__ import annotations

import math
import multiprocessing
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from recipes import PRETRAININGS
from recipes.models.architecture import Router
from recipes.plan.hardware import NODES
from tests.megatron import dry_run_case
from tests.megatron.dry_run_case import Outcome
from tests.megatron.harness import megatron_is_installed
from uccl_ep_train.core import cuda

ROOT = Path(__file__).resolve().parents[2]
Look = Callable[..., Outcome]

# Total and active parameters in 10^9, to so many digits; whether the input embedding counts as active.
PUBLISHED = {
    "deepseek_v3": ("671", "37", False),
    "deepseek_v2_lite": ("15.7", "2.4", False),
    "qwen3_30b_a3b": ("30.5", "3.3", True),
    "qwen3_235b_a22b": ("235", "22", True),
    "mixtral_8x7b": ("46.7", "12.9", True),
    "kimi_k2": ("1040", "32", False),
    "gpt_oss_120b": ("117", "5.1", False),
}


@pytest.fixture(scope="module")
def look() -> Iterator[Look]:
    """dry_run_case.look in a process of its own."""
    if not megatron_is_installed():
        pytest.skip("no module megatron.core: megatron-core is not installed")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=dry_run_case.prepare) as pool:
        yield lambda *args, **kwargs: pool.submit(dry_run_case.look, *args, **kwargs).result(timeout=280)


def is_published(number: int, text: str) -> bool:
    """Within 1 % of what the text may have been rounded from."""
    digits = len(text.split(".")[1]) if "." in text else 0
    unit = 10.0**-digits if text != "1040" else 10.0  # 1.04 T
    return abs(number / 1e9 - float(text)) <= 0.01 * float(text) + unit / 2


def memory_of_pages(page: str) -> dict[str, int]:
    """GiB of a rank on H200, by recipe."""
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\d+) \|$", page, re.MULTILINE)
    return {name: int(gib) for name, gib in rows}


@pytest.mark.parametrize("name", ["dsv3_proxy_4xh200", *PRETRAININGS])
def test_the_page_has_the_memory_that_a_dry_run_shows(name: str, look: Look) -> None:
    """Rounded up."""
    page = memory_of_pages((ROOT / "docs" / "recipes.md").read_text())
    found = look(name, "h200")
    assert not found.refused, found.refused
    assert page[name] == math.ceil(found.needed_bytes / 2**30)


@pytest.mark.parametrize("name", PRETRAININGS)
def test_parameters_are_the_published_ones(name: str, look: Look) -> None:
    total, active, with_input = PUBLISHED[name]
    found = look(name, "b200")  # the fewest stages
    assert not found.refused, found.refused
    assert is_published(found.total, total), found.total
    counted = found.active if with_input else found.active_without_input
    assert is_published(counted, active), counted
    assert bool(found.mtp) == (name == "deepseek_v3")


def test_another_model_is_not_the_published_one(look: Look) -> None:
    """Control: what a wrong width, a missing shared expert and missing heads do to the counts."""
    for changes in (
        {"model.expert_ffn_size": 1472},
        {"model.shared_ffn_size": None},
        {"model.num_heads": 24},
    ):
        found = look("deepseek_v2_lite", "b200", changes)
        assert not found.refused, found.refused
        total, active = found.total, found.active_without_input
        assert not (is_published(total, "15.7") and is_published(active, "2.4")), changes


def test_stages_do_not_change_the_number_of_parameters(look: Look) -> None:
    assert look("qwen3_30b_a3b", "h100").total == look("qwen3_30b_a3b", "h200").total


@pytest.mark.slow
@pytest.mark.timeout(300)  # two busy cores, and the largest has 16 layers of 64 ranks in a stage
@pytest.mark.parametrize("hardware", NODES)
@pytest.mark.parametrize("name", PRETRAININGS)
def test_every_recipe_builds_and_fits_on_every_node_type(name: str, hardware: str, look: Look) -> None:
    found = look(name, hardware)
    assert not found.refused, found.refused
    assert 0 < found.needed_bytes <= found.gpu_bytes


@pytest.mark.parametrize("name", PRETRAININGS)
def test_megatron_takes_the_configuration_with_every_dispatcher(name: str, look: Look) -> None:
    for dispatcher in ("alltoall", "flex-deepep", "flex-hybridep"):
        found = look(name, "h200", dispatcher=dispatcher, only_config=True)
        assert not found.refused, found.refused


def test_the_recipes_that_train_here_build_and_fit(look: Look) -> None:
    tiny, proxy = look("tiny_host"), look("dsv3_proxy_4xh200")
    assert not tiny.refused and not proxy.refused
    assert tiny.gpu_bytes == 0 and "not predicted" in tiny.text
    assert 0.7 * proxy.gpu_bytes < proxy.needed_bytes <= proxy.gpu_bytes
    for dispatcher in ("alltoall", "allgather", "flex-deepep", "flex-hybridep"):
        assert not look("dsv3_proxy_4xh200", token_dispatcher=dispatcher, only_config=True).refused


@pytest.mark.skipif(not cuda.built(), reason="the memory of a GPU's buffer is not known")
def test_the_buffer_is_that_of_the_rank_that_needs_most(look: Look) -> None:
    """Eight ranks in domains of 3, 3 and 2: those of the last one pass on more."""
    found = look("qwen3_30b_a3b", "h200", domain_size=3)
    gib, mib = (re.search(words, found.text) for words in (r"buffer +([\d.]+) GiB", r"buffer: (\d+) MiB"))
    assert gib and mib, found.text
    assert gib[1] == f"{int(mib[1]) / 1024:.1f}"


@pytest.mark.parametrize(
    ("name", "hardware", "changes"),
    [
        ("deepseek_v3", "h100", {"num_ranks": 64, "pp": 1, "last_stage_layers": None}),
        ("qwen3_30b_a3b", "h200", {"recompute": (), "micro_batch_size": 8}),
        ("mixtral_8x7b", "h200", {"distributed_optimizer": False, "num_ranks": 8, "pp": 1}),
    ],
)
def test_what_does_not_fit_is_an_error(name: str, hardware: str, changes: dict[str, Any], look: Look) -> None:
    found = look(name, hardware, changes)
    assert found.refused.startswith(f"DoesNotFitError: {name} does not fit {hardware}")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.num_experts": 100}, "BuildError"),  # 8 ranks do not share 100 experts
        ({"pp": 7}, "48 layers do not divide into 7 equal stages"),
        ({"recompute": ("nothing",)}, "Invalid choices for recompute_modules"),
        ({"recompute": ("mla_up_proj",)}, "multi_latent_attention"),
        ({"model.router": Router(num_groups=3, group_topk=2)}, "groups"),
    ],
)
def test_what_megatron_or_the_dispatcher_refuses_is_said(
    changes: dict[str, Any], words: str, look: Look
) -> None:
    assert words in look("qwen3_30b_a3b", "h200", changes).refused


def test_a_dispatcher_without_enough_memory_is_refused(look: Look) -> None:
    found = look("dsv3_proxy_4xh200", budget_bytes=1 << 12)
    assert found.refused.startswith("MemoryBudgetError")


def test_the_dry_run_is_a_command(tmp_path: Path) -> None:
    """Needs neither GPUs nor Megatron-LM nor ranks; prints what it says it prints."""
    if not megatron_is_installed():
        pytest.skip("no module megatron.core: megatron-core is not installed")
    command = [
        sys.executable,
        "-m",
        "recipes.launch",
        "--recipe=mixtral_8x7b",
        "--hardware=h200",
        "--dry-run",
        "--ep=4",
        "--domain-size=2",
        f"--picture={tmp_path / 'ports.png'}",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    for words in (
        "--num-layers 32", "46.70 B in total", "optimizer", "fits", "on the NIC", "the stock alltoall's",
        "predicted: all of a step", "group of 4 ranks in 2 domains of 2", "what binds",
    ):  # fmt: skip
        assert words in done.stdout, words
    assert (tmp_path / "ports.png").read_bytes()[:4] == b"\x89PNG"
