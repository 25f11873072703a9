"""The sections of `EpConfig`: every setting that does not describe the model.

Each field has one public name: its own, with the `prefix` of its section before it. It is a flat argument
of `EpConfig`, the name in errors, an option of Megatron's command line and, after UCCL_EP_, a variable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from uccl_ep_train.settings.checks import (
    MAX_RANKS,
    MAX_TIMEOUT_S,
    MAX_TOKENS,
    MAX_WINDOW_CHUNKS,
    choice,
    flag,
    integer,
    integers,
    name_of,
    names,
    num_bytes,
    number,
    optional,
)
from uccl_ep_train.settings.fields import Section, Setting, setting, settings_of

WireDtype = Literal["fp8", "bf16"]
CallWireDtype = Literal["fp8", "bf16", "fp8_pow2", "fp8_fp32"]
"""Of one dispatch, which may name the scales."""
WideDtype = Literal["bf16", "fp32"]
ScaleMode = Literal["pow2", "fp32"]
Backend = Literal["auto", "host", "cuda"]
TransportName = Literal["auto", "loop", "verbs", "ofi"]


@dataclass(frozen=True, kw_only=True)
class Wire(Section):
    """Number formats on the wire."""

    dispatch_dtype: WireDtype = setting("fp8", choice(WireDtype))
    """fp8: BF16 rows are quantised on the wire (FP32 rows are refused); bf16: rows travel unquantised.

    Allowed: 'fp8' | 'bf16'.
    """

    grad_dtype: WireDtype = setting("bf16", choice(WireDtype))
    """Wire dtype of combine's backward, a dispatch of gradients; bf16: gradients travel unquantised.

    Allowed: 'bf16' | 'fp8'.
    """

    combine_wire_dtype: WideDtype = setting("bf16", choice(WideDtype))
    """Dtype of BF16 partial sums between hops, and of low latency's between domains; fp32: no rounding
    before the last sum.

    Allowed: 'bf16' | 'fp32' (fp32 needs max_dtype='fp32').
    """

    fp8_scale: ScaleMode = setting("pow2", choice(ScaleMode))
    """pow2: scales are powers of two, so dequantised rows are exact in BF16; fp32: unrounded scales.

    Allowed: 'pow2' | 'fp32'.
    """


@dataclass(frozen=True, kw_only=True)
class Memory(Section):
    """What a buffer may allocate on this rank, and how it divides it."""

    max_dtype: WideDtype = setting("fp32", choice(WideDtype), native="max_element_bytes")
    """Widest tensor dtype that the slots are sized for; bf16 halves the memory.

    Allowed: 'bf16' | 'fp32'.
    """

    budget_bytes: int = setting(512 << 20, num_bytes(1, 1 << 46), native="=")
    """Memory of a rank for staging, landing, fold pieces, relay output, flags and rings.

    Unit: bytes. Allowed: 1 .. 2^46, at least the least budget that memory_plan() names.
    """

    window_tokens: int | None = setting(None, optional(integer(1, MAX_TOKENS)), native="=")
    """Of the budget, what so many tokens of each rank need to go in one window, and the routing of more,
    which take several. None: all of the budget; GPU only.

    Unit: tokens. Allowed: None, or 1 .. 65536.
    """

    low_latency_tokens: int | None = setting(None, optional(integer(1, 4096)), native="=")
    """Memory of the budget for `LowLatency` with at most so many tokens of a rank; None: for none.

    Unit: tokens. Allowed: None, or 1 .. 4096.
    """

    low_latency_topk: int = setting(8, integer(1, 32), native="=")
    """Experts of a token that this memory is for.

    Unit: experts. Allowed: 1 .. 32.
    """

    chunk_bytes: int | None = setting(None, optional(num_bytes(1, 1 << 30)), native="=")
    """Size of a chunk; None: chosen from the budget.

    Unit: bytes. Allowed: None, or 1 .. 2^30.
    """

    window_chunks: int | None = setting(None, optional(integer(1, MAX_WINDOW_CHUNKS)), native="=")
    """Slots per channel; None: chosen from the budget.

    Unit: chunks. Allowed: None, or 1 .. 32767.
    """


@dataclass(frozen=True, kw_only=True)
class Deadlines(Section):
    """How long a rank waits for others before it raises."""

    arrival_timeout_s: float = setting(
        300.0, number(0.0, MAX_TIMEOUT_S, open_low=True), agree=False, native="="
    )
    """A peer that has not entered the operation by then is an error; covers slow data loading. A pause of
    this process does not count.

    Unit: seconds. Allowed: > 0, at most 10^6.
    """

    progress_timeout_s: float = setting(20.0, number(0.0, 1e6, open_low=True), agree=False, native="=")
    """All ranks entered, and no byte or flag moved for this long: an error; a slow link is none.

    Unit: seconds. Allowed: > 0, at most 10^6.
    """

    mask_timeout_s: float = setting(0.0, number(0.0, 1e6), native="=")
    """Low-latency operations go on without a rank that has not answered for this long; 0: it is an error.
    Longer than any rank may lie behind another. The rank's death is then no error. With several domains
    the rank's domain goes with it. At most 512 ranks.

    Unit: seconds. Allowed: 0 .. 10^6.
    """


@dataclass(frozen=True, kw_only=True)
class Gpu(Section):
    """Whether tensors lie on a GPU, and what the kernels may take of it."""

    backend: Backend = setting("auto", choice(Backend))
    """Where the tensors of a buffer lie: in CPU memory or on a GPU; auto: cuda if there is one.

    Allowed: auto | host | cuda.
    """

    num_sms: int = setting(24, integer(1, 1024))
    """Streaming multiprocessors that the kernels may occupy; GPU only.

    Unit: SMs. Allowed: 1 .. 1024.
    """

    stage_sms: int | None = setting(None, optional(integer(1, 1024)))
    """SMs that staging and the routing of a new plan may take before they leave; None: num_sms.

    Unit: SMs. Allowed: None, or 1 .. 1024.
    """

    low_latency_sms: int | None = setting(None, optional(integer(1, 256)), native="=")
    """SMs that a low-latency kernel may occupy; None: 64. At least 2 with several domains.

    Unit: SMs. Allowed: None, or 1 .. 256.
    """

    low_latency_fold_pairs: int = setting(384, integer(0, 1 << 20), agree=False, native="=")
    """From how many pairs of token and expert on a low-latency combine sums before it sends. It then sends
    fewer bytes, but waits for the weights of all ranks first.

    Unit: entries of topk_idx, T * K. Allowed: 0 .. 1048576.
    """

    bulk_copies: bool = setting(True, flag(), agree=False, native="=")
    """Use the copy engines that SMs of sm_90 have; False: plain loads, as on other GPUs.

    Allowed: True | False.
    """


@dataclass(frozen=True, kw_only=True)
class Network(Section):
    """Which ranks form a domain, and how rows travel between domains. Unset NIC settings follow the NIC's
    family (`docs/nics.md`) and may differ per rank.
    """

    domain_size: int | None = setting(None, optional(integer(1, MAX_RANKS)))
    """Splits the group in consecutive domains of this size (the last may be smaller); None: probed.

    Unit: ranks. Allowed: None, or 1 .. 65536.
    """

    domains: tuple[int, ...] | None = setting(
        None, optional(integers(0, MAX_RANKS - 1, form="domain id per rank: 0,0,1,1"))
    )
    """Domain of each rank, for uneven or interleaved domains; overrides domain_size.

    Unit: domain ids. Allowed: None, or an integer >= 0 per rank of the group.
    """

    num_proxies: int = setting(1, integer(1, 4), native="=")
    """Proxy threads of a rank that post to the transport.

    Unit: threads. Allowed: 1 .. 4, of which buffers so far take 1.
    """

    transport: TransportName = setting("auto", choice(TransportName), native="=")
    """How rows travel between domains; auto: what every rank has, loop on one host; loop: memory copies;
    verbs: RDMA NICs; ofi: libfabric. One that does not work on some rank is an error.

    Allowed: 'auto' | 'loop' | 'verbs' | 'ofi'.
    """

    nics: tuple[str, ...] | None = setting(
        None, optional(names(form="names: mlx5_0,mlx5_1")), agree=False, native="nic.devices"
    )
    """Exactly the NICs that this rank uses; None: its share of those nearest to its GPU or CPUs.

    Unit: device names. Allowed: None, or names as in /sys/class/infiniband (ofi: libfabric domains), at least
    one.
    """

    nic_window_bytes: int | None = setting(
        None,
        optional(num_bytes(1, (1 << 64) - 1)),
        agree=False,
        native="nic.window_bytes",
        theirs="IB_MAX_INFLIGHT_BYTES",
    )
    """Rows in flight per NIC; None: the NIC family's default for verbs, else no limit.

    Unit: bytes. Allowed: None, or 1 .. 2^64 - 1.
    """

    nic_window_ops: int | None = setting(
        None,
        optional(integer(1, (1 << 32) - 1)),
        agree=False,
        native="nic.window_ops",
        theirs="IB_MAX_INFLIGHT_NORMAL",
    )
    """Writes of rows in flight per NIC; None: the NIC family's default for verbs, else no limit.

    Unit: writes. Allowed: None, or 1 .. 2^32 - 1.
    """

    ib_gid_index: int = setting(
        -1, integer(-1, 255), agree=False, native="nic.gid_index", theirs="IB_GID_INDEX"
    )
    """Entry of the port's GID table that verbs use; on RoCE it selects the address and the version.

    Unit: index. Allowed: -1 (chosen) .. 255.
    """

    ib_service_level: int = setting(
        -1, integer(-1, 15), agree=False, native="nic.service_level", theirs="IB_SL"
    )
    """Service level of verbs; the fabric maps it to a lane.

    Allowed: -1 (the NIC family's) .. 15.
    """

    ib_traffic_class: int = setting(
        -1, integer(-1, 255), agree=False, native="nic.traffic_class", theirs="IB_TC"
    )
    """Traffic class of verbs; on RoCE four times the DSCP that switches sort by.

    Allowed: -1 (the NIC family's) .. 255.
    """

    ofi_provider: str | None = setting(None, optional(name_of(64)), native="nic.provider")
    """Libfabric provider of ofi, e.g. efa, cxi, tcp, verbs;ofi_rxm; None: the first that can do it.

    Allowed: None, or a name as fi_info prints it.
    """

    net_interface: str | None = setting(
        None, optional(name_of(15)), agree=False, native="nic.interface", theirs="SOCKET_IFNAME"
    )
    """Interface of ofi over tcp; None: libfabric's choice.

    Allowed: None, or the name of a network interface.
    """


@dataclass(frozen=True, kw_only=True)
class LoopFaults(Section):
    """Makes the loop transport slow or faulty, to emulate a NIC and for tests."""

    prefix = "loop_"

    gbytes_per_s: float = setting(0.0, number(0.0, 1e6), agree=False, native="loop.gbytes_per_s")
    """Link rate of the loop transport, to stand in for a NIC.

    Unit: 10^9 bytes/s. Allowed: 0 (unlimited) .. 10^6.
    """

    latency_us: float = setting(0.0, number(0.0, 1e7), agree=False, native="loop.latency_usec")
    """Latency of the loop transport.

    Unit: microseconds. Allowed: 0 .. 10^7.
    """

    seed: int = setting(0, integer(0, (1 << 63) - 1), agree=False, native="loop.seed")
    """Seed of the loop transport's disorder, for tests.

    Allowed: 0 (in order) .. 2^63 - 1.
    """

    refuse_rate: float = setting(0.0, number(0.0, 0.9999), agree=False, native="loop.refuse_rate")
    """Share of posts that the loop transport refuses (EAGAIN), for tests.

    Unit: fraction. Allowed: 0 .. 0.9999.
    """

    duplicate_rate: float = setting(0.0, number(0.0, 1.0), agree=False, native="loop.duplicate_rate")
    """Share of arrivals that the loop transport reports twice, and of datagrams that come twice, for tests.

    Unit: fraction. Allowed: 0 .. 1.
    """

    loss_rate: float = setting(0.0, number(0.0, 1.0), agree=False, native="loop.loss_rate")
    """Share of datagrams (errors, heartbeats, goodbyes) that the loop transport loses, for tests.

    Unit: fraction. Allowed: 0 .. 1.
    """

    drop_peer: int = setting(-1, integer(-1, MAX_RANKS - 1), agree=False, native="loop.drop_peer")
    """The loop transport loses all traffic to this rank, for tests.

    Unit: group rank. Allowed: -1 (none) .. 65535.
    """


SECTIONS: dict[str, type[Section]] = {
    "wire": Wire,
    "memory": Memory,
    "deadlines": Deadlines,
    "gpu": Gpu,
    "network": Network,
    "faults": LoopFaults,
}
"""By the field of `EpConfig` that holds one."""

SETTINGS_OF: dict[str, tuple[Setting, ...]] = {
    section: settings_of(owner, section) for section, owner in SECTIONS.items()
}

SETTINGS: dict[str, Setting] = {entry.name: entry for entries in SETTINGS_OF.values() for entry in entries}
"""All fields of the sections, by their public names."""
