"""Check `gpus`: whether each rank has one that this build can use, and whether they reach each other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uccl_ep_train.core import cuda
from uccl_ep_train.core.native import load_native
from uccl_ep_train.errors import NativeMissingError
from uccl_ep_train.tools.doctor.findings import (
    FIX,
    WARNING,
    Facts,
    Finding,
    Group,
    Said,
    each,
    equal,
    fine,
    fix,
    warning,
)
from uccl_ep_train.tools.doctor.session import Here, Options

NAME = "gpus"
MIB = 1 << 20
TRIAL_BYTES = 4 * MIB
_DRIVERS_GPUS = Path("/proc/driver/nvidia/gpus")


def look(here: Here) -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {
        "of_driver": num_gpus_of_driver(),
        "num_gpus": torch.cuda.device_count(),
        "gpu": here.gpu,
        "torch_cuda": torch.version.cuda or "",
        "backend": "auto" if here.config is None else here.config.gpu.backend,
        "with_cuda": False,
    }
    try:
        facts["with_cuda"] = cuda.built()
    except NativeMissingError:  # `versions` says so
        return facts
    return facts if here.gpu < 0 else facts | _of_gpu(here.gpu, facts["with_cuda"])


def num_gpus_of_driver(folder: Path = _DRIVERS_GPUS) -> int:
    """NVIDIA's driver shows all of the host, whatever this process may use."""
    try:
        return len(list(folder.iterdir()))
    except OSError:
        return 0


def _of_gpu(index: int, with_cuda: bool) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    facts: dict[str, Any] = {
        "name": properties.name,
        "id": str(getattr(properties, "uuid", "")),
        "peers": {
            str(peer): bool(torch.cuda.can_device_access_peer(index, peer))
            for peer in range(torch.cuda.device_count())
            if peer != index
        },
        "pci": "",
        "vmm": "",
        "dmabuf": False,
    }
    if not with_cuda:
        return facts
    core = load_native()
    facts["pci"] = core.gpu_pci_address(index)
    try:
        facts["dmabuf"] = core.try_gpu_memory(index, TRIAL_BYTES)
    except RuntimeError as error:
        facts["vmm"] = str(error)
    return facts


def judge(group: Group, facts: Mapping[int, Facts], options: Options) -> list[Finding]:
    found = each(NAME, facts, lambda _, seen: _of_rank(seen))
    with_gpu = {rank: seen for rank, seen in facts.items() if seen["gpu"] >= 0}
    without = tuple(rank for rank in facts if rank not in with_gpu)
    if with_gpu and without:
        found.append(
            Finding(
                NAME,
                FIX,
                "no GPU here, and the other ranks have one",
                "all ranks of a job need the same",
                without,
            )
        )
    found += equal(
        NAME,
        with_gpu,
        "name",
        "their GPUs",
        "kernels wait for the slowest; a job of one kind of GPU is faster",
        WARNING,
    )
    return found + _apart(group, with_gpu)


def _of_rank(seen: Facts) -> list[Said]:
    if seen["gpu"] < 0:
        return [_without(seen)]
    said = []
    if not seen["with_cuda"] and seen["backend"] != "host":
        said.append(
            fix(
                "there is a GPU, and the extension was built without CUDA kernels",
                "build it here with nvcc on the PATH or in CUDA_HOME (pip install . --no-build-isolation),\n"
                "or with UCCL_EP_CUDA_ARCHS=all; or set UCCL_EP_BACKEND=host for tensors in CPU memory",
            )
        )
    if "MIG" in seen.get("name", "") or seen.get("id", "").startswith("MIG"):
        said.append(
            warning(
                f"{seen['name']} is a slice of a GPU (MIG)",
                "slices do not reach each other's memory: set UCCL_EP_DOMAIN_SIZE=1, or switch MIG off "
                "(nvidia-smi -mig 0)",
            )
        )
    if seen.get("vmm"):
        said.append(
            fix(
                f"its memory cannot be shared: {seen['vmm']}",
                "ranks of a domain map each other's memory by file descriptors: a driver from 525 (CUDA "
                "12) on is needed",
            )
        )
    if said:
        return said
    dmabuf = (
        "; it gives dmabufs"
        if seen.get("dmabuf")
        else "; it gives no dmabufs, NICs need a peer-memory module"
    )
    return [
        fine(f"{seen['name']}; memory was exported, imported and read{dmabuf if seen['with_cuda'] else ''}")
    ]


def _without(seen: Facts) -> Said:
    if seen["backend"] == "cuda":
        return fix(
            "UCCL_EP_BACKEND is cuda, and torch sees no GPU",
            "let the launcher give each rank a GPU, or unset it",
        )
    if seen["of_driver"] and seen["backend"] != "host":
        why = (
            "CUDA_VISIBLE_DEVICES, or the container, hides them"
            if seen["torch_cuda"]
            else "this torch was built without CUDA"
        )
        return fix(
            f"the driver has {seen['of_driver']} GPUs, and torch sees none: {why}",
            "install a torch with CUDA; Slurm --gpus-per-node, Docker --gpus all, Kubernetes limits "
            "nvidia.com/gpu",
        )
    return fine("no GPU: tensors in CPU memory")


def _apart(group: Group, facts: Mapping[int, Facts]) -> list[Finding]:
    """Ranks of one host whose GPUs do not reach each other: they would be taken for a domain."""
    found = []
    for rank, seen in facts.items():
        peers = [
            peer
            for peer in group.neighbours(rank)
            if peer in facts
            and seen["peers"].get(str(facts[peer]["gpu"])) is False
            and seen["id"] != facts[peer]["id"]
        ]
        if peers:
            found.append(
                Finding(
                    NAME,
                    FIX,
                    f"GPU {seen['gpu']} does not reach the memory of those of rank "
                    f"{', '.join(map(str, peers))}",
                    "without NVLink look for PCIe peer access: `nvidia-smi topo -p2p r`, IOMMU and ACS "
                    "off, no MIG. Or\n"
                    "set UCCL_EP_DOMAIN_SIZE to the number of consecutive ranks whose GPUs do reach "
                    "each other",
                    (rank,),
                )
            )
    return found
