"""An example: ranks whose compiled JAX programs dispatch and combine, on the CPU, without torch.

`PYTHONPATH=. python tests/c_api/jax_rank.py HANDLERS [CASE...]` starts two processes. A pipe is their
all-gather. HANDLERS is the library that a compiler makes of jax_ffi.cc. CASE is a layer, its gradients, or
too little room ("room"); the default is all.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import multiprocessing as mp
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tests.c_api.ctypes_rank import GroupConfig, all_gather_over

jax = importlib.import_module("jax")  # by name: type checkers need not have it
jnp = importlib.import_module("jax.numpy")

HIDDEN, TOKENS, TOPK, RANKS, LOCAL_EXPERTS = 128, 7, 2, 2, 3
EXPERTS = RANKS * LOCAL_EXPERTS
ROOM = RANKS * TOKENS * TOPK  # rows that can come at most
PLAN = np.int64(5)  # any number; layers and microbatches that are under way at once need one each
LITTLE_PLAN = np.int64(6)

# ---- dispatch and combine in JAX -----------------------------------------------------------------------
# Each call has a side effect, so that JAX does not drop it. That sets no order. `after`, a result of the call
# before it, does.


def call_dispatch(x: Any, idx: Any, after: Any, room: int = ROOM, plan: np.int64 = PLAN) -> Any:
    """Rows [room, H] for the local experts, and how many each has. idx without columns: as before."""
    made = (
        jax.ShapeDtypeStruct((room, x.shape[1]), jnp.float32),
        jax.ShapeDtypeStruct((LOCAL_EXPERTS,), jnp.int32),
    )
    return jax.ffi.ffi_call("uccl_ep_dispatch", made, has_side_effect=True)(x, idx, after, plan=plan)


def call_combine(rows: Any, after: Any) -> Any:
    made = jax.ShapeDtypeStruct((TOKENS, rows.shape[1]), jnp.float32)
    return jax.ffi.ffi_call("uccl_ep_combine", made, has_side_effect=True)(rows, after, plan=PLAN)


@jax.custom_vjp
def dispatch(x: Any, idx: Any) -> Any:
    return call_dispatch(x, idx, after=idx)


def dispatch_forward(x: Any, idx: Any) -> Any:
    rows, counts = dispatch(x, idx)
    return (rows, counts), counts


def dispatch_backward(counts: Any, gradients: Any) -> Any:
    of_rows, _ = gradients
    return call_combine(of_rows, after=counts), None


@jax.custom_vjp
def combine(rows: Any) -> Any:
    return call_combine(rows, after=rows)


def combine_forward(rows: Any) -> Any:
    out = combine(rows)
    return out, out


def combine_backward(out: Any, gradient: Any) -> Any:
    as_before = jnp.zeros((TOKENS, 0), jnp.int32)
    rows, _ = call_dispatch(gradient, as_before, after=out)
    return (rows,)


dispatch.defvjp(dispatch_forward, dispatch_backward)
combine.defvjp(combine_forward, combine_backward)


def layer(x: Any, factors: Any, idx: Any) -> Any:
    """An expert multiplies its rows by its factor, and adds 1: rows that nothing came for are no longer 0."""
    rows, counts = dispatch(x, idx)
    of_rows = jnp.repeat(factors, counts, total_repeat_length=ROOM)
    return combine(rows * of_rows[:, None] + 1), rows, counts


def loss(x: Any, factors: Any, idx: Any, weights: Any) -> Any:
    return jnp.sum(layer(x, factors, idx)[0] * weights)


# ---- what is right: small whole numbers, so that all sums are exact ------------------------------------


def x_of(rank: int) -> np.ndarray:
    token, h = np.indices((TOKENS, HIDDEN))
    return ((rank * 31 + token * 17 + h * 3) % 64).astype(np.float32)


def weights_of(rank: int) -> np.ndarray:
    token, h = np.indices((TOKENS, HIDDEN))
    return ((rank * 3 + token * 5 + h) % 8 - 3).astype(np.float32)


def idx_of(rank: int, step: int) -> np.ndarray:
    """The second expert is another one than the first, or none (-1)."""
    token, k = np.indices((TOKENS, TOPK))
    idx = (token * 7 + rank * 5 + step + k * LOCAL_EXPERTS) % EXPERTS
    return np.where((k == 1) & ((token + rank) % 6 == 5), -1, idx).astype(np.int32)


def factors_of(rank: int) -> np.ndarray:
    return np.arange(2 + rank * LOCAL_EXPERTS, 2 + (rank + 1) * LOCAL_EXPERTS, dtype=np.float32)


def arrivals(rank: int, step: int) -> list[list[tuple[int, int]]]:
    """Of each local expert, the sources and tokens of its rows, in their order."""
    first = rank * LOCAL_EXPERTS
    idx = [idx_of(source, step) for source in range(RANKS)]
    return [
        [(source, t) for source in range(RANKS) for t in range(TOKENS) if expert in idx[source][t]]
        for expert in range(first, first + LOCAL_EXPERTS)
    ]


def factors_of_tokens(rank: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """[T, 1] each: the sum of the factors of a token's experts, and their number."""
    idx = idx_of(rank, step)
    factors = np.concatenate([factors_of(owner) for owner in range(RANKS)])
    sums = np.where(idx >= 0, factors[idx], 0).sum(axis=1, keepdims=True)
    return sums, (idx >= 0).sum(axis=1, keepdims=True)


