"""Node types: what a GPU's memory holds and what its products are, beside the planner's rates."""

from __future__ import annotations

from dataclasses import dataclass

from uccl_ep_train.planner.machine import MACHINES, Machine

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Node:
    """A kind of node.

    memory_bytes    what torch sees of a GPU's memory, less than is printed on the box
    fp8_recipe      of TransformerEngine's matrix products; None: BF16
    no_uccl_ep      why the dispatcher cannot run there; empty if it can
    """

    name: str
    memory_bytes: int
    fp8_recipe: str | None
    no_uccl_ep: str = ""

    @property
    def machine(self) -> Machine:
        """Its networks and their rates."""
        return MACHINES[self.name]

    @property
    def gpus(self) -> int:
        return self.machine.gpus


NODES = {
    node.name: node
    for node in (
        Node(name="h100", memory_bytes=79 * _GIB, fp8_recipe="blockwise"),  # 80 GB HBM3
        Node(name="h200", memory_bytes=139 * _GIB, fp8_recipe="blockwise"),  # 141 GB HBM3e
        # 192 GB HBM3e, of which 180 are usable. TransformerEngine's 1x128 blocks are Hopper's.
        Node(name="b200", memory_bytes=178 * _GIB, fp8_recipe="mxfp8"),
        # 192 GB HBM3. TransformerEngine's block scaling needs NVIDIA's GPUs.
        Node(
            name="mi300x",
            memory_bytes=191 * _GIB,
            fp8_recipe=None,
            no_uccl_ep="uccl_ep has no HIP backend",
        ),
    )
}
