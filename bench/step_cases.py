"""The cells of `megatron_step.py` (each is a recipe in one size), and the command line that selects them."""

from __future__ import annotations

import argparse
import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

from bench.bounds import EXPERTS, MOST_RUNS, RANKS, RUNS, SEED, TOKENS, TOPK, add_output
from recipes import RECIPES
from recipes.models.architecture import Model
from recipes.models.recipe import DEVICES, DISPATCHERS, Recipe, RecipeError
from uccl_ep_train.common.command_line import whole
from uccl_ep_train.oracle import fp8
from uccl_ep_train.settings.checks import MAX_HIDDEN

STOCK = "alltoall"
OURS = "uccl_ep"
MOST_MIB = 1 << 26
IDEAL = "ideal"
"""A dispatcher that moves rows in no time, see ideal.py."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What is compared: every dispatcher trains `recipe`, in place of the recipe's own dispatcher.

    overlap  Megatron's `overlap_moe_expert_parallel_comm`: communication of one micro-batch during the
             computation of another
    problem  why the cell cannot run; "" if no reason is known
    """

    recipe: Recipe
    overlap: bool
    problem: str = ""

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a rank in one forward pass."""
        return self.recipe.micro_batch_size * self.recipe.sequence_length

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of a rank in one step."""
        return self.micro_batch_tokens * self.recipe.num_microbatches

    def __str__(self) -> str:
        r = self.recipe
        return (
            f"{r.name} {self.micro_batch_tokens} tokens x {r.num_microbatches}, H={r.model.hidden_size}, "
            f"{r.dispatch_dtype}, overlap {'on' if self.overlap else 'off'}"
        )


