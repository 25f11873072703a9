"""Sweeps of the planner with uneven routing: drawn with skew, or of a router's trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from uccl_ep_train.errors import InputError
from uccl_ep_train.planner.__main__ import main
from uccl_ep_train.planner.shape import Router, read_trace

OF_TRAINING = str(Path(__file__).parents[2] / "bench" / "traces" / "tiny_host.npz")
SWEEP = ["--sweep", "--ep", "4", "--domain-size", "2", "--experts", "8", "--topk", "2", "--hidden", "4096"]
OTHER_ROUTING = (
    ["--skew", "2"], ["--router-trace", OF_TRAINING], ["--router-trace", OF_TRAINING, "--layer", "3"],
)  # fmt: skip


def test_times_follow_the_routing(capsys: pytest.CaptureFixture[str]) -> None:
    tables = set()
    for words in ([], ["--skew", "0"], *OTHER_ROUTING):
        assert main([*SWEEP, "--tokens", "1024", *words]) == 0
        said = capsys.readouterr().out
        assert ("those of even routing" in said) == (words in OTHER_ROUTING)
        tables.add(said)
    assert len(tables) == 4  # no skew is even routing


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--skew", "-1"], "argument --skew: '-1': allowed is 0 .. 100"),
        (["--layer", "1"], "--layer is for --router-trace"),
        (["--skew", "1", "--router-trace", OF_TRAINING], "allowed is one of them"),
        (["--router-trace", OF_TRAINING, "--layer", "4"], "layer = 4; allowed is 0 .. 3"),
        (["--router-trace", OF_TRAINING, "--tokens", "65536"], "tokens of a layer, not 262144 of all ranks"),
        (["--router-trace", "/nope.npz"], "/nope.npz is no router trace"),
    ],
)
def test_what_is_no_routing_is_refused(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = main([*SWEEP, *words])
    except SystemExit as exit:
        status = exit.code
    captured = capsys.readouterr()
    assert status == 2 and text in captured.out + captured.err


@pytest.mark.parametrize(
    "words",
    [
        ["--trace", "x.json", "--tokens", "128"],
        ["--fit", "bench", "--hardware", "h100"],
        ["--fit", "bench", "--ep", "8"],
        ["--fit", "bench", "--skew", "1"],
    ],
)
def test_options_of_a_sweep_are_refused_elsewhere(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert f"{words[2]} is for --sweep" in capsys.readouterr().err


def test_a_damaged_trace_is_refused(tmp_path: Path) -> None:
    router = Router(num_experts=8, topk=2)
    (tmp_path / "cut.npz").write_bytes(Path(OF_TRAINING).read_bytes()[:9000])
    with pytest.raises(InputError, match=r"cut\.npz is no router trace"):
        read_trace(tmp_path / "cut.npz", 8, router)
    for name, idx, text in (
        ("high", np.full((1, 1, 8, 2), 8), "experts from 8 to 8; allowed is 0 .. 7"),
        ("low", np.full((1, 1, 8, 2), -1), "experts from -1 to -1; allowed is 0 .. 7"),
        ("floats", np.zeros((1, 1, 8, 2)), "allowed are integers"),
    ):
        np.savez(tmp_path / f"{name}.npz", topk_idx=idx, num_experts=np.array(8))
        with pytest.raises(InputError, match=text):
            read_trace(tmp_path / f"{name}.npz", 8, router)
