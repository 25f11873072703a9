"""Calls of the C interface that have to be refused: `python tests/c_api/refusals_rank.py LIBRARY HEADER`.

Each pointer of each function is NULL once, while the others are right. A call that one of two ranks refuses
is an error of both, also where the refused pointer is that of the result. Settings of a group that are not
allowed are named, with their value. A rank that refuses a creation tells those that wait for it.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.c_api.ctypes_rank import (
    FP32,
    AllGather,
    CombineArgs,
    DispatchArgs,
    GroupConfig,
    Output,
    Routing,
    Sizes,
    all_gather_over,
    run_ranks,
)

OK, CONFIG_ERROR, INPUT_ERROR, DTYPE_ERROR, RANK_MISMATCH, PEER_FAILED = 0, 16, 18, 19, 37, 39
HIDDEN, TOKENS = 128, 4
X = (ctypes.c_float * (TOKENS * HIDDEN))()
IDX = (ctypes.c_int64 * TOKENS)(*(t % 2 for t in range(TOKENS)))
ROWS = ctypes.create_string_buffer(1 << 20)
TIMEOUT = ctypes.c_uint64(20_000_000)
HANDLES = {"group": "uccl_ep_group", "plan": "uccl_ep_plan", "op": "uccl_ep_op"}
MAY_BE_NULL = {
    ("uccl_ep_group_destroy", "group"),
    ("uccl_ep_plan_destroy", "plan"),
    ("uccl_ep_op_destroy", "op"),
    ("uccl_ep_is_done", "op"),
    ("uccl_ep_wait", "stream"),
    ("uccl_ep_group_stats", "stats"),
}
"""`stats` with a capacity of 0, as here."""


class Core:
    def __init__(self, library: str) -> None:
        self.calls = ctypes.CDLL(library)
        self.calls.uccl_ep_error_text.restype = ctypes.c_char_p

    def text(self) -> str:
        return self.calls.uccl_ep_error_text().decode()

    def good(self, name: str, *arguments: Any) -> None:
        status = getattr(self.calls, name)(*arguments)
        assert status == OK, (name, status, self.text())


def gather_alone(_: object, mine: int, num_bytes: int, gathered: int, step: bytes) -> int:
    ctypes.memmove(gathered, mine, num_bytes)
    return 0


ALONE = AllGather(gather_alone)


def config_alone(**more: object) -> GroupConfig:
    return GroupConfig(
        num_ranks=1, num_experts=2, hidden=HIDDEN, budget_bytes=64 << 20, all_gather=ALONE, **more
    )


def routing() -> Routing:
    return Routing(width=1, data=ctypes.addressof(IDX), num_tokens=TOKENS)


def rows_of_x() -> DispatchArgs:
    return DispatchArgs(hidden=HIDDEN, x=ctypes.addressof(X), dtype=FP32)


def parameters(header: str) -> dict[str, list[tuple[str, str]]]:
    """(type, name) of the parameters of each function."""
    found = {}
    for name, given in re.findall(r"UCCL_EP_API [\w* ]*?\b(uccl_ep_\w+)\(([^)]*)\)", header):
        words = [] if given == "void" else [" ".join(word.split()) for word in given.split(",")]
        pairs = [re.fullmatch(r"(.*?)(\w+)", word) for word in words]
        found[name] = [(pair[1].strip(), pair[2]) for pair in pairs if pair is not None]
    assert len(found) > 10
    return found


def right_values(core: Core) -> dict[str, Any]:
    """What is right for a parameter, by its type and name; handles are those of an operation under way."""
    byref, group, plan, op = ctypes.byref, ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    core.good("uccl_ep_group_create", byref(config_alone()), byref(group))
    core.good("uccl_ep_plan_create", group, byref(routing()), byref(plan))
    core.good("uccl_ep_dispatch", plan, byref(rows_of_x()), byref(op))
    return {
        "uccl_ep_group* group": group,
        "uccl_ep_plan* plan": plan,
        "uccl_ep_op* op": op,
        "uccl_ep_group_config* config": config_alone(),
        "uccl_ep_routing* routing": routing(),
        "uccl_ep_dispatch_args* args": rows_of_x(),
        "uccl_ep_combine_args* args": CombineArgs(hidden=HIDDEN, dtype=FP32),
        "uccl_ep_sizes* sizes": Sizes(),
        "uccl_ep_output* output": Output(rows=ctypes.addressof(ROWS)),
        "uccl_ep_stat* stats": ctypes.create_string_buffer(64),
        "size_t* num_stats": ctypes.c_size_t(),
        "size_t capacity": 0,
        "void* stream": None,
        "uint64_t timeout_us": TIMEOUT,
        "int abort": 1,
        **{f"{kind}** {name}": ctypes.c_void_p() for name, kind in HANDLES.items()},
    }


def passed(value: Any) -> Any:
    is_handle = value is None or isinstance(value, int | ctypes.c_uint64)
    return value if is_handle else ctypes.byref(value)


def arguments(given: list[tuple[str, str]], values: Mapping[str, Any], null: str) -> list[Any]:
    """Of a call, with NULL for the parameter of that name."""
    made = []
    for kind, name in given:
        value = values[f"{kind.removeprefix('const ')} {name}"]
        of_handle = kind.endswith("*") and not kind.endswith("**") and name in HANDLES
        made.append(None if name == null else value if of_handle else passed(value))
    return made


def each_pointer_is_null_once(core: Core, header: str) -> int:
    count = 0
    values = right_values(core)
    for function, given in parameters(header).items():
        for kind, null in given:
            if not kind.endswith("*"):
                continue
            count += 1
            status = getattr(core.calls, function)(*arguments(given, values, null))
            if (function, null) in MAY_BE_NULL:
                continue
            assert status == INPUT_ERROR, (function, null, status)
            assert f"{null} is NULL" in core.text(), (function, null, core.text())
    core.calls.uccl_ep_op_destroy(values["uccl_ep_op* op"])
    core.calls.uccl_ep_plan_destroy(values["uccl_ep_plan* plan"])
    core.calls.uccl_ep_group_destroy(values["uccl_ep_group* group"], 1)
    return count


def settings_are_named(core: Core) -> None:
    for name, value, shown in (
        ("transport", b"bogus", "transport = 'bogus': allowed is auto | "),
        ("transport", b"\xff\xfe" + b"x" * 500, "transport = '??xxx"),
        ("arrival_timeout_s", -1.0, "arrival_timeout_s = -1: allowed is more than 0, at most 10^6 seconds"),
        ("arrival_timeout_s", float("nan"), "arrival_timeout_s = "),
        ("progress_timeout_s", float("inf"), "progress_timeout_s = inf"),
        ("progress_timeout_s", 1e300, "progress_timeout_s = 1e+300"),
    ):
        group = ctypes.c_void_p()
        config = config_alone(**{name: value})
        status = core.calls.uccl_ep_group_create(ctypes.byref(config), ctypes.byref(group))
        assert status == CONFIG_ERROR and shown in core.text(), (name, value, status, core.text())


def one_of_two_refuses(library: str, rank: int, peer: Connection) -> None:
    """Rank 0 gives no place for the operation, and calls again."""
    core, byref = Core(library), ctypes.byref
    group, plan, op = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    config = GroupConfig(rank=rank, num_ranks=2, num_experts=2, hidden=HIDDEN, budget_bytes=64 << 20)
    config.all_gather = all_gather_over(peer, rank)
    core.good("uccl_ep_group_create", byref(config), byref(group))
    core.good("uccl_ep_plan_create", group, byref(routing()), byref(plan))
    if rank == 0:
        assert core.calls.uccl_ep_dispatch(plan, byref(rows_of_x()), None) == INPUT_ERROR
        assert "op is NULL" in core.text()
    sizes = Sizes()
    status = core.calls.uccl_ep_dispatch(plan, byref(rows_of_x()), byref(op))
    if status == OK:
        status = core.calls.uccl_ep_counts(op, TIMEOUT, byref(sizes))
    assert status == RANK_MISMATCH and "op is NULL" in core.text(), (rank, status, core.text())
    core.calls.uccl_ep_op_destroy(op)
    core.calls.uccl_ep_plan_destroy(plan)
    core.calls.uccl_ep_group_destroy(group, 1)


WRONG = {
    "rank": (1 << 20, "rank = 1048576: allowed are up to 65536"),
    "widest": (9, "widest = 9: allowed is 1 to 2"),
    "group": (None, "group is NULL"),
}
"""Settings that make one rank refuse the creation, and what it says."""


def one_of_two_creates_nothing(library: str, rank: int, peer: Connection) -> None:
    """Rank 1 refuses each creation; rank 0, which waits for it in its all-gather, learns why."""
    core, byref = Core(library), ctypes.byref
    for name, (value, text) in WRONG.items():
        group = ctypes.c_void_p()
        config = GroupConfig(rank=rank, num_ranks=2, num_experts=2, hidden=HIDDEN, budget_bytes=64 << 20)
        config.all_gather = all_gather_over(peer, rank)
        place: Any = byref(group)
        if rank == 1 and name == "group":
            place = None
        elif rank == 1:
            setattr(config, name, value)
        status, said = core.calls.uccl_ep_group_create(byref(config), place), core.text()
        if rank == 1:
            assert status in (CONFIG_ERROR, INPUT_ERROR, DTYPE_ERROR) and text in said, (name, status, said)
        else:
            assert status == PEER_FAILED and "rank 1 failed with" in said, (name, status, said)
            assert text in said, (name, said)


def main() -> None:
    library, header = sys.argv[1], Path(sys.argv[2]).read_text()
    core = Core(library)
    settings_are_named(core)
    count = each_pointer_is_null_once(core, header)
    run_ranks(one_of_two_refuses)
    run_ranks(one_of_two_creates_nothing)
    print(f"{count} pointers were NULL, all is refused")


if __name__ == "__main__":
    main()
