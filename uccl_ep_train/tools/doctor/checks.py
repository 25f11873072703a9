"""All checks, in stages: what needs nobody else first, then what the ranks do together."""

from __future__ import annotations

from uccl_ep_train.tools.doctor import (
    dispatch,
    environment,
    gpus,
    layout,
    limits,
    memory,
    network,
    nics,
    versions,
)
from uccl_ep_train.tools.doctor.session import Check

STAGES: tuple[tuple[Check, ...], ...] = (
    (
        # These two tell the others which GPU and which settings there are.
        Check(layout.NAME, layout.look, layout.judge),
        Check(environment.ENVIRONMENT, environment.look, environment.judge),
        Check(versions.NAME, versions.look, versions.judge),
        Check(limits.NAME, limits.look, limits.judge),
        Check(gpus.NAME, gpus.look, gpus.judge),
        Check(nics.NAME, nics.look, nics.judge),
        Check(environment.LEFTOVERS, environment.look_for_leftovers, environment.judge_leftovers),
    ),
    (Check(network.SOCKETS, network.look_at_sockets, network.judge_sockets),),
    (Check(network.CLOCKS, network.look_at_clocks, network.judge_clocks),),
    (Check(network.TRANSPORT, network.look_at_transport, network.judge_transport),),
    (
        Check(memory.NAME, memory.look, memory.judge),
        Check(network.REGISTRATION, network.look_at_registration, network.judge_registration),
    ),
    (Check(dispatch.NAME, dispatch.look, dispatch.judge),),
)
