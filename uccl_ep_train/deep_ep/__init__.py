"""A module of DeepEP's shape on this library: `Buffer`, high throughput, and `ElasticBuffer`.

    python -m uccl_ep_train.deep_ep train.py ARGUMENTS     runs a program that imports deep_ep
    uccl_ep_train.deep_ep.install()                        the same, by the program itself, before it imports

An installed deep_ep is not hidden unless told: `install(replace=True)`, `--replace`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

import torch

from uccl_ep_train.deep_ep import buffer, elastic
from uccl_ep_train.deep_ep.buffer import Buffer
from uccl_ep_train.deep_ep.config import Config
from uccl_ep_train.deep_ep.elastic import ElasticBuffer
from uccl_ep_train.deep_ep.elastic_handle import EPHandle
from uccl_ep_train.deep_ep.utils.event import EventHandle, EventOverlap
from uccl_ep_train.errors import ConfigError

topk_idx_t = torch.int64
__version__ = "2.1.0+uccl.ep.train"  # of the DeepEP whose calls these are

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "install",
    "topk_idx_t",
]

_PARTS = ("envs", "event", "gate", "math", "refs", "testing")  # of `utils`
_COMPILED = "deep_ep_cpp"  # whose classes are here; later `deep_ep._C`


def install(*, replace: bool = False) -> None:
    """From now on `import deep_ep` in this process means this module.

    replace  also where deep_ep is installed or has been imported

    Raises `ConfigError` where it is, and `replace` is False.
    """
    here = sys.modules[__name__]
    if sys.modules.get("deep_ep") is here:
        return
    for package in ("deep_ep", _COMPILED):
        taken = package in sys.modules or importlib.util.find_spec(package) is not None
        if taken and not replace:
            raise ConfigError(
                f"{package} is installed; allowed with replace=True, which hides it in this process"
            )
    for name in [name for name in sys.modules if name.startswith("deep_ep.")]:
        del sys.modules[name]
    for part in _PARTS:
        importlib.import_module(f"{__name__}.utils.{part}")
    # No module of this package is loaded a second time by its other name.
    for name in [name for name in sys.modules if name.startswith(f"{__name__}.")]:
        sys.modules[f"deep_ep{name.removeprefix(__name__)}"] = sys.modules[name]
    buffers = ModuleType("deep_ep.buffers")
    vars(buffers).update(legacy=buffer, elastic=elastic)
    vars(here).update(buffers=buffers, _C=here)
    others = {"buffers": buffers, "buffers.legacy": buffer, "buffers.elastic": elastic, "_C": here}
    sys.modules.update({f"deep_ep.{name}": module for name, module in others.items()})
    sys.modules.update({"deep_ep": here, _COMPILED: here})
