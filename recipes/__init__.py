"""Training recipes: `python -m recipes.launch --recipe tiny_host`. A recipe is a function without logic.

`models` has the models, `plan` their layouts and costs, `training` the training loop, `measure` the
measurements.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from recipes.earlier_paths import HOMES
from recipes.models.deepseek_v2_lite import deepseek_v2_lite
from recipes.models.deepseek_v3 import deepseek_v3
from recipes.models.dsv3_proxy import dsv3_proxy_4xh200
from recipes.models.gpt_oss import gpt_oss_120b
from recipes.models.kimi_k2 import kimi_k2
from recipes.models.layout import Pretraining
from recipes.models.mixtral import mixtral_8x7b
from recipes.models.paired_gpu import paired_gpu
from recipes.models.paired_host import paired_host
from recipes.models.qwen3 import qwen3_30b_a3b, qwen3_235b_a22b
from recipes.models.rank_of_job import deepseek_v3_rank, qwen3_235b_rank
from recipes.models.recipe import Recipe
from recipes.models.tiny_host import tiny_host
from uccl_ep_train.earlier_paths import EarlierPaths

sys.meta_path.insert(0, EarlierPaths(__name__, HOMES))

RECIPES: dict[str, Callable[[], Recipe]] = {
    "tiny_host": tiny_host,
    "paired_host": paired_host,
    "paired_gpu": paired_gpu,
    "dsv3_proxy_4xh200": dsv3_proxy_4xh200,
    "deepseek_v3_rank": deepseek_v3_rank,
    "qwen3_235b_rank": qwen3_235b_rank,
}
"""Trained by recipes/training/loop.py."""

PRETRAININGS: dict[str, Callable[[], Pretraining]] = {
    "deepseek_v3": deepseek_v3,
    "deepseek_v2_lite": deepseek_v2_lite,
    "qwen3_30b_a3b": qwen3_30b_a3b,
    "qwen3_235b_a22b": qwen3_235b_a22b,
    "mixtral_8x7b": mixtral_8x7b,
    "kimi_k2": kimi_k2,
    "gpt_oss_120b": gpt_oss_120b,
}
"""Trained by Megatron-LM's pretrain_gpt.py."""
