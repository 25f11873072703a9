"""Whether a build compiles fast enough: python -m tests.compile_time LIMIT COMMAND [ARGUMENT ...]

COMMAND builds. LIMIT is the processor time that it may take, as a multiple of what `YARDSTICK` takes.
This text is compiled now and then while COMMAND runs. So the verdict depends neither on the number of cores
nor on their speed, which changes on shared machines: two cores took 159 s or 360 s for the same kernels.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAUSE_S = 30.0
# The standard library alone, so that it changes with no source of ours.
YARDSTICK = """
#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <regex>
#include <string>
#include <vector>
template <int kNumber>
struct Part {
  std::map<std::string, std::vector<std::function<int(const std::string&)>>> all;
  int run(const std::string& text) {
    std::regex pattern("([a-z]+)" + std::to_string(kNumber) + "(.*)");
    std::smatch match;
    if (!std::regex_match(text, match, pattern)) return kNumber;
    std::vector<std::pair<int, std::string>> found;
    for (auto& [name, calls] : all)
      for (auto& call : calls) found.emplace_back(call(name) % (kNumber + 2), name);
    std::sort(found.begin(), found.end());
    std::mt19937_64 random(kNumber);
    std::shuffle(found.begin(), found.end(), random);
    return found.empty() ? 0 : found.front().first + Part<kNumber - 1>().run(found.front().second);
  }
};
template <>
struct Part<0> {
  int run(const std::string& text) { return static_cast<int>(text.size()); }
};
int main(int argc, char** argv) { return Part<12>().run(argv[argc - 1]); }
"""


class Yardstick:
    """Compiles it every `PAUSE_S` while it is entered. `seconds`: the processor time, on average."""

    def __init__(self) -> None:
        self._samples: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> Yardstick:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def seconds(self) -> float:
        return statistics.mean(self._samples)

    def _sample(self) -> None:
        while True:
            self._samples.append(compile_once())
            if self._ended.wait(PAUSE_S):
                return


def compile_once() -> float:
    """Processor seconds that the yardstick takes."""
    command = ["g++", "-std=c++20", "-O2", "-x", "c++", "-c", "-", "-o", os.devnull]
    compiler = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    assert compiler.stdin is not None
    with compiler.stdin as source:
        source.write(YARDSTICK)
    _, status, used = os.wait4(compiler.pid, 0)
    compiler.returncode = os.waitstatus_to_exitcode(status)
    if compiler.returncode != 0:
        raise subprocess.CalledProcessError(compiler.returncode, command)
    return used.ru_utime + used.ru_stime


def newest_report() -> dict[str, Any]:
    """What setup.py noted of the last build without a sanitizer."""
    found = [path for path in ROOT.glob("build/objects-*-werror*/*.json") if is_plain(path.parent.name)]
    report: dict[str, Any] = json.loads(max(found, key=lambda path: path.stat().st_mtime).read_text())
    return report


def is_plain(folder: str) -> bool:
    return not folder.endswith(("-address", "-undefined", "-thread"))


def verdict(report: dict[str, Any], yardstick_s: float, limit: float) -> tuple[bool, str]:
    """Whether it is within the limit, and a line that says so.

    yardstick_s: what the yardstick took meanwhile, in processor seconds
    """
    needed = report["cpu_s"] / yardstick_s
    text = (
        f"{needed:.1f} yardsticks, allowed are {limit:.1f} ({report['cpu_s']:.0f} s of processors, "
        f"yardstick {yardstick_s:.2f} s; {report['wall_s']:.0f} s by the clock)"
    )
    if report["compiled"] < report["units"] or report["shared"]:
        return False, (
            f"{text}: {report['compiled']} of {report['units']} units were compiled, and {report['shared']} "
            "that other builds share; it has to be all of the former, and none of the latter"
        )
    return needed <= limit, text


def main(limit: float, command: list[str]) -> int:
    with Yardstick() as yardstick:
        built = subprocess.run(command, check=False)
    if built.returncode != 0:
        print(f"[ci] {'compile time':26} FAILED: exit code {built.returncode} of {' '.join(command)}")
        return built.returncode
    good, text = verdict(newest_report(), yardstick.seconds, limit)
    print(f"[ci] {'compile time':26} {'ok' if good else 'FAILED'}: {text}")
    return not good


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
