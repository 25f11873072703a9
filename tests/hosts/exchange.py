"""What the ranks do on each of several hosts (scripts/several_hosts.sh), as torchrun would start them:

    ./scripts/several_hosts.sh python -m tests.hosts.exchange {cut,vanish}

cut     random dispatches and combines with their backward are compared with the oracle bit for bit; the last
        host's network goes down in the midst of others; when all ranks have raised it comes up again, and the
        same processes compare as before with a new buffer
vanish  the last host's processes are killed in the midst of operations

A rank's results are lines of JSON; times are time.monotonic(), which all hosts share.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from tests.bits import flip_bit
from tests.cases import EngineSpec, differences, expect, make_case, run_case
from uccl_ep_train import Buffer, EpConfig
from uccl_ep_train.errors import CommunicationError

RANKS_PER_HOST = 2
PORT = 29400
NUM_CASES = 12
STRUCK_AT = 5  # operation
DEADLINE_S = 4.0
# Nothing of where the ranks are: the hosts are what makes them domains, and the transport what they have.
SETTINGS: dict[str, Any] = {
    "budget_bytes": 8 << 20,
    "arrival_timeout_s": DEADLINE_S,
    "progress_timeout_s": DEADLINE_S / 2,
}


def tell(**fields: Any) -> None:
    line = json.dumps({"rank": dist.get_rank(), "at": time.monotonic(), **fields})
    os.write(1, f"{line}\n".encode())  # at once: the host's ranks share a pipe


def network(state: str) -> None:
    subprocess.run(["ip", "link", "set", "eth0", state], check=True)


def work_until_it_fails(buffer: Buffer, scenario: str) -> None:
    """Strikes the last host, and tells what this rank is told of it."""
    last = dist.get_world_size() - 1
    generator = torch.Generator().manual_seed(dist.get_rank())
    x_TH = torch.randn(400, 256, generator=generator).bfloat16()
    topk_idx_TK = torch.rand(400, 8, generator=generator).argsort(dim=1)[:, :3].contiguous()
    try:
        for turn in range(1_000_000):
            if turn == STRUCK_AT and dist.get_rank() == last:
                tell(struck=scenario)
                if scenario == "vanish":
                    os.kill(-1, signal.SIGKILL)  # all of this host, itself excepted
                    os.kill(os.getpid(), signal.SIGKILL)
                network("down")
            result = buffer.dispatch(x_TH, topk_idx_TK)
            buffer.combine(result.rows, result.handle)
    except CommunicationError as error:
        tell(raised=type(error).__name__, message=str(error), peer=error.fields()["peer"])


def check_cases(num_ranks: int) -> None:
    """Compares random operations with the oracle, and whether a flipped bit is noticed (the control)."""
    domains = tuple(rank // RANKS_PER_HOST for rank in range(num_ranks))
    spec = EngineSpec(domains=domains, num_experts=2 * num_ranks, hidden=256)
    cases = [make_case(seed, spec, hidden=256) for seed in range(NUM_CASES)]
    wanted = [expect(case) for case in cases]
    rank, found = dist.get_rank(), []
    config = EpConfig(num_experts=spec.num_experts, hidden=spec.hidden, **SETTINGS)
    with Buffer(dist.group.WORLD, config) as buffer:
        for turn, (case, expected) in enumerate(zip(cases, wanted, strict=True)):
            seen = run_case(case, expected, rank, buffer)
            found += [f"case {turn}: {line}" for line in differences(case, expected, rank, seen)]
        spoilt = replace(seen, out=flip_bit(seen.out), rows=flip_bit(seen.rows))
        tell(
            differences=found,
            control=differences(case, expected, rank, spoilt),
            domains=buffer.topology.domain_of,
            transport=buffer.transport,
            bytes_shipped=buffer.stats()[f"ship.rows.domain{1 - domains[rank]}.bytes"],
        )


def run_rank(local: int, scenario: str) -> None:
    host, num_ranks = int(os.environ["NODE_RANK"]), int(os.environ["NNODES"]) * RANKS_PER_HOST
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{os.environ['MASTER_ADDR']}:{PORT}",
        rank=host * RANKS_PER_HOST + local,
        world_size=num_ranks,
    )
    if scenario == "cut":
        check_cases(num_ranks)
    buffer = Buffer(dist.group.WORLD, EpConfig(num_experts=8, hidden=256, **SETTINGS))
    work_until_it_fails(buffer, scenario)
    buffer.close()
    tell(closed=True)
    if scenario == "cut":
        # Until all ranks have raised: one host may wait in an operation, the other for it to enter the
        # next one. Over a link that is mended before, that host would be told the first one's error.
        time.sleep(DEADLINE_S / 2 + 1.0)
        if dist.get_rank() == num_ranks - 1:
            network("up")
        check_cases(num_ranks)
        dist.barrier()
    os._exit(0)  # gloo's clean-up would wait for ranks that have gone


if __name__ == "__main__":
    torch.multiprocessing.spawn(run_rank, args=(sys.argv[1],), nprocs=RANKS_PER_HOST)
