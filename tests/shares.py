"""How the tests share a machine: which run beside others, and which need it for themselves.

Most tests wait more than they compute, so a few processes run them side by side (`--dist loadgroup` of
pytest-xdist). What watches the clock, /dev/shm, descriptors or network namespaces runs alone, afterwards. So
does training, whose ranks take all cores.
"""

from __future__ import annotations

from pathlib import PurePosixPath

# Files or folders below tests/.
ALONE = (
    "fault",
    "hosts",
    "megatron",
    *(
        f"unit/test_{name}.py"
        for name in (
            *(
                "bootstrap",
                "buffers",
                "compile",
                "creation",
                "destroyed_groups",
                "doctor_ranks",
                "ends",
                "explain",
            ),
            *("launch_examples", "leftovers", "lifecycle", "limits", "monitor", "soft_roce", "topology"),
        )
    ),
)
# Programs of tests/native.
ALONE_PROGRAMS = ("copier", "fault", "life", "ofi_fault", "pause_engine", "verbs_event")


def is_alone(path: PurePosixPath, program: str | None) -> bool:
    """path: of the test's file, below tests/; program: of a native claim."""
    names = {str(path), *map(str, path.parents)}
    return program in ALONE_PROGRAMS or not names.isdisjoint(ALONE)


def group_of(path: PurePosixPath, program: str | None) -> str:
    """Tests of a group run in one process, in order: they share what one of them has built."""
    return f"{path}:{program}" if program else str(path)
