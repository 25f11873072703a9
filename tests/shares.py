"""How the tests share a machine: which run by themselves, and which beside each other.

Most tests wait more than they compute, so a few processes run them beside each other (`--dist loadgroup` of
pytest-xdist). Two kinds run one by one. What watches the clock, descriptors or network namespaces is marked
`waits`: it hardly computes, and goes before all others. Training is marked `trains`: it takes all cores.
"""

from __future__ import annotations

from pathlib import PurePosixPath

# Files or folders below tests/.
WAITS = (
    "fault",
    "hosts",
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
TRAINS = ("megatron",)
# Programs of tests/native.
WAITING_PROGRAMS = ("copier", "fault", "life", "ofi_fault", "pause_engine", "verbs_event")


def mark_of(path: PurePosixPath, program: str | None) -> str | None:
    """path: of the test's file, below tests/; program: of a native claim. None: it runs beside others."""
    names = {str(path), *map(str, path.parents)}
    if program in WAITING_PROGRAMS or not names.isdisjoint(WAITS):
        return "waits"
    return None if names.isdisjoint(TRAINS) else "trains"


def group_of(path: PurePosixPath, program: str | None) -> str:
    """Tests of a group run in one process, in order: they share what one of them has built."""
    return f"{path}:{program}" if program else str(path)
