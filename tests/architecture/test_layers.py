"""Who may include and import whom. Each check is also shown to find a planted violation."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.earlier_paths import HOMES as HOMES_OF_RECIPES
from tests.architecture.tree import CPP, ROOT, Check, cpp_code, matches, plant, project_files
from uccl_ep_train.earlier_paths import HOMES

# An #include may only point down this list, or stay in its folder.
LAYERS = ["bindings", "c_api", "engine", "proxy", "transport", "backend", "queue", "sync", "device", "layout"]
LAYERS += ["common"]
# The layer of a vendor's GPUs; its folder is on the include path.
DEVICE = ("gpu", "cuda")
# The folder of a layer that lies below its other folders.
LOWEST = {"engine": "group"}

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_TORCH = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"](?:torch|ATen|c10)/[^>"]*[>"]', re.MULTILINE)
_NIC = re.compile(r"^[ \t]*#.*include[ \t(]*[<\"](?:infiniband|rdma)/[^>\"]*[>\"]", re.MULTILINE)
_ATOMIC = re.compile(
    r"std::atomic\w*|std::memory_order\w*|#[ \t]*include[ \t]*<(?:std)?atomic(?:\.h)?>"
    r"|cuda::(?:std::)?atomic\w*|\b__(?:atomic|sync)_\w+|\batomic(?:Add|CAS|Exch|Or|And|Max|Min|Inc|Dec|Sub|Xor)\w*"
)

_VENDOR = re.compile(
    r"\b(?:cuda|hip)[A-Z_]\w*|<(?:cuda|hip)|\bcu[A-Z]\w*|\bCUDART\w*|\bCUDA_\w+|\bCU_\w+"
    r"|\b__(?:CUDA|HIP|nv|hip|AMD)\w*|\basm\b|<<<"
    r"|\b__(?:ldc[gsv]|nanosleep|v(?:max|min)[us][24]|reduce_\w+_sync|cvta\w*|h[a-z]+2)\b"
)

# --------------------------------------------------------------------------------------- C++


def check_includes(root: Path) -> list[str]:
    """Quoted includes name existing files, seen from csrc/, and point down the list or stay in place."""
    found = []
    csrc = root / "csrc"
    for path in project_files(root, *CPP, under="csrc"):
        own = path.relative_to(csrc).parts
        own = own[len(DEVICE) :] if own[: len(DEVICE)] == DEVICE else own
        for match in _INCLUDE.finditer(path.read_text()):
            target = tuple(match.group(1).split("/"))
            problem = _include_problem(csrc, own, target)
            if problem:
                found.append(f'{path.relative_to(root)}: #include "{match.group(1)}": {problem}')
    return found


def _include_problem(csrc: Path, own: tuple[str, ...], target: tuple[str, ...]) -> str:
    if not csrc.joinpath(*(DEVICE if target[0] == "device" else ()), *target).is_file():
        return "no such file, seen from csrc/ or the device layer"
    if own[0] not in LAYERS or target[0] not in LAYERS:
        return f"csrc/ has the layers {' '.join(LAYERS)} and no others"
    if LAYERS.index(target[0]) < LAYERS.index(own[0]):
        return f"{own[0]} lies below {target[0]}"
    siblings = own[0] == target[0] and len(own) > 2 and len(target) > 2
    if siblings and target[1] not in (own[1], LOWEST.get(own[0])):
        return f"{own[1]} and {target[1]} are alternatives: what they share belongs in {own[0]}/ or below"
    return ""


def check_torch_headers(root: Path) -> list[str]:
    """The core is torch-free: one build works with several versions of torch."""
    return [
        line
        for path in project_files(root, *CPP, under="csrc")
        for line in matches(root, path, path.read_text(), _TORCH)
    ]


def check_nic_headers(root: Path) -> list[str]:
    """Every build has every transport: what is used of NICs' libraries is declared in csrc/transport."""
    return [
        line for path in project_files(root, *CPP) for line in matches(root, path, path.read_text(), _NIC)
    ]


def check_vendors(root: Path) -> list[str]:
    """A vendor's names, its compiler's words and its assembly are in the device layer alone."""
    return [
        line
        for path in project_files(root, *CPP, under="csrc")
        if not path.is_relative_to(root / "csrc" / "gpu")
        for line in matches(root, path, cpp_code(path.read_text()), _VENDOR)
    ]


def check_atomics(root: Path) -> list[str]:
    """Atomics live in csrc/sync, where each states who writes, who reads and what it publishes."""
    return [
        line
        for path in project_files(root, *CPP, under="csrc")
        if not path.is_relative_to(root / "csrc" / "sync")
        for line in matches(root, path, cpp_code(path.read_text()), _ATOMIC)
    ]


