"""`--moe-token-dispatcher-type uccl_ep` and `--uccl-ep-*` in a Megatron parser, and the launcher."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.megatron.harness import megatron_is_installed
from uccl_ep_train.errors import ConfigError
from uccl_ep_train.megatron import flags, plugin
from uccl_ep_train.megatron.compat import UnsupportedMegatronError
from uccl_ep_train.settings.config import ALL_SETTINGS, EpConfig, Network

ROOT = Path(__file__).resolve().parents[2]


def megatron_parser() -> argparse.ArgumentParser:
    """The options that matter of Megatron-LM's, as its releases declare them."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument(
        "--moe-token-dispatcher-type", choices=["allgather", "alltoall", "flex"], default="allgather"
    )
    parser.add_argument("--moe-flex-dispatcher-backend", choices=["deepep", "hybridep"], default="deepep")
    parser.add_argument("--moe-enable-deepep", action="store_true")
    parser.add_argument("--seq-length", type=int)
    parser.add_argument("--micro-batch-size", type=int)
    parser.add_argument("--eval-micro-batch-size", type=int)  # Megatron-LM main
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--context-parallel-size", type=int, default=1)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--distributed-timeout-minutes", type=int, default=10)
    return parser


@pytest.fixture
def enabled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each call of `plugin.enable`, which is replaced: Megatron is not needed here."""
    calls: list[dict[str, Any]] = []

    def enable(**options: Any) -> dict[str, Any]:
        calls.append(options)
        return dict(plugin.CARRIER)

    monkeypatch.setattr(plugin, "enable", enable)
    return calls


def parse(*arguments: str) -> argparse.Namespace:
    parser = megatron_parser()
    flags.extend_megatron_parser(parser)
    return parser.parse_args(arguments)


def test_our_name_becomes_the_carrier_and_the_options_reach_the_plugin(enabled: list[Any]) -> None:
    namespace = parse(
        "--moe-token-dispatcher-type", "uccl_ep",
        "--uccl-ep-dispatch-dtype", "bf16",
        "--uccl-ep-grad-dtype", "fp8",
        "--uccl-ep-num-sms", "16",
        "--uccl-ep-budget-bytes", "256M",
        "--uccl-ep-arrival-timeout-s", "60",
        "--uccl-ep-progress-timeout-s", "5.5",
        "--uccl-ep-domain-size", "4",
        "--uccl-ep-transport", "loop",
        "--uccl-ep-loop-gbytes-per-s", "12.5",
        "--uccl-ep-reuse-plans-in-recompute", "0",
    )  # fmt: skip
    assert namespace.moe_token_dispatcher_type == "flex"
    assert namespace.moe_flex_dispatcher_backend == "hybridep"
    assert enabled == [
        {
            "dispatch_dtype": "bf16",
            "grad_dtype": "fp8",
            "num_sms": 16,
            "budget_bytes": 256 << 20,
            "arrival_timeout_s": 60.0,
            "progress_timeout_s": 5.5,
            "domain_size": 4,
            "transport": "loop",
            "loop_gbytes_per_s": 12.5,
            "reuse_plans_in_recompute": False,
        }
    ]


SHAPE = ("--moe-token-dispatcher-type", "uccl_ep", "--seq-length", "4096", "--micro-batch-size", "2")


@pytest.mark.parametrize(
    ("arguments", "variable", "tokens"),
    [
        (SHAPE, None, 8192),
        ((*SHAPE, "--eval-micro-batch-size", "3"), None, 12288),
        ((*SHAPE, "--eval-micro-batch-size", "1"), None, 8192),
        ((*SHAPE, "--context-parallel-size", "3"), None, 2731),
        ((*SHAPE, "--tensor-model-parallel-size", "4"), None, 8192),  # attention alone is cut
        ((*SHAPE, "--tensor-model-parallel-size", "4", "--sequence-parallel"), None, 2048),
        ((*SHAPE, "--seq-length", "1000000"), None, 65536),
        ((*SHAPE, "--uccl-ep-window-tokens", "100"), "200", 100),
        (SHAPE, "200", None),  # the environment counts
        (SHAPE[:4], None, None),
    ],
)
def test_a_buffer_is_as_large_as_megatrons_shapes_need(
    arguments: tuple[str, ...],
    variable: str | None,
    tokens: int | None,
    enabled: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable:
        monkeypatch.setenv("UCCL_EP_WINDOW_TOKENS", variable)
    parse(*arguments)
    assert [options.get("window_tokens") for options in enabled] == [tokens]


@pytest.mark.parametrize(
    ("arguments", "variable", "seconds"),
    [
        ((), None, 600.0),  # Megatron's own default
        (("--distributed-timeout-minutes", "60"), None, 3600.0),
        (("--distributed-timeout-minutes", "1"), None, None),  # 300 s, as without it
        (("--distributed-timeout-minutes", "10000000"), None, 1e6),
        (("--distributed-timeout-minutes", "60", "--uccl-ep-arrival-timeout-s", "7"), None, 7.0),
        (("--distributed-timeout-minutes", "60"), "9", None),  # the environment counts
    ],
)
def test_a_buffer_waits_for_ranks_as_long_as_torch_distributed(
    arguments: tuple[str, ...],
    variable: str | None,
    seconds: float | None,
    enabled: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable:
        monkeypatch.setenv("UCCL_EP_ARRIVAL_TIMEOUT_S", variable)
    parse(*SHAPE[:2], *arguments)
    assert [options.get("arrival_timeout_s") for options in enabled] == [seconds]


def test_every_field_that_the_model_does_not_decide_is_an_option() -> None:
    parser = megatron_parser()
    flags.extend_megatron_parser(parser)
    fields = set(ALL_SETTINGS) - {"num_experts", "hidden", "source_order"}
    options = {name for name in parser._option_string_actions if name.startswith("--uccl-ep-")}
    fields.add("reuse_plans_in_recompute")  # the plug-in's own
    assert options == {"--uccl-ep-" + name.replace("_", "-") for name in fields}
    assert "bytes" in parser.format_help()


def test_megatrons_own_dispatchers_are_left_alone(enabled: list[Any]) -> None:
    namespace = parse("--moe-token-dispatcher-type", "alltoall")
    assert namespace.moe_token_dispatcher_type == "alltoall"
    assert namespace.moe_flex_dispatcher_backend == "deepep"
    assert enabled == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--uccl-ep-num-sms", "4"), "--uccl-ep-num-sms needs --moe-token-dispatcher-type uccl_ep"),
        (("--moe-token-dispatcher-type", "uccl_ep", "--moe-enable-deepep"), "--moe-enable-deepep"),
        (("--moe-token-dispatcher-type", "uccl_ep", "--uccl-ep-num-sms", "many"), "invalid"),
        (("--moe-token-dispatcher-type", "uccl-ep"), "invalid choice"),
        (
            ("--moe-token-dispatcher-type", "uccl_ep", "--uccl-ep-reuse-plans-in-recompute", "2"),
            "invalid boolean value: '2'",
        ),
    ],
)
def test_contradictions_end_at_the_command_line(
    enabled: list[Any], capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    with pytest.raises(SystemExit):
        parse(*arguments)
    assert words in capsys.readouterr().err
    assert enabled == []


def test_a_value_that_cannot_work_ends_at_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def enable(**options: Any) -> dict[str, Any]:
        EpConfig.from_env(num_experts=1, hidden=128, **options)
        raise AssertionError("the value was accepted")

    monkeypatch.setattr(plugin, "enable", enable)
    with pytest.raises(SystemExit):
        parse("--moe-token-dispatcher-type", "uccl_ep", "--uccl-ep-grad-dtype", "fp16")
    assert "grad_dtype = 'fp16': allowed is" in capsys.readouterr().err


def test_a_parser_without_the_dispatcher_option_is_refused() -> None:
    with pytest.raises(UnsupportedMegatronError):
        flags.extend_megatron_parser(argparse.ArgumentParser())


def test_options_of_the_model_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="source_order is decided by the model"):
        plugin.enable(source_order=(0, 1))


def test_equal_settings_of_another_type_are_no_other_settings() -> None:
    """A list, a tuple and an iterator of the same domains; other domains are refused."""
    if not megatron_is_installed():
        pytest.skip("no module megatron.core: megatron-core is not installed")
    plugin.enable(domains=iter([0, 1]), nics=["a", "b"])
    try:
        assert plugin.enable(domains=[0, 1], nics=("a", "b")) == plugin.CARRIER
        assert plugin.enable(network=Network(domains=(0, 1), nics=("a", "b"))) == plugin.CARRIER
        with pytest.raises(ConfigError, match="already enabled"):
            plugin.enable(domains=(0, 0), nics=["a", "b"])
    finally:
        plugin.disable()


SCRIPT = """
import os
import torch
from megatron.core import parallel_state
from megatron.training.arguments import parse_args
from megatron.training.training import setup_model_and_optimizer

