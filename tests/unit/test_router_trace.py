"""A run that would save no routing is refused, instead of ending without the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes import launch
from recipes.measure.router_trace import saved_steps
from recipes.training import asked

STEPS = 400


def test_routing_is_saved_evenly_over_the_run_and_in_its_last_step() -> None:
    assert [saved_steps(num) for num in (400, 6, 3, 1)] == [
        [100, 200, 300, 400],
        [1, 3, 4, 6],
        [1, 2, 3],
        [1],
    ]


@pytest.mark.parametrize(
    ("words", "newest", "text"),
    [
        (["--stop-at=99"], 0, "would go from step 0 to 99"),
        ([], 400, "would go from step 400 to 400"),
        (["--stop-at=199"], 100, "would go from step 100 to 199"),
        (["--stop-at=100"], 0, ""),
        (["--restart"], 400, ""),
        ([], 399, ""),
    ],
)
def test_a_run_needs_a_step_whose_routing_is_saved(
    words: list[str],
    newest: int,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launch, "run_ranks", lambda *_: 7)
    for name, value in (("steps", [newest] if newest else []), ("check", None), ("check_files", None)):
        monkeypatch.setattr(asked.Checkpoints, name, lambda *_, value=value: value)
    words = [*words, f"--steps={STEPS}", f"--run-dir={tmp_path}", f"--router-trace={tmp_path / 'x.npz'}"]
    assert launch.main([*words, "--device=cpu"]) == (2 if text else 7)
    said = capsys.readouterr().err
    assert f"100, 200, 300, 400, of which routing is saved; this one {text}" in said if text else not said