# ------------------------------------------------------------------------------------ Python

# An import may only point down this list, or stay in its folder. Folders of one line do not know each other.
PACKAGE: list[tuple[str, ...]] = [
    ("megatron", "deep_ep", "tools", "planner"),
    ("api",),
    ("group",),
    ("core",),
    ("oracle", "settings"),
    ("common",),
    ("errors", "earlier_paths"),
]
PACKAGES: dict[str, list[tuple[str, ...]]] = {
    "uccl_ep_train": PACKAGE,
    "recipes": [
        ("quality",),
        ("launch",),
        ("training",),
        ("measure",),
        ("plan",),
        ("models",),
        ("earlier_paths",),
    ],
}
FACES = {"recipes": ("RECIPES", "PRETRAININGS")}
"""What is imported from a package's face inside of it, too."""
EARLIER = {"uccl_ep_train": HOMES, "recipes": HOMES_OF_RECIPES}

# (folder or file, exempt folder, what it must not import, why)
IMPORT_RULES = [
    ("uccl_ep_train", "uccl_ep_train/megatron", ("megatron",), "it knows no trainer"),
    ("uccl_ep_train", "", ("recipes", "tests", "bench"), "a library knows no program that uses it"),
    (
        "uccl_ep_train",
        "uccl_ep_train/core",
        ("uccl_ep_train._native",),
        "the core is the only door to native code; the oracle judges that, and it raises what `errors` has",
    ),
    *(
        (f"uccl_ep_train/{folder}", "", ("uccl_ep_train.oracle",), "nothing that it judges relies on it")
        for folder in ("megatron", "api", "group", "core")
    ),
    (
        "uccl_ep_train/settings/env.py",
        "",
        ("uccl_ep_train.settings.config", "uccl_ep_train.errors"),
        "it is run before the package exists",
    ),
    (
        "uccl_ep_train/settings/variables.py",
        "",
        ("uccl_ep_train.settings.config",),
        "a configuration is made from what it says",
    ),
    ("recipes", "", ("tests", "bench"), "what users run does not need the tests"),
]


def check_packages(root: Path) -> list[str]:
    """Imports inside a package point down its list, by today's paths. Its face may import all."""
    found = []
    for package in PACKAGES:
        for path in project_files(root, ".py", under=package):
            own = path.relative_to(root / package).with_suffix("").parts[0]
            for line, module in imports_of(path, root):
                top, _, below = module.partition(".")
                if own == "__init__" or top != package or not below:
                    continue
                if problem := _import_problem(package, own, below.split(".")[0]):
                    found.append(f"{path.relative_to(root)}:{line}: imports {module}: {problem}")
    return found


def _import_problem(package: str, own: str, target: str) -> str:
    floors = {folder: floor for floor, folders in enumerate(PACKAGES[package]) for folder in folders}
    if own not in floors:
        return f"{package} has {' '.join(floors)} and nothing else"
    if target in ("_native", own, *FACES.get(package, ())):
        return ""
    if target not in floors:
        return "inside the package a name is imported from the module that defines it"
    if floors[target] < floors[own]:
        return f"{own} lies below {target}"
    return f"{own} and {target} do not know each other" if floors[target] == floors[own] else ""


def check_circles(root: Path) -> list[str]:
    """No file imports itself through others: neither when it is loaded, nor in a function, nor for types."""
    imported = {
        path: {root.joinpath(*module.split(".")).with_suffix(".py") for _, module in imports_of(path, root)}
        for package in PACKAGES
        for path in project_files(root, ".py", under=package)
        if path != root / PRINTS_WHAT_USES_IT
    }
    reached = {path: _reached(path, imported) for path in imported}
    return [
        f"{path.relative_to(root)}: imports itself through others"
        for path in imported
        # One line for a circle: of its first file.
        if path in reached[path]
        and path == min(other for other in reached[path] if path in reached.get(other, ()))
    ]


def _reached(path: Path, imported: dict[Path, set[Path]]) -> set[Path]:
    reached: set[Path] = set()
    waiting = [path]
    while waiting:
        new = imported.get(waiting.pop(), set()) - reached
        reached |= new
        waiting += new
    return reached


PRINTS_WHAT_USES_IT = "uccl_ep_train/settings/env.py"
"""Imports the table of variables only where it is run as a program."""