args = parse_args()
(model,), _, _ = setup_model_and_optimizer(args)
names = {type(m.token_dispatcher).__name__ for m in model.modules() if hasattr(m, "token_dispatcher")}
# One write: the ranks share the pipe.
os.write(1, f"dispatchers: {' '.join(names)} backend: {args.moe_flex_dispatcher_backend}\\n".encode())
parallel_state.destroy_model_parallel()
torch.distributed.destroy_process_group()
"""

# Runs SCRIPT, whose path is the first argument, with each list of arguments: by the launcher each time, or
# the launcher runs this file, which runs it each time.
AGAIN = """
import os, runpy, sys
from uccl_ep_train.megatron import launch

script, folder, options = sys.argv[1], sys.argv[2], [line.split() for line in sys.argv[3:]]
for number, arguments in enumerate(options):
    os.environ["GROUPS_AT"] = f"file://{folder}/{number}"
    sys.argv = [script, *arguments]
    launch.main(sys.argv) if os.environ["BY"] == "launcher" else runpy.run_path(script, run_name="__main__")
"""

TRAINING = {
    "__init__.py": "",
    "initialize.py": "def initialize_megatron(allow_no_cuda=False): ...\n",
    "arguments.py": """
import argparse

def add_megatron_arguments(parser):
    parser.add_argument("--moe-token-dispatcher-type", choices=["alltoall", "flex"], default="alltoall")
    parser.add_argument("--moe-flex-dispatcher-backend", default="deepep")
    return parser

