"""How much a rank keeps in flight on its NICs, as measured by `calibrate.py` and stored on disk per topology.

Without a measurement the NIC family's default applies (docs/nics.md). A setting overrides both.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from uccl_ep_train.common.command_line import unwritable
from uccl_ep_train.common.shown import shown
from uccl_ep_train.core.topology import Topology
from uccl_ep_train.errors import ConfigError
from uccl_ep_train.settings import env
from uccl_ep_train.settings.config import EpConfig
from uccl_ep_train.settings.sections import SETTINGS

_UNREADABLE = (OSError, ValueError, TypeError, AttributeError, RecursionError)
_ALLOWED = {"num_bytes": "1 .. 2^64 - 1", "ops": "1 .. 2^32 - 1"}


@dataclass(frozen=True)
class Windows:
    """Limits per NIC: bytes and writes of rows in flight.

    num_bytes  `EpConfig.nic_window_bytes`
    ops        `EpConfig.nic_window_ops`
    """

    num_bytes: int
    ops: int

    def apply(self, config: EpConfig) -> EpConfig:
        return config.replace(nic_window_bytes=self.num_bytes, nic_window_ops=self.ops)


def default_path() -> Path:
    """`UCCL_EP_WINDOWS_FILE`, else nic_windows.json in the user's cache folder.

    Raises `ConfigError` if the user has none: a container's user may be a number without a home.
    """
    if named := env.read("UCCL_EP_WINDOWS_FILE"):
        return Path(named)
    try:
        cache = env.read("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    except RuntimeError as error:
        raise ConfigError(
            f"UCCL_EP_WINDOWS_FILE = '': allowed is a file to keep windows in (HOME is not set: {error})"
        ) from None
    return Path(cache) / "uccl_ep_train" / "nic_windows.json"


def problem_of(path: Path) -> str:
    """Why `store` would fail; empty if it would not."""
    unfinished = _unfinished(path)
    problem = unwritable(path, makes_folders=True) or unwritable(unfinished, makes_folders=True)
    if problem:
        return problem
    try:
        _known(path)
    except _UNREADABLE as error:
        return _reason(error)
    return ""


def topology_key(transport: str, nics: str, topology: Topology) -> str:
    """The key of a measurement. nics: this rank's probe of the transport."""
    sizes = sorted(len(members) for members in topology.members)
    return f"{transport}: {nics}; domains of {', '.join(map(str, sizes))} ranks"


def lookup(key: str, path: Path | None = None) -> Windows | None:
    """The windows that were measured for `key`, or None. An unreadable file causes a warning."""
    try:
        path = path or default_path()
    except ConfigError:  # nothing can have been kept
        return None
    try:
        entry = _known(path).get(key)
        if entry is None:
            return None
        return Windows(
            _number(entry, "num_bytes", "nic_window_bytes"), _number(entry, "ops", "nic_window_ops")
        )
    except _UNREADABLE as error:
        warnings.warn(
            f"{shown(str(path))} is no file of measured windows and is ignored: {_reason(error)}",
            stacklevel=2,
        )
        return None


def _known(path: Path) -> dict[str, Any]:
    """All measurements of a file; none if there is no file."""
    if not path.exists():  # also below what is no folder, as in a HOME of /dev/null
        return {}
    if not path.is_file():  # to read a pipe would never end
        raise ValueError("it is no regular file")
    known = json.loads(path.read_text())
    if not isinstance(known, dict):
        raise ValueError("it holds no measurements")
    return known


def _unfinished(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}")


def _reason(error: Exception) -> str:
    """Without the path, which the message has."""
    return getattr(error, "strerror", None) or str(error)


def _number(entry: Mapping[str, Any], name: str, setting: str) -> int:
    """A field of a measurement. Raises ValueError naming it, where it is not what the setting allows."""
    value = entry.get(name)
    try:
        if value is not None:
            return cast(int, SETTINGS[setting].spec.kind.check(value))
    except (ValueError, TypeError, OverflowError):
        pass
    raise ValueError(f"{name} = {shown(value)}: allowed is {_ALLOWED[name]}")


def store(key: str, windows: Windows, figures: Mapping[str, Any], path: Path | None = None) -> Path:
    """Stores `windows` for `key` with their measurements; other entries of the file stay.

    Raises `ConfigError` if the file cannot be written or has other contents.
    """
    path = path or default_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        known = _known(path)
        known[key] = {**asdict(windows), **figures}
        unfinished = _unfinished(path)
        unfinished.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
        unfinished.replace(path)
    except _UNREADABLE as error:
        raise ConfigError(
            f"UCCL_EP_WINDOWS_FILE = {shown(str(path))}: allowed is a file to keep windows in "
            f"({_reason(error)})"
        ) from error
    return path


def settle(config: EpConfig, nics: str, topology: Topology) -> EpConfig:
    """`config` with the measured windows, if it sets neither and the transport has NICs."""
    network = config.network
    settled = network.nic_window_bytes is not None or network.nic_window_ops is not None
    if network.transport == "loop" or settled:
        return config
    found = lookup(topology_key(network.transport, nics, topology))
    return config if found is None else found.apply(config)
