"""A job is a recipe with a node type and a dispatcher: it can be described, and started."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace

from recipes.models.architecture import Model
from recipes.models.layout import Layout, Pretraining
from recipes.models.recipe import Recipe, RecipeError
from recipes.plan import arguments
from recipes.plan.arguments import Arguments
from recipes.plan.hardware import NODES, Node
from uccl_ep_train.settings.checks import MAX_GPU_RANKS

_PACKAGES = {"flex-deepep": ("deep_ep", "Buffer"), "flex-hybridep": ("deep_ep", "HybridEPBuffer")}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training.

    node              None: any machine; nothing is compared with it
    dispatcher        one of arguments.DISPATCHERS
    why_dispatcher    why that is not uccl_ep, where the recipe or the node decided it
    """

    name: str
    model: Model
    layout: Layout
    node: Node | None
    dispatcher: str
    why_dispatcher: str
    dispatch_dtype: str
    grad_dtype: str
    budget_bytes: int
    domain_size: int
    arguments: Arguments  # Megatron-LM's

    def with_arguments(self, more: Arguments) -> Job:
        return replace(self, arguments=self.arguments | more)


def of_pretraining(
    recipe: Pretraining,
    hardware: str,
    dispatcher: str | None = None,
    num_ranks: int | None = None,
    *,
    ep: int | None = None,
    domain_size: int | None = None,
) -> Job:
    """ep: ranks that share a layer's experts; domain_size: those of them that share memory. None: the
    recipe's, and a node's.

    Raises RecipeError for what cannot run: a dispatcher on this node type, a number of ranks, experts or
    domains that do not come out even.
    """
    if hardware not in recipe.layouts:
        raise RecipeError(f"hardware = {hardware}: {recipe.name} has layouts for {', '.join(recipe.layouts)}")
    node, layout = NODES[hardware], recipe.layouts[hardware]
    if ep is not None:
        layout = _regrouped(recipe, layout, ep, num_ranks)
    if num_ranks is not None:
        layout = _resized(layout, num_ranks)
    if domain_size is not None and not 1 <= domain_size <= layout.ep:
        raise RecipeError(f"domain_size = {domain_size}: allowed is 1 .. {layout.ep}, the ranks of a group")
    why = node.no_uccl_ep
    if dispatcher == "uccl_ep" and why:
        raise RecipeError(f"token_dispatcher = uccl_ep: {why}; allowed here are {', '.join(_others())}")
    chosen = dispatcher or ("alltoall" if why else recipe.token_dispatcher)
    if chosen == "allgather":
        raise RecipeError(
            f"token_dispatcher = allgather: {recipe.name} has {', '.join(['uccl_ep', *_others()])}"
        )
    job = Job(
        name=recipe.name,
        model=recipe.model,
        layout=layout,
        node=node,
        dispatcher=chosen,
        why_dispatcher="" if dispatcher else why,
        dispatch_dtype=recipe.dispatch_dtype,
        grad_dtype=recipe.grad_dtype,
        budget_bytes=recipe.budget_bytes,
        domain_size=min(node.gpus, layout.ep) if domain_size is None else domain_size,
        arguments={
            **arguments.model_arguments(recipe.model),
            **arguments.layout_arguments(layout),
            # As many entries as the model has, however many the tokenizer needs.
            "make_vocab_size_divisible_by": recipe.model.vocab_size,
            "tokenizer_type": "HuggingFaceTokenizer",
            "tokenizer_model": recipe.model.tokenizer,
            **arguments.schedule_arguments(recipe.schedule),
        },
    )
    return job.with_arguments(_dispatcher_arguments(job))


def trial(recipe: Pretraining, hardware: str, num_layers: int, num_ranks: int) -> Pretraining:
    """Ten steps of the first `num_layers` layers on `num_ranks` GPUs of one host, which share the experts.

    Widths, experts, micro-batches, precision and recomputation stay. So a rank does in a layer what it does
    in the whole model, but with more experts of its own. One of the model's dense layers is kept.

    Raises RecipeError.
    """
    model = recipe.model
    least = 1 + min(1, model.first_dense_layers)
    if not least <= num_layers <= model.num_layers:
        raise RecipeError(f"trial = {num_layers}: allowed are {least} .. {model.num_layers} layers")
    if num_ranks < 1 or model.num_experts % num_ranks:
        raise RecipeError(
            f"num_ranks = {num_ranks}: in a trial all ranks share the {model.num_experts} experts of a "
            "layer; allowed is what divides them, and a GPU each"
        )
    layout = recipe.layouts[hardware]
    return replace(
        recipe,
        model=replace(model, num_layers=num_layers, first_dense_layers=min(1, model.first_dense_layers)),
        layouts={
            hardware: replace(
                layout,
                num_ranks=num_ranks,
                pp=1,
                last_stage_layers=None,
                ep=num_ranks,
                global_batch_size=2 * num_ranks * layout.micro_batch_size,
            )
        },
        schedule=replace(recipe.schedule, num_steps=10, warmup_steps=2),
    )


