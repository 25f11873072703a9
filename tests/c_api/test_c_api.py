"""The C interface, by programs that know nothing else of the library."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from uccl_ep_train.tools import c_interface

HERE = Path(__file__).resolve().parent
HEADER = c_interface.PACKAGE / "include" / "uccl_ep.h"

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler (cc)")


def run(*command: str | Path, timeout: float = 110) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=timeout, check=False
    )


def compiled(source: Path, binary: Path, *more: str) -> Path:
    warnings = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror")
    words = [*c_interface.cflags(), *c_interface.libs(), "-lpthread"]
    done = run("cc", *warnings, source, *more, "-o", binary, *words)
    assert done.returncode == 0, done.stderr
    return binary


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(HERE / "ranks.c", tmp_path_factory.mktemp("c_api") / "ranks")


# Ranks, domains (0: they find each other), tokens of a rank.
@pytest.mark.parametrize("given", [(2, 0, 50), (3, 2, 70), (1, 0, 9), (4, 4, 20), (2, 2, 0)])
def test_ranks_in_c_dispatch_combine_and_get_errors(ranks: Path, given: tuple[int, int, int]) -> None:
    done = run(ranks, *map(str, given))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{given[0]} ranks, all values are right\n"


@pytest.mark.parametrize("domains", [1, 3])
def test_the_death_of_a_rank_is_an_error_of_the_others(ranks: Path, domains: int) -> None:
    done = run(ranks, "3", str(domains), "40", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3 ranks, all values are right\n"


def test_a_wrong_value_is_found(tmp_path: Path) -> None:
    """Control: a program that expects other sums."""
    text = (HERE / "ranks.c").read_text()
    right = "experts * value_of(seat->rank, t, h)"
    assert text.count(right) == 1
    (tmp_path / "ranks.c").write_text(text.replace(right, right + " + 1"))
    done = run(compiled(tmp_path / "ranks.c", tmp_path / "ranks"), "2")
    assert done.returncode == 1 and "is not so" in done.stderr


def test_a_program_without_torch_calls_it_through_ctypes() -> None:
    done = run(sys.executable, HERE / "ctypes_rank.py", c_interface.LIBRARY)
    assert done.returncode == 0, done.stderr
    assert "all values are right" in done.stdout


def test_the_library_has_the_header_s_functions_and_no_others() -> None:
    declared = set(re.findall(r"UCCL_EP_API [\w* ]*?\b(uccl_ep_\w+)\(", HEADER.read_text()))
    listed = run("nm", "-D", "--defined-only", c_interface.LIBRARY)
    if listed.returncode != 0:
        pytest.skip(f"nm: {listed.stderr}")
    exported = {line.split()[-1] for line in listed.stdout.splitlines() if " T " in line}
    assert len(declared) > 10 and exported == declared


def test_the_header_is_the_one_of_the_sources_and_of_cxx_too(tmp_path: Path) -> None:
    assert HEADER.read_text() == (HERE.parents[1] / "csrc" / "c_api" / "uccl_ep.h").read_text()
    (tmp_path / "one.cc").write_text(
        '#include "uccl_ep.h"\n'
        "int main() { uccl_ep_sizes s = UCCL_EP_INIT(uccl_ep_sizes); return s.num_rows != 0; }\n"
    )
    done = run(
        "c++", "-std=c++20", "-Wall", "-Werror", *c_interface.cflags(), "-fsyntax-only", tmp_path / "one.cc"
    )
    assert done.returncode == 0, done.stderr


STRICT = (
    "-Wall",
    "-Wextra",
    "-Wpedantic",
    "-Wmissing-field-initializers",
    "-Wshadow",
    "-Wconversion",
    "-Werror",
)
STRICT_CXX = ("-Wold-style-cast", "-Wuseless-cast", "-Wzero-as-null-pointer-constant")


@pytest.mark.parametrize("standard", ["c99", "c11", "c++11", "c++17", "c++20"])
def test_the_header_causes_no_warning(tmp_path: Path, standard: str) -> None:
    is_cxx = standard.startswith("c++")
    source = tmp_path / ("one.cc" if is_cxx else "one.c")
    structs = re.findall(r"^} (uccl_ep_\w+);", HEADER.read_text(), re.MULTILINE)
    named = [name for name in structs if name not in ("uccl_ep_status", "uccl_ep_dtype", "uccl_ep_stat")]
    assert len(named) == 6
    lines = [f"  {name} s{i} = UCCL_EP_INIT({name});\n  sum += s{i}.size;\n" for i, name in enumerate(named)]
    source.write_text(
        '#include "uccl_ep.h"\nint main(void) {\n  size_t sum = 0;\n'
        + "".join(lines)
        + "  return sum == 0;\n}\n"
    )
    command = ("c++", *STRICT_CXX) if is_cxx else ("cc", "-Wstrict-prototypes")
    done = run(*command, *STRICT, f"-std={standard}", *c_interface.cflags(), "-fsyntax-only", source)
    assert done.returncode == 0, done.stderr


def test_what_cannot_be_right_is_refused_and_counted() -> None:
    done = run(sys.executable, HERE / "refusals_rank.py", c_interface.LIBRARY, HEADER)
    assert done.returncode == 0, done.stderr
    assert "pointers were NULL, all is refused" in done.stdout


def test_pkg_config_knows_it() -> None:
    if shutil.which("pkg-config") is None:
        pytest.skip("pkg-config is not installed")
    folder = c_interface.LIBRARY.parent / "pkgconfig"
    done = run("env", f"PKG_CONFIG_PATH={folder}", "pkg-config", "--cflags", "--libs", "uccl_ep")
    assert done.returncode == 0, done.stderr
    flags = {str(Path(word[2:]).resolve()) for word in done.stdout.split() if word[:2] in ("-I", "-L")}
    assert flags == {str(HEADER.parent), str(c_interface.LIBRARY.parent)}


def test_the_tool_says_what_a_compiler_needs() -> None:
    module = "uccl_ep_train.tools.c_interface"
    assert run(sys.executable, "-m", module).stdout == f"{c_interface.LIBRARY.parent / 'pkgconfig'}\n"
    said = run(sys.executable, "-m", module, "--cflags", "--libs").stdout.split()
    assert said == [*c_interface.cflags(), *c_interface.libs()]


def test_paths_with_spaces_are_quoted_for_a_shell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    library = tmp_path / "with space" / "lib" / "libuccl_ep.so"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setattr(c_interface, "PACKAGE", library.parents[1])
    monkeypatch.setattr(c_interface, "LIBRARY", library)
    monkeypatch.setattr(sys, "argv", ["c_interface", "--cflags", "--libs"])
    c_interface.main()
    assert shlex.split(capsys.readouterr().out) == [*c_interface.cflags(), *c_interface.libs()]


@pytest.mark.parametrize("seed", [1, 2])
def test_drawn_values_are_errors_with_a_text_or_work(seed: int) -> None:
    """No call crashes or hangs, and a right one afterwards has right results."""
    done = run(sys.executable, HERE / "fuzz_rank.py", c_interface.LIBRARY, str(seed), "1000")
    assert done.returncode == 0, done.stderr
    statuses = {line.split()[-1] for line in done.stdout.splitlines()}
    assert "0" in statuses and len(statuses) >= 4, done.stdout
