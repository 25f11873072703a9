"""The step-time benchmark with real ranks: dispatchers side by side, equal losses, Megatron's refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipes.plan import devices
from tests.megatron.harness import MegatronRanks

ROOT = Path(__file__).resolve().parents[2]


def bench(device: str, out: Path, *options: str) -> tuple[list[dict[str, Any]], str]:
    command = [
        sys.executable, "-m", "bench.megatron_step", f"--device={device}", "--num-ranks=2", "--layers=1",
        "--micro-batch-tokens=64", "--steps=2", "--warmup=1", f"--out={out}", *options,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.with_suffix(".json").read_text()), done.stdout


def test_a_cell_leaves_no_model_behind(ranks: MegatronRanks, tmp_path: Path) -> None:
    """Otherwise the next cells of a sweep run out of a GPU's memory."""
    found = ranks.run("step_case.models_left", data_dir=str(tmp_path), device=ranks.device)
    assert found == [(["uccl_ep", "alltoall"], 0)] * 4


@pytest.mark.slow
@pytest.mark.timeout(450)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_dispatchers_train_side_by_side_with_equal_losses_and_fp8_has_others(
    tmp_path: Path, device: str
) -> None:
    if device == "cuda" and (why_not := devices.lacking(2)):
        pytest.skip(why_not)
    records, said = bench(
        device, tmp_path / "step", "--dispatchers", "uccl_ep", "alltoall", "allgather",
        "--dispatch-dtype", "bf16", "fp8", "--overlap", "off", "on",
    )  # fmt: skip
    assert len(records) == 4 * 3
    by_cell = {(r["cell_dtype"], r["overlap"], r["system"]): r for r in records}
    for dtype in ("bf16", "fp8"):
        for overlap in (False, True):
            ours, stock = (by_cell[dtype, overlap, name] for name in ("uccl_ep", "alltoall"))
            assert ours["equals_stock"] is (dtype == "bf16"), said
            assert len(ours["losses"]) == 3 and ours["runs"] == 2
            assert ours["losses"][0] == pytest.approx(stock["losses"][0], rel=1e-2), "another model or batch"
            assert ours["dispatch_ms"] > 0 and ours["combine_ms"] > 0 and ours["outside_torch_bytes"] > 0
            assert (ours["peak_torch_bytes"] is None) == (device == "cpu")
        assert by_cell[dtype, False, "allgather"]["not_run"] == ""
        refused = by_cell[dtype, True, "allgather"]["not_run"]
        assert "overlap_moe_expert_parallel_comm is supported with" in refused, refused
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
