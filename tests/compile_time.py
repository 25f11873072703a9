"""Whether the default build compiles fast enough: python -m tests.compile_time LIMIT

LIMIT is in seconds on two cores. What two cores need is half the processor time. Unlike the time by the clock
it does not depend on how many cores there are here. What else they do adds up to a half.
For CI, after its build.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def newest_report() -> dict[str, Any]:
    """What setup.py noted of the last build without a sanitizer."""
    found = [path for path in ROOT.glob("build/objects-*-werror*/*.json") if is_plain(path.parent.name)]
    report: dict[str, Any] = json.loads(max(found, key=lambda path: path.stat().st_mtime).read_text())
    return report


def is_plain(folder: str) -> bool:
    return not folder.endswith(("-address", "-undefined", "-thread"))


def verdict(report: dict[str, Any], limit_s: float) -> tuple[bool, str]:
    """Whether it is within the limit, and a line that says so."""
    needed_s = report["cpu_s"] / 2
    text = (
        f"{needed_s:.0f} s on two cores, allowed are {limit_s:.0f} (here {report['wall_s']:.0f} s, "
        f"{report['compiled']} of {report['units']} units)"
    )
    if report["compiled"] < report["units"]:
        return False, f"{text}: this was not the whole build"
    return needed_s <= limit_s, text


if __name__ == "__main__":
    good, text = verdict(newest_report(), float(sys.argv[1]))
    print(f"[ci] {'compile time':26} {'ok' if good else 'FAILED'}: {text}")
    sys.exit(not good)
