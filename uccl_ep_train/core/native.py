"""Loads the compiled core `uccl_ep_train._native`, on first use, and speaks `EpConfig` to it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from uccl_ep_train.common import limits
from uccl_ep_train.common.shown import shown
from uccl_ep_train.core.topology import Topology
from uccl_ep_train.errors import ConfigError, NativeMissingError
from uccl_ep_train.settings.checks import Value
from uccl_ep_train.settings.config import ALL_SETTINGS, EpConfig

if TYPE_CHECKING:
    from uccl_ep_train._native import EngineConfig, Trial

SYSFS = Path("/sys")


def load_native() -> ModuleType:
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


ELEMENT_BYTES = {"bf16": 2, "fp32": 4}


class RowFormat(NamedTuple):
    """How a row travels: codes, then scales, then metadata; filled up to 16 bytes.

    name         "bf16" | "fp32" | "fp8" | "mxfp8"
    scale        of "fp8", "pow2" | "fp32"; else ""
    code_bits    of an element
    block        neighbouring elements with one scale, or one word of exponents. The last ones may be fewer
    scale_bytes  of a scale; 0: there is none
    """

    name: str
    scale: str
    code_bits: int
    block: int
    scale_bytes: int

    def num_scales(self, hidden: int) -> int:
        return -(-hidden // self.block) if self.scale_bytes else 0

    def row_bytes(self, hidden: int, num_metadata: int = 0) -> int:
        beside = self.num_scales(hidden) * self.scale_bytes + num_metadata * 4
        return hidden * self.code_bits // 8 + -(-beside // 16) * 16


@functools.cache
def row_formats() -> tuple[RowFormat, ...]:
    """Those of the native core, which declares them."""
    return tuple(RowFormat(*entry) for entry in load_native().row_formats())


def row_format(name: str, scale: str) -> RowFormat:
    """Raises `ConfigError` where no rows travel so."""
    for entry in row_formats():
        if entry.name == name and entry.scale in ("", scale):
            return entry
    known = " | ".join(dict.fromkeys(entry.name for entry in row_formats()))
    raise ConfigError(f"no rows travel as {shown(name)} with scales {shown(scale)}; allowed is {known}")


def native_values(config: EpConfig, topology: Topology, rank: int, generation: int) -> dict[str, Value]:
    """One rank's native `EngineConfig`, by the names of its fields, "nic.window_ops"; None: left as it is."""
    values: dict[str, Value] = _settings(config)
    return values | {
        "rank": rank,
        "num_ranks": topology.num_ranks,
        "domain_of": topology.domain_of,
        "host_of": topology.host_of,
        "generation": generation,
        "max_element_bytes": ELEMENT_BYTES[config.memory.max_dtype],
        # Creation has replaced "auto" by then; a plan made without peers takes them to be on one host.
        "transport": None if config.network.transport == "auto" else config.network.transport,
    }


def native_config(config: EpConfig, topology: Topology, rank: int, generation: int = 1) -> EngineConfig:
    """The native `EngineConfig` of one rank.

    Raises `ConfigError` where the configuration does not fit the group's size.
    """
    check_fit(config, topology.num_ranks)
    return _filled(native_values(config, topology, rank, generation))


def _settings(config: EpConfig) -> dict[str, Value]:
    return {entry.native: entry.of(config) for entry in ALL_SETTINGS.values() if entry.native}


def _filled(values: Mapping[str, Value]) -> EngineConfig:
    native: EngineConfig = load_native().EngineConfig()
    for path, value in values.items():
        *holders, name = path.split(".")
        if value is not None:
            setattr(functools.reduce(getattr, holders, native), name, value)
    return native


def _nic_config(config: EpConfig) -> EngineConfig:
    """With nothing but what says how NICs are used."""
    return _filled({path: value for path, value in _settings(config).items() if path.startswith("nic.")})


def probe_transports(config: EpConfig, names: Sequence[str]) -> list[tuple[str, bool, str, str]]:
    """(name, usable, text, link) of the named transports, about this host."""
    return list(load_native().transports(_nic_config(config), list(names)))


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
    """Opens the configured transport and registers so much memory of the host, and of a GPU, as an engine
    would.

    Raises what the creation of a buffer raises where a NIC cannot be opened or refuses memory.
    """
    core = load_native()
    trial = _trial(config, around)
    trial.transport = config.network.transport
    trial.host_bytes = host_bytes
    if device_bytes:
        core.try_gpu_registration(trial, device, device_bytes)
    else:
        core.try_registration(trial)


def _trial(config: EpConfig, around: Surroundings) -> Trial:
    trial: Trial = load_native().Trial()
    trial.nic = _nic_config(config).nic
    trial.local_idx, trial.local_size, trial.near_pci = (
        around.local_idx,
        around.local_size,
        around.near_pci,
    )
    return trial


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
    if config.faults.drop_peer >= num_ranks:
        raise ConfigError(
            f"loop_drop_peer = {config.faults.drop_peer}: allowed is -1 or a group rank below {num_ranks}"
        )
