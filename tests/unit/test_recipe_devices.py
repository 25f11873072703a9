"""Where a recipe runs: GPUs where every rank can have one, else the CPU; and with how many ranks."""

from __future__ import annotations

import dataclasses
import itertools
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipes import RECIPES, launch
from recipes.launch import chosen_recipe, parse_args
from recipes.measure.timing import DispatchClock
from recipes.models.recipe import Recipe, RecipeError
from recipes.plan import devices
from recipes.plan.devices import DeviceError, place
from uccl_ep_train.core import cuda


def recipe(*arguments: str) -> Recipe:
    return chosen_recipe(parse_args(list(arguments)), None)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """machine(n): from now on torch sees n GPUs. machine(n, built=False): and the extension knows none."""

    def make(num_gpus: int, built: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        monkeypatch.setattr(cuda, "built", lambda: built)

    return make


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[str]]]:
    """The number of ranks and the arguments of each start of ranks; none is really started."""
    calls: list[tuple[int, list[str]]] = []

    def run_ranks(num_ranks: int, argv: list[str]) -> int:
        calls.append((num_ranks, argv))
        return 1

    monkeypatch.setattr(launch, "run_ranks", run_ranks)
    return calls


@pytest.mark.parametrize(("num_gpus", "device"), [(0, "cpu"), (3, "cpu"), (4, "cuda"), (8, "cuda")])
def test_every_rank_gets_a_gpu_of_its_own_or_none_does(machine: Any, num_gpus: int, device: str) -> None:
    machine(num_gpus)
    placed, why_cpu = place(recipe())
    assert placed.device == device
    assert why_cpu == (
        "" if device == "cuda" else f"running on the CPU: 4 ranks need a GPU each, and torch sees {num_gpus}"
    )


def test_fewer_ranks_need_fewer_gpus(machine: Any) -> None:
    machine(2)
    assert place(recipe("--num-ranks", "2"))[0].device == "cuda"
    assert place(recipe())[0].device == "cpu"


def test_gpus_that_the_extension_was_not_built_for_are_not_used(machine: Any) -> None:
    machine(4, built=False)
    placed, why_cpu = place(recipe())
    assert placed.device == "cpu" and "without CUDA kernels" in why_cpu
    with pytest.raises(DeviceError, match="without CUDA kernels"):
        place(recipe("--device", "cuda"))


