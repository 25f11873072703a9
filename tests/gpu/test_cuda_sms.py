"""SMs that the kernels occupy while they wait for a late rank: counted by where others can run."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.test_cuda_backend import spec_of
from tests.machine import needs_gpus
from uccl_ep_train import Buffer
from uccl_ep_train.settings.sections import WireDtype

NVCC = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
pytestmark = [
    pytest.mark.gpu,
    needs_gpus(),
    pytest.mark.skipif(not Path(NVCC).is_file(), reason=f"no nvcc ({NVCC})"),
]

T, H, K, E = 1024, 7168, 4, 8  # more chunks of 8 tokens than SMs
SHARED_BYTES = 120 << 10  # no room beside a block of ours, nor for a second one


@pytest.fixture(scope="module")
def census(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], set[int]]:
    """Where blocks of another kernel can run on the current GPU."""
    built = tmp_path_factory.mktemp("census") / "census.so"
    command = [NVCC, "-shared", "-Xcompiler=-fPIC", "-arch=native", "-o", str(built),
               str(Path(__file__).with_name("census.cu"))]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    run = ctypes.CDLL(str(built)).census

    def count() -> set[int]:
        num_sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        stream = torch.cuda.Stream(priority=-1)
        found = torch.full((8 * num_sms,), -1, dtype=torch.int32, device="cuda")
        torch.cuda.current_stream().synchronize()
        arguments = (ctypes.c_void_p(found.data_ptr()), ctypes.c_int(len(found)), ctypes.c_int(SHARED_BYTES))
        status = run(*arguments, ctypes.c_longlong(200_000), ctypes.c_void_p(stream.cuda_stream))
        assert status == 0, status
        stream.synchronize()
        with torch.cuda.stream(stream):
            return set(found.tolist())

    return count


def count_free(census: Callable[[], set[int]]) -> set[int]:
    """As `census`, while kernels run on the current stream."""
    device, free = torch.cuda.current_device(), set[int]()

    def run() -> None:
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream())
        free.update(census())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return free


@pytest.mark.parametrize(("num_sms", "stage_sms"), [(16, None), (24, None), (24, 90)])
@pytest.mark.parametrize("wire", ["bf16", "fp8"])
def test_kernels_keep_to_num_sms(
    census: Callable[[], set[int]], num_sms: int, stage_sms: int | None, wire: WireDtype
) -> None:
    """Those of staging are free again when our rows are staged and routed."""
    sms = (("num_sms", num_sms), ("stage_sms", stage_sms))
    spec = spec_of(2, hidden=H, settings=(*sms, ("budget_bytes", 256 << 20)))
    go = threading.Event()
    occupied: dict[str, int] = {}

    def step(rank: int, buffer: Buffer) -> None:
        all_sms = torch.cuda.get_device_properties(buffer.device).multi_processor_count
        x = torch.ones(T, H, dtype=torch.bfloat16, device=buffer.device)
        idx = torch.arange(T * K, device=buffer.device).reshape(T, K) % E
        first = buffer.dispatch(x, idx, dispatch_dtype=wire)
        calls: dict[str, Callable[[], Any]] = {
            "new": lambda: buffer.dispatch(x, idx, capacity=T * K * 2, dispatch_dtype=wire),
            "cached": lambda: buffer.dispatch(x, handle=first.handle, dispatch_dtype=wire),
            "combine": lambda: buffer.combine(first.rows, first.handle),
        }
        torch.cuda.synchronize()
        if rank == 0:
            assert len(census()) == all_sms  # control: nothing of ours runs
        for name, run in calls.items():
            if rank == 0:
                run()
                time.sleep(0.01)
                occupied[name] = all_sms - len(count_free(census))
                go.set()
            else:
                assert go.wait(20)
                go.clear()
                run()
            torch.cuda.synchronize()
            buffer.check()

    with spec.group() as group:
        group.run(step)
    # The last block that routes speaks with the others, and may be one of those that only stage.
    assert num_sms <= occupied["new"] <= num_sms + (stage_sms is not None), occupied
    assert occupied["combine"] == num_sms
    # Blocks that place what comes from their own rank are through.
    assert 0 < occupied["cached"] <= num_sms, occupied
