"""python -m recipes.launch --recipe tiny_host [--token-dispatcher uccl_ep|alltoall|...] [--dry-run] [options]

Starts the recipe's ranks on this machine (unless torchrun already did), trains, and draws the loss curve.
Each rank gets a GPU if there are enough; otherwise all use the CPU. Ctrl-C saves a checkpoint; the same
command resumes.

A full-size recipe is trained by Megatron-LM's own script, on ranks that torchrun starts:

    torchrun ... -m recipes.launch --recipe deepseek_v3 --hardware h200 --megatron-lm PATH \\
        --data-path PREFIX [-- further arguments of pretrain_gpt.py]

or tried on this host's GPUs: four of its layers, ten steps, synthetic data:

    python -m recipes.launch --recipe deepseek_v2_lite --trial 4 --megatron-lm PATH
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import shlex
import shutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from recipes import PRETRAININGS, RECIPES
from recipes.models.recipe import ABLATIONS, DEVICES, DISPATCHERS, Recipe, RecipeError
from recipes.plan import devices, jobs
from recipes.plan.devices import DeviceError
from recipes.plan.hardware import NODES
from recipes.training import asked, pretrain
from recipes.training.checkpoint import CheckpointError
from uccl_ep_train.common.command_line import output_file, run, whole
from uccl_ep_train.errors import ConfigError, InputError
from uccl_ep_train.settings import env
from uccl_ep_train.settings.variables import of_launcher

MOST_SEED = (1 << 31) - 1
_RUN_ID = "recipes.launch"  # torchrun's default is another
STOPPED = 130  # exit status after Ctrl-C, as in shells
# Options that only recipes/training/loop.py knows.
_OWN_LOOP = (
    "device", "ablate", "run_dir", "restart", "resume", "start_from", "stop_at", "compare",
    "router_trace",
)  # fmt: skip
# And those that only recipes/training/pretrain.py knows.
_FULL_SIZE = ("megatron_lm", "data_path", "hardware", "trial", "ep", "extra")
_CONTRADICTIONS = (
    ("restart", "resume", "allowed is one of them: the first deletes what the second needs"),
    ("start_from", "resume", "allowed is one of them: a run that is resumed has begun already"),
    ("router_trace", "compare", "allowed is one of them: the second run would overwrite the file"),
    ("trial", "data_path", "allowed is one of them: a trial has synthetic data"),
)


def parse_args(argv: list[str]) -> argparse.Namespace:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m recipes.launch", description=about)
    parser.add_argument(
        "--recipe", choices=[*RECIPES, *PRETRAININGS], help="tiny_host; with --ep: deepseek_v3"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print arguments, parameters, memory and traffic; fail if a GPU's memory is too small",
    )
    _add_full_size_options(parser)
    _add_own_loop_options(parser)
    parser.add_argument(
        "--device",
        choices=DEVICES,
        help="auto (tiny_host's): GPUs if every rank can have its own, else the CPU",
    )
    parser.add_argument(
        "--num-ranks",
        type=int,
        help="default: torchrun's, else the recipe's; fewer hold more experts each. Full-size: in all",
    )
    parser.add_argument("--token-dispatcher", choices=DISPATCHERS, help="default: the recipe's")
    parser.add_argument("--dispatch-dtype", choices=("fp8", "bf16"), help="rows on the wire (uccl_ep)")
    parser.add_argument(
        "--grad-dtype", choices=("bf16", "fp8"), help="gradients of combine on the wire (uccl_ep)"
    )
    parser.add_argument("--domain-size", type=int, help="ranks that share memory (uccl_ep); on GPUs: all")
    parser.add_argument(
        "--picture",
        type=output_file(".png"),
        metavar="FILE.png",
        help="of a dry run: how long each resource is busy",
    )
    parser.add_argument(
        "--ablate", choices=ABLATIONS, help="negative controls: what training loses without it"
    )
    parser.add_argument("--steps", type=whole(1), help="optimizer steps of the whole run")
    parser.add_argument("--seed", type=whole(0, MOST_SEED))
    # What follows `--` is for pretrain_gpt.py.
    end = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:end])
    args.extra = argv[end + 1 :]
    if args.recipe is None:
        args.recipe = "tiny_host" if args.ep is None else "deepseek_v3"
    for name in _OWN_LOOP if args.recipe in PRETRAININGS else _FULL_SIZE:
        value = getattr(args, name)
        if value is not None and value is not False and value != []:
            option = "what follows `--`" if name == "extra" else f"--{name.replace('_', '-')}"
            parser.error(f"{option} is not for {args.recipe}")
    if args.picture and not args.dry_run:
        parser.error("--picture is for a dry run")
    for name, other, why in _CONTRADICTIONS:
        if getattr(args, name) and getattr(args, other):
            parser.error(f"--{name.replace('_', '-')} with --{other.replace('_', '-')}: {why}")
    if args.domain_size is not None and args.recipe in PRETRAININGS and not args.dry_run:
        parser.error(f"--domain-size of {args.recipe} is for a dry run: its ranks find their domains")
    return args


def _add_full_size_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("recipes that Megatron-LM trains: " + ", ".join(PRETRAININGS))
    group.add_argument("--hardware", choices=sorted(NODES), help="node type to lay it out for (h200)")
    group.add_argument("--ep", type=int, help="ranks that share a layer's experts; default: the layout's")
    group.add_argument("--megatron-lm", type=Path, help="a checkout, with pretrain_gpt.py")
    group.add_argument("--data-path", nargs="+", default=[], help="of pretrain_gpt.py: prefixes of datasets")
    group.add_argument(
        "--trial", type=int, metavar="LAYERS", help="so many layers of it on this host's GPUs, ten steps"
    )


def _add_own_loop_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("runs of the other recipes")
    group.add_argument(
        "--run-dir", type=Path, help="default: runs/<recipe>; resumed when it holds a checkpoint"
    )
    group.add_argument("--restart", action="store_true", help="do not resume: overwrite the run in --run-dir")
    group.add_argument(
        "--resume", action="store_true", help="resume, and fail when there is nothing to resume"
    )
    group.add_argument(
        "--start-from",
        type=Path,
        metavar="RUN_DIR",
        help="go on from another run's newest checkpoint, which may have had another dispatcher",
    )
    group.add_argument("--stop-at", type=int, metavar="STEP", help="save a checkpoint after it, and leave")
    group.add_argument(
        "--compare", choices=DISPATCHERS, help="train once more with this dispatcher and draw both curves"
    )
    group.add_argument(
        "--router-trace",
        type=output_file(".npz", makes_folders=True),
        metavar="FILE.npz",
        help="save what the routers chose in a few steps, for bench/",
    )


def chosen_recipe(args: argparse.Namespace, dispatcher: str | None) -> Recipe:
    """The recipe with the command line's changes. Raises RecipeError."""
    recipe = RECIPES[args.recipe]()
    started = of_launcher("WORLD_SIZE", 0, 0) if dist.is_torchelastic_launched() else recipe.num_ranks
    num_ranks = started if args.num_ranks is None else args.num_ranks
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