def sized(recipe: Recipe, *, tokens: int | None, hidden: int | None, expert_ffn: int | None) -> Recipe:
    """The recipe with these widths and with `tokens` of a rank in one forward pass. Raises RecipeError.

    Sequences keep their length if `tokens` is a multiple of it; fewer tokens become one shorter sequence.
    Heads keep their width, and their number follows the hidden size. If the model sets the width of a head
    itself, it keeps the number of heads. Experts keep their ratio to the hidden size, in whole blocks of FP8
    scales, unless `expert_ffn` is given.
    """
    if tokens is not None:
        length = min(tokens, recipe.sequence_length)
        if length < 1 or tokens % length:
            raise RecipeError(f"{tokens} tokens are not whole sequences of {length}")
        recipe = replace(recipe, sequence_length=length, micro_batch_size=tokens // length)
    model = recipe.model
    if hidden is not None:
        own_width = model.latent is not None or model.head_dim is not None
        head = 1 if own_width else model.hidden_size // model.num_heads
        if hidden % fp8.BLOCK or hidden % head:
            raise RecipeError(
                f"hidden = {hidden} is not a multiple of {fp8.BLOCK} and of {head}, a head's width"
            )
        model = replace(
            model,
            hidden_size=hidden,
            num_heads=model.num_heads if own_width else hidden // head,
            expert_ffn_size=_in_blocks(model.expert_ffn_size * hidden / model.hidden_size),
        )
    if expert_ffn is not None:
        model = replace(model, expert_ffn_size=expert_ffn)
    return replace(recipe, model=model)


def _in_blocks(width: float) -> int:
    return max(1, round(width / fp8.BLOCK)) * fp8.BLOCK


def architecture(recipe: Recipe) -> dict[str, int]:
    """The sizes of the model that a record names."""
    names = ("num_layers", "hidden_size", "num_heads", "expert_ffn_size", "num_experts", "topk")
    return {name: getattr(recipe.model, name) for name in names}


def cells_of(args: argparse.Namespace, recipe: Recipe) -> list[Cell]:
    """All cells of the sweep, also those that cannot run (`Cell.problem`)."""
    cells = []
    for dtype, tokens, hidden, overlap in itertools.product(
        args.dispatch_dtype, args.micro_batch_tokens, args.hidden, args.overlap
    ):
        chosen, problem = replace(recipe, dispatch_dtype=dtype), ""
        try:
            chosen = sized(chosen, tokens=tokens, hidden=hidden, expert_ffn=args.expert_ffn)
        except RecipeError as error:
            problem = str(error)
        cells.append(Cell(recipe=chosen, overlap=overlap == "on", problem=problem))
    return cells


def parse_args(argv: list[str], about: str = "") -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.megatron_step", description=about)
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="tiny_host")
    parser.add_argument("--dispatchers", nargs="+", choices=(*DISPATCHERS, IDEAL), default=[OURS, STOCK])
    parser.add_argument("--device", choices=DEVICES, help="default: the recipe's")
    parser.add_argument("--num-ranks", type=RANKS, help="on this machine; default: the recipe's")
    sweep = parser.add_argument_group("the sweep: every combination of; defaults are the recipe's")
    sweep.add_argument("--micro-batch-tokens", type=TOKENS, nargs="+", default=[None], help="of a rank")
    sweep.add_argument("--hidden", type=whole(1, MAX_HIDDEN), nargs="+", default=[None])
    sweep.add_argument("--dispatch-dtype", nargs="+", choices=("bf16", "fp8"), default=["bf16"], help=OURS)
    sweep.add_argument(
        "--overlap", nargs="+", choices=("off", "on"), default=["off"],
        help="Megatron's overlap of expert parallel communication with another micro-batch",
    )  # fmt: skip
    sweep.add_argument(
        "--cell",
        type=whole(1),
        metavar="N",
        help="only the N-th, from 1; it joins the results that --out has",
    )
    parser.add_argument(
        "--expert-ffn", type=whole(1, MAX_HIDDEN), help="width of the experts; default: in the recipe's ratio"
    )
    parser.add_argument("--layers", type=whole(1))
    parser.add_argument("--experts", type=EXPERTS, help="of the group; a router's groups of experts go")
    parser.add_argument("--topk", type=TOPK, help="experts of a token")
    parser.add_argument(
        "--num-microbatches", type=RUNS,
        help="of a step, in all cells; default: the recipe's, with --overlap on at least 2",
    )  # fmt: skip
    parser.add_argument("--grad-dtype", choices=("bf16", "fp8"), help=f"gradients of combine, {OURS}")
    parser.add_argument("--budget-mib", type=whole(1, MOST_MIB), help=f"memory of {OURS} for each rank")
    parser.add_argument(
        "--steps", type=whole(2, MOST_RUNS), default=20, help="counted ones of each dispatcher, 2 or more"
    )
    parser.add_argument(
        "--warmup", type=RUNS, default=3, help="steps before them, 1 or more: the first allocates"
    )
    parser.add_argument("--seed", type=SEED)
    add_output(parser, "megatron_step", ".png")
    args = parser.parse_args(argv)
    if len(set(args.dispatchers)) < len(args.dispatchers):
        parser.error("--dispatchers names one twice")
    num_cells = math.prod(map(len, (args.dispatch_dtype, args.micro_batch_tokens, args.hidden, args.overlap)))
    if args.cell is not None and not 1 <= args.cell <= num_cells:
        parser.error(f"--cell {args.cell}: allowed are 1 to {num_cells}")
    return args


def _model(args: argparse.Namespace, model: Model) -> Model:
    """The model with the layers, experts and top-k of the options. Raises RecipeError."""
    sizes = {"num_layers": args.layers, "num_experts": args.experts, "topk": args.topk}
    model = replace(model, **{name: size for name, size in sizes.items() if size is not None})
    if not 1 <= model.topk <= model.num_experts:
        raise RecipeError(f"topk = {model.topk}: allowed is 1 .. {model.num_experts}, the number of experts")
    if args.experts is None and args.topk is None:
        return model
    return replace(model, router=replace(model.router, num_groups=None, group_topk=None))


def base_recipe(args: argparse.Namespace) -> Recipe:
    """The recipe with the settings that all cells share. Raises RecipeError."""
    recipe = RECIPES[args.recipe]()
    num_ranks = args.num_ranks or recipe.num_ranks
    at_least = 2 if "on" in args.overlap else 1
    changes: dict[str, Any] = {
        "device": args.device,
        "model": _model(args, recipe.model),
        "grad_dtype": args.grad_dtype,
        "budget_bytes": None if args.budget_mib is None else args.budget_mib << 20,
        "seed": args.seed,
    }
    return replace(
        recipe,
        num_ranks=num_ranks,
        domain_size=min(recipe.domain_size, num_ranks),
        num_microbatches=args.num_microbatches or max(at_least, recipe.num_microbatches),
        num_steps=args.warmup + args.steps,
        ablate="none",
        **{name: value for name, value in changes.items() if value is not None},
    )
