"""The fields of `EpConfig` that say how rows travel between domains: the transport, its NICs, its faults."""

from __future__ import annotations

from dataclasses import dataclass, field

from uccl_ep_train.config_checks import (
    MAX_RANKS,
    choice,
    info,
    integer,
    name_of,
    names,
    number,
    optional,
)


@dataclass(frozen=True, kw_only=True)
class TransportConfig:
    """Base of `EpConfig`, which validates it. NIC settings that are left open follow the NIC's family
    (`docs/nics.md`) and may differ per rank.
    """

    transport: str = field(
        default="auto",
        metadata=info(
            "",
            "'auto' | 'loop' | 'verbs' | 'ofi'",
            "how rows travel between domains; auto: what every rank has, loop on one host; loop: memory "
            "copies; verbs: RDMA NICs; ofi: libfabric. One that does not work on some rank is an error",
            choice("auto", "loop", "verbs", "ofi"),
        ),
    )
    nics: tuple[str, ...] | None = field(
        default=None,
        metadata=info(
            "device names",
            "None, or names as in /sys/class/infiniband (ofi: libfabric domains), at least one",
            "exactly the NICs that this rank uses; None: its share of those nearest to its GPU or CPUs",
            optional(names),
            agree=False,
        ),
    )
    nic_window_bytes: int | None = field(
        default=None,
        metadata=info(
            "bytes",
            "None, or 1 .. 2^64 - 1",
            "rows in flight per NIC; None: the NIC family's default for verbs, else no limit",
            optional(integer(1, (1 << 64) - 1)),
            agree=False,
        ),
    )
    nic_window_ops: int | None = field(
        default=None,
        metadata=info(
            "writes",
            "None, or 1 .. 2^32 - 1",
            "writes of rows in flight per NIC; None: the NIC family's default for verbs, else no limit",
            optional(integer(1, (1 << 32) - 1)),
            agree=False,
        ),
    )
    ib_gid_index: int = field(
        default=-1,
        metadata=info(
            "index",
            "-1 (chosen) .. 255",
            "entry of the port's GID table that verbs use; on RoCE it selects the address and the version",
            integer(-1, 255),
            agree=False,
        ),
    )
    ib_service_level: int = field(
        default=-1,
        metadata=info(
            "",
            "-1 (the NIC family's) .. 15",
            "service level of verbs; the fabric maps it to a lane",
            integer(-1, 15),
            agree=False,
        ),
    )
    ib_traffic_class: int = field(
        default=-1,
        metadata=info(
            "",
            "-1 (the NIC family's) .. 255",
            "traffic class of verbs; on RoCE four times the DSCP that switches sort by",
            integer(-1, 255),
            agree=False,
        ),
    )
    ofi_provider: str | None = field(
        default=None,
        metadata=info(
            "",
            "None, or a name as fi_info prints it",
            "libfabric provider of ofi, e.g. efa, cxi, tcp, verbs;ofi_rxm; None: the first that can do it",
            optional(name_of(64)),
        ),
    )
    net_interface: str | None = field(
        default=None,
        metadata=info(
            "",
            "None, or the name of a network interface",
            "interface of ofi over tcp; None: libfabric's choice",
            optional(name_of(15)),
            agree=False,
        ),
    )
    loop_gbytes_per_s: float = field(
        default=0.0,
        metadata=info(
            "10^9 bytes/s",
            "0 (unlimited) .. 10^6",
            "link rate of the loop transport, to stand in for a NIC",
            number(0.0, 1e6),
            agree=False,
        ),
    )
    loop_latency_us: float = field(
        default=0.0,
        metadata=info(
            "microseconds", "0 .. 10^7", "latency of the loop transport", number(0.0, 1e7), agree=False
        ),
    )
    loop_seed: int = field(
        default=0,
        metadata=info(
            "",
            "0 (in order) .. 2^63 - 1",
            "seed of the loop transport's disorder, for tests",
            integer(0, (1 << 63) - 1),
            agree=False,
        ),
    )
    loop_refuse_rate: float = field(
        default=0.0,
        metadata=info(
            "fraction",
            "0 .. 0.9999",
            "share of posts that the loop transport refuses (EAGAIN), for tests",
            number(0.0, 0.9999),
            agree=False,
        ),
    )
    loop_duplicate_rate: float = field(
        default=0.0,
        metadata=info(
            "fraction",
            "0 .. 1",
            "share of arrivals that the loop transport reports twice, for tests",
            number(0.0, 1.0),
            agree=False,
        ),
    )
    loop_drop_peer: int = field(
        default=-1,
        metadata=info(
            "group rank",
            "-1 (none) .. 65535",
            "the loop transport loses all traffic to this rank, for tests",
            integer(-1, MAX_RANKS - 1),
            agree=False,
        ),
    )
