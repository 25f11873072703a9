"""Megatron's own dispatcher tests, with our dispatcher in place of the one that they name.

    torchrun --nproc_per_node 4 scripts/megatron_own_tests.py MEGATRON_LM [--domain-size D] [--wrong] [...]

MEGATRON_LM is a checkout of Megatron-LM: its Megatron-Core is used, and its files stay as they are. The tests
of `test_a2a_token_dispatcher.py` run, and those of HybridEP in `test_token_dispatcher.py`. A test that asks
for eight ranks gets the nearest layout for the ranks that there are. Ranks run on one GPU each, or on the
CPU. With NCCL 2.30 or later and NCCL_MULTI_RANK_GPU_ENABLE=1, several ranks may share a GPU.

--domain-size D  ranks that share a domain (default: all)
--wrong          the control: rows are multiplied by 2, then by 3 ..., and tests that dispatch must fail
...              arguments of pytest

The exit code is 1 if tests failed or none called our dispatcher, which Megatron's tests would not notice.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from uccl_ep_train.common.command_line import whole
from uccl_ep_train.core import cuda
from uccl_ep_train.megatron import cpu_shims
from uccl_ep_train.settings.checks import MAX_RANKS

FOLDER = "tests/unit_tests/transformer/moe"
TESTS = (f"{FOLDER}/test_a2a_token_dispatcher.py", f"{FOLDER}/test_token_dispatcher.py::TestFlexDispatcher")

OF_NCCL_EP = ("ncclep", "zero_copy", "mxfp8_wire")  # in the names of tests that need NCCL EP's package


def nearest_layout(tp_size: int, ep_size: int, num_ranks: int) -> tuple[int, int]:
    """(TP, EP) for at most `num_ranks` ranks: the larger of the two is halved until the ranks suffice."""
    while tp_size * ep_size > num_ranks:
        tp_size, ep_size = (tp_size // 2, ep_size) if tp_size > ep_size else (tp_size, ep_size // 2)
    return tp_size, ep_size


def groups() -> list[dist.ProcessGroup]:
    """The groups of this process, in the order of their creation."""
    return list(dist.distributed_c10d._world.pg_map)


class InPlaceOfStock:
    """A plugin of pytest that gives every layer of a test our dispatcher."""

    def __init__(self, options: dict[str, Any], wrong: bool) -> None:
        """options: see `uccl_ep_train.megatron.enable`"""
        self.options = options
        self.wrong = wrong
        self.num_dispatches = 0
        self._has_gpu = torch.cuda.is_available

    def pytest_collection(self) -> None:
        torch.cuda.is_available = lambda: True  # otherwise the tests would be skipped on the CPU

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        left_out = [item for item in items if any(name in item.name for name in OF_NCCL_EP)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]

    def pytest_collection_finish(self) -> None:
        torch.cuda.is_available = self._has_gpu

    @pytest.fixture(autouse=True)
    def ours(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        from tests.unit_tests.test_utilities import Utils
        from tests.unit_tests.transformer.moe.test_token_dispatcher import MoEModelTestContainer

        from uccl_ep_train.megatron import plugin
        from uccl_ep_train.megatron.dispatcher import UcclEpManager

        stock_init, our_dispatch = MoEModelTestContainer.__init__, UcclEpManager.dispatch

        def init(container: Any, *, tp_size: int, ep_size: int, **kwargs: Any) -> None:
            tp_size, ep_size = nearest_layout(tp_size, ep_size, Utils.world_size)
            kwargs |= {"moe_token_dispatcher_type": plugin.DISPATCHER_NAME}
            stock_init(container, tp_size=tp_size, ep_size=ep_size, **kwargs)

        def dispatch(manager: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            self.num_dispatches += 1
            rows = our_dispatch(manager, *args, **kwargs)
            return rows * (1 + self.num_dispatches) if self.wrong else rows

        monkeypatch.setattr(MoEModelTestContainer, "__init__", init)
        monkeypatch.setattr(UcclEpManager, "dispatch", dispatch)
        before = set(groups())
        plugin.enable(**self.options)
        yield
        plugin.disable()
        # Megatron does not destroy a test's groups. Each keeps threads of gloo or memory of a GPU.
        for group in groups():
            if group not in before and group is not dist.group.WORLD:
                dist.destroy_process_group(group)


def join_on_cpu() -> None:
    """What Megatron's `Utils.initialize_distributed` does, over gloo."""
    from tests.unit_tests.test_utilities import Utils

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    Utils.inited = True


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("megatron_lm", type=Path)
    parser.add_argument("--domain-size", type=whole(1, MAX_RANKS))
    parser.add_argument("--wrong", action="store_true")
    args, for_pytest = parser.parse_known_args()
    root = args.megatron_lm.resolve()
    if not (root / TESTS[0]).is_file():
        parser.error(f"{args.megatron_lm} has no {TESTS[0]}; allowed is a checkout of Megatron-LM")
    sys.path.insert(0, str(root))  # before our own `tests`
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    on_gpus = torch.cuda.device_count() >= (1 if cuda.ranks_may_share() else num_ranks)
    if not on_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        cpu_shims.install()
    cpu_shims.install_for_local_spec()
    from megatron.core.transformer.moe import fused_a2a
    from tests.unit_tests.test_utilities import Utils

    if not on_gpus:
        Utils.initialize_distributed = staticmethod(join_on_cpu)
    fused_a2a.HAVE_HYBRIDEP = True  # so that its tests run: our plug-in takes its place
    options = {"dispatch_dtype": "bf16", "backend": "cuda" if on_gpus else "host", "transport": "loop"}
    if args.domain_size:
        options["domain_size"] = args.domain_size
    ours = InPlaceOfStock(options, args.wrong)
    # Megatron's conftest.py downloads data of other tests.
    quiet = [
        "-q",
        "--noconftest",
        "-pno:cacheprovider",
        "-pno:warnings",
        f"-c{os.devnull}",
        f"--rootdir={root}",
    ]
    if rank > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    failed = pytest.main([*quiet, *(str(root / test) for test in TESTS), *for_pytest], plugins=[ours])
    print(f"{ours.num_dispatches} dispatches by uccl_ep on {num_ranks} ranks, {'GPUs' if on_gpus else 'CPU'}")
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(bool(failed) or ours.num_dispatches == 0)


if __name__ == "__main__":
    sys.exit(main())
