"""One `Buffer` per expert parallel group, shared by all MoE layers of the process."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from uccl_ep_train.errors import ConfigError
from uccl_ep_train.group.lifecycle import also_over_if, group_is_over
from uccl_ep_train.settings import variables
from uccl_ep_train.settings.checks import HIDDEN_UNIT, Value
from uccl_ep_train.settings.config import EpConfig, Gpu, normalised
from uccl_ep_train.settings.fields import Section

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from uccl_ep_train.api.buffer import Buffer

# SMs of the kernels where Megatron computes nothing beside them, and of the GPU's at most a third, so that
# two buffers leave others theirs. 24 need half as long again to decode FP8 rows as NVLink needs to bring them
# (docs/performance.md).
SMS_ALONE = 48


class BufferPool:
    """Creates buffers on demand and closes them together.

    Creation is collective over the group: every rank of a group builds the same layers in the same order.
    """

    def __init__(self, options: Mapping[str, Value | Section]) -> None:
        """`options`: arguments of `EpConfig`, except those that the model decides."""
        self.options = normalised(options)
        self._buffers: dict[tuple[ProcessGroup, EpConfig], Buffer] = {}
        self._users: weakref.WeakKeyDictionary[Buffer, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()

    def __iter__(self) -> Iterator[Buffer]:
        return iter(self._buffers.values())

    def buffer(self, group: ProcessGroup, config: Any, tp_size: int, ep_size: int, *, user: Any) -> Buffer:
        """The buffer of an expert TP x EP group for a model's TransformerConfig. Raises ConfigError.

        user: the dispatcher; while it lives, its buffer is not dropped with Megatron's groups
        """
        # Imported here, so that flags and checks of the plug-in work without the compiled extension.
        from uccl_ep_train.api.buffer import Buffer

        ep_config = self.ep_config(config, tp_size, ep_size)
        key = (group, ep_config)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.closed:
            self.drop_outlived()
            buffer = self._buffers[key] = Buffer(group, ep_config)
            users = self._users[buffer] = weakref.WeakSet()
            if _is_megatrons(group):
                forgotten = functools.partial(_is_forgotten, weakref.ref(group), users)
                also_over_if(buffer, forgotten)
        self._users[buffer].add(user)
        return buffer

    def configs(self) -> list[EpConfig]:
        """The resolved configuration of each buffer."""
        return [config for _, config in self._buffers]

    @property
    def outlived(self) -> bool:
        """Whether there are buffers and the process groups of all have been destroyed."""
        return bool(self._buffers) and all(group_is_over(buffer) for buffer in self)

    def close(self, *, abort: bool = False) -> None:
        """Closes all. With `abort` it cuts short what another thread closes."""
        for key, buffer in reversed(list(self._buffers.items())):
            buffer.close(abort=abort)
            if self._buffers.get(key) is buffer:
                del self._buffers[key]

    def drop_outlived(self) -> None:
        """Closes buffers whose group is gone: no new layer uses them, and their memory is needed."""
        for key, buffer in list(self._buffers.items()):
            if group_is_over(buffer):
                del self._buffers[key]
                buffer.close(abort=True)

    def ep_config(self, config: Any, tp_size: int, ep_size: int) -> EpConfig:
        """The configuration that `buffer` would use. Raises ConfigError."""
        dtype = config.params_dtype
        if dtype not in (torch.bfloat16, torch.float32):
            raise ConfigError(
                f"params_dtype = {dtype}: the dispatcher carries torch.bfloat16 and torch.float32"
            )
        # `Float16Module` converts parameters that were made in another dtype, float32 by default.
        if getattr(config, "fp16", False):
            raise ConfigError("fp16 = True: the dispatcher carries torch.bfloat16 and torch.float32")
        narrows = getattr(config, "bf16", False)
        hidden = getattr(config, "moe_latent_size", None) or config.hidden_size
        wide = dtype == torch.float32 or getattr(config, "fp32_residual_connection", False)
        options: dict[str, Value] = {
            "num_experts": tp_size * config.num_moe_experts,
            "hidden": hidden + row_padding(hidden),
            "source_order": stock_source_order(tp_size, ep_size),
            **self.options,
        }
        said = variables.said()
        wire = said["combine_wire_dtype"].value if "combine_wire_dtype" in said else None
        if not wide and options.get("combine_wire_dtype", wire) != "fp32" and "max_dtype" not in said:
            options.setdefault("max_dtype", "bf16")
        if "num_sms" not in options and "num_sms" not in said:
            options |= sms_of(config)
        ep_config = EpConfig.from_env(**options)
        for name in ("dispatch_dtype", "grad_dtype"):
            if dtype == torch.float32 and not narrows and getattr(ep_config.wire, name) == "fp8":
                raise ConfigError(
                    f"{name} = 'fp8' quantises BF16 rows and this model has float32 hidden states; "
                    f"allowed is {name} = 'bf16', which sends rows unquantised"
                )
        return ep_config


def _is_megatrons(group: Any) -> bool:
    """Whether Megatron's parallel state has this expert TP x EP group now."""
    from megatron.core import parallel_state

    return parallel_state.get_expert_tensor_and_model_parallel_group(check_initialized=False) is group


def _is_forgotten(group: weakref.ref[Any], users: weakref.WeakSet[Any]) -> bool:
    """Whether Megatron has dropped a group, and no layer uses its buffer.

    Megatron destroys no group, so a model of before may still be in use.
    """
    if _is_megatrons(group()):
        return False
    if users:
        gc.collect()  # a dropped model is full of cycles
    return not users


def sms_of(config: Any) -> dict[str, int]:
    """num_sms: the number that a TransformerConfig asks for (Megatron-LM main), or more than the default,
    which leaves SMs to overlapped computation.
    """
    asked = getattr(config, "moe_flex_dispatcher_num_sms", None)
    if asked is not None:
        return {"num_sms": asked}
    beside = ("overlap_moe_expert_parallel_comm", "moe_shared_expert_overlap")
    if not torch.cuda.is_available() or any(getattr(config, name, False) for name in beside):
        return {}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    num_sms = min(SMS_ALONE, properties.multi_processor_count // 3)
    return {"num_sms": num_sms} if num_sms > Gpu.num_sms else {}


def row_padding(hidden: int) -> int:
    """Elements by which a model's row is padded to the dispatcher's, a multiple of 32."""
    return -hidden % HIDDEN_UNIT


def stock_source_order(tp_size: int, ep_size: int) -> tuple[int, ...]:
    """Sources inside an expert in the order of Megatron's all-to-all dispatcher, as TP x EP group ranks.

    That dispatcher exchanges over EP, then gathers over expert TP, so the expert TP rank is major. In the
    group it is minor.
    """
    return tuple(ep * tp_size + tp for tp in range(tp_size) for ep in range(ep_size))