def trial_arguments(job: Job) -> Arguments:
    """Further arguments of Megatron-LM in a trial: synthetic data, and a line for each step."""
    return {
        "tokenizer_type": "NullTokenizer",
        "tokenizer_model": None,
        "vocab_size": job.model.vocab_size - 1,  # and the end of a document
        "mock_data": True,
        "split": "100,0,0",
        "eval_iters": 0,
        "log_interval": 1,
        "log_throughput": True,
    }


def of_recipe(recipe: Recipe) -> Job:
    """A recipe that `training/loop.py` trains; the arguments say the same in Megatron-LM's words."""
    job = Job(
        name=recipe.name,
        model=recipe.model,
        layout=recipe.layout,
        node=NODES[recipe.hardware] if recipe.hardware else None,
        dispatcher=recipe.token_dispatcher,
        why_dispatcher="",
        dispatch_dtype=recipe.dispatch_dtype,
        grad_dtype=recipe.grad_dtype,
        budget_bytes=recipe.budget_bytes,
        domain_size=recipe.domain_size,
        arguments={
            **arguments.model_arguments(recipe.model),
            **arguments.layout_arguments(recipe.layout),
            "moe_grouped_gemm": recipe.transformer_engine,
        },
    )
    return job.with_arguments(_dispatcher_arguments(job))


def check_package(dispatcher: str) -> None:
    """Raises RecipeError where the package of a flex dispatcher is missing."""
    if dispatcher not in _PACKAGES:
        return
    package, name = _PACKAGES[dispatcher]
    try:
        there = hasattr(importlib.import_module(package), name)
    except ImportError as error:
        raise RecipeError(
            f"token_dispatcher = {dispatcher}: its package {package} cannot be imported: {error}"
        ) from None
    if not there:
        raise RecipeError(f"token_dispatcher = {dispatcher}: the installed package {package} has no {name}")


def _others() -> list[str]:
    return [name for name in arguments.DISPATCHERS if name not in ("uccl_ep", "allgather")]


def _dispatcher_arguments(job: Job) -> Arguments:
    found = dict(arguments.DISPATCHERS[job.dispatcher])
    if job.dispatcher == "uccl_ep":
        found |= {
            "uccl_ep_dispatch_dtype": job.dispatch_dtype,
            "uccl_ep_grad_dtype": job.grad_dtype,
            "uccl_ep_budget_bytes": job.budget_bytes,
        }
        if job.layout.ep > MAX_GPU_RANKS:
            raise RecipeError(
                f"ep = {job.layout.ep}: groups of uccl_ep's CUDA backend have at most {MAX_GPU_RANKS} ranks"
            )
    else:
        # uccl_ep leaves nothing to permute.
        found["moe_permute_fusion"] = bool(job.arguments.get("moe_grouped_gemm"))
    return found


def _regrouped(recipe: Pretraining, layout: Layout, ep: int, num_ranks: int | None) -> Layout:
    """With groups of `ep` ranks. Without a number of ranks, the fewest from the layout's on that fit."""
    experts = recipe.model.num_experts
    if ep < 1 or experts % ep:
        allowed = [n for n in range(1, experts + 1) if experts % n == 0]
        raise RecipeError(f"ep = {ep}: allowed is one of {allowed}: {experts} experts are spread evenly")
    step = layout.pp * ep
    fewest = -(-layout.num_ranks // step) * step
    return replace(layout, ep=ep) if num_ranks is not None else _resized(replace(layout, ep=ep), fewest)


def _resized(layout: Layout, num_ranks: int) -> Layout:
    """The same pipeline stages and size of expert parallel groups, but more or fewer groups."""
    step = layout.pp * layout.ep
    if num_ranks < 1 or num_ranks % step:
        raise RecipeError(
            f"num_ranks = {num_ranks}: allowed are multiples of {step}, {layout.pp} pipeline stages of "
            f"{layout.ep} expert parallel ranks"
        )
    resized = replace(layout, num_ranks=num_ranks)
    if layout.global_batch_size % (resized.dp * layout.micro_batch_size):
        raise RecipeError(
            f"num_ranks = {num_ranks}: {resized.dp} data parallel ranks do not divide the "
            f"{layout.global_batch_size} sequences of a step"
        )
    return resized
