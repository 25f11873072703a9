"""python -m uccl_ep_train.megatron.launch SCRIPT [arguments of SCRIPT]

Runs any Megatron pretraining script (torchrun ... -m uccl_ep_train.megatron.launch SCRIPT ...) with one more
dispatcher, `--moe-token-dispatcher-type uccl_ep`, and its options `--uccl-ep-*`. The script and Megatron are
not changed. Without that dispatcher the script runs as if it had been started directly.
"""

from __future__ import annotations

import functools
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from uccl_ep_train.megatron import cpu_shims, flags

USAGE = "python -m uccl_ep_train.megatron.launch SCRIPT [arguments of SCRIPT]"


def patch_training() -> Callable[[], None]:
    """Hooks into megatron.training behind parser and model; returns what undoes it. Raises
    UnsupportedMegatronError.
    """
    from megatron.training import arguments, training

    from uccl_ep_train.megatron.compat import UnsupportedMegatronError

    for module, name in ((arguments, "add_megatron_arguments"), (training, "setup_model_and_optimizer")):
        if not hasattr(module, name):
            raise UnsupportedMegatronError(
                f"{module.__name__} has no {name}; known to work: Megatron-LM 0.16 to 0.20"
            )
    stock_add, stock_setup = arguments.add_megatron_arguments, training.setup_model_and_optimizer

    @functools.wraps(stock_add)
    def add_megatron_arguments(parser: Any) -> Any:
        parser = stock_add(parser)
        flags.extend_megatron_parser(parser)
        return parser

    @functools.wraps(stock_setup)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        chunks, *others = stock_setup(*args, **kwargs)
        _verify_chunks(chunks)
        return chunks, *others

    arguments.add_megatron_arguments = add_megatron_arguments
    training.setup_model_and_optimizer = setup_model_and_optimizer

    def undo() -> None:
        arguments.add_megatron_arguments = stock_add
        training.setup_model_and_optimizer = stock_setup

    return undo


def _verify_chunks(chunks: list[Any]) -> None:
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from uccl_ep_train.megatron import plugin

    if not plugin.is_enabled():
        return
    has_moe = any(isinstance(m, MoELayer) for chunk in chunks for m in chunk.modules())
    # A pipeline stage may have dense layers only; a whole model may not.
    if has_moe or parallel_state.get_pipeline_model_parallel_world_size() == 1:
        count = plugin.verify(chunks)
        if (
            parallel_state.get_data_parallel_rank() == 0
            and parallel_state.get_tensor_model_parallel_rank() == 0
        ):
            print(f"uccl_ep: dispatcher in place in {count} MoE layers\n{plugin.describe()}", flush=True)


def main(argv: list[str]) -> None:
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__ or USAGE)
        sys.exit(0 if argv else 2)
    script = Path(argv[0])
    if not script.is_file():
        print(f"SCRIPT {script}: allowed is a file with a program in Python", file=sys.stderr)
        sys.exit(2)
    sys.argv = argv
    sys.path.insert(0, str(script.resolve().parent))  # as `python SCRIPT` does; Megatron-LM lies beside it
    if cpu_shims.install():
        cpu_shims.install_training()
    run(script)


def run(script: Path) -> None:
    """Runs the script with the dispatcher available and cleans up afterwards: may be called again."""
    from uccl_ep_train.megatron import plugin

    undo = patch_training()
    failed = True
    try:
        runpy.run_path(str(script), run_name="__main__")
        failed = False
    except SystemExit as end:
        failed = end.code not in (None, 0)
        raise
    finally:
        undo()
        # If this rank failed, tell ranks inside an operation at once.
        plugin.disable(abort=failed)


if __name__ == "__main__":
    main(sys.argv[1:])