def run_ranks(num_ranks: int, argv: list[str], program: tuple[str, ...] = ("-m", "recipes.launch")) -> int:
    """Runs a program on `num_ranks` local ranks under torchrun's agent, and returns its exit status.

    The agent passes SIGINT and SIGTERM on to the ranks, which save and exit; it kills those that stay too
    long.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=num_ranks, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        max_restarts=0, run_id=_RUN_ID, monitor_interval=0.2,
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)(*program, *argv)
    except SignalException:
        return STOPPED
    except ChildFailedError as error:
        print(f"{program[-1]} failed: {error}", file=sys.stderr)
        return 1
    return 0


def set_up_rank(recipe: Recipe) -> None:
    """Sets up this rank's device, Megatron with what it needs on a CPU, and the process groups."""
    backend = devices.join(recipe.device, of_launcher("LOCAL_RANK", 0, 0))
    from uccl_ep_train.megatron import cpu_shims

    # Advice about packages that a CPU run cannot have; four ranks would print it four times.
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    cpu_shims.install()  # before Megatron is imported
    cpu_shims.install_for_local_spec()
    from recipes.training import loop

    loop.set_up(recipe, backend)


def train_rank(args: argparse.Namespace, recipe: Recipe, why_cpu: str, run_dir: Path) -> int:
    """Runs one rank from its set-up to its exit status."""
    set_up_rank(recipe)
    from recipes.training import loop

    if dist.get_rank() == 0:
        if why_cpu:
            print(why_cpu, flush=True)
        if args.restart:
            shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
        print(f"recipe {recipe.name}, run directory {run_dir}\n{loop.describe(recipe)}", flush=True)
    dist.barrier()
    data_dir = Path("runs") / "data"
    outcome = loop.run(recipe, run_dir, data_dir, args.router_trace, args.start_from, args.stop_at)
    if dist.get_rank() == 0:
        print(f"{recipe.name} with {recipe.token_dispatcher}: {outcome}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def chosen_job(args: argparse.Namespace) -> jobs.Job:
    """The job that a dry run describes, or Megatron-LM trains for a full-size recipe. Raises RecipeError."""
    if args.recipe in RECIPES:
        return jobs.of_recipe(chosen_recipe(args, args.token_dispatcher))
    recipe = PRETRAININGS[args.recipe]()
    if args.dispatch_dtype:
        recipe = dataclasses.replace(recipe, dispatch_dtype=args.dispatch_dtype)
    if args.grad_dtype:
        recipe = dataclasses.replace(recipe, grad_dtype=args.grad_dtype)
    hardware, num_ranks = args.hardware or "h200", args.num_ranks
    if args.trial is not None:
        num_ranks = _trial_ranks(num_ranks)
        recipe = jobs.trial(recipe, hardware, args.trial, num_ranks)
    job = jobs.of_pretraining(
        recipe, hardware, args.token_dispatcher, num_ranks, ep=args.ep, domain_size=args.domain_size
    )
    asked.check_dispatcher_options(args, [job.dispatcher])
    if args.trial is not None:
        job = job.with_arguments(jobs.trial_arguments(job))
    own = {"train_iters": args.steps, "seed": args.seed}
    return job.with_arguments({name: value for name, value in own.items() if value is not None})


def _trial_ranks(asked: int | None) -> int:
    """`asked` if given; otherwise the number of GPUs or, inside a rank, the number of ranks."""
    if asked is not None:
        return asked
    there = of_launcher("WORLD_SIZE", 0, 0) or torch.cuda.device_count()
    if there == 0:
        raise RecipeError("a trial needs GPUs, and torch sees none; for a dry run give --num-ranks")
    return there


def _start_trial(job: jobs.Job, args: argparse.Namespace, argv: list[str]) -> int:
    """Starts the trial's ranks on this host. Raises RecipeError for what the ranks would refuse."""
    why = devices.lacking(job.layout.num_ranks)
    if why:
        raise RecipeError(f"a trial needs GPUs: {why}")
    pretrain.script_of(job, args.megatron_lm)
    jobs.check_package(job.dispatcher)
    return run_ranks(job.layout.num_ranks, argv)


def _describe(job: jobs.Job, args: argparse.Namespace) -> None:
    """A dry run. Raises what it refuses, and what the run would refuse."""
    if args.recipe in RECIPES:
        recipe = chosen_recipe(args, args.token_dispatcher)
        asked.check_run(args, recipe)
        with contextlib.suppress(DeviceError):  # a dry run needs no GPU
            recipe, _ = devices.place(recipe, keep_domains=args.domain_size is not None)
        asked.check_folders(args, recipe, _runs(args, recipe))
    elif args.megatron_lm is not None:
        pretrain.script_of(job, args.megatron_lm)
    from recipes.plan import dry_run  # its imports need Megatron

    dry_run.run(job, args.picture)
    if args.extra:
        print(f"not counted above, since it follows `--`: {shlex.join(args.extra)}")


def _describe_or_start(args: argparse.Namespace, argv: list[str]) -> int:
    """Does a dry run, or starts a full-size recipe, which on a rank of torchrun does not return."""
    try:
        job = chosen_job(args)
        if args.dry_run:
            _describe(job, args)
        elif args.trial is not None and not dist.is_torchelastic_launched():
            return _start_trial(job, args, argv)
        else:
            pretrain.start(pretrain.command(job, args.megatron_lm, args.data_path, args.extra))
    except (RecipeError, CheckpointError, ConfigError, InputError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _placed(args: argparse.Namespace) -> tuple[Recipe, str]:
    """The recipe for this machine, and why it is for the CPU. Raises RecipeError or DeviceError."""
    recipe, why_cpu = devices.place(
        chosen_recipe(args, args.token_dispatcher), keep_domains=args.domain_size is not None
    )
    for dispatcher in {recipe.token_dispatcher, args.compare or recipe.token_dispatcher}:
        jobs.check_package(dispatcher)
    if _started_by_torchrun() or not dist.is_torchelastic_launched():
        asked.check_run(args, recipe, why_cpu)
    return recipe, why_cpu


def _runs(args: argparse.Namespace, recipe: Recipe) -> dict[Path, str]:
    """The folder of each run that the command line asks for, and its dispatcher."""
    run_dir = args.run_dir or default_run_dir(recipe)
    runs = {run_dir: recipe.token_dispatcher}
    if args.compare:
        runs[run_dir / f"compare_{args.compare}"] = args.compare
    return runs


def _started_by_torchrun() -> bool:
    """Whether this is a rank that `run_ranks` has not started: nobody has checked its options yet."""
    return dist.is_torchelastic_launched() and env.read("TORCHELASTIC_RUN_ID") != _RUN_ID


def _train(args: argparse.Namespace, argv: list[str]) -> int:
    """Trains a recipe of our own loop: as a rank, or by starting ranks."""
    try:
        recipe, why_cpu = _placed(args)
        runs = _runs(args, recipe)
        if _started_by_torchrun() and args.compare:
            raise RecipeError("--compare: under torchrun it is not allowed; it starts ranks twice by itself")
        if _started_by_torchrun() or not dist.is_torchelastic_launched():
            asked.check_folders(args, recipe, runs)
        if not dist.is_torchelastic_launched():
            asked.make_folders(runs)
    except (RecipeError, DeviceError, CheckpointError, ConfigError) as error:
        print(error, file=sys.stderr)
        return 2
    run_dir = next(iter(runs))
    if dist.is_torchelastic_launched():
        return train_rank(args, recipe, why_cpu, run_dir)
    if why_cpu:
        print(why_cpu, flush=True)
    for folder, dispatcher in runs.items():
        # The last of two equal options counts, so the run's own come after the user's.
        own = [f"--device={recipe.device}", f"--run-dir={folder}", f"--token-dispatcher={dispatcher}"]
        status = run_ranks(recipe.num_ranks, [*argv, *own])
        if status != 0:
            return status
    from recipes.measure.plot import plot_losses  # matplotlib takes seconds to import

    curve = run_dir / "loss.png"
    plot_losses([folder / "metrics.jsonl" for folder in runs], curve)
    print(f"loss curve: {curve}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if arguments is None else arguments)
    args = parse_args(argv)
    return (_describe_or_start if args.dry_run or args.recipe in PRETRAININGS else _train)(args, argv)


if __name__ == "__main__":
    sys.exit(run(main))
