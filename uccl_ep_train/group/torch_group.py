"""What creation needs of a `torch.distributed` process group."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from uccl_ep_train.errors import ConfigError, DtypeError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store


def joined(group: ProcessGroup | None) -> tuple[ProcessGroup, int]:
    """The group (None: the default one), and this process's rank in it. Raises as `TorchBootstrap` does."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError("torch.distributed is not initialised: call init_process_group first")
    if group is None:
        group = cast("ProcessGroup", dist.group.WORLD)
    member = group is not dist.GroupMember.NON_GROUP_MEMBER
    if member and not isinstance(group, dist.ProcessGroup):
        raise DtypeError(
            f"group is {type(group).__name__}; "
            "allowed is a ProcessGroup (get_group() of a DeviceMesh), or None"
        )
    rank = dist.get_rank(group) if member else -1
    if rank < 0:
        raise ConfigError("this process is not a member of the group")
    return group, rank


def store_of(group: ProcessGroup) -> Store:
    from torch.distributed import distributed_c10d

    getter = getattr(group, "get_group_store", None)
    if getter is not None:
        try:
            return getter()
        except RuntimeError:
            pass
    entry = distributed_c10d._world.pg_map.get(group)
    if entry is None or entry[1] is None:
        raise ConfigError("the group has no key-value store; pass bootstrap= instead")
    return entry[1]