def parse_args(extra_args_provider=None):
    return add_megatron_arguments(argparse.ArgumentParser()).parse_args()
""",
    "training.py": """
import os
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.initialize import initialize_megatron

def setup_model_and_optimizer(args):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    at = os.environ.get("GROUPS_AT")
    torch.distributed.init_process_group("gloo", init_method=at, rank=rank, world_size=size)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2, hidden_size=128, num_attention_heads=4, num_moe_experts=4, add_bias_linear=False,
        expert_model_parallel_size=2, use_cpu_initialization=True,
        moe_token_dispatcher_type=args.moe_token_dispatcher_type,
        moe_flex_dispatcher_backend=args.moe_flex_dispatcher_backend,
    )
    spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False)
    model = GPTModel(config=config, transformer_layer_spec=spec, vocab_size=64, max_sequence_length=16)
    return [model], None, None
""",
}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ("--moe-token-dispatcher-type", "uccl_ep", "--uccl-ep-dispatch-dtype", "bf16"),
            "dispatchers: UcclEpTokenDispatcher backend: hybridep",
        ),
        (
            ("--moe-token-dispatcher-type", "alltoall"),
            "dispatchers: MoEAlltoAllTokenDispatcher backend: deepep",
        ),
    ],
)
def test_the_launcher_runs_a_script_with_the_dispatcher_it_names(
    tmp_path: Path, options: tuple[str, ...], expected: str
) -> None:
    """Two ranks; a stand-in for Megatron-LM's training package beside the real megatron.core."""
    printed = launch(["-m", "uccl_ep_train.megatron.launch", str(written(tmp_path)), *options])
    assert printed.count(expected) == 2, printed
    assert printed.count("uccl_ep: dispatcher in place in 2 MoE layers") == ("uccl_ep" in options)


@pytest.mark.parametrize("by", ["launcher", "script"])
def test_one_process_may_train_several_times(tmp_path: Path, by: str) -> None:
    """With the same options, with others, and with Megatron's dispatcher; groups are made anew each time."""
    script, again = written(tmp_path), tmp_path / "again.py"
    again.write_text(AGAIN)
    ours = "--moe-token-dispatcher-type uccl_ep --uccl-ep-dispatch-dtype bf16"
    options = [ours, ours, f"{ours} --uccl-ep-num-sms 2", "--moe-token-dispatcher-type alltoall"]
    start = [] if by == "launcher" else ["-m", "uccl_ep_train.megatron.launch"]
    command = [*start, str(again), str(script), str(tmp_path), *options]
    printed = launch(command, BY=by)
    assert printed.count("dispatchers: UcclEpTokenDispatcher") == 2 * 3, printed
    assert printed.count("dispatchers: MoEAlltoAllTokenDispatcher") == 2, printed


def written(folder: Path) -> Path:
    """SCRIPT, and the training package beside it."""
    # Not imported: without the launcher's shims Megatron-Core may be there and yet fail on a CPU.
    if not megatron_is_installed():
        pytest.skip("no module megatron.core: megatron-core is not installed")
    training = folder / "megatron" / "training"
    training.mkdir(parents=True)
    for name, text in TRAINING.items():
        (training / name).write_text(text)
    script = folder / "pretrain.py"
    script.write_text(SCRIPT)
    return script


def launch(arguments: list[str], **environment: str) -> str:
    """What two ranks print."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
    ]
    # The script puts nothing on a GPU, and may find fewer of them than ranks.
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)} | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
