"""docs/nics.md says what the code says: settings, defaults of NIC families, messages."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from uccl_ep_train.settings.sections import SETTINGS
from uccl_ep_train.settings.variables import VARIABLES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "nics.md").read_text()


def table(heading: str) -> list[list[str]]:
    """Cells of the first table under a heading, without its head."""
    section = PAGE.split(f"\n## {heading}", 1)[1].split("\n## ", 1)[0]
    lines = iter(section.splitlines())
    first = next(line for line in lines if line.startswith("|"))
    taken = itertools.takewhile(lambda line: line.startswith("|"), itertools.chain([first], lines))
    rows = [[cell.strip().strip("`") for cell in line.strip()[1:-1].split("|")] for line in taken]
    assert len(rows) > 2
    return rows[2:]


def literals(*folders: str) -> str:
    """All source text, with literals that the compiler joins joined."""
    text = "\n".join(
        path.read_text()
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".cc", ".h", ".py")
    )
    return re.sub(r'"\s*\n\s*f?"', "", text)


def test_every_nic_setting_is_listed_with_its_variables() -> None:
    wanted = {entry.name for entry in SETTINGS.values() if entry.native.startswith("nic.")}
    rows = table("Settings")
    assert {row[0] for row in rows} == wanted
    for name, ours, theirs, *_ in rows:
        names = {variable.name for variable in VARIABLES if variable.field == name}
        assert names == {entry for entry in (ours, theirs) if entry}


def test_what_has_no_effect_is_listed_with_the_reason_that_is_printed() -> None:
    idle = {variable.name: variable.no_effect for variable in VARIABLES if variable.no_effect}
    assert len(idle) == 3
    for name, reason in idle.items():
        (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")]
        assert line.replace("`", "") == f"| {name} | {reason} |"


def test_the_transports_are_those_that_may_be_named() -> None:
    allowed = SETTINGS["transport"].info.allowed
    named = [row[0].split("`")[0] for row in table("Which transport")]
    assert " | ".join(f"'{name}'" for name in named) == allowed


def test_the_family_table_is_that_of_the_code() -> None:
    source = (ROOT / "csrc" / "transport" / "nics.cc").read_text()
    rows = re.findall(
        r'\{NicFamily::k\w+, "([^"]+)", "([^"]*)", (\w+), ([\d\']+), (\d+), (\d+), (\d+)\}', source
    )
    assert len(rows) == 6
    coded = [
        [
            name,
            ", ".join(drivers.split()),
            "" if vendor == "0" else vendor,
            "no limit" if window == "0" else window.replace("'", ""),
            *rest,
        ]
        for name, drivers, vendor, window, *rest in rows
    ]
    assert table("Defaults of a NIC family (`verbs`)") == coded


def test_every_message_is_one_that_the_code_prints() -> None:
    printed = literals("csrc/transport", "csrc/engine", "uccl_ep_train")
    for message, advice in table("What is wrong"):
        # States of a queue pair are put in.
        assert message.removesuffix(" RTR") in printed, message
        assert advice
