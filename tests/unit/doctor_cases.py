"""What the tests of the doctor share: two hosts, a rank alone, and how findings are read."""

from __future__ import annotations

from typing import Any

from uccl_ep_train import EpConfig
from uccl_ep_train.group.transport import Place
from uccl_ep_train.tools.doctor.findings import FIX, Finding, Group
from uccl_ep_train.tools.doctor.meeting import Identity, Meeting
from uccl_ep_train.tools.doctor.session import Here, Options

NODE0, NODE1 = Place("node0", "boot0 1"), Place("node1", "boot1 1")
PAIR, APART = Group((NODE0, NODE0)), Group((NODE0, NODE1))
OPTIONS = Options()
MIB = 1 << 20


def alone(**settings: Any) -> Here:
    meeting = Meeting(Identity(), None, 1.0)
    return Here(meeting, OPTIONS, config=EpConfig(num_experts=8, hidden=256, backend="host", **settings))


def both(facts: dict[str, Any], **second: Any) -> dict[int, dict[str, Any]]:
    return {0: facts, 1: {**facts, **second}}


def levels(findings: Any) -> list[str]:
    return [finding.level for finding in findings]


def the(findings: Any, level: str = FIX) -> Finding:
    (finding,) = [finding for finding in findings if finding.level == level]
    return finding
