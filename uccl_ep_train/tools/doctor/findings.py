"""Findings of the checks: one line each, the remedy below it, and the ranks that it concerns.

A check looks on every rank (`look`, its result is what JSON can carry) and is judged where all results are
(`judge`, pure): so a finding always knows all its ranks, and a judgement can be tested without the fault.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from uccl_ep_train.group.transport import Place, ranks_on

OK, WARNING, FIX = "ok", "warning", "FIX"
LEVELS = (OK, WARNING, FIX)
_NAME_WIDTH = 15
_MOST_LINES_OF_OK = 4
"""Of one check; what is fine on a thousand ranks need not be read a thousand times."""

Facts = Mapping[str, Any]
"""What `look` returned on one rank."""


@dataclass(frozen=True)
class Finding:
    """text: what is so; remedy: what to do, "" if nothing; ranks: whom it is about, () for all."""

    check: str
    level: str
    text: str
    remedy: str = ""
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Said:
    """One rank's result in one check: a finding without its ranks."""

    level: str
    text: str
    remedy: str = ""


def fine(text: str) -> Said:
    return Said(OK, text)


def warning(text: str, remedy: str) -> Said:
    return Said(WARNING, text, remedy)


def fix(text: str, remedy: str) -> Said:
    return Said(FIX, text, remedy)


@dataclass(frozen=True)
class Group:
    """The ranks of a run, for judgements. places: by rank; a rank that never came has one without a name."""

    places: tuple[Place, ...]

    @property
    def size(self) -> int:
        return len(self.places)

    @property
    def num_hosts(self) -> int:
        return len({place.host for place in self.places})

    @property
    def spans_hosts(self) -> bool:
        """Whether rows have to leave a memory that ranks can share."""
        return len({place.memory for place in self.places}) > 1

    def neighbours(self, rank: int) -> list[int]:
        """The ranks that share memory with `rank`, itself included."""
        return [peer for peer, place in enumerate(self.places) if place.memory == self.places[rank].memory]

    def named(self, ranks: Sequence[int]) -> str:
        return ranks_on(sorted(ranks), self.places)


def each(
    check: str, facts: Mapping[int, Facts], say: Callable[[int, Facts], Sequence[Said]]
) -> list[Finding]:
    """What every rank has to say; those who say the same share a finding."""
    groups: dict[Said, list[int]] = {}
    for rank in sorted(facts):
        for said in say(rank, facts[rank]):
            groups.setdefault(said, []).append(rank)
    return [
        Finding(check, said.level, said.text, said.remedy, tuple(ranks)) for said, ranks in groups.items()
    ]


def equal(
    check: str, facts: Mapping[int, Facts], name: str, what: str, remedy: str, level: str = FIX
) -> list[Finding]:
    """A finding if the ranks differ in one of their facts: the value of each group of ranks."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(facts):
        groups.setdefault(str(facts[rank].get(name)), []).append(rank)
    if len(groups) < 2:
        return []
    usual = max(groups, key=lambda value: len(groups[value]))
    odd = tuple(rank for value, ranks in groups.items() if value != usual for rank in ranks)
    values = "; ".join(f"{value} (rank {_short(ranks)})" for value, ranks in groups.items())
    return [Finding(check, level, f"ranks differ in {what}: {values}", remedy, odd)]


def _short(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")


@dataclass(frozen=True)
class Report:
    """findings: in the order of the checks. facts: by check, then by rank."""

    group: Group
    findings: tuple[Finding, ...]
    facts: Mapping[str, Mapping[int, Facts]] = field(default_factory=dict)

    def count(self, level: str) -> int:
        return sum(finding.level == level for finding in self.findings)

    @property
    def exit_status(self) -> int:
        """1: something has to be fixed."""
        return 1 if self.count(FIX) else 0

    def text(self) -> str:
        return "\n".join([self._head(), *self._rows(), self._verdict()])

    def json(self) -> str:
        """`facts` has what was seen, for those who want to judge it themselves."""
        return json.dumps(
            {
                "exit_status": self.exit_status,
                "ranks": [place._asdict() for place in self.group.places],
                "findings": [asdict(finding) for finding in self.findings],
                "facts": self.facts,
            },
            indent=1,
        )

    def _head(self) -> str:
        size, hosts = self.group.size, self.group.num_hosts
        return (
            f"uccl_ep_train.doctor: {size} rank{'s' if size > 1 else ''} on "
            f"{hosts} host{'s' if hosts > 1 else ''}"
        )

    def _rows(self) -> list[str]:
        rows = []
        shown: dict[str, int] = {}
        for finding in self.findings:
            if finding.level == OK:
                shown[finding.check] = shown.get(finding.check, 0) + 1
                if shown[finding.check] > _MOST_LINES_OF_OK:
                    continue
            some = 0 < len(finding.ranks) < self.group.size
            who = f"{self.group.named(finding.ranks)}: " if some else ""
            rows.append(f"{finding.level:<9}{finding.check:<{_NAME_WIDTH}}{who}{finding.text}")
            marks = ["-> ", *["   "] * finding.remedy.count("\n")]
            lines = zip(marks, finding.remedy.splitlines(), strict=False)
            rows += [" " * (9 + _NAME_WIDTH) + mark + line for mark, line in lines]
        return rows

    def _verdict(self) -> str:
        to_fix, warnings = self.count(FIX), self.count(WARNING)
        if to_fix:
            text = f"{to_fix} thing{'s have' if to_fix > 1 else ' has'} to be fixed"
        else:
            text = "nothing has to be fixed"
        return text + (f"; {warnings} warning{'s' if warnings > 1 else ''}" if warnings else "")
