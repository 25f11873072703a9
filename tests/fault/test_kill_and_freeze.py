"""A rank is killed or frozen, in any role, at any step: the others raise in time, name it, stop training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.fault.training import ARRIVAL_S, PHASES, PROGRESS_S, ROLES, Scene, Strike, strike

pytestmark = pytest.mark.fault

GRACE_S = 2.0
# Groups that wait for a slow network and for deadlines need little of a processor.
AT_A_TIME = 6
DEADLINES = {"ProgressTimeout": PROGRESS_S, "ArrivalTimeout": ARRIVAL_S}


def strikes(scenes: Iterable[Scene]) -> list[Strike]:
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return list(pool.map(strike, scenes))


def complaints(seen: Strike) -> list[str]:
    """What a strike shows that must not be."""
    found = []
    victim = seen.scene.victim
    # Whoever was struck before it entered a call is waited for since the last of the others entered it.
    waited_since = max([seen.at, *(survivor.entered for survivor in seen.survivors.values())])
    for rank, survivor in seen.survivors.items():
        if survivor.peer != victim:
            found.append(f"rank {rank} blames rank {survivor.peer}")
        if seen.scene.how == "kill" and survivor.error != "PeerDied":
            found.append(f"rank {rank} raised {survivor.error}: a death is seen, no deadline has to pass")
        if seen.scene.how == "kill" and survivor.raised - seen.at > PROGRESS_S:
            found.append(f"rank {rank} took {survivor.raised - seen.at:.2f} s to see a death")
        if seen.scene.how == "freeze":
            limit = DEADLINES.get(survivor.error)
            if limit is None:
                found.append(f"rank {rank} raised {survivor.error}")
            elif survivor.raised - waited_since > limit + GRACE_S:
                found.append(
                    f"rank {rank} raised {survivor.raised - waited_since:.2f} s after the last entered"
                )
        if survivor.hook != survivor.error:
            found.append(f"rank {rank}: the call raised {survivor.error}, the hook {survivor.hook}")
        if not survivor.untouched:
            found.append(f"rank {rank} changed its parameters or the optimizer's state")
        if not survivor.control:
            found.append(f"rank {rank}: the step that was prevented would have changed nothing")
        if survivor.close_seconds > GRACE_S:
            found.append(f"rank {rank} closed in {survivor.close_seconds:.2f} s")
    return found


def check(seen: list[Strike]) -> None:
    for entry in seen:
        print(entry.describe())
    wrong = [f"{line}\n{entry.describe()}" for entry in seen for line in complaints(entry)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_the_others_raise_in_time_name_the_rank_and_take_no_step(how: str) -> None:
    check(strikes(Scene.random(1, role, phase, how) for role in ROLES for phase in PHASES))


# Where a victim can be caught, by its role: the steps that its worker or its proxy had not finished.
# "exchange" stands for a rank that had not come yet, too.
REACHABLE = {
    "source": {"exchange", "stage", "ship", "fold", "merge"},
    "relay": {"exchange", "plan", "place", "fold", "merge", "ship"},
    "destination": {"exchange", "plan", "place", "fold"},
    "neighbour": {"exchange", "plan", "stage", "place", "fold", "merge"},
}
WAITS = {"exchange", "plan", "stage", "ship", "place", "fold", "merge"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_every_step_of_every_role_at_random_times(how: str) -> None:
    """The signal comes at a random time; it goes on until every step was hit."""
    kinds = [(role, phase) for role in ROLES for phase in PHASES]
    turns = 8
    caught = {role: Counter[str]() for role in ROLES}
    waited = Counter[str]()

    def missing() -> list[str]:
        found = [
            f"{role} at {step}" for role, steps in REACHABLE.items() for step in steps - caught[role].keys()
        ]
        return found + [f"a survivor in {step}" for step in WAITS - waited.keys()]

    for attempt in range(4):
        scenes = [
            # Random, yet spread over the phase, more densely at its beginning: exchange and plan are short.
            replace(scene, delay=((turn + scene.delay) / turns) ** 2)
            for turn in range(turns)
            for scene in (Scene.random(100 * (attempt + 1) + turn, *kind, how) for kind in kinds)
        ]
        seen = strikes(scenes)
        check(seen)
        for entry in seen:
            caught[entry.scene.role].update(entry.caught)
            if all(survivor.fields["step"] == "exchange" for survivor in entry.survivors.values()):
                caught[entry.scene.role].update(["exchange"])
            waited.update(survivor.fields["step"] for survivor in entry.survivors.values())
        print(f"{how}, {attempt + 1}: victims were caught at {caught}, survivors waited in {waited}")
        if not missing():
            return
    raise AssertionError(f"not hit: {missing()}")


def test_a_group_that_is_not_struck_trains_on() -> None:
    """Control: the same slow group with the same deadlines fails for no other reason."""
    seen = strike(Scene("source", "dispatch", "let live", 2, 0.5, 1))
    assert not seen.survivors
