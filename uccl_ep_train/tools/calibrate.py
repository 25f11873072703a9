"""Measures how much should be in flight on the NICs of this cluster, and keeps it for the buffers to come.

    torchrun ... -m uccl_ep_train.calibrate [--tokens 4096] [--hidden 7168] [--experts 256] [--topk 8]

Every rank of the job dispatches and combines random tokens with each window in turn; the smallest window that
is within 3 % of the best time wins, because what is not in flight cannot be lost. Takes some seconds. The
result is written once per host, to the file that `UCCL_EP_WINDOWS_FILE` names.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from uccl_ep_train.api.buffer import Buffer
from uccl_ep_train.common.command_line import run, whole
from uccl_ep_train.common.shown import shown
from uccl_ep_train.errors import ConfigError, EpError
from uccl_ep_train.group import transport, windows
from uccl_ep_train.group.windows import Windows
from uccl_ep_train.settings import env
from uccl_ep_train.settings.checks import HIDDEN_UNIT, MAX_EXPERTS, MAX_HIDDEN, MAX_TOKENS, MAX_TOPK
from uccl_ep_train.settings.config import EpConfig
from uccl_ep_train.settings.variables import of_launcher

MIB = 1 << 20
UNLIMITED = (1 << 64) - 1
CANDIDATES: tuple[Windows, ...] = (
    Windows(MIB * 3 // 2, 1),
    Windows(2 * MIB, 1),
    Windows(2 * MIB, 4),
    Windows(4 * MIB, 8),
    Windows(UNLIMITED, 8),
    Windows(UNLIMITED, 32),
)
"""From the least in flight to the most."""
TOLERANCE = 0.03


def best(seconds: Mapping[Windows, float]) -> Windows:
    """The first, hence least, of the windows that are within `TOLERANCE` of the fastest."""
    if not seconds:
        raise ConfigError("no window was measured; allowed is at least one")
    limit = min(seconds.values()) * (1 + TOLERANCE)
    return next(window for window, took in seconds.items() if took <= limit)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m uccl_ep_train.calibrate", description=(__doc__ or "").partition("\n")[0]
    )
    hidden = whole(HIDDEN_UNIT, MAX_HIDDEN, multiple=HIDDEN_UNIT)
    parser.add_argument("--tokens", type=whole(1, MAX_TOKENS), default=4096, help="per rank (4096)")
    parser.add_argument("--hidden", type=hidden, default=7168, help="elements, a multiple of 32 (7168)")
    parser.add_argument("--experts", type=whole(1, MAX_EXPERTS), default=256, help="of the whole group (256)")
    parser.add_argument("--topk", type=whole(1, MAX_TOPK), default=8, help="experts per token (8)")
    parser.add_argument("--rounds", type=whole(1), default=10, help="dispatches and combines per window (10)")
    options = parser.parse_args(arguments)
    if options.topk > options.experts:
        parser.error(f"--topk {options.topk}: allowed is 1 .. {options.experts}, the number of experts")
    return options


def config_of(options: argparse.Namespace) -> EpConfig:
    """Before the ranks meet. Raises ConfigError for what would only fail later."""
    if not all(map(env.read, ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"))):
        raise ConfigError(
            f"WORLD_SIZE = {shown(env.read('WORLD_SIZE'))}: allowed is a rank of torchrun, which sets its "
            "variables"
        )
    ranks = of_launcher("WORLD_SIZE", 1, 1)
    of_launcher("RANK", 0, 0, ranks - 1)
    of_launcher("LOCAL_RANK", 0, 0, ranks - 1)
    of_launcher("MASTER_PORT", 1, 1, 65535)
    if options.experts % ranks:
        raise ConfigError(f"--experts {options.experts}: allowed is a multiple of the {ranks} ranks")
    config = EpConfig.from_env(num_experts=options.experts, hidden=options.hidden)
    if config.network.nic_window_bytes is not None or config.network.nic_window_ops is not None:
        raise ConfigError(
            "nic_window_bytes, nic_window_ops are set: allowed is neither, or nothing could be measured"
        )
    path = windows.default_path()
    problem = windows.problem_of(path)
    if problem:
        raise ConfigError(
            f"UCCL_EP_WINDOWS_FILE = {shown(str(path))}: allowed is a file to keep windows in ({problem})"
        )
    return config


def measure(config: EpConfig, options: argparse.Namespace) -> tuple[float, str, str]:
    """Median seconds of a dispatch and its combine on the slowest rank; the transport; its windows' key."""
    with Buffer(None, config) as buffer:
        key = windows.topology_key(buffer.transport, buffer.nics, buffer.topology)
        made = torch.Generator().manual_seed(buffer.rank)
        x_TH = torch.randn(options.tokens, options.hidden, generator=made).bfloat16().to(buffer.device)
        scores_TE = torch.rand(options.tokens, options.experts, generator=made)
        topk_idx_TK = scores_TE.topk(options.topk).indices.to(buffer.device)
        handle = buffer.dispatch(x_TH, topk_idx_TK).handle
        times = []
        for _ in range(options.rounds):
            dist.barrier()
            started = time.perf_counter()
            out_TH = buffer.combine(buffer.dispatch(x_TH, handle=handle).rows, handle)
            if out_TH.is_cuda:
                torch.cuda.synchronize()
            slowest = torch.tensor(time.perf_counter() - started, dtype=torch.float64, device=buffer.device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            times.append(float(slowest))
        return statistics.median(times), buffer.transport, key


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, file=sys.stderr, flush=True)


def text_of(window: Windows) -> str:
    size = "no limit" if window.num_bytes == UNLIMITED else f"{window.num_bytes / MIB:.1f} MiB"
    return f"{size}, {window.ops} writes"


@contextmanager
def _group() -> Iterator[None]:
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(of_launcher("LOCAL_RANK", 0, 0) % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def calibrate(config: EpConfig, options: argparse.Namespace) -> Windows | None:
    """Collective. None where there are no NICs to calibrate. Raises what a `Buffer` raises."""
    seconds: dict[Windows, float] = {}
    key = ""
    for window in CANDIDATES:
        took, name, key = measure(window.apply(config), options)
        if name == "loop":
            say("[calibrate] the ranks have one domain or one host: no NIC carries their rows")
            return None
        seconds[window] = took
        say(f"[calibrate] {name}, {text_of(window)}: {took * 1e3:.2f} ms")
    chosen = best(seconds)
    here = transport.Place.here().memory
    places: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(places, here)
    if places.index(here) == dist.get_rank():
        figures = {
            "milliseconds": {text_of(window): round(took * 1e3, 3) for window, took in seconds.items()}
        }
        path = windows.store(key, chosen, figures)
        say(f"[calibrate] chosen: {text_of(chosen)}; kept in {path} for {key}")
    dist.barrier()
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        config = config_of(options)
    except ConfigError as error:
        print(f"[calibrate] {error}", file=sys.stderr)
        return 2
    try:
        with _group():
            calibrate(config, options)
    except (EpError, dist.DistError) as error:
        print(f"[calibrate] {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
