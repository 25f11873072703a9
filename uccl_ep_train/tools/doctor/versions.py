"""Check `versions`: what is installed on each rank, and whether it is the same on all."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import uccl_ep_train
from uccl_ep_train.core import cuda
from uccl_ep_train.core.native import load_native
from uccl_ep_train.errors import NativeMissingError
from uccl_ep_train.tools.doctor.findings import (
    WARNING,
    Facts,
    Finding,
    Group,
    Said,
    each,
    equal,
    fine,
    fix,
    warning,
)
from uccl_ep_train.tools.doctor.session import Here, Options

NAME = "versions"
_DRIVER = Path("/proc/driver/nvidia/version")
_INSTALL = "install one and the same environment on all hosts, or use one image"

# (fact, in words): facts that must be equal on all ranks.
_MUST_AGREE = (
    ("package", "the version of uccl_ep_train"),
    ("with_cuda", "whether the extension was built with nvcc"),
    ("torch", "the version of torch"),
    ("megatron", "the version of megatron-core"),
    ("engine", "the version of TransformerEngine"),
)
_SHOULD_AGREE = (
    ("python", "the version of Python"),
    ("driver", "the version of the GPU driver"),
    ("digest", "the bytes of the extension, which may come from other sources"),
)


def look(_: Here) -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "driver": driver(),
        "megatron": _installed("megatron-core"),
        "engine": _installed("transformer-engine"),
        "package": uccl_ep_train.__version__,
        "native": "",
    }
    try:
        core = load_native()
    except NativeMissingError as error:
        return facts | {"native": str(error)}
    return facts | {
        "with_cuda": cuda.built(),
        "digest": hashlib.sha256(Path(str(core.__file__)).read_bytes()).hexdigest()[:12],
    }


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def driver(path: Path = _DRIVER) -> str:
    """Of NVIDIA's kernel module; "" where there is none."""
    try:
        found = re.search(r"\d+\.\d+(\.\d+)?", path.read_text())
    except OSError:
        return ""
    return found.group() if found else ""


def judge(_: Group, facts: Mapping[int, Facts], options: Options) -> list[Finding]:
    found = each(NAME, facts, lambda _, seen: _of_rank(seen))
    built = {rank: seen for rank, seen in facts.items() if not seen["native"]}
    for name, what in _MUST_AGREE:
        found += equal(NAME, built, name, what, _INSTALL)
    for name, what in _SHOULD_AGREE:
        found += equal(NAME, built, name, what, _INSTALL, WARNING)
    return found


def _of_rank(seen: Facts) -> list[Said]:
    if seen["native"]:
        return [fix(seen["native"], "without the extension nothing of this package works on that host")]
    gpu = f", CUDA {seen['cuda']}" if seen["cuda"] else ", without CUDA"
    gpu += f", driver {seen['driver']}" if seen["driver"] else ""
    backends = "host and CUDA" if seen["with_cuda"] else "host only"
    trainers = ", ".join(
        f"{name} {seen[key] or 'absent'}"
        for name, key in (("megatron-core", "megatron"), ("TransformerEngine", "engine"))
    )
    said = [
        fine(f"Python {seen['python']}, torch {seen['torch']}{gpu}; {trainers}"),
        fine(f"uccl_ep_train {seen['package']}, extension {seen['digest']}: backends {backends}"),
    ]
    if not seen["megatron"]:
        said.append(
            warning(
                "megatron-core is not installed",
                "pip install 'uccl_ep_train[megatron]', unless only Buffer is used",
            )
        )
    return said
