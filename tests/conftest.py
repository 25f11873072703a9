"""What all tests share: the project on the path, one thread a rank, failures that say what they compared."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[1]
# `pytest` alone, unlike `python -m pytest`, does not put the project's folder on the path.
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

pytest.register_assert_rewrite("tests.harness", "tests.process_ranks")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend",
        choices=("host", "cuda"),
        default="host",
        help="where buffers work whose test does not say; cuda: with a GPU for each rank, else skipped",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Settings of the user's shell must not change what the tests prove."""
    for name in [name for name in os.environ if name.startswith("UCCL_EP_")]:
        del os.environ[name]
    # Tests of the host backend run on machines with a GPU, too; those of the CUDA backend name it.
    os.environ["UCCL_EP_BACKEND"] = config.getoption("--backend")
    # Ranks are threads of one process there: a kernel of torch's that is loaded late would wait for ours.
    os.environ["CUDA_MODULE_LOADING"] = "EAGER"
    try:
        from hypothesis import settings
    except ImportError:
        return
    # CI repeats the same cases; elsewhere each run tries new ones and remembers the failures.
    settings.register_profile("ci", derandomize=True, deadline=None, database=None, print_blob=True)
    settings.register_profile("developer", deadline=None, print_blob=True)
    settings.load_profile("ci" if os.environ.get("CI") else "developer")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from tests import shares

    for item in items:
        path = PurePosixPath(item.path.relative_to(ROOT / "tests"))
        program = getattr(getattr(item, "callspec", None), "params", {}).get("program")
        item.add_marker(pytest.mark.xdist_group(shares.group_of(path, program)))
        if (mark := shares.mark_of(path, program)) is not None:
            item.add_marker(getattr(pytest.mark, mark))


@pytest.fixture(autouse=True, scope="session")
def _one_thread_per_rank() -> Iterator[None]:
    """Ranks are threads or processes on few cores: torch's own threads would only stand in their way."""
    if "torch" not in sys.modules:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of ours or of UCCL-EP is set, and none has been warned about."""
    from uccl_ep_train.settings import variables

    for name in list(os.environ):
        if name.startswith("UCCL_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(variables, "_warned", set())
