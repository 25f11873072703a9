"""A program without the launcher that an exception ends tells the other ranks which."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron.harness import megatron_is_installed

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import os, sys
import torch
from uccl_ep_train.megatron import cpu_shims
cpu_shims.install()
cpu_shims.install_for_local_spec()
import torch.distributed as dist
from tests.megatron import training_case
from tests.megatron.settings import TrainCase

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
training_case.initialize(ep=2)
case = TrainCase(ep=2)
model, optimizer, _ = training_case.build(case)
training_case.train_step(case, [model], optimizer, 0)
dist.barrier()
if rank == 1:
    if sys.argv[2] == "raises":
        raise ArithmeticError("the user's mistake")
    sys.exit(0)
try:
    training_case.train_step(case, [model], optimizer, 1)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("way", ["raises", "ends"])
def test_an_uncaught_exception_is_told_to_the_other_ranks(tmp_path: Path, way: str) -> None:
    """Control: a program that ends too early has no exception to tell."""
    if not megatron_is_installed():
        pytest.skip("no module megatron.core: megatron-core is not installed")
    more = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path / "store"), way]
    ranks = [
        subprocess.Popen(
            command, cwd=ROOT, env=os.environ | more | {"RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        printed = [process.communicate(timeout=120)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert "PeerFailed" in printed[0], printed
    told = "its program was ended by ArithmeticError: the user's mistake"
    assert (told in printed[0]) == (way == "raises"), printed
