"""One rank that calls the C interface with drawn values: each call works, or returns an error with a text.

`python tests/c_api/fuzz_rank.py LIBRARY SEED CALLS`. Pointers are NULL or lead to enough memory, as C
programs have to see to; all other fields may be anything. Afterwards a right call still has right results.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections import Counter
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
)

HIDDEN, TOKENS, WIDTH, EXPERTS = 256, 8, 4, 4
OK, PENDING, FIRST_ERROR = 0, 1, 16
WORDS = (0, 1, 2, 3, 7, 128, 256, 384, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
SMALL = (0, 1, 2, 3, 4, 5, 9, 100)  # of what has to fit memory
MEMORY = ctypes.create_string_buffer(1 << 22)
PLACES = range(TOKENS * WIDTH)
ROUTED = (ctypes.c_int64 * (TOKENS * WIDTH))(*(-1 if i % 5 == 0 else i % WIDTH for i in PLACES))


def gather_alone(_: object, mine: int, num_bytes: int, gathered: int, step: bytes) -> int:
    ctypes.memmove(gathered, mine, num_bytes)
    return 0


ALONE = AllGather(gather_alone)


class Fuzz:
    """`good` makes a struct that works; `struct` one of which some fields are drawn."""

    def __init__(self, library: str, seed: int) -> None:
        self.core = ctypes.CDLL(library)
        self.core.uccl_ep_error_text.restype = ctypes.c_char_p
        self.random = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.group = ctypes.c_void_p()

    def call(self, name: str, *arguments: Any) -> int:
        status = int(getattr(self.core, name)(*arguments))
        if status >= FIRST_ERROR:
            text = self.core.uccl_ep_error_text()
            assert text and text.decode().isprintable(), (name, status, text)
        else:
            assert status in (OK, PENDING), (name, status)
        self.seen[f"{name}: {status}"] += 1
        return status

    def struct(self, of: type[Any], bounded: tuple[str, ...], **good: object) -> Any:
        """bounded: fields that memory limits."""
        made = of(**good)
        for name, kind in of._fields_:
            if self.random.random() > 0.15:
                continue
            if name == "size":
                made.size = self.random.choice((0, 1, 8, 12, ctypes.sizeof(of) - 8, 2**40))
            elif kind is ctypes.c_void_p:
                setattr(made, name, self.random.choice((None, ctypes.addressof(MEMORY))))
            elif kind is ctypes.c_double:
                setattr(made, name, self.random.choice((-1.0, 0.0, 0.5, float("nan"), float("inf"))))
            elif kind is ctypes.c_char_p:
                setattr(made, name, self.random.choice((b"", b"loop", b"none", b"\xff\xfe", b"x" * 500)))
            elif kind in (ctypes.c_uint32, ctypes.c_int32, ctypes.c_int, ctypes.c_uint64):
                values = SMALL if name in bounded else WORDS
                setattr(made, name, self.random.choice(values))
        return made

    def make_group(self) -> None:
        """A right one, if there is none or it is broken."""
        if self.group:
            if self.call("uccl_ep_group_check", self.group) == OK:
                return
            self.call("uccl_ep_group_destroy", self.group, 1)
        right = {"num_ranks": 1, "num_experts": EXPERTS, "hidden": HIDDEN, "budget_bytes": 64 << 20}
        config = GroupConfig(**right, all_gather=ALONE)
        self.group = ctypes.c_void_p()
        assert self.call("uccl_ep_group_create", ctypes.byref(config), ctypes.byref(self.group)) == OK

    def try_group(self) -> None:
        config = self.struct(
            GroupConfig,
            ("num_ranks", "num_experts", "hidden", "rank"),
            num_ranks=1,
            num_experts=EXPERTS,
            hidden=HIDDEN,
            budget_bytes=64 << 20,
            all_gather=ALONE,
        )
        config.on_gpu = 0
        config.num_ranks = min(config.num_ranks, 1)  # nobody else is there
        config.domain_of = None
        made = ctypes.c_void_p()
        if self.call("uccl_ep_group_create", ctypes.byref(config), ctypes.byref(made)) == OK:
            self.call("uccl_ep_group_destroy", made, self.random.randrange(2))

    def routing(self, **good: object) -> Any:
        routing = self.struct(
            Routing,
            ("width", "num_tokens", "capacity", "max_tokens"),
            width=WIDTH,
            data=ctypes.addressof(ROUTED),
            num_tokens=TOKENS,
            **good,
        )
        routing.width, routing.num_tokens = min(routing.width, WIDTH), min(routing.num_tokens, TOKENS)
        if routing.data == ctypes.addressof(MEMORY):
            routing.data = ctypes.addressof(ROUTED)
        return routing

    def try_operations(self) -> None:
        """A dispatch and a combine, as far as they get."""
        plan, op, byref = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.byref
        if self.call("uccl_ep_plan_create", self.group, byref(self.routing()), byref(plan)) != OK:
            return
        if self.random.random() < 0.2:
            self.call("uccl_ep_plan_update", plan, byref(self.routing()))
        memory = ctypes.addressof(MEMORY)
        args = self.struct(DispatchArgs, ("hidden",), hidden=HIDDEN, x=memory, dtype=FP32)
        args.stream = None
        sizes = self.struct(Sizes, ())
        sizes.num_rows = 0
        completed = False
        if self.call("uccl_ep_dispatch", plan, byref(args), byref(op)) == OK:
            counted = self.call("uccl_ep_counts", op, ctypes.c_uint64(10**6), byref(sizes)) == OK
            told = sizes.size == ctypes.sizeof(Sizes)  # else the number of rows is not known
            if counted and told and sizes.num_rows * 4 * HIDDEN <= len(MEMORY):
                output = self.struct(Output, (), rows=memory)
                output.stream = None
                completed = self.call("uccl_ep_complete", op, byref(output)) == OK
            self.call("uccl_ep_wait", op, None, ctypes.c_uint64(10**6 if completed else 0))
            self.core.uccl_ep_op_destroy(op)
            if not completed:  # it stays queued: nothing after it can run
                self.core.uccl_ep_plan_destroy(plan)
                self.call("uccl_ep_group_destroy", self.group, 1)
                self.group = ctypes.c_void_p()
                return
            sums = self.struct(CombineArgs, ("hidden",), hidden=HIDDEN, rows=memory, dtype=FP32, out=memory)
            sums.stream = None
            if self.call("uccl_ep_combine", plan, byref(sums), byref(op)) == OK:
                self.call("uccl_ep_wait", op, None, ctypes.c_uint64(10**6))
                self.core.uccl_ep_op_destroy(op)
        self.core.uccl_ep_plan_destroy(plan)

    def works(self) -> None:
        """A right dispatch and combine have right results."""
        self.make_group()
        byref, plan, op, sizes = ctypes.byref, ctypes.c_void_p(), ctypes.c_void_p(), Sizes()
        x = (ctypes.c_float * (TOKENS * HIDDEN))(*(float(i % 91) for i in range(TOKENS * HIDDEN)))
        idx = (ctypes.c_int64 * TOKENS)(*(t % EXPERTS for t in range(TOKENS)))
        out = (ctypes.c_float * (TOKENS * HIDDEN))()
        rows = ctypes.addressof(MEMORY)
        routing = Routing(width=1, data=ctypes.addressof(idx), num_tokens=TOKENS)
        forever = ctypes.c_uint64(60_000_000)
        done = [self.call("uccl_ep_plan_create", self.group, byref(routing), byref(plan))]
        args = DispatchArgs(hidden=HIDDEN, x=ctypes.addressof(x), dtype=FP32)
        done.append(self.call("uccl_ep_dispatch", plan, byref(args), byref(op)))
        done.append(self.call("uccl_ep_counts", op, forever, byref(sizes)))
        done.append(self.call("uccl_ep_complete", op, byref(Output(rows=rows))))
        done.append(self.call("uccl_ep_wait", op, None, forever))
        self.core.uccl_ep_op_destroy(op)
        sums = CombineArgs(hidden=HIDDEN, rows=rows, dtype=FP32, out=ctypes.addressof(out))
        done.append(self.call("uccl_ep_combine", plan, byref(sums), byref(op)))
        done.append(self.call("uccl_ep_wait", op, None, forever))
        self.core.uccl_ep_op_destroy(op)
        self.core.uccl_ep_plan_destroy(plan)
        assert done == [OK] * len(done) and list(out) == list(x)


def main() -> None:
    library, seed, calls = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    fuzz = Fuzz(library, seed)
    for turn in range(calls):
        fuzz.make_group()
        (fuzz.try_group if turn % 10 == 0 else fuzz.try_operations)()
    fuzz.works()
    assert fuzz.call("uccl_ep_group_destroy", fuzz.group, 0) == OK
    for name, count in sorted(fuzz.seen.items()):
        print(f"{count:6} {name}")


if __name__ == "__main__":
    main()
