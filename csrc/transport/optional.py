"""Which transports can be compiled here: a folder is left out where its library's header is not installed."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True)
class Needs:
    header: str
    package: str  # that brings the header, on Debian
    elsewhere: tuple[str, ...] = ()  # where vendors put it


NEEDS = {
    "ofi": Needs(header="rdma/fabric.h", package="libfabric-dev", elsewhere=("/opt/amazon/efa/include",)),
    "verbs": Needs(header="infiniband/verbs.h", package="libibverbs-dev"),
}


@dataclass(frozen=True, kw_only=True)
class Transports:
    missing: dict[str, str]  # folder -> why it is not compiled
    include_dirs: tuple[str, ...]  # beyond the compiler's own

    def compiles(self, source: Path) -> bool:
        """False for a source in the folder of a transport that is left out."""
        return source.parent.name not in self.missing


def find_transports(compiler: str) -> Transports:
    """Asks the compiler for each header. A folder that does not exist needs nothing."""
    missing, include_dirs = {}, []
    for name, needs in NEEDS.items():
        if not (HERE / name).is_dir() or _finds(compiler, needs.header):
            continue
        found = [place for place in needs.elsewhere if (Path(place) / needs.header).is_file()]
        if found:
            include_dirs.append(found[0])
        else:
            missing[name] = f"{needs.header} is not installed ({needs.package})"
    return Transports(missing=missing, include_dirs=tuple(include_dirs))


def text(found: Transports) -> str:
    """One line for whoever builds."""
    there = sorted({path.parent.name for path in HERE.glob("*/*.cc")} - {"cuda"} - set(found.missing))
    without = "".join(f"; no {name}: {why}" for name, why in sorted(found.missing.items()))
    return f"transports {', '.join(there)} are built{without}"


def _finds(compiler: str, header: str) -> bool:
    command = [compiler, "-E", "-x", "c++", "-o", "/dev/null", "-"]
    source = f"#include <{header}>\n"
    return subprocess.run(command, input=source, text=True, capture_output=True, check=False).returncode == 0
