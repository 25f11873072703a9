"""A training loop to strike at: four ranks whose network, or whose number of rows, makes every step last.

`strike(scene)` starts the ranks, kills or freezes the victim at a seeded random time inside a phase of its
second iteration, and returns what the survivors did (`Survivor`) and at which steps the victim was caught.
"""

from __future__ import annotations

import json
import mmap
import random
import struct
import tempfile
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.process_ranks import START_TIMEOUT_S, ProcessRanks, Rank
from uccl_ep_train import Buffer, EpConfig
from uccl_ep_train.errors import CommunicationError
from uccl_ep_train.group.bootstrap import TorchBootstrap

NUM_RANKS = 4
EXPERTS_PER_RANK = 2
TOP_K = 4
ARRIVAL_S = 4.0
PROGRESS_S = 2.0
ROLES = ("source", "relay", "destination", "neighbour")
PHASES = ("between", "dispatch", "combine", "backward")


@dataclass(frozen=True)
class Scene:
    """One strike.

    role     of the victim in a group of two domains: "source" of all rows; only "relay" of somebody's rows to
             another; only "destination" of rows that others send and relay. "neighbour": one domain without
             a network, all send to all
    phase    "between": the victim computes while the others wait for it; "dispatch"; "combine"; "backward"
    how      "kill" | "freeze" | "let live": trains four iterations
    delay    of the strike, as a share of the phase's length
    window   slots of a channel: with one or two the victim holds all credits of its channels most of the time
    """

    role: str
    phase: str
    how: str
    victim: int
    delay: float
    window: int

    def __str__(self) -> str:
        place = f"{self.phase} at {self.delay:.2f}, window {self.window}"
        return f"{self.how} rank {self.victim} ({self.role}) in {place}"

    @classmethod
    def random(cls, seed: int, role: str, phase: str, how: str) -> Scene:
        rng = random.Random(f"{seed} {role} {phase} {how}")
        return cls(role, phase, how, rng.randrange(NUM_RANKS), rng.random(), rng.choice([1, 2]))

    @property
    def domains(self) -> tuple[int, ...]:
        return (0, 0, 0, 0) if self.role == "neighbour" else (0, 0, 1, 1)

    @property
    def hidden(self) -> int:
        return 1024 if self.role == "neighbour" else 128

    @property
    def num_tokens(self) -> int:
        """Of a source."""
        return 600 if self.role == "neighbour" else 50 * self.window

    def routes(self) -> dict[int, list[int]]:
        """By source, the ranks to whose experts its tokens go; sources without tokens are left out."""
        everybody = list(range(NUM_RANKS))
        if self.role == "neighbour":
            return dict.fromkeys(everybody, everybody)
        own = [rank for rank in everybody if self.domains[rank] == self.domains[self.victim]]
        others = [rank for rank in everybody if rank not in own]
        local = own.index(self.victim)
        neighbour = own[1 - local]
        if self.role == "source":
            return {self.victim: everybody}
        if self.role == "relay":
            return {others[local]: [neighbour]}
        assert self.role == "destination", self.role
        return {others[1 - local]: [self.victim], neighbour: [self.victim]}

    def config(self) -> EpConfig:
        return EpConfig(
            num_experts=EXPERTS_PER_RANK * NUM_RANKS,
            hidden=self.hidden,
            max_dtype="bf16",
            domains=self.domains,
            budget_bytes=4 << 20,
            arrival_timeout_s=ARRIVAL_S,
            progress_timeout_s=PROGRESS_S,
            # One row in a chunk, and the time of a round trip for each.
            chunk_bytes=64 + 2 * self.hidden,
            window_chunks=self.window,
            loop_latency_us=2000.0,
            loop_gbytes_per_s=0.001,
        )


@dataclass(frozen=True)
class Survivor:
    """What a rank saw of the end. Times are time.monotonic().

    call         the phase in which it raised;  entered, raised  when it called and when it got the exception
    untouched    parameters and optimizer are bit for bit those of the last complete step
    hook         class of what `optimizer.step()` raised although the exception had been swallowed
    control      whether the same step changes the parameters once the buffer is closed
    """

    error: str
    message: str
    fields: dict[str, Any]
    call: str
    entered: float
    raised: float
    untouched: bool
    hook: str
    control: bool
    close_seconds: float

    @property
    def peer(self) -> int:
        return int(self.fields["peer"])


# ---------------------------------------------------------------------------------------- the ranks


