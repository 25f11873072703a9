"""Megatron-LM as it is: its pretrain_gpt.py, and its own dispatcher tests. MEGATRON_LM names the checkout."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.machine import lacks_tcp

ROOT = Path(__file__).resolve().parents[2]
CHECKOUT = os.environ.get("MEGATRON_LM", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM names no checkout of Megatron-LM"),
]

MODEL = shlex.split("""
    --num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128 --ffn-hidden-size 256
    --expert-model-parallel-size 2 --moe-router-dtype fp32 --moe-router-load-balancing-type none
    --micro-batch-size 2 --global-batch-size 8 --train-iters 5 --lr 1e-3 --seed 7 --log-interval 1
    --eval-iters 0 --eval-interval 100 --mock-data --tokenizer-type NullTokenizer --vocab-size 255
    --attention-dropout 0 --hidden-dropout 0 --position-embedding-type rope --disable-bias-linear
    --transformer-impl local --use-cpu-initialization --distributed-backend gloo --no-persist-layer-norm
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
    --no-gradient-accumulation-fusion --no-rope-fusion
""")
CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # asked for with tensor parallelism


def torchrun(*words: str, cpu: bool, hosts: int = 1, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """On this host, or one rank on each of two."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run"]
    if hosts == 1:
        command += ["--standalone", f"--nproc-per-node={ranks}", *words]
    else:
        meet = "--nnodes=2 --node_rank=$NODE_RANK --master_addr=$MASTER_ADDR --master_port=29500"
        command = [
            "scripts/several_hosts.sh",
            "bash",
            "-c",
            f"{shlex.join(command)} {meet} {shlex.join(words)}",
        ]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | CONNECTIONS | ({"CUDA_VISIBLE_DEVICES": ""} if cpu else {}),
    )  # fmt: skip


