"""Loads the compiled core `uccl_ep_train._native`, on first use, and speaks `EpConfig` to it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uccl_ep_train import limits
from uccl_ep_train.config import EpConfig
from uccl_ep_train.errors import ConfigError, NativeMissingError
from uccl_ep_train.topology import Topology

SYSFS = Path("/sys")


def load_native() -> Any:
    """The extension module. Raises `NativeMissingError` saying how to build it, and `ConfigError` where no
    file can be opened.
    """
    try:
        return importlib.import_module("uccl_ep_train._native")
    except ImportError as error:
        limits.require_descriptor("the compiled extension uccl_ep_train._native cannot be opened")
        raise NativeMissingError(
            "the compiled extension uccl_ep_train._native cannot be imported: build it with "
            f"'pip install .' (or 'pip install -e . --no-build-isolation') in the project's folder ({error})"
        ) from error


def native_config(config: EpConfig, topology: Topology, rank: int, generation: int = 1) -> Any:
    """The native `EngineConfig` of one rank.

    Raises `ConfigError` where the configuration does not fit the group's size.
    """
    check_fit(config, topology.num_ranks)
    native = load_native().EngineConfig()
    native.rank = rank
    native.num_ranks = topology.num_ranks
    native.domain_of = list(topology.domain_of)
    native.num_experts = config.num_experts
    native.hidden = config.hidden
    native.max_element_bytes = 4 if config.max_dtype == "fp32" else 2
    native.budget_bytes = config.budget_bytes
    native.window_tokens = config.window_tokens or 0
    native.chunk_bytes = config.chunk_bytes or 0
    native.window_chunks = config.window_chunks or 0
    native.arrival_timeout_s = config.arrival_timeout_s
    native.progress_timeout_s = config.progress_timeout_s
    native.num_proxies = config.num_proxies
    native.bulk_copies = config.bulk_copies
    native.source_order = list(config.source_order or range(topology.num_ranks))
    native.generation = generation
    # Creation has replaced "auto" by then; a plan made without peers takes them to be on one host.
    native.transport = "loop" if config.transport == "auto" else config.transport
    native.loop_gbytes_per_s = config.loop_gbytes_per_s
    native.loop_latency_us = config.loop_latency_us
    native.loop_seed = config.loop_seed
    native.loop_refuse_rate = config.loop_refuse_rate
    native.loop_duplicate_rate = config.loop_duplicate_rate
    native.loop_drop_peer = config.loop_drop_peer
    _set_nic(native.nic, config)
    return native


def probe_transports(config: EpConfig, names: Sequence[str]) -> list[tuple[str, bool, str, str]]:
    """(name, usable, text, link) of the named transports, about this host."""
    core = load_native()
    native = core.EngineConfig()
    _set_nic(native.nic, config)
    return list(core.transports(native, list(names)))


@dataclass(frozen=True)
class HostNic:
    """A NIC as sysfs shows it, by its port that is ACTIVE, else its first.

    pci_path    "pci0000:00/0000:00:01.0/0000:01:00.0"; "": no PCI device
    numa_node   -1: not known
    link_layer  "InfiniBand" | "Ethernet" (RoCE) | "Unspecified" (EFA)
    state       "ACTIVE" | "DOWN" | ...
    """

    name: str
    family: str
    pci_path: str
    driver: str
    numa_node: int
    port: int
    link_layer: str
    state: str
    gbits_per_s: float


@dataclass(frozen=True)
class Surroundings:
    """What a rank's choice of NICs goes by: its place among the ranks that share the host's, and the PCI
    address of its GPU ("": tensors in CPU memory).
    """

    local_idx: int = 0
    local_size: int = 1
    near_pci: str = ""


def host_nics(root: Path = SYSFS) -> list[HostNic]:
    """The RDMA NICs of this host, as the transports find them."""
    return [HostNic(**nic) for nic in load_native().host_nics(str(root))]


def rank_nics(config: EpConfig, around: Surroundings, root: Path = SYSFS) -> list[HostNic]:
    """Those that a rank would use for `verbs`. Raises `ConfigError` for one that is named and absent or down,
    and where none is left.
    """
    return [HostNic(**nic) for nic in load_native().rank_nics(_trial(config, around), str(root))]


def try_registration(
    config: EpConfig, around: Surroundings, host_bytes: int, *, device: int = -1, device_bytes: int = 0
) -> None:
    """Opens `config.transport` and registers so much memory of the host, and of a GPU, as an engine would.

    Raises what the creation of a buffer raises where a NIC cannot be opened or refuses memory.
    """
    core = load_native()
    trial = _trial(config, around)
    trial.transport = config.transport
    trial.host_bytes = host_bytes
    if device_bytes:
        core.try_cuda_registration(trial, device, device_bytes)
    else:
        core.try_registration(trial)


def _trial(config: EpConfig, around: Surroundings) -> Any:
    core = load_native()
    trial, native = core.Trial(), core.EngineConfig()
    _set_nic(native.nic, config)
    trial.nic = native.nic
    trial.local_idx, trial.local_size, trial.near_pci = (
        around.local_idx,
        around.local_size,
        around.near_pci,
    )
    return trial


def _set_nic(nic: Any, config: EpConfig) -> None:
    nic.devices = list(config.nics or ())
    nic.provider = config.ofi_provider or ""
    nic.interface = config.net_interface or ""
    nic.gid_index = config.ib_gid_index
    nic.service_level = config.ib_service_level
    nic.traffic_class = config.ib_traffic_class
    nic.window_bytes = config.nic_window_bytes or 0
    nic.window_ops = config.nic_window_ops or 0


def check_fit(config: EpConfig, num_ranks: int) -> None:
    """Raises `ConfigError` where a value does not fit a group of `num_ranks`."""
    if config.num_experts % num_ranks:
        raise ConfigError(
            f"num_experts = {config.num_experts}: allowed is a multiple of the number of ranks, {num_ranks}"
        )
    if config.source_order is not None and len(config.source_order) != num_ranks:
        raise ConfigError(
            f"source_order = {config.source_order}: allowed is a permutation of the {num_ranks} group ranks"
        )
    if config.loop_drop_peer >= num_ranks:
        raise ConfigError(
            f"loop_drop_peer = {config.loop_drop_peer}: allowed is -1 or a group rank below {num_ranks}"
        )
