"""Rules that a reader would otherwise have to watch over. Each check is shown to find a planted violation."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.cpp_functions import CppFunction, cpp_functions
from tests.architecture.tree import CPP, ROOT, Check, cpp_code, matches, plant, project_files

MAX_LINES = 400
EXCUSE = "Longer than 400 lines because"
HEAD_LINES = 30
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 6
# Of a function of device code, by its name: registers may need what the rules forbid. A measurement says so.
DEVICE_EXCUSE = re.compile(r"\b(\w+) breaks the rule of (lines|parameters) because [^.]*\d")
MAX_CONDITIONALS_PER_1000 = 3.5

_ENDS_PROCESS = re.compile(
    r"(?<![\w.>])(?:std::|::)?(?:abort|_?exit|quick_exit|_Exit|terminate|__trap|__builtin_trap)[ \t]*\("
    r"|\bassert[ \t]*\("
)
_GETENV = re.compile(r"\b(?:std::)?(?:secure_)?getenv[ \t]*\(")
_CONDITIONAL = re.compile(r"^[ \t]*#[ \t]*(?:if|ifdef|ifndef|elif)\b.*$", re.MULTILINE)
# In pieces, or this file would be its own violation.
_MACHINE_FOLDERS = "|".join(["work", "farm", "root", "home"])
_MACHINE_PATH = re.compile(rf"(?<![\w.])/(?:{_MACHINE_FOLDERS})/\S*|(?<![\w)])\.libra" + r"ry\b")
_HOSTS = [
    ("pypi", "org"),
    ("files", "pythonhosted", "org"),
    ("download", "pytorch", "org"),
    ("deb", "debian", "org"),
]
_REGISTRY = re.compile("|".join(re.escape(".".join(host)) for host in _HOSTS))
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)|!\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^[ \t]*(```|~~~).*?^[ \t]*\1[ \t]*$", re.MULTILINE | re.DOTALL)
_NAMED_PATH = re.compile(r"`((?:uccl_ep_train|csrc|recipes|tests|bench|scripts|docs|\.ci)/[\w./-]*)`")

# -------------------------------------------------------------------------------------- code


def check_nothing_ends_the_process(root: Path) -> list[str]:
    """The core raises; it never ends the process. (`assert` would, and vanishes in release builds.)"""
    return [
        line
        for path in project_files(root, *CPP, under="csrc")
        for line in matches(root, path, cpp_code(path.read_text()), _ENDS_PROCESS)
    ]


def check_environment(root: Path) -> list[str]:
    """uccl_ep_train/settings/env.py alone reads the environment. Tests, benchmarks and scripts are exempt."""
    found = []
    for path in project_files(root, ".py"):
        parts = path.relative_to(root).parts
        if parts[0] in ("tests", "bench", "scripts") or parts == ("uccl_ep_train", "settings", "env.py"):
            continue
        found += [f"{path.relative_to(root)}:{line}: {what}" for line, what in _environment_uses(path)]
    for path in project_files(root, *CPP, under="csrc"):
        found += matches(root, path, cpp_code(path.read_text()), _GETENV)
    return found


def _environment_uses(path: Path) -> Iterator[tuple[int, str]]:
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in names and getattr(node.value, "id", "") == "os":
            yield node.lineno, f"os.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            for alias in node.names:
                if alias.name in names:
                    yield node.lineno, f"from os import {alias.name}"


def check_file_length(root: Path) -> list[str]:
    """At most 400 lines, unless the head of the file says why not."""
    found = []
    for path in project_files(root, ".py", *CPP):
        lines = path.read_text().splitlines()
        if len(lines) > MAX_LINES and not any(EXCUSE in line for line in lines[:HEAD_LINES]):
            found.append(
                f"{path.relative_to(root)}: {len(lines)} lines, and its head does not say '{EXCUSE}'"
            )
    return found


def check_function_length(root: Path) -> list[str]:
    """Bodies of at most 60 lines, docstrings not counted. Device code may be excused in its file's head."""
    found = []
    for path in project_files(root, ".py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                length = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
                if length > MAX_FUNCTION_LINES:
                    found.append(f"{path.relative_to(root)}:{node.lineno}: {node.name} has {length} lines")
    for path in project_files(root, *CPP):
        for function in cpp_functions(path.read_text()):
            if function.lines > MAX_FUNCTION_LINES and not is_excused(path, function, "lines"):
                found.append(
                    f"{path.relative_to(root)}:{function.line}: {function.name} has {function.lines} lines"
                )
    return found


def check_parameters(root: Path) -> list[str]:
    """At most six parameters in C++; a template's are not counted. Device code may be excused, as above."""
    return [
        f"{path.relative_to(root)}:{function.line}: {function.name} has {function.parameters} parameters"
        for path in project_files(root, *CPP, under="csrc")
        for function in cpp_functions(path.read_text())
        if function.parameters > MAX_PARAMETERS and not is_excused(path, function, "parameters")
    ]


def is_excused(path: Path, function: CppFunction, rule: str) -> bool:
    """The head of a file of kernels names the function, the rule, and a measurement."""
    head = " ".join(line.lstrip("/ ") for line in path.read_text().splitlines()[:HEAD_LINES])
    return path.suffix in (".cu", ".cuh") and (function.name, rule) in DEVICE_EXCUSE.findall(head)


def check_conditionals(root: Path) -> list[str]:
    """Variation is a folder, not an #if."""
    texts = {path: path.read_text() for path in project_files(root, *CPP, under="csrc")}
    places = [line for path, text in texts.items() for line in matches(root, path, text, _CONDITIONAL)]
    num_lines = sum(text.count("\n") for text in texts.values())
    # Below 1,000 lines a single one would already be over; the compatibility headers need a few.
    allowed = max(3.0, MAX_CONDITIONALS_PER_1000 * num_lines / 1000)
    return places if len(places) > allowed else []


# -------------------------------------------------------------------------------------- text


def check_machine_paths(root: Path) -> list[str]:
    """No path of a developer's machine, no package registry by its host's name."""
    found: list[str] = []
    for path in project_files(root):
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += matches(root, path, text, _MACHINE_PATH)
        found += matches(root, path, text, _REGISTRY)
    return found


def check_links(root: Path) -> list[str]:
    """Links of the documentation lead to files and headings that exist; so do project paths in `code`."""
    found = []
    for path in project_files(root, ".md"):
        prose = _FENCE.sub(lambda fence: "\n" * fence.group().count("\n"), path.read_text())
        for match in _LINK.finditer(prose):
            target = match.group(1) or match.group(2)
            if not _link_resolves(path, target):
                found.append(f"{path.relative_to(root)}: link to {target}")
        for name in _NAMED_PATH.findall(prose):
            if not (root / name).exists():
                found.append(f"{path.relative_to(root)}: names {name}")
    return found


def _link_resolves(page: Path, target: str) -> bool:
    if re.match(r"[a-z]+:", target):
        return True
    name, _, anchor = target.partition("#")
    file = (page.parent / name) if name else page
    if not file.exists():
        return False
    return not anchor or file.suffix != ".md" or anchor in _anchors(file.read_text())


def _anchors(markdown: str) -> set[str]:
    """Names that a heading can be linked by: lower case, spaces to hyphens, punctuation dropped."""
    headings = re.findall(r"^#+[ \t]+(.+?)[ \t]*$", _FENCE.sub("", markdown), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# ------------------------------------------------------------------------------------ claims

CHECKS: list[Check] = [
    check_nothing_ends_the_process,
    check_environment,
    check_file_length,
    check_function_length,
    check_parameters,
    check_conditionals,
    check_machine_paths,
    check_links,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_project_keeps_the_rule(check: Check) -> None:
    assert check(ROOT) == []


_LONG = "x = 1\n" * (MAX_LINES + 1)
_BODY = "  x = 1;\n" * (MAX_FUNCTION_LINES + 1)
_SEVEN = "int a, std::map<int, int> b, int c = g(1, 2), int d, int e, int f, int g"
_MANY_IFS = "#ifdef A\n#endif\n" * 10 + "int x;\n" * 2000

PLANTED: list[tuple[Check, str, str]] = [
    (check_nothing_ends_the_process, "csrc/engine/bad.cc", "void f() { std::abort(); }\n"),
    (check_nothing_ends_the_process, "csrc/engine/bad.cc", "void f() { ::_exit(1); }\n"),
    (check_nothing_ends_the_process, "csrc/backend/gpu/bad.cu", "if (late) __trap();\n"),
    (check_nothing_ends_the_process, "csrc/engine/bad.cc", "if (x) std::terminate ();\n"),
    (check_nothing_ends_the_process, "csrc/engine/bad.cc", "assert(x < 65536);\n"),
    (check_environment, "uccl_ep_train/api/buffer.py", "import os\nDEBUG = os.environ.get('X')\n"),
    (check_environment, "recipes/bad.py", "import os\nos.getenv('X')\n"),
    (check_environment, "setup.py", "from os import environ\n"),
    (check_environment, "csrc/common/bad.h", 'const char* x = std::getenv("X");\n'),
    (check_file_length, "recipes/bad.py", _LONG),
    (check_file_length, "csrc/engine/bad.cc", _LONG),
    (check_function_length, "recipes/bad.py", f"def f():\n{_BODY}"),
    (check_function_length, "csrc/engine/bad.cc", f"namespace n {{\nint f(int x) const {{\n{_BODY}}}\n}}\n"),
    (check_function_length, "csrc/engine/bad.h", f"struct S {{\n  S() : a(1), b(2) {{\n{_BODY}}}\n}};\n"),
    (
        check_function_length,
        "csrc/backend/gpu/bad.cu",
        f"__global__ void __launch_bounds__(64, 1)\n    f(int x) {{\n{_BODY}}}\n",
    ),
    (
        check_function_length,
        "csrc/backend/gpu/bad.cuh",
        f"// f breaks the rule of lines because it must.\n__device__ int f() {{\n{_BODY}}}\n",
    ),
    (
        check_function_length,
        "csrc/backend/gpu/bad.cuh",
        f"// g breaks the rule of lines because it saves 9 registers.\n__device__ int f() {{\n{_BODY}}}\n",
    ),
    (check_parameters, "csrc/engine/bad.cc", f"namespace n {{\nint f({_SEVEN}) {{}}\n}}\n"),
    (
        check_parameters,
        "csrc/backend/gpu/bad.cuh",
        f"template <typename A, typename B>\n__device__ int f({_SEVEN}) const {{}}\n",
    ),
    (
        check_parameters,
        "csrc/backend/gpu/bad.cuh",
        f"struct S {{\n  __device__ S({_SEVEN})\n      : a(b), c(d) {{}}\n}};\n",
    ),
    (check_parameters, "csrc/bindings/bad.cc", f'm.def("f", [](int x, {_SEVEN}) {{ g(); }});\n'),
    (check_conditionals, "csrc/common/bad.h", _MANY_IFS),
    (check_machine_paths, "docs/bad.md", "see /" + "work/main/x\n"),
    (check_machine_paths, "scripts/bad.sh", "cp '/" + "root/.config' .\n"),
    (check_machine_paths, "scripts/bad.sh", "curl " + ".".join(_HOSTS[0]) + "/simple\n"),
    (check_links, "README.md", "see [the walk](docs/gone.md)\n"),
    (check_links, "README.md", "# Title\nsee [below](#no-such-heading)\n"),
    (check_links, "docs/bad.md", "![curve](loss.png)\n"),
    (check_links, "docs/bad.md", "`csrc/engine/gone.cc` does it\n"),
]


@pytest.mark.parametrize(
    ("check", "name", "text"), PLANTED, ids=lambda value: getattr(value, "__name__", None) or ""
)
def test_a_planted_violation_is_found(check: Check, name: str, text: str, tmp_path: Path) -> None:
    found = check(plant(tmp_path, {name: text}))
    assert len(found) >= 1 and all(line.startswith(name) for line in found)


def test_what_is_allowed_is_not_reported(tmp_path: Path) -> None:
    allowed = {
        "csrc/engine/good.cc": "// exit() is a word\nop.exit(1); bool on_exit(int);\n#if A\n",
        "uccl_ep_train/settings/env.py": "import os\nos.environ['X']\n",
        "csrc/engine/long.cc": f"namespace n {{\nstruct S {{\n{_BODY}{_BODY}}};\n}}\n",
        "csrc/backend/gpu/good.cuh": "// f breaks the rule of lines because calls cost 9 registers.\n"
        "// f breaks the rule of parameters because a struct costs 3 % of time.\n"
        f"__device__ int f({_SEVEN}) {{\n{_BODY}}}\n",
        "csrc/engine/six.cc": "template <int A, int B>\n"
        "int f(int a, M<int, int> b, int c, int d, int e, int g) {"
        "  if (h(a, b, c, d, e, g, 7)) {\n  }\n  h(1, 2, 3, 4, 5, 6, [&] { return 7; });\n}\n",
        "recipes/long.py": f"class C:\n{_BODY}{_BODY}",
        "tests/good.py": "import os\nos.environ['X']\n",
        "recipes/good.py": f"# {EXCUSE} it is a table.\n" + _LONG,
        "README.md": "# A (marked) title\n[up](#a-marked-title) [docs](docs/good.md) [w](https://example.com/x)\n",
        "docs/good.md": "```\n[not a link](gone.md)\n```\n`csrc/engine/good.cc`, http://x.y/work/\n",
    }
    plant(tmp_path, allowed)
    assert [line for check in CHECKS for line in check(tmp_path)] == []