def test_the_cpu_is_used_where_it_was_asked_for(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(4)
    assert place(recipe("--device", "cpu")) == (recipe("--device", "cpu"), "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert devices.join("cpu", 1) == "gloo"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "", "torch would still see the GPUs"


def test_a_rank_on_gpus_takes_the_one_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control for the test above: here the GPUs stay visible."""
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert devices.join("cuda", 3) == "cpu:gloo,cuda:nccl"
    assert taken == [3]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8", "the user's choice counts"


def test_ranks_share_gpus_where_nccl_is_told_to_let_them(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    machine(2)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "0")
    assert place(recipe())[0].device == "cpu"
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert place(recipe())[0].device == "cuda"
    for rank in range(4):
        devices.join("cuda", rank)
    assert taken == [0, 1, 0, 1]
    machine(0)
    assert place(recipe())[1] == "running on the CPU: 4 ranks need a GPU each, and torch sees 0"


def test_on_gpus_all_ranks_are_in_one_domain_unless_others_are_asked_for(machine: Any) -> None:
    machine(4)
    assert (recipe().domain_size, place(recipe())[0].domain_size) == (2, 4)
    machine(3)
    assert place(recipe())[0].domain_size == 2


def test_the_ranks_of_each_of_several_hosts_are_a_domain(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert place(recipe())[0].device == "cpu"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    eight = recipe("--num-ranks=8", "--domain-size=4")
    placed, why_cpu = place(eight)
    assert (placed.device, placed.domain_size, why_cpu) == ("cuda", 2, "")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    for device in ("auto", "cpu"):
        assert place(dataclasses.replace(eight, device=device))[0].domain_size == 1
        assert place(dataclasses.replace(eight, device=device), keep_domains=True)[0].domain_size == 4


def test_a_recipe_has_the_ranks_that_torchrun_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert recipe().num_ranks == 4, "WORLD_SIZE alone may be of pods"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    assert recipe().num_ranks == 8
    assert recipe("--num-ranks=2").num_ranks == 2
    monkeypatch.setenv("WORLD_SIZE", "16")
    with pytest.raises(RecipeError, match=r"num_ranks = 16: 8 experts"):
        recipe()


def test_domains_that_were_asked_for_are_kept(machine: Any) -> None:
    machine(4)
    for size in ("1", "2", "4"):
        placed, why_cpu = place(recipe("--domain-size", size), keep_domains=True)
        assert (placed.device, placed.domain_size, why_cpu) == ("cuda", int(size), "")


def test_too_few_gpus_are_an_error_before_ranks_start(
    machine: Any, started: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    machine(3)
    options = [f"--run-dir={tmp_path}", "--device=cuda"]
    assert launch.main(options) == 2
    assert capsys.readouterr().err == "device = cuda: 4 ranks need a GPU each, and torch sees 3\n"
    assert started == []
    machine(4)  # control
    assert launch.main(options) == 1
    assert len(started) == 1


@pytest.mark.parametrize(("num_gpus", "device", "num_lines"), [(2, "cuda", 0), (1, "cpu", 1)])
def test_the_ranks_are_told_what_the_launcher_chose(
    machine: Any,
    started: list[tuple[int, list[str]]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Any,
    num_gpus: int,
    device: str,
    num_lines: int,
) -> None:
    machine(num_gpus)
    launch.main(["--device=auto", "--num-ranks=2", f"--run-dir={tmp_path}"])
    ((num_ranks, argv),) = started
    assert num_ranks == 2
    told = parse_args(argv)
    assert (told.device, told.num_ranks) == (device, 2)
    assert capsys.readouterr().out.count("running on the CPU") == num_lines


def test_the_number_of_ranks_can_be_chosen() -> None:
    assert (recipe().num_ranks, recipe().domain_size) == (4, 2)
    fewer, more = recipe("--num-ranks", "1"), recipe("--num-ranks", "8")
    assert (fewer.num_ranks, fewer.domain_size) == (1, 1)
    assert (more.num_ranks, more.domain_size) == (8, 2)
    assert recipe("--num-ranks", "8", "--domain-size", "4").domain_size == 4
    assert recipe("--num-ranks", "4") == recipe()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--num-ranks=3"],
            "num_ranks = 3: 8 experts have to be spread evenly; allowed is one of [1, 2, 4, 8]",
        ),
        (["--num-ranks=0"], "num_ranks = 0"),
        (["--num-ranks=16"], "num_ranks = 16"),
        (["--domain-size=5"], "domain_size = 5: allowed is 1 .. 4, the number of ranks"),
        (["--num-ranks=2", "--domain-size=4"], "domain_size = 4: allowed is 1 .. 2"),
        (["--domain-size=0"], "domain_size = 0"),
    ],
)
def test_ranks_and_domains_that_cannot_be_are_refused_before_ranks_start(
    started: list[Any], capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    with pytest.raises(RecipeError):
        recipe(*arguments)
    assert launch.main(arguments) == 2
    assert words in capsys.readouterr().err
    assert started == []


def test_a_recipe_checks_itself() -> None:
    for make in RECIPES.values():
        with pytest.raises(RecipeError):
            dataclasses.replace(make(), num_ranks=make().model.num_experts + 1)
    assert RECIPES["tiny_host"]().device == "auto"
    with pytest.raises(RecipeError, match="sized for GPUs of h200"):
        dataclasses.replace(RECIPES["dsv3_proxy_4xh200"](), device="cpu")
    with pytest.raises(RecipeError, match="checkpoint_interval"):
        dataclasses.replace(RECIPES["tiny_host"](), distributed_optimizer=True)
    proxy = RECIPES["dsv3_proxy_4xh200"]()
    with pytest.raises(RecipeError, match=r"num_layers = 1: 1 of .* are dense; allowed is at least 2"):
        dataclasses.replace(proxy, model=dataclasses.replace(proxy.model, num_layers=1))


@pytest.fixture
def one_ms_a_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes by being looked at."""
    times = itertools.count()
    monkeypatch.setattr(devices, "mark", lambda: next(times))
    monkeypatch.setattr(devices, "milliseconds", lambda start, end: float(end - start))


@pytest.mark.usefixtures("one_ms_a_mark")
def test_the_clock_counts_each_stage_forward_and_backward_once() -> None:
    stages = {
        "dispatch": ("dispatch_preprocess", "token_dispatch", "dispatch_postprocess"),
        "combine": ("combine_preprocess", "token_combine", "combine_postprocess"),
    }
    double = {name: lambda x: 2.0 * x for names in stages.values() for name in names}
    layer = SimpleNamespace(token_dispatcher=SimpleNamespace(**double))
    clock = DispatchClock([layer])
    x = torch.ones(3, requires_grad=True)
    out = x
    for name in (*stages["dispatch"], "token_combine"):
        out = getattr(layer.token_dispatcher, name)(out)
    assert clock.take() == {"dispatch": 3.0, "combine": 1.0}
    out.sum().backward()
    assert clock.take() == {"dispatch": 3.0, "combine": 1.0}
    assert clock.take() == {"dispatch": 0.0, "combine": 0.0}
    assert x.grad is not None and x.grad.eq(16.0).all()
