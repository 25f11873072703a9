"""One run of the doctor: the checks in stages, a deadline for each, and rank 0 as the judge.

Within a stage a rank looks at its own machine, or the ranks do something together; after it rank 0 gathers
what they saw. A missing rank is named, and no step that needs it is started.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from uccl_ep_train.common.limits import start_thread
from uccl_ep_train.core.topology import Topology
from uccl_ep_train.errors import EpError
from uccl_ep_train.group.lifecycle import Settled
from uccl_ep_train.group.transport import Place
from uccl_ep_train.settings.config import EpConfig
from uccl_ep_train.tools.doctor.findings import FIX, WARNING, Facts, Finding, Group, Report, Said, each
from uccl_ep_train.tools.doctor.meeting import GRACE_S, Identity, LostError, Meeting


@dataclass(frozen=True)
class Options:
    """hidden, num_experts: of the job, for the size of its buffers. group_size: ranks that dispatch
    together.
    """

    timeout_s: float = 60.0
    hidden: int = 7168
    num_experts: int = 256
    group_size: int = 64


@dataclass
class Here:
    """What a check may know of the rank it looks for.

    gpu      index of its GPU; -1: none
    config   of the environment; None where that cannot be, `environment` says why
    settled  what the group has agreed on, from check `transport` on
    """

    meeting: Meeting
    options: Options
    gpu: int = -1
    config: EpConfig | None = None
    settled: Settled | None = None

    @property
    def me(self) -> Identity:
        return self.meeting.me

    @property
    def places(self) -> tuple[Place, ...]:
        return self.meeting.places()

    @property
    def group(self) -> range:
        """The ranks of the expert-parallel group that this rank stands for: consecutive ones."""
        first = self.me.rank // self.options.group_size * self.options.group_size
        return range(first, min(first + self.options.group_size, self.me.size))

    def usable_config(self) -> EpConfig:
        if self.config is None:
            raise Skipped("the environment is refused, see there")
        return self.config

    def topology(self) -> Topology:
        """The group's domains; before they are known, one for each host."""
        if self.settled is not None:
            return self.settled.topology
        names = [self.places[rank].memory for rank in self.group]
        topology = Topology.from_config(self.usable_config(), len(names)) or Topology.from_domains(names)
        return topology.on_hosts(names)


class Skipped(Exception):
    """A check that another finding makes useless; the text says which."""


@dataclass(frozen=True)
class Check:
    """look: on every rank, returns what JSON can carry. judge: of all ranks that could look; pure."""

    name: str
    look: Callable[[Here], Facts]
    judge: Callable[[Group, Mapping[int, Facts], Options], Sequence[Finding]]


@dataclass
class _Looked:
    """The result of `look`: facts, an error in words, or nothing within the deadline."""

    facts: Facts | None = None
    error: str = ""
    skipped: str = ""
    hung: bool = False

    def said(self) -> dict[str, Any]:
        return {"facts": self.facts, "error": self.error, "skipped": self.skipped, "hung": self.hung}


def _look(check: Check, here: Here, deadline_s: float) -> _Looked:
    """On a thread of its own: a driver that never returns must not keep this process from saying so."""
    looked = _Looked()

    def run() -> None:
        try:
            if here.gpu >= 0:
                import torch

                torch.cuda.set_device(here.gpu)  # holds for a thread
            looked.facts = check.look(here)
        except Skipped as reason:
            looked.skipped = str(reason)
        except EpError as error:
            looked.error = f"{type(error).__name__}: {error}"
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            looked.error = f"{type(error).__name__}: {error} (at {where.name}, line {where.lineno})"

    thread = threading.Thread(target=run, name=f"check {check.name}", daemon=True)
    try:
        start_thread(thread)
    except EpError as error:
        return _Looked(error=f"{type(error).__name__}: {error}")
    thread.join(deadline_s)
    if thread.is_alive():  # what it may still write is not looked at
        return _Looked(error=f"did not end within {deadline_s:g} s", hung=True)
    return looked