class Model(torch.nn.Module):
    """Embeddings, the weights of the routing, and one factor per hidden element for the experts."""

    def __init__(self, num_tokens: int, hidden: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.x_TH = torch.nn.Parameter(torch.randn(num_tokens, hidden, generator=generator).bfloat16())
        self.weights_TK = torch.nn.Parameter(torch.rand(num_tokens, TOP_K, generator=generator))
        self.expert_H = torch.nn.Parameter(torch.ones(hidden, dtype=torch.bfloat16))


def choose_experts(num_tokens: int, ranks: list[int]) -> Tensor:
    """[T, K] different experts of the ranks, -1 where they have fewer than K."""
    experts = [rank * EXPERTS_PER_RANK + i for rank in ranks for i in range(EXPERTS_PER_RANK)]
    generator = torch.Generator().manual_seed(11)
    topk_idx_TK = torch.full((num_tokens, TOP_K), -1)
    for token in range(num_tokens):
        order = torch.randperm(len(experts), generator=generator)[:TOP_K].tolist()
        topk_idx_TK[token, : len(order)] = torch.tensor([experts[i] for i in order])
    return topk_idx_TK


@dataclass
class Progress:
    """Where a rank is; marked to the parent, too."""

    rank: Rank
    call: str = ""
    entered: float = 0.0
    iteration: int = 0
    lengths: dict[str, float] = field(default_factory=dict)

    def enter(self, call: str) -> None:
        self.leave()
        self.call, self.entered = call, time.monotonic()
        self.rank.mark(f"{call} {self.iteration}")

    def leave(self) -> None:
        if self.call:
            self.lengths[self.call] = time.monotonic() - self.entered
        self.call = ""


def iterate(buffer: Buffer, model: Model, topk_idx_TK: Tensor, progress: Progress, pause_s: float) -> None:
    progress.enter("between")
    time.sleep(pause_s)
    progress.enter("dispatch")
    result = buffer.dispatch(model.x_TH, topk_idx_TK, model.weights_TK)
    assert result.row_weights is not None
    rows_RH = result.rows * model.expert_H * result.row_weights[:, None].bfloat16()
    progress.enter("combine")
    out_TH = buffer.combine(rows_RH, result.handle)
    progress.enter("backward")
    # The other gradients come through the buffer: that of the experts' factor exists without any other rank.
    (out_TH.float().square().sum() + model.expert_H.float().sum()).backward()
    progress.leave()


def snapshot(model: Model, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = [entry for kept in optimizer.state.values() for entry in kept.values()]
    tensors = [*model.parameters(), *(entry for entry in state if isinstance(entry, Tensor))]
    return [tensor.detach().clone() for tensor in tensors]


def same(before: list[Tensor], after: list[Tensor]) -> bool:
    return len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def train(rank: Rank, scene: Scene, samples: str) -> Survivor:
    """Trains until a communication error ends it; then tries to go on in spite of it."""
    routes = scene.routes()
    num_tokens = scene.num_tokens if rank.rank in routes else 0
    topk_idx_TK = choose_experts(num_tokens, routes.get(rank.rank, []))
    model = Model(num_tokens, scene.hidden)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    progress = Progress(rank)
    pause_s = 0.3 if scene.phase == "between" and rank.rank == scene.victim else 0.0
    # The deadlines are for what is tested: processes may take their time to come up.
    buffer = Buffer(None, scene.config(), bootstrap=TorchBootstrap(rank.group, timeout_s=START_TIMEOUT_S))
    if rank.rank == scene.victim:
        threading.Thread(target=sample, args=(buffer, samples), daemon=True).start()
    try:
        while True:
            before = snapshot(model, optimizer)
            optimizer.zero_grad()
            iterate(buffer, model, topk_idx_TK, progress, pause_s)
            optimizer.step()
            progress.iteration += 1
            rank.mark(f"lengths {progress.iteration}", dict(progress.lengths))
    except CommunicationError as error:
        raised = time.monotonic()
        return aftermath(buffer, model, optimizer, before, error, progress, raised)


def aftermath(
    buffer: Buffer,
    model: Model,
    optimizer: torch.optim.Optimizer,
    before: list[Tensor],
    error: CommunicationError,
    progress: Progress,
    raised: float,
) -> Survivor:
    # Somebody swallows the exception, with a gradient at hand.
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    hook = "nothing"
    try:
        optimizer.step()
    except CommunicationError as pending:
        hook = type(pending).__name__
    untouched = same(before, snapshot(model, optimizer))
    started = time.monotonic()
    buffer.close()
    close_seconds = time.monotonic() - started
    optimizer.step()
    control = not same(before, snapshot(model, optimizer))
    return Survivor(
        type(error).__name__, str(error), error.fields(), progress.call, progress.entered, raised, untouched,
        hook, control, close_seconds,
    )  # fmt: skip


# ------------------------------------------------------------------------- where the victim was caught

STEPS = ("exchange", "plan", "stage", "place", "fold", "merge")
ROWS = {"stage": ["staged"], "place": ["placed"], "fold": ["folded"], "merge": ["merged", "relayed"]}
# Number, time; by step, what grows while it is not done: rows and seconds of waiting; chunks not shipped yet.
SAMPLE = struct.Struct(f"<Qd{len(STEPS) + 1}d")
NUM_SAMPLES = 64
SAMPLE_PERIOD_S = 0.001
AT_THE_END_S = 0.008


def sample(buffer: Buffer, path: str) -> None:
    """Writes down how far each step is, until this process is struck."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), SAMPLE.size * NUM_SAMPLES) as ring:
        number = 0
        while not buffer.closed:
            stats = buffer.stats()
            # A chunk holds one row.
            shipped = [name for name in stats if name.startswith(("ship.rows.", "ship.return."))]
            flushed = sum(stats[name] for name in shipped if name.endswith(".chunks"))
            unshipped = stats["rows.shipped"] + stats["rows.relayed"] - flushed
            grows = [
                stats[f"blocked_seconds.{step}"] + sum(stats[f"rows.{name}"] for name in ROWS.get(step, []))
                for step in STEPS
            ]
            number += 1
            place = number % NUM_SAMPLES * SAMPLE.size
            SAMPLE.pack_into(ring, place, number, time.monotonic(), *grows, unshipped)
            time.sleep(SAMPLE_PERIOD_S)


def caught_at(path: str) -> frozenset[str]:
    """The steps that were not done when the victim was struck."""
    with open(path, "rb") as file:
        entries = sorted(SAMPLE.iter_unpack(file.read()))
    last = entries[-1]
    first = next(entry for entry in entries if entry[0] and entry[1] >= last[1] - AT_THE_END_S)
    steps = {step for i, step in enumerate(STEPS) if last[2 + i] > first[2 + i]}
    return frozenset(steps | ({"ship"} if last[-1] > 0 else set()))


@dataclass(frozen=True)
class Strike:
    """`at`: when the signal was sent. `survivors` by rank."""

    scene: Scene
    at: float
    caught: frozenset[str]
    survivors: dict[int, Survivor]

    def describe(self) -> str:
        lines = [f"{self.scene}: caught at {sorted(self.caught)}"]
        for rank, seen in self.survivors.items():
            lines.append(
                f"  rank {rank}: {seen.raised - self.at:.2f} s later, in {seen.call} since "
                f"{seen.entered - self.at:.2f}: {seen.error}: {seen.message} {json.dumps(seen.fields)} "
                f"closed in {seen.close_seconds:.2f} s"
            )
        return "\n".join(lines)


def strike(scene: Scene) -> Strike:
    with tempfile.NamedTemporaryFile() as samples:
        samples.truncate(SAMPLE.size * NUM_SAMPLES)
        with ProcessRanks(NUM_RANKS, train, (scene, samples.name)) as ranks:
            lengths = ranks.wait_mark("lengths 1", [scene.victim])[0]
            ranks.wait_mark(f"{scene.phase} 1", [scene.victim])
            time.sleep(scene.delay * lengths[scene.phase])
            if scene.how == "let live":
                ranks.wait_mark("lengths 4")
                return Strike(scene, time.monotonic(), frozenset(), {})
            at = ranks.kill(scene.victim) if scene.how == "kill" else ranks.freeze(scene.victim)
            left = [rank for rank in range(NUM_RANKS) if rank != scene.victim]
            outcomes = ranks.outcomes(timeout_s=ARRIVAL_S + PROGRESS_S + 10, ranks=left)
            caught = caught_at(samples.name)
        failed = [outcome for outcome in outcomes.values() if outcome.error]
        assert not failed, f"{scene}: {failed}"
        return Strike(scene, at, caught, {rank: outcomes[rank].value for rank in left})
