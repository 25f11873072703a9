"""Node types: what a GPU has, and how fast rows leave it. All rates are bytes per second and GPU, one way."""

from __future__ import annotations

from dataclasses import dataclass

_GB = 10**9
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Node:
    """A kind of node.

    memory_bytes    what torch sees of a GPU's memory, less than is printed on the box
    link            the GPUs' network inside the node, a domain of the dispatcher
    measured        whether link's rate was measured with our kernels; else it is the vendor's peak, which
                    nothing reaches, and predicted times are lower bounds
    fp8_recipe      of TransformerEngine's matrix products; None: BF16
    no_uccl_ep      why the dispatcher cannot run there; empty if it can
    """

    name: str
    gpus: int
    memory_bytes: int
    link: str
    link_rate: float
    nic: str
    nic_rate: float
    measured: bool
    fp8_recipe: str | None
    no_uccl_ep: str = ""


NODES = {
    "h100": Node(
        name="h100",
        gpus=8,
        memory_bytes=79 * _GIB,  # 80 GB HBM3
        link="NVLink 4, 18 links: the rate measured on H200, which has the same",
        link_rate=330 * _GB,  # vendor: 450
        nic="400 Gbit/s per GPU, vendor's rate",
        nic_rate=50 * _GB,
        measured=True,
        fp8_recipe="blockwise",
    ),
    "h200": Node(
        name="h200",
        gpus=8,
        memory_bytes=139 * _GIB,  # 141 GB HBM3e
        link="NVLink 4, 18 links: measured, all-to-all of 4 GPUs, 12 to 24 SMs",
        link_rate=330 * _GB,  # vendor: 450
        nic="400 Gbit/s per GPU, vendor's rate",
        nic_rate=50 * _GB,
        measured=True,
        fp8_recipe="blockwise",
    ),
    "b200": Node(
        name="b200",
        gpus=8,
        memory_bytes=178 * _GIB,  # 192 GB HBM3e, of which 180 are usable
        link="NVLink 5, 18 links: vendor's rate",
        link_rate=900 * _GB,
        nic="400 Gbit/s per GPU, vendor's rate",
        nic_rate=50 * _GB,
        measured=False,
        fp8_recipe="mxfp8",  # TransformerEngine's 1x128 blocks are Hopper's
    ),
    "mi300x": Node(
        name="mi300x",
        gpus=8,
        memory_bytes=191 * _GIB,  # 192 GB HBM3
        link="Infinity Fabric, 7 links of 64 GB/s: vendor's rate",
        link_rate=448 * _GB,
        nic="400 Gbit/s per GPU, vendor's rate",
        nic_rate=50 * _GB,
        measured=False,
        fp8_recipe=None,  # TransformerEngine's block scaling needs NVIDIA's GPUs
        no_uccl_ep="uccl_ep has no HIP backend",
    ),
}
