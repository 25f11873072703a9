"""python -m recipes.launch --recipe tiny_host [--token-dispatcher uccl_ep|alltoall|allgather] [options]

Starts the recipe's ranks on this machine (unless torchrun already did), trains, and draws the loss curve.
A GPU for each rank if there are as many, else the CPU. Ctrl-C saves a checkpoint; the same command resumes.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
import warnings
from pathlib import Path

import torch.distributed as dist

from recipes import RECIPES, devices
from recipes.checkpoint import CheckpointError, Checkpoints
from recipes.devices import DeviceError
from recipes.settings import ABLATIONS, DEVICES, DISPATCHERS, Recipe, RecipeError
from uccl_ep_train import env

_STOPPED = 130  # exit status after Ctrl-C, as shells use it


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m recipes.launch", description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="tiny_host")
    parser.add_argument(
        "--device",
        choices=DEVICES,
        help="auto (tiny_host's): GPUs if every rank can have its own, else the CPU",
    )
    parser.add_argument(
        "--num-ranks",
        type=int,
        help="on this machine; default: the recipe's. Fewer ranks hold more experts each",
    )
    parser.add_argument("--token-dispatcher", choices=DISPATCHERS, help="default: the recipe's")
    parser.add_argument("--dispatch-dtype", choices=("fp8", "bf16"), help="rows on the wire (uccl_ep)")
    parser.add_argument(
        "--grad-dtype", choices=("bf16", "fp8"), help="gradients of combine on the wire (uccl_ep)"
    )
    parser.add_argument("--domain-size", type=int, help="ranks that share memory (uccl_ep); on GPUs: all")
    parser.add_argument(
        "--ablate", choices=ABLATIONS, help="negative controls: what training loses without it"
    )
    parser.add_argument("--steps", type=int, help="optimizer steps of the whole run")
    parser.add_argument("--seed", type=int)
    parser.add_argument(
        "--run-dir", type=Path, help="default: runs/<recipe>; resumed when it holds a checkpoint"
    )
    parser.add_argument(
        "--restart", action="store_true", help="do not resume: overwrite the run in --run-dir"
    )
    parser.add_argument(
        "--resume", action="store_true", help="resume, and fail when there is nothing to resume"
    )
    parser.add_argument(
        "--compare", choices=DISPATCHERS, help="train once more with this dispatcher and draw both curves"
    )
    parser.add_argument(
        "--router-trace", type=Path, help="save what the routers chose in a few steps (.npz), for bench/"
    )
    return parser.parse_args(argv)


def chosen_recipe(args: argparse.Namespace, dispatcher: str | None) -> Recipe:
    """The recipe with the command line's changes. Raises RecipeError."""
    recipe = RECIPES[args.recipe]()
    num_ranks = recipe.num_ranks if args.num_ranks is None else args.num_ranks
    changes = {
        "device": args.device,
        "num_ranks": num_ranks,
        "token_dispatcher": dispatcher,
        "dispatch_dtype": args.dispatch_dtype,
        "grad_dtype": args.grad_dtype,
        "domain_size": min(recipe.domain_size, num_ranks) if args.domain_size is None else args.domain_size,
        "ablate": args.ablate,
        "num_steps": args.steps,
        "seed": args.seed,
    }
    return dataclasses.replace(recipe, **{k: v for k, v in changes.items() if v is not None})


def default_run_dir(recipe: Recipe) -> Path:
    """runs/<recipe>, with a suffix for another dispatcher than the recipe's and for an ablation."""
    dispatcher = recipe.token_dispatcher
    suffix = "" if dispatcher == RECIPES[recipe.name]().token_dispatcher else f"-{dispatcher}"
    return Path("runs") / (recipe.name + suffix + ("" if recipe.ablate == "none" else f"-{recipe.ablate}"))


def run_ranks(num_ranks: int, argv: list[str], module: str = "recipes.launch") -> int:
    """Runs a module on `num_ranks` local ranks under torchrun's agent; its exit status.

    The agent passes SIGINT and SIGTERM on to the ranks, which save and leave; it kills what stays too long.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=num_ranks, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        max_restarts=0, run_id="recipe", monitor_interval=0.2,
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)("-m", module, *argv)
    except SignalException:
        return _STOPPED
    except ChildFailedError as error:
        print(f"{module} failed: {error}", file=sys.stderr)
        return 1
    return 0


def set_up_rank(recipe: Recipe) -> None:
    """This rank's device, Megatron with what it needs on a CPU, and the process groups."""
    backend = devices.join(recipe.device, int(env.read("LOCAL_RANK", "0")))
    from uccl_ep_train.megatron import cpu_shims

    # Advice about packages that a CPU run cannot have; four ranks would print it four times.
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    cpu_shims.install()  # before Megatron is imported
    cpu_shims.install_for_local_spec()
    from recipes import train

    train.set_up(recipe, backend)


def train_rank(args: argparse.Namespace, recipe: Recipe, why_cpu: str, run_dir: Path) -> int:
    """One rank's whole life."""
    set_up_rank(recipe)
    from recipes import train

    if dist.get_rank() == 0:
        if why_cpu:
            print(why_cpu, flush=True)
        if args.restart:
            shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
        print(f"recipe {recipe.name}, run directory {run_dir}\n{train.describe(recipe)}", flush=True)
    dist.barrier()
    outcome = train.run(recipe, run_dir, Path("runs") / "data", args.router_trace)
    if dist.get_rank() == 0:
        state = "finished" if outcome.finished else "stopped, the same command resumes it,"
        print(
            f"{recipe.name} with {recipe.token_dispatcher}: {state} at step {outcome.step}, "
            f"validation loss {outcome.val_loss:.4f} nats per byte, {outcome.seconds:.0f} s",
            flush=True,
        )
    dist.barrier()
    dist.destroy_process_group()
    return 0


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    try:
        recipe, why_cpu = devices.place(
            chosen_recipe(args, args.token_dispatcher), keep_domains=args.domain_size is not None
        )
    except (RecipeError, DeviceError) as error:
        print(error, file=sys.stderr)
        return 2
    run_dir = args.run_dir or default_run_dir(recipe)
    if dist.is_torchelastic_launched():
        return train_rank(args, recipe, why_cpu, run_dir)
    checkpoints = Checkpoints(run_dir / "checkpoints", recipe)
    if args.resume and not checkpoints.steps():
        print(f"--resume: no checkpoint in {run_dir}", file=sys.stderr)
        return 2
    try:
        if not args.restart:
            checkpoints.check()  # here once, rather than on every rank
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 2
    runs = {run_dir: recipe.token_dispatcher}
    if args.compare:
        runs[run_dir / f"compare_{args.compare}"] = args.compare
    if why_cpu:
        print(why_cpu, flush=True)
    for folder, dispatcher in runs.items():
        # The last of two equal options counts, so the run's own come after the user's.
        own = [f"--device={recipe.device}", f"--run-dir={folder}", f"--token-dispatcher={dispatcher}"]
        status = run_ranks(recipe.num_ranks, [*argv, *own])
        if status != 0:
            return status
    from recipes.plot import plot_losses  # matplotlib takes seconds to import

    curve = run_dir / "loss.png"
    plot_losses([folder / "metrics.jsonl" for folder in runs], curve)
    print(f"loss curve: {curve}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
