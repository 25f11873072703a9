"""This rank's identity, and how the ranks of a check communicate: over the launcher's store, with deadlines.

No collective and no process group: what the doctor examines is what those need. Rank 0 gathers, and says how
it goes on. A rank that is late is named, with its host, its process and what it was about to do.
"""

from __future__ import annotations

import datetime
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from uccl_ep_train.common.shown import shown
from uccl_ep_train.group.presence import Presence
from uccl_ep_train.group.transport import Place
from uccl_ep_train.settings import env
from uccl_ep_train.settings.checks import MAX_RANKS

MOST_PORT = 65535
START_FACTOR = 3
"""Ranks start at different times, and import torch from a slow file system: the first meeting may take so
many times longer than the others."""
GRACE_S = 5.0
LEAVE_S = 3.0


class UsageError(ValueError):
    """The environment does not say who this rank is."""


class LostError(RuntimeError):
    """Rank 0 does not answer any more; the text says why."""


@dataclass(frozen=True)
class Identity:
    """This process among the ranks. host, port: of the store, "" and 0 for a rank alone.

    store_is_served  by the launcher (torchrun); else rank 0 has to
    prefix           of our keys: a restarted job must not read what the one before has written
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    host: str = ""
    port: int = 0
    store_is_served: bool = False
    prefix: str = ""
    launcher: str = "none"


def identity() -> Identity:
    """From what torchrun, Ray's trainers (RANK, WORLD_SIZE ...) or srun set. Raises UsageError."""
    if env.read("RANK") and env.read("WORLD_SIZE"):
        names, launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK"), "torchrun"
        if not env.read("TORCHELASTIC_RUN_ID"):
            launcher = "environment"
    elif _number("SLURM_STEP_NUM_TASKS", 1) > 1:
        names, launcher = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"), "srun"
    else:
        return Identity(local_rank=_number("LOCAL_RANK", 0))
    rank, size, local_rank = (_number(name, 0) for name in names)
    if not 1 <= size <= MAX_RANKS:
        raise UsageError(f"{names[1]} = {size}: allowed is 1 .. {MAX_RANKS}")
    if not 0 <= rank < size:
        raise UsageError(f"{names[0]} = {rank} with {names[1]} = {size}: allowed is 0 .. {size - 1}")
    if size == 1:
        return Identity(local_rank=local_rank, launcher=launcher)
    host, port = env.read("MASTER_ADDR"), _number("MASTER_PORT", 0)
    if not host or not port:
        raise UsageError(
            f"there are {size} ranks, and MASTER_ADDR or MASTER_PORT is not set: set them to rank 0's host "
            "and a free port of it (scripts/slurm shows how), or start the ranks by torchrun"
        )
    if not 1 <= port <= MOST_PORT:
        raise UsageError(f"MASTER_PORT = {port}: allowed is 1 .. {MOST_PORT}")
    served = env.read("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = env.read("TORCHELASTIC_RESTART_COUNT", "0")
    return Identity(rank, size, local_rank, host, port, served, f"uccl_ep_train/doctor/{attempt}", launcher)


def _number(name: str, default: int) -> int:
    text = env.read(name)
    try:
        return int(text) if text else default
    except ValueError:
        raise UsageError(f"{name} = {shown(text)}: allowed is an integer") from None


def open_store(me: Identity, timeout_s: float) -> Any:
    """The store's client; rank 0 serves it where the launcher does not. Raises what torch raises."""
    import torch.distributed as dist

    serves = me.rank == 0 and not me.store_is_served
    store = dist.TCPStore(
        me.host,
        me.port,
        is_master=serves,
        timeout=datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )
    return store


def unreachable(me: Identity, error: Exception) -> tuple[str, str]:
    """The reason why `open_store` did not reach a store, and the remedy."""
    where = f"{me.host}:{me.port}"
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(me.host, me.port)})
    except OSError as failure:
        return (
            f"the name in MASTER_ADDR, {me.host}, has no address here ({failure})",
            "set MASTER_ADDR to rank 0's IP address, or mend DNS or /etc/hosts",
        )
    first = str(error).splitlines()[0][:160]
    return (
        f"the store at {where} ({', '.join(addresses)}) cannot be reached: {first}",
        "rank 0 has to run there, and the port has to be open between the hosts: MASTER_ADDR is to be "
        "an address of\n"
        "rank 0's host in the network that all hosts share, MASTER_PORT free and not behind a firewall",
    )


