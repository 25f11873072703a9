"""Aliases of old import paths: see `uccl_ep_train/earlier_paths.py`."""

from __future__ import annotations

from collections.abc import Mapping

HOMES: Mapping[str, str] = {
    "architecture": "models.architecture",
    "arguments": "plan.arguments",
    "attention": "models.attention",
    "checkpoint": "training.checkpoint",
    "data": "training.data",
    "deepseek_v2_lite": "models.deepseek_v2_lite",
    "deepseek_v3": "models.deepseek_v3",
    "devices": "plan.devices",
    "dispatchers": "training.dispatchers",
    "dry_run": "plan.dry_run",
    "dsv3_proxy": "models.dsv3_proxy",
    "gpt_oss": "models.gpt_oss",
    "hardware": "plan.hardware",
    "jobs": "plan.jobs",
    "kimi_k2": "models.kimi_k2",
    "layout": "models.layout",
    "memory": "plan.memory",
    "metrics": "measure.metrics",
    "mixtral": "models.mixtral",
    "model": "training.build",
    "paired": "measure.paired",
    "paired_gpu": "models.paired_gpu",
    "paired_host": "models.paired_host",
    "parameters": "plan.parameters",
    "plot": "measure.plot",
    "pretrain": "training.pretrain",
    "proof": "measure.proof",
    "qwen3": "models.qwen3",
    "rank_of_job": "models.rank_of_job",
    "router_trace": "measure.router_trace",
    "settings": "models.recipe",
    "timing": "measure.timing",
    "tiny_host": "models.tiny_host",
    "traffic": "plan.traffic",
    "train": "training.loop",
}
"""The earlier name of each module, and where it lies in `recipes`."""