def check_earlier_paths(root: Path) -> list[str]:
    """Paths from before there were folders are for programs of others."""
    found = []
    for folder in (*EARLIER, "bench", "scripts", "tests"):
        for path in project_files(root, ".py", under=folder):
            for line, module in imports_of(path, root):
                package, _, name = module.partition(".")
                home = EARLIER.get(package, {}).get(name.split(".")[0])
                if home is not None:
                    found.append(f"{path.relative_to(root)}:{line}: imports {module}: now {home}")
    return found


def check_imports(root: Path) -> list[str]:
    """The rules above, also for imports inside functions and by name."""
    found = []
    for place, exempt, forbidden, why in IMPORT_RULES:
        for path in project_files(root, ".py", under=place):
            if exempt and path.is_relative_to(root / exempt):
                continue
            for line, module in imports_of(path, root):
                if any(module == name or module.startswith(name + ".") for name in forbidden):
                    found.append(f"{path.relative_to(root)}:{line}: imports {module}: {why}")
    return found


def imports_of(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of every import in the file; `from a import b` gives both a and a.b."""
    package = path.relative_to(root).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = ".".join(base + ([node.module] if node.module else []))
            yield node.lineno, module
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


# ------------------------------------------------------------------------------------ claims

CHECKS: list[Check] = [
    check_includes,
    check_torch_headers,
    check_nic_headers,
    check_vendors,
    check_atomics,
    check_packages,
    check_circles,
    check_earlier_paths,
    check_imports,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_project_keeps_its_layers(check: Check) -> None:
    assert check(ROOT) == []


_HEADERS = {
    "recipes/plan/traffic.py": "import recipes.plan.hardware\n",
    "csrc/common/units.h": "#pragma once\n",
    "csrc/transport/transport.h": '#include "common/units.h"\n',
    "csrc/transport/loop/loop.h": '#include "transport/transport.h"\n#include "transport/loop/loop.h"\n',
    "csrc/transport/verbs/verbs.h": "// std::atomic is only mentioned here\n",
    "csrc/gpu/cuda/device/words.cuh": '#include "common/units.h"\nasm volatile("");\n',
    "csrc/sync/device.cuh": '#include "device/words.cuh"\n// cudaStream_t is only mentioned here\n',
    "csrc/engine/group/group.h": '#include "transport/transport.h"\n',
    "csrc/engine/host/engine.h": '#include "engine/group/group.h"\n',
}

PLANTED: list[tuple[Check, str, str]] = [
    (check_includes, "csrc/common/bad.h", '#include "transport/transport.h"\n'),
    (check_includes, "csrc/transport/verbs/bad.cc", '#  include "transport/loop/loop.h"\n'),
    (check_includes, "csrc/engine/bad.cc", '#include "common/gone.h"\n'),
    (check_includes, "csrc/engine/group/bad.cc", '#include "engine/host/engine.h"\n'),
    (check_includes, "csrc/engine/gpu/bad.cc", '#include "engine/host/engine.h"\n'),
    (check_includes, "csrc/utils2/bad.cc", '#include "common/units.h"\n'),
    (check_torch_headers, "csrc/bindings/bad.cc", "#include <torch/extension.h>\n"),
    (check_torch_headers, "csrc/bindings/bad.cc", '#include "c10/core/Device.h"\n'),
    (check_nic_headers, "csrc/transport/verbs/bad.h", "#include <infiniband/verbs.h>\n"),
    (check_nic_headers, "tests/native/bad.cc", "#if __has_include(<rdma/fabric.h>)\n#endif\n"),
    (check_includes, "csrc/gpu/cuda/device/bad.h", '#include "sync/device.cuh"\n'),
    (check_includes, "csrc/backend/gpu/bad.cuh", '#include "device/gone.cuh"\n'),
    (check_includes, "csrc/backend/gpu/bad.cuh", '#include "gpu/cuda/device/words.cuh"\n'),
    (check_vendors, "csrc/engine/gpu/bad.cc", "cudaStream_t stream = nullptr;\n"),
    (check_vendors, "csrc/transport/gpu/bad.cc", "cuMemCreate(&handle, 1, &p, 0);\n"),
    (check_vendors, "csrc/backend/gpu/bad.cuh", '__device__ void f() { asm volatile("trap;"); }\n'),
    (check_vendors, "csrc/backend/gpu/bad.cuh", "#if __CUDA_ARCH__ >= 900\n#endif\n"),
    (check_vendors, "csrc/backend/gpu/bad.cuh", "__nv_bfloat162 two;\n"),
    (check_vendors, "csrc/backend/gpu/bad.cu", "kernel<<<1, 1>>>();\n"),
    (check_atomics, "csrc/queue/bad.h", "std::atomic<int> counter;\n"),
    (check_atomics, "csrc/queue/bad.h", "/* a\n */ __atomic_store_n(&x, 1, 0);\n"),
    (check_atomics, "csrc/backend/gpu/bad.cu", "atomicAdd(&x, 1);\n"),
    (check_imports, "uccl_ep_train/api/bad.py", "def f():\n    from megatron.core import parallel_state\n"),
    (
        check_imports,
        "uccl_ep_train/api/bad.py",
        "import importlib\nimportlib.import_module('recipes.launch')\n",
    ),
    (check_imports, "uccl_ep_train/megatron/bad.py", "import recipes\n"),
    (check_imports, "uccl_ep_train/errors.py", "from uccl_ep_train import _native\n"),
    (check_imports, "uccl_ep_train/oracle/plan.py", "import uccl_ep_train._native\n"),
    (check_imports, "uccl_ep_train/core/bad.py", "from uccl_ep_train.oracle.fp8 import BLOCK\n"),
    (check_imports, "uccl_ep_train/settings/env.py", "def f():\n    import uccl_ep_train.settings.config\n"),
    (check_imports, "uccl_ep_train/settings/variables.py", "from uccl_ep_train.settings import config\n"),
    (check_packages, "uccl_ep_train/bad.py", "import uccl_ep_train.errors\n"),
    (check_packages, "uccl_ep_train/utils/bad.py", "import uccl_ep_train.errors\n"),
    (check_packages, "uccl_ep_train/core/bad.py", "from ..group import domains\n"),
    (check_packages, "uccl_ep_train/api/bad.py", "from uccl_ep_train.megatron import flags\n"),
    (check_packages, "uccl_ep_train/api/bad.py", "def f():\n    from uccl_ep_train import megatron\n"),
    (check_packages, "uccl_ep_train/tools/bad.py", "from uccl_ep_train import Buffer\n"),
    (check_packages, "uccl_ep_train/oracle/plan.py", "from uccl_ep_train.core.native import load_native\n"),
    (check_packages, "uccl_ep_train/oracle/plan.py", "from uccl_ep_train.settings.env import read\n"),
    (check_packages, "recipes/bad.py", "import recipes.launch\n"),
    (check_packages, "recipes/models/bad.py", "from recipes.plan.jobs import Job\n"),
    (check_packages, "recipes/measure/bad.py", "from recipes import launch\n"),
    (check_circles, "recipes/plan/hardware.py", "def f():\n    from recipes.plan import traffic\n"),
    (check_earlier_paths, "bench/bad.py", "from recipes.settings import Recipe\n"),
    (check_earlier_paths, "recipes/bad.py", "from uccl_ep_train.engine import Buffer\n"),
    (check_earlier_paths, "tests/unit/bad.py", "def f():\n    from uccl_ep_train import cuda\n"),
    (check_imports, "recipes/bad.py", "import tests.harness\n"),
]


@pytest.mark.parametrize(
    ("check", "name", "text"), PLANTED, ids=lambda value: getattr(value, "__name__", None) or ""
)
def test_a_planted_violation_is_found(check: Check, name: str, text: str, tmp_path: Path) -> None:
    found = check(plant(tmp_path, _HEADERS | {name: text}))
    assert len(found) >= 1 and all(line.startswith(name) for line in found)


def test_what_is_allowed_is_not_reported(tmp_path: Path) -> None:
    allowed = _HEADERS | {
        "csrc/sync/flag.h": "#include <atomic>\nstd::atomic<int> x;\n",
        "csrc/engine/factory.cc": '#include "transport/loop/loop.h"\nconst char* text = "std::atomic";\n',
        "csrc/transport/factory.cc": '#include "transport/loop/loop.h"\n',
        "uccl_ep_train/__init__.py": "from uccl_ep_train.api.buffer import Buffer\n",
        "uccl_ep_train/megatron/plugin.py": "import megatron.core\nimport uccl_ep_train.api.buffer\n",
        "uccl_ep_train/core/native.py": "from uccl_ep_train import _native\nimport uccl_ep_train.errors\n",
        "uccl_ep_train/tools/doctor/dispatch.py": "from uccl_ep_train.oracle.reference import dispatch\n",
        "recipes/quality.py": "from recipes import RECIPES\nfrom recipes import launch\n",
        "recipes/launch.py": "import uccl_ep_train.megatron\nimport megatron.core\n",
    }
    plant(tmp_path, allowed)
    assert [line for check in CHECKS for line in check(tmp_path)] == []
