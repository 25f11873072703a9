"""Training recipes: `python -m recipes.launch --recipe tiny_host`. A recipe is a function without logic."""

from __future__ import annotations

from collections.abc import Callable

from recipes.paired_host import paired_host
from recipes.settings import Recipe
from recipes.tiny_host import tiny_host

RECIPES: dict[str, Callable[[], Recipe]] = {"tiny_host": tiny_host, "paired_host": paired_host}