@dataclass
class Session:
    """stages: checks whose results are gathered together. `hung`: a thread of ours will not come back."""

    here: Here
    stages: Sequence[Sequence[Check]]
    hung: bool = False
    _findings: list[Finding] = field(default_factory=list)
    _facts: dict[str, dict[int, Facts]] = field(default_factory=dict)
    _doing: str = "start"

    def run(self, show: Callable[[Report], None]) -> int:
        """The exit status, equal on all ranks: a shell goes on to the training on all hosts, or on none.

        show  what rank 0 does with the report, before anybody leaves: launchers end all ranks when one has

        Raises LostError where rank 0 is gone.
        """
        late = self.here.meeting.meet()
        self._absent(late)
        if not late:
            self._run_stages()
        return self._end(show)

    def _run_stages(self) -> None:
        for number, stage in enumerate(self.stages):
            said: dict[str, Any] = {}
            for check in stage:
                self._doing = check.name
                self.here.meeting.about_to(check.name)
                looked = _look(check, self.here, self.here.options.timeout_s)
                self.hung |= looked.hung
                said[check.name] = looked.said()
                if looked.hung:
                    break
            self.here.meeting.about_to(f"{self._doing}, done")
            if not self._goes_on(stage, said, is_last=number == len(self.stages) - 1):
                return

    def _goes_on(self, stage: Sequence[Check], said: dict[str, Any], *, is_last: bool) -> bool:
        meeting = self.here.meeting
        # One check that hangs is the last of its stage.
        patience_s = self.here.options.timeout_s * min(2, len(stage)) + GRACE_S
        if meeting.me.rank != 0:
            return bool(meeting.report(said, patience_s=patience_s))
        came, late = meeting.gather(said, patience_s=patience_s)
        stuck = any(entry["hung"] for answer in came.values() for entry in answer.values())
        self._judge(stage, came)
        self._absent(late)
        if (stuck or late) and not is_last:
            names = [c.name for s in self.stages[self.stages.index(stage) + 1 :] for c in s]
            text = f"not done, because of what is above: {', '.join(names)}"
            self._findings.append(Finding("the rest", WARNING, text, "mend that first, then ask again"))
        goes_on = not stuck and not late
        meeting.answer(goes_on)
        return goes_on

    def _judge(self, stage: Sequence[Check], came: Mapping[int, Mapping[str, Any]]) -> None:
        options = self.here.options
        group = Group(self.here.places)
        for check in stage:
            answers = {rank: said[check.name] for rank, said in came.items() if check.name in said}
            failed = {rank: answer for rank, answer in answers.items() if answer["error"]}
            skipped = {rank: answer for rank, answer in answers.items() if answer["skipped"]}
            seen = {rank: said["facts"] for rank, said in answers.items() if said["facts"] is not None}
            self._facts[check.name] = seen
            self._findings += each(check.name, failed, lambda _, said: [failure(said["error"])])
            self._findings += each(
                check.name, skipped, lambda _, said: [Said(WARNING, f"not done: {said['skipped']}")]
            )
            if seen:
                self._findings += check.judge(group, seen, options)

    def _absent(self, late: Mapping[int, str]) -> None:
        for rank, why in sorted(late.items()):
            self._findings.append(
                Finding(
                    "ranks",
                    FIX,
                    f"rank {rank} {why}",
                    "its own output, or dmesg on its host, says more; what it was about to check is the "
                    "suspect",
                )
            )

    def report(self) -> Report:
        return Report(Group(self.here.places), tuple(self._findings), self._facts)

    def _end(self, show: Callable[[Report], None]) -> int:
        meeting = self.here.meeting
        if meeting.me.rank != 0:
            return int(meeting.report(None))
        report = self.report()
        show(report)
        meeting.gather(None, patience_s=0.0)
        meeting.answer(report.exit_status)
        return report.exit_status

    def stopped(self, by: str, reconnect: Callable[[], Any], *, without_0: bool) -> Report | None:
        """What is known when this rank is told to stop, or rank 0 is lost (without_0): it cannot speak then.

        None: a lower rank speaks.
        """
        meeting = self.here.meeting
        missing = meeting.missing_now(reconnect)
        if without_0 and meeting.me.rank != 0:
            missing.setdefault(0, meeting.last_seen(0, by))
        speaker = min(rank for rank in range(meeting.me.size) if rank not in missing)
        if meeting.me.rank != speaker:
            return None
        self._absent(missing)
        if not missing:
            self._findings.append(
                Finding(
                    "ranks",
                    FIX,
                    f"{by} during check {self._doing!r}, and no rank of this host has ended",
                    "if nobody did that by hand, a rank of another host has ended: the launcher's "
                    "output names it",
                )
            )
        return self.report()


def failure(text: str) -> Said:
    """For what a check could not look at."""
    return Said(
        FIX,
        text,
        "a job would end the same way; docs/nics.md lists the messages of transports with what to do",
    )


def lost(error: Exception) -> str:
    """Of rank 0, for `stopped`."""
    if isinstance(error, LostError):
        return str(error)
    return f"cannot be heard any more, the store was lost: {str(error).splitlines()[0][:120]}"
