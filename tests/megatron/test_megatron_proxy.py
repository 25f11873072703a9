"""The piece of DeepSeek-V3, shrunken: latent attention, a dense layer, group limits, shared expert, bias."""

from __future__ import annotations

from tests.megatron.harness import MegatronRanks


def test_the_proxys_routing_trains_the_same_bits_as_with_alltoall(ranks: MegatronRanks) -> None:
    stock = ranks.run("proxy_case.train_proxy", dispatcher="alltoall")
    ours = ranks.run("proxy_case.train_proxy", dispatcher="uccl_ep")
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine.dispatchers == ("UcclEpTokenDispatcher",) * 2
        assert theirs.dispatchers == ("MoEAlltoAllTokenDispatcher",) * 2
        assert mine.losses == theirs.losses
        assert mine.parameters == theirs.parameters
        assert mine.bias == theirs.bias and any(mine.bias), "the balancing bias was not updated"
        assert mine.shared == 2 * 3 * 128 * 64
        assert mine.most_groups == 1


def test_without_group_limits_the_proxy_trains_something_else(ranks: MegatronRanks) -> None:
    """Control: the limits and the comparison do something."""
    limited = ranks.run("proxy_case.train_proxy", dispatcher="uccl_ep")
    free = ranks.run("proxy_case.train_proxy", dispatcher="uccl_ep", limited=False)
    assert max(outcome.most_groups for outcome in free) == 2
    assert [o.parameters for o in free] != [o.parameters for o in limited]
