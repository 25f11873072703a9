"""Rates and times of a kind of node, each with its source. GB/s are 10^9 bytes per second, one way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace

from uccl_ep_train.errors import InputError

FIT = "fitted: python -m uccl_ep_train.planner --fit"


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What the kernels of 24 SMs take; other numbers of SMs are as much faster or slower.

    Fitted on measured operations (`fit.py`). ns: nanoseconds; a *step* adds one segment of a row to a sum.

    place_ns     to write 1000 bytes of an output row
    pull_ns      to read 1000 bytes over NVLink for it
    codes_ns     of each output row that consists of codes and scales, besides
    expand_ns    to write 1000 bytes of a BF16 row that came as codes, instead of place_ns
    expand_row_ns  of each such row, besides
    step_ns, step_byte_ns  of a step: in any case, and for each 1000 bytes of it
    merge_ns     of a step of a merge, which other warps do beside
    dispatch_us, combine_us  of an operation: call, launch, first and last flag
    plan_us, plan_token_ns  of a new plan, and for each token of a rank
    dispatch_turn_us, combine_turn_us  from a window to the next: its last rows, tables of the next one
    member_us    of an operation, for each doubling of the domain: more flags of more members
    link_share   of the link's rate that kernels reach
    hop_us       of a chunk between domains beyond post, bytes and wire: queue, copy, arrival
    relay_us     of a combine's pieces that several ranks write to one: until all are seen there
    """

    place_ns: float
    pull_ns: float
    codes_ns: float
    expand_ns: float
    expand_row_ns: float
    step_ns: float
    step_byte_ns: float
    merge_ns: float
    dispatch_us: float
    combine_us: float
    plan_us: float
    plan_token_ns: float
    dispatch_turn_us: float
    combine_turn_us: float
    member_us: float
    link_share: float
    hop_us: float
    relay_us: float

    def with_values(self, values: Mapping[str, float]) -> Kernels:
        return replace(self, **values)

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


KERNELS = Kernels(
    place_ns=0.6339,
    pull_ns=1.015,
    codes_ns=0.8703,
    expand_ns=0.5877,
    expand_row_ns=2.342,
    step_ns=1.982,
    step_byte_ns=0.2087,
    merge_ns=1.758,
    dispatch_us=15.34,
    combine_us=14.71,
    plan_us=23.01,
    plan_token_ns=3.974,
    dispatch_turn_us=7.567,
    combine_turn_us=16.62,
    member_us=3.423,
    link_share=0.938,
    hop_us=24.84,
    relay_us=11.66,
)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A kind of node.

    gpus        of a node; they form a domain unless another size is asked for
    link, nic   what they are, in words
    link_gbps   into a GPU over the network of its domain, GB/s
    nic_gbps    of a rank's NICs together, GB/s
    wire_us     of a message without bytes, one way
    post_us     of a proxy, for a command
    pass_us     of the warp that polls, for 32 words of host memory
    host_us     of the host: from the counts of a new plan that it reads until the call ends
    stage_ns, stage_several_ns  of 24 SMs, to stage 1000 bytes of a token for one domain, and for several
    measured    whether link_gbps was measured with our kernels; else it is the vendor's peak, which nothing
                reaches, and predicted times are lower bounds
    sources     of each figure
    """

    name: str
    gpus: int
    link: str
    nic: str
    link_gbps: float
    nic_gbps: float
    wire_us: float = 5.0
    post_us: float = 0.2
    pass_us: float = 1.5
    host_us: float = 69.0
    stage_ns: float = 2.5
    stage_several_ns: float = 5.6
    num_sms: int = 24
    measured: bool = True
    kernels: Kernels = KERNELS
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False)

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, float) and not value > 0:
                raise InputError(f"{entry.name} = {value}: allowed is more than 0")
        if self.num_sms < 1:
            raise InputError(f"num_sms = {self.num_sms}: allowed is at least 1")

    def source(self, name: str) -> str:
        """Where a figure is from; `name` is a field of Machine or Kernels."""
        return self.sources.get(name) or (FIT if hasattr(self.kernels, name) else _COMMON[name])

    @property
    def link_bytes_per_s(self) -> float:
        return 1e9 * self.link_gbps

    @property
    def nic_bytes_per_s(self) -> float:
        return 1e9 * self.nic_gbps


_COMMON = {
    "wire_us": "setting latency_us of the emulated network in bench/results/h200_x2_two_domains.json",
    "post_us": "bench/results/posting_rate.json: 4.8 to 7.7 million commands a second",
    "pass_us": "one warp that loads 32 words of pinned host memory, one H100; no result file",
    "host_us": "bench/results/h200_x4_windows.json : fitted; HOSTS in fit.py has those of other hosts",
    "stage_ns": "bench/results/h200_x4_one_domain_24_sms.json: step `stage`, cached FP8, T = 4096",
    "stage_several_ns": "bench/results/h200_x4_four_domains.json: the same step",
    "num_sms": "default of the setting num_sms",
    "nic_gbps": "vendor's rate",
    "gpus": "vendor's specification",
}
_VENDOR_NIC = "400 Gbit/s per GPU, vendor's rate"
_MEASURED = "measured, all-to-all of 4 GPUs, 12 to 24 SMs; vendor: 450"

MACHINES = {
    "h100": Machine(
        name="h100",
        gpus=8,
        link="NVLink 4, 18 links: the rate measured on H200, which has the same",
        nic=_VENDOR_NIC,
        link_gbps=330.0,
        nic_gbps=50.0,
        sources={"link_gbps": f"H200's: {_MEASURED}"},
    ),
    "h200": Machine(
        name="h200",
        gpus=8,
        link="NVLink 4, 18 links: measured, all-to-all of 4 GPUs, 12 to 24 SMs",
        nic=_VENDOR_NIC,
        link_gbps=330.0,
        nic_gbps=50.0,
        sources={"link_gbps": _MEASURED},
    ),
    "b200": Machine(
        name="b200",
        gpus=8,
        link="NVLink 5, 18 links: vendor's rate",
        nic=_VENDOR_NIC,
        link_gbps=900.0,
        nic_gbps=50.0,
        measured=False,
        sources={"link_gbps": "vendor's rate"},
    ),
    "mi300x": Machine(
        name="mi300x",
        gpus=8,
        link="Infinity Fabric, 7 links of 64 GB/s: vendor's rate",
        nic=_VENDOR_NIC,
        link_gbps=448.0,
        nic_gbps=50.0,
        measured=False,
        sources={"link_gbps": "vendor's rate"},
    ),
}
