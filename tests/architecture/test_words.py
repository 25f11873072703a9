"""One word for one thing (docs/glossary.md). Each check is also shown to find a planted violation."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.architecture.tree import CPP, ROOT, Check, cpp_code, plant, project_files

GLOSSARY = "docs/glossary.md"
RETIRED = "tests/architecture/retired_names.md"

_RETIRED = "Names that are gone"
_QUOTED = re.compile(r"`([^`]+)`")
_IDENTIFIER = re.compile(r"\b[A-Za-z_]\w*\b")
_NAME = re.compile(r'"([a-z][a-z0-9_.]*)"')  # of a part of memory, as users see it
_TYPE = re.compile(
    r"^(?:struct|class|union|enum class)\s+(?:alignas\([^)]*\)\s+)?([A-Z]\w*)\b(?=[^;\n]*(?:\{|$))",
    re.MULTILINE,
)
_NUMBER = re.compile(r"^constexpr \w+ (k[A-Z]\w*) = (\d+);", re.MULTILINE)
_CONSTANT = re.compile(r"^(?:inline\s+)?constexpr\s+[\w:]+\s+(k[A-Z]\w*)\s*[={]", re.MULTILINE)


class Retired(NamedTuple):
    """A name, perhaps with `*`, that is an identifier nowhere under `folder`. say: what took its place."""

    name: str
    folder: str
    say: str


def rows_of(page: str, heading: str = "") -> Iterator[list[str]]:
    """Cells of the page's tables, without their heads. heading: of that section only; "": of all but it."""
    for section in re.split(r"^## ", page, flags=re.MULTILINE):
        is_retired = section.startswith(_RETIRED)
        if is_retired != (heading == _RETIRED):
            continue
        lines = [line for line in section.splitlines() if line.startswith("|")]
        yield from ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:])


def retired(page: str) -> list[Retired]:
    """What the table keeps out."""
    found = []
    for names, folder, say in rows_of(page, _RETIRED):
        found += [Retired(name, _QUOTED.findall(folder)[0], say) for name in _QUOTED.findall(names)]
    return found


def check_retired_names(root: Path) -> list[str]:
    """No identifier of the sources, and no name that they give in a string, was retired there."""
    rules = retired((root / RETIRED).read_text())
    found = []
    for path in project_files(root, *CPP, under="csrc"):
        name = str(path.relative_to(root))
        ours = [rule for rule in rules if name.startswith(rule.folder + "/")]
        text = path.read_text()
        code = cpp_code(text)
        words = [(match.group(), code, match) for match in _IDENTIFIER.finditer(code)]
        for match in _NAME.finditer(text):
            words += [(word, text, match) for word in match.group(1).split(".")]
        for word, where, match in words:
            for rule in ours:
                if fnmatchcase(word, rule.name):
                    line = where.count("\n", 0, match.start()) + 1
                    found.append(f"{name}:{line}: {word}: say {rule.say}")
    return found


def check_unique_names(root: Path) -> list[str]:
    """A type or constant of a header has its name for itself; alternatives of one seam may share names."""
    places: dict[str, set[Path]] = defaultdict(set)
    for path in project_files(root, ".h", ".cuh", under="csrc"):
        code = cpp_code(path.read_text())
        for pattern in (_TYPE, _CONSTANT):
            for name in pattern.findall(code):
                places[name].add(path.relative_to(root))
    return [
        f"{second}: {name}: {first} has one, too"
        for name, paths in sorted(places.items())
        for first, *others in [sorted(paths)]
        for second in others
        if not _are_alternatives(first, second)
    ]


def _are_alternatives(one: Path, other: Path) -> bool:
    """Such as csrc/transport/loop and csrc/transport/verbs, which never meet."""
    return len(one.parts) == len(other.parts) == 4 and one.parts[1] == other.parts[1] == "transport"


def check_terms(root: Path) -> list[str]:
    """The glossary says of each word one thing, once, in one line."""
    terms = [row[0] for row in rows_of((root / GLOSSARY).read_text())]
    words = [word for term in terms for word in re.split(r", ", term)]
    return [f"{GLOSSARY}: {word} is explained twice" for word in sorted(set(words)) if words.count(word) > 1]