def same(what: str, got: Any, right: np.ndarray) -> None:
    got = np.asarray(got)
    assert got.shape == right.shape, (what, got.shape, right.shape)
    assert np.array_equal(got, right), f"{what}: {got} is not {right}"


# ---- cases ---------------------------------------------------------------------------------------------


def check_layer(rank: int) -> None:
    """One compiled program runs three times, with two routings."""
    program = jax.jit(layer)
    for step in (0, 1, 0):
        out, rows, counts = program(x_of(rank), factors_of(rank), idx_of(rank, step))
        came = arrivals(rank, step)
        same("counts", counts, np.array([len(of_expert) for of_expert in came]))
        right = np.zeros((ROOM, HIDDEN), np.float32)
        for row, (source, token) in enumerate(itertools.chain(*came)):
            right[row] = x_of(source)[token]
        same("rows", rows, right)
        sums, experts = factors_of_tokens(rank, step)
        same("sums", out, sums * x_of(rank) + experts)


def check_gradients(rank: int) -> None:
    """Of the tokens, which come back, and of the factors, which are sums over the tokens of all ranks."""
    program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    for step in (2, 3):
        arguments = x_of(rank), factors_of(rank), idx_of(rank, step), weights_of(rank)
        value, (of_x, of_factors) = program(*arguments)
        sums, experts = factors_of_tokens(rank, step)
        same("loss", value, np.sum((sums * x_of(rank) + experts) * weights_of(rank)))
        same("gradient of x", of_x, sums * weights_of(rank))
        right = [
            sum(float(np.dot(x_of(source)[t], weights_of(source)[t])) for source, t in of_expert)
            for of_expert in arrivals(rank, step)
        ]
        same("gradient of the factors", of_factors, np.array(right))


def check_room(rank: int) -> None:
    """Rank 0 has room for one row less than come. The group stays usable: check_layer() follows."""
    come = sum(map(len, arrivals(rank, 0)))
    room = come - 1 if rank == 0 else come
    program = jax.jit(lambda x, idx: call_dispatch(x, idx, idx, room, LITTLE_PLAN))
    try:
        jax.block_until_ready(program(x_of(rank), idx_of(rank, 0)))
        said = ""
    except jax.errors.JaxRuntimeError as error:
        said = str(error)
    if rank == 0:
        right = f"plan 6: {come} rows came, and there is room for {room}"
        assert right in said, f"room: {said!r} does not say {right!r}"
    else:
        assert said == "", f"room: {said!r}, and all rows fit"
    check_layer(rank)


CASES: dict[str, Callable[[int], None]] = {
    "layer": check_layer,
    "gradients": check_gradients,
    "room": check_room,
}

# ---- ranks ---------------------------------------------------------------------------------------------


def rank_main(handlers: str, rank: int, peer: Connection, cases: list[str]) -> None:
    jax.config.update("jax_platforms", "cpu")
    core = ctypes.CDLL(handlers)  # the functions of the C interface, too: it is linked with them
    core.uccl_ep_error_text.restype = ctypes.c_char_p
    for name in ("dispatch", "combine"):
        handler = jax.ffi.pycapsule(getattr(core, f"jax_ffi_{name}"))
        jax.ffi.register_ffi_target(f"uccl_ep_{name}", handler, platform="cpu")

    config = GroupConfig(
        rank=rank, num_ranks=RANKS, num_experts=EXPERTS, hidden=HIDDEN, budget_bytes=64 << 20
    )
    config.all_gather = all_gather_over(peer, rank)
    group = ctypes.c_void_p()
    status = core.uccl_ep_group_create(ctypes.byref(config), ctypes.byref(group))
    assert status == 0, core.uccl_ep_error_text().decode()
    core.jax_ffi_use_group(group)
    for case in cases:
        CASES[case](rank)
    core.jax_ffi_use_group(None)
    assert core.uccl_ep_group_destroy(group, 0) == 0, core.uccl_ep_error_text().decode()


def main() -> None:
    handlers, *cases = sys.argv[1:]
    spawn = mp.get_context("spawn")
    ends = spawn.Pipe()
    ranks = [
        spawn.Process(target=rank_main, args=(handlers, rank, ends[rank], cases or [*CASES]))
        for rank in range(RANKS)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(100)
    for rank in ranks:
        rank.kill()
    assert [rank.exitcode for rank in ranks] == [0] * RANKS
    print(f"{RANKS} ranks, all values are right")


if __name__ == "__main__":
    main()