class TimedStore:
    """A store whose calls are timed: where the process that serves it is stopped they do not come back."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self._began: dict[int, float] = {}  # by thread; written by it alone

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.real, name)

        def timed(*given: Any) -> Any:
            own = threading.get_ident()
            self._began[own] = time.monotonic()
            try:
                return call(*given)
            finally:
                self._began.pop(own, None)

        return timed

    def waited_s(self) -> float:
        """Of the call that has waited longest; 0: there is none."""
        return max((time.monotonic() - began for began in list(self._began.values())), default=0.0)


class Meeting:
    """The ranks that check each other. Rank 0 calls `gather`, the others `report`, in the same order.

    A single rank communicates with no other.
    """

    def __init__(self, me: Identity, store: Any, timeout_s: float) -> None:
        self.me = me
        self.timeout_s = timeout_s
        self.presences: list[Presence | None] = [None] * me.size
        self.store = self._of_prefix(store)
        self.presences[me.rank] = Presence.here()
        self._step = 0
        self._said_at = ""

    def _of_prefix(self, store: Any) -> Any:
        if store is None:
            return None
        import torch.distributed as dist

        return TimedStore(dist.PrefixStore(self.me.prefix, store))

    def about_to(self, what: str) -> None:
        """Records what this rank does next, for reports if it goes missing."""
        self._said_at = what
        if self.store is not None:
            self.store.set(f"at/{self.me.rank}", what)

    def gather(
        self, payload: Any, *, patience_s: float | None = None
    ) -> tuple[dict[int, Any], dict[int, str]]:
        """On rank 0: what the ranks gave to this step's `report`, and why the others did not."""
        step, self._step = self._step, self._step + 1
        here: dict[int, Any] = {0: payload}
        waited_for = set(range(1, self.me.size))
        late: dict[int, str] = {}
        waited_s = self.timeout_s + GRACE_S if patience_s is None else patience_s
        deadline = time.monotonic() + waited_s
        pause_s, looked = 0.001, time.monotonic()
        while waited_for:
            for rank in sorted(waited_for):
                if self.store.check([f"{step}/{rank}"]):
                    here[rank] = json.loads(self.store.get(f"{step}/{rank}"))
                    waited_for.discard(rank)
            now = time.monotonic()
            if waited_for and now - looked > 0.5:
                looked = now
                ended = [rank for rank in waited_for if self._has_ended(rank)]
                # Results posted before its end count.
                for rank in ended:
                    if not self.store.check([f"{step}/{rank}"]):
                        late[rank] = self.last_seen(rank, "has ended")
                        waited_for.discard(rank)
            if now > deadline:
                late |= {rank: self.last_seen(rank, self.silence(rank, waited_s)) for rank in waited_for}
                break
            if waited_for:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.05)
        return here, late

    def answer(self, value: Any) -> None:
        """On rank 0, after `gather`: what `report` returns on the others."""
        if self.store is not None:
            self.store.set(f"answer/{self._step - 1}", json.dumps(value))

    def report(self, payload: Any, *, patience_s: float | None = None) -> Any:
        """On the other ranks. Raises LostError where rank 0 does not answer."""
        step, self._step = self._step, self._step + 1
        self.store.set(f"{step}/{self.me.rank}", json.dumps(payload))
        # Rank 0 may wait for others, then think.
        patience_s = 2 * (self.timeout_s + GRACE_S) if patience_s is None else 2 * patience_s
        deadline, pause_s = time.monotonic() + patience_s, 0.001
        while not self.store.check([f"answer/{step}"]):
            if self._has_ended(0):
                raise LostError("has ended")
            if time.monotonic() > deadline:
                raise LostError(self.silence(0, patience_s))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        return json.loads(self.store.get(f"answer/{step}"))

    def meet(self) -> dict[int, str]:
        """The first step: all learn where the others are; those who did not come, and why."""
        patience_s = START_FACTOR * self.timeout_s
        known = self._known(self.me.rank)
        own = asdict(known) | {"place": known.place._asdict()}
        if self.me.rank == 0:
            came, late = self.gather(own, patience_s=patience_s)
            everyone: dict[str, Any] = {"came": came, "late": late}
            self.answer(everyone)
        else:
            everyone = self.report(own, patience_s=patience_s)
        for rank, said in everyone["came"].items():
            self.presences[int(rank)] = Presence(Place(**said["place"]), said["pid"], said["pid_space"])
        return {int(rank): why for rank, why in everyone["late"].items()}

    def places(self) -> tuple[Place, ...]:
        return tuple(Place("an unknown host", "") if seen is None else seen.place for seen in self.presences)

    def missing_now(self, reconnect: Callable[[], Any]) -> dict[int, str]:
        """For a rank that is told to stop: who has gone before. Over a connection of its own, because another
        thread may wait on the usual one."""
        ended = [rank for rank in range(self.me.size) if rank != self.me.rank and self._has_ended(rank)]
        try:
            self.store = self._of_prefix(reconnect())
        except Exception:  # The store went, too: what they were about to do stays unknown.
            self.store = None
        return {rank: self.last_seen(rank, "has ended") for rank in ended}

    def last_seen(self, rank: int, what: str) -> str:
        seen = self.presences[rank]
        where = "" if seen is None else f" (process {seen.pid} on {seen.place.host})"
        at = ""
        try:
            if self.store is not None and self.store.check([f"at/{rank}"]):
                at = f"; it was last seen at check {bytes(self.store.get(f'at/{rank}')).decode()!r}"
        except Exception:
            at = ""
        return f"{what}{where}{at}"

    def leave(self) -> None:
        """The last step. Rank 0 goes last where it serves the store, but waits for nobody long."""
        if self.store is None or self.me.size == 1:
            return
        try:
            self.store.set(f"left/{self.me.rank}", "")
            others = [f"left/{rank}" for rank in range(1, self.me.size)]
            deadline = time.monotonic() + LEAVE_S
            while self.me.rank == 0 and not self.store.check(others) and time.monotonic() < deadline:
                time.sleep(0.01)
        except Exception:  # The store is gone, and so are the ranks that would wait.
            return

    def _known(self, rank: int) -> Presence:
        seen = self.presences[rank]
        return replace(Presence.here(), pid=-1, pid_space="") if seen is None else seen

    def _has_ended(self, rank: int) -> bool:
        seen = self.presences[rank]
        return seen is not None and seen.has_ended()

    def silence(self, rank: int, waited_s: float) -> str:
        seen = self.presences[rank]
        if seen is None:
            return f"did not come within {waited_s:g} s"
        stopped = ": its process is stopped" if seen.has_stopped() else ""
        return f"has not answered for {waited_s:g} s{stopped}"