def check_numbers(root: Path) -> list[str]:
    """A number that the glossary gives for a constant is that constant's."""
    values: dict[str, str] = {}
    for path in project_files(root, ".h", ".cuh", under="csrc"):
        values |= dict(_NUMBER.findall(cpp_code(path.read_text())))
    found = []
    for row in rows_of((root / GLOSSARY).read_text()):
        for number, name in re.findall(r"^(\d+) .*\(`(k\w+)`\)$", row[1]):
            if values.get(name) != number:
                found.append(f"{GLOSSARY}: {row[0]}: {number}, and {name} is {values.get(name)}")
    return found


# ------------------------------------------------------------------------------------ claims

CHECKS: list[Check] = [check_retired_names, check_unique_names, check_terms, check_numbers]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_word_means_one_thing(check: Check) -> None:
    assert check(ROOT) == []


def test_the_glossary_has_terms_and_retired_names() -> None:
    page = (ROOT / GLOSSARY).read_text()
    assert len(list(rows_of(page))) >= 40
    rules = retired((ROOT / RETIRED).read_text())
    assert len(rules) >= 40
    assert all((ROOT / rule.folder).is_dir() and rule.say for rule in rules)


_PAGE = (ROOT / GLOSSARY).read_text()

PLANTED: list[tuple[Check, str, str]] = [
    (check_retired_names, "csrc/backend/gpu/bad.cuh", "void f(const Domain& d);\n"),
    (check_retired_names, "csrc/backend/gpu/bad.cuh", "uint32_t chunk_rows = 0;\n"),
    (check_retired_names, "csrc/backend/gpu/bad.cc", 'take(l.part, "flags.values_full", ranks);\n'),
    (check_retired_names, "csrc/transport/loop/bad.h", "struct Op {};\n"),
    (check_retired_names, "csrc/layout/bad.h", "WindowParams window_of(int);\n"),
    (check_unique_names, "csrc/backend/gpu/bad.h", "struct RegionLayout {\n};\n"),
    (check_unique_names, "csrc/queue/bad.h", "constexpr uint32_t kMaxRanks = 64;\n"),
    (check_unique_names, "csrc/transport/bad.h", "enum class Kind : int { kA };\n"),
    (check_numbers, GLOSSARY, "## A\n| word | meaning |\n|---|---|\n| tile | 32 tokens (`kTileTokens`) |\n"),
    (check_terms, GLOSSARY, "## A\n| word | meaning |\n|---|---|\n| slot | a |\n| ring, slot | b |\n"),
]

_HEADERS = {
    GLOSSARY: _PAGE,
    RETIRED: (ROOT / RETIRED).read_text(),
    "csrc/backend/gpu/layout.h": "\n".join(
        f"constexpr uint32_t {name} = {value};"
        for name, value in (("kTileTokens", 64), ("kTokenBlock", 32), ("kRowGroup", 8), ("kFp8Block", 128))
    ),
    "csrc/layout/region.h": "struct RegionLayout {\n};\nconstexpr uint32_t kMaxRanks = 1u << 18;\n",
    "csrc/transport/loop/address.h": "struct Address {\n};\nenum class Kind : int { kB };\n",
}


@pytest.mark.parametrize(
    ("check", "name", "text"), PLANTED, ids=lambda value: getattr(value, "__name__", None) or ""
)
def test_a_planted_violation_is_found(check: Check, name: str, text: str, tmp_path: Path) -> None:
    found = check(plant(tmp_path, _HEADERS | {name: text}))
    assert len(found) >= 1 and all(name in line for line in found)


def test_what_is_allowed_is_not_reported(tmp_path: Path) -> None:
    allowed = _HEADERS | {
        "csrc/layout/wire.h": "// a Domain, WindowParams\nstruct OpHeader;\nint chunk_rows = 0;\n",
        "csrc/backend/gpu/good.cuh": 'uint32_t chunk = 0, slot = 0;\nconst char* text = "Domain";\n',
        "csrc/transport/verbs/address.h": "struct Address {\n};\n",
        "csrc/engine/good.h": "struct RegionLayout;\nuint32_t window_tokens = 0;\n",
    }
    plant(tmp_path, allowed)
    assert [line for check in CHECKS for line in check(tmp_path)] == []