def pretrain(
    dispatcher: str, *more: str, hosts: int = 1, ranks: int = 2
) -> tuple[list[tuple[str, str]], str]:
    """Loss and gradient's norm of each step, as printed, and all that was."""
    done = torchrun(
        "-m", "uccl_ep_train.megatron.launch", f"{CHECKOUT}/pretrain_gpt.py", *MODEL,
        "--moe-token-dispatcher-type", dispatcher, *more, cpu=True, hosts=hosts, ranks=ranks,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    steps = re.findall(r"lm loss: (\S+) .*grad norm: (\S+)", done.stdout)
    assert len(steps) == 5, done.stdout[-4000:]
    return steps, done.stdout


OPTIONS = {
    "fp32": "",
    "distributed optimizer": "--bf16 --use-distributed-optimizer",
    "1F1B overlap": "--bf16 --use-distributed-optimizer --overlap-moe-expert-parallel-comm",
    "recompute": "--bf16 --recompute-granularity selective --recompute-modules moe",
    "tensor parallel": "--bf16 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 "
    "--sequence-parallel",
}


@pytest.mark.parametrize("name", OPTIONS)
def test_pretrain_gpt_trains_alike_and_says_who_dispatched(name: str) -> None:
    options = OPTIONS[name].split()
    stock, printed = pretrain("alltoall", *options)
    assert "uccl_ep: dispatcher in place" not in printed
    ours, printed = pretrain("uccl_ep", "--uccl-ep-dispatch-dtype", "bf16", *options)
    assert printed.count("uccl_ep: dispatcher in place in 2 MoE layers") == 1
    tokens = 2 * 64 // (2 if "--sequence-parallel" in options else 1)  # that a buffer on GPUs is made for
    assert re.findall(r"window_tokens +(\d+) ", printed) == [str(tokens)]
    assert ours == stock
    assert len(set(ours)) == 5  # it learns: no step is like another


STAGES = "--bf16 --pipeline-model-parallel-size 2 --num-layers 4"
# Four ranks; MoE layers of each model (chunks of virtual stages) that says who dispatched.
LAYOUTS = {
    "pipeline stages": (STAGES, [2, 2]),
    "virtual stages, 1F1B overlap": (
        f"{STAGES} --num-layers-per-virtual-pipeline-stage 1 --use-distributed-optimizer "
        "--overlap-moe-expert-parallel-comm",
        [2, 2],
    ),
    "a stage of dense layers": (f"{STAGES} --moe-layer-freq ([0]*2+[1]*2)", [2]),
    "stages that recompute": (
        f"{STAGES} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        [2, 2],
    ),
    "two expert parallel groups": (
        "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        [2],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_pretrain_gpt_trains_alike_on_four_ranks(name: str) -> None:
    options, num_layers = LAYOUTS[name]
    stock, _ = pretrain("alltoall", *options.split(), ranks=4)
    ours, printed = pretrain("uccl_ep", "--uccl-ep-dispatch-dtype", "bf16", *options.split(), ranks=4)
    assert [int(n) for n in re.findall(r"dispatcher in place in (\d+) MoE layers", printed)] == num_layers
    assert ours == stock
    assert len(set(ours)) == 5


# What models that people train have: each changes what is dispatched, or which layers do it.
MODELS = {
    "multi-token prediction": ("--mtp-num-layers 1", 3),
    "DeepSeek-V3's router": (
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-num-groups 4 "
        "--moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5",
        2,
    ),
    "an overlapped shared expert": (
        "--moe-shared-expert-intermediate-size 128 --moe-shared-expert-overlap",
        2,
    ),
    "a capacity, padded": ("--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity", 2),
}


@pytest.mark.parametrize("name", MODELS)
def test_pretrain_gpt_trains_such_models_alike(name: str) -> None:
    options, num_layers = MODELS[name]
    try:
        stock, _ = pretrain("alltoall", "--bf16", *options.split())
    except AssertionError as error:
        if "isinstance() arg 2 must be a type" not in str(error):
            raise
        pytest.skip("this Megatron-LM needs TransformerEngine for it, whoever dispatches")
    try:
        ours, printed = pretrain("uccl_ep", "--uccl-ep-dispatch-dtype", "bf16", "--bf16", *options.split())
    except AssertionError as error:  # by Megatron 0.16 and 0.17, with their reason
        if "moe_shared_expert_overlap only works with alltoall token dispatcher" not in str(error):
            raise
        return
    assert printed.count(f"dispatcher in place in {num_layers} MoE layers") == 1
    assert ours == stock
    assert len(set(ours)) == 5


@pytest.mark.skipif(bool(lacks_tcp()), reason=lacks_tcp())
def test_pretrain_gpt_trains_alike_on_two_hosts() -> None:
    """With no setting of ours: the hosts make the domains, and rows go over TCP."""
    stock, _ = pretrain("alltoall", "--bf16", hosts=2)
    ours, printed = pretrain("uccl_ep", "--uccl-ep-dispatch-dtype", "bf16", "--bf16", hosts=2)
    assert "dispatcher in place in 2 MoE layers" in printed
    assert ours == stock


RANKS = 2 if torch.cuda.is_available() else 8  # eight is what its tests ask for


@pytest.mark.parametrize("num_domains", [1, 2])
def test_its_own_dispatcher_tests_pass(num_domains: int) -> None:
    size = f"--domain-size={RANKS // num_domains}"
    done = torchrun("scripts/megatron_own_tests.py", CHECKOUT, size, cpu=False, ranks=RANKS)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (dispatches,) = re.findall(rf"(\d+) dispatches by uccl_ep on {RANKS} ranks", done.stdout)
    assert int(dispatches) >= 20


def test_its_own_dispatcher_tests_fail_with_wrong_rows() -> None:
    """Control."""
    done = torchrun("scripts/megatron_own_tests.py", CHECKOUT, "--wrong", cpu=False)
    assert done.returncode != 0
    ((failed, passed),) = re.findall(r"(\d+) failed, (\d+) passed", done.stdout)
    # Those with one rank have Megatron's dispatcher; with TransformerEngine, on GPUs, there are more of both.
    most_passed = int(failed) // 3 if torch.cuda.is_available() else 6
    assert int(failed) >= 20 and int(passed) <= most_passed
