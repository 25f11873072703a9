"""Training fails, groups and model are made anew in the same processes, and the old ones are in no way."""

from __future__ import annotations

import pytest

from tests.megatron.harness import MegatronRanks


@pytest.mark.parametrize("way", ["disable", "enable", "other options"])
def test_after_a_restart_in_the_process_training_begins_anew(ranks: MegatronRanks, way: str) -> None:
    found_by_rank = ranks.run(
        "restart_case.restart", timeout_s=220, port=ranks.store_port, generation=way, way=way
    )
    for rank, found in enumerate(found_by_rank):
        assert found["after"] == found["before"]
        assert found["error"] == ("ArithmeticError" if rank == 1 else "PeerFailed")
        # Control: before the groups are destroyed the error still keeps optimizers from stepping.
        assert found.get("step") == (None if rank == 1 else "PeerFailed")
        assert found["buffers"] == 1 and found["old closed"]
