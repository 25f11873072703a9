"""Which tests need the machine for themselves: the names say what is there."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from tests import shares
from tests.native.test_native import PROGRAMS

TESTS = Path(__file__).resolve().parents[1]


def missing(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if not (TESTS / name).exists()]


def test_every_name_is_that_of_a_test() -> None:
    assert missing((*shares.WAITS, *shares.TRAINS)) == []
    assert set(shares.WAITING_PROGRAMS) <= set(PROGRAMS)


def test_a_name_without_a_test_is_found() -> None:
    """Control."""
    assert missing(("fault", "unit/test_gone.py")) == ["unit/test_gone.py"]


def test_what_watches_the_clock_and_what_trains_run_by_themselves_and_the_rest_does_not() -> None:
    native = PurePosixPath("native/test_native.py")
    assert shares.mark_of(PurePosixPath("fault/test_pauses.py"), None) == "waits"
    assert shares.mark_of(PurePosixPath("unit/test_limits.py"), None) == "waits"
    assert shares.mark_of(PurePosixPath("megatron/test_megatron_step.py"), None) == "trains"
    assert (shares.mark_of(native, "life"), shares.mark_of(native, "queue")) == ("waits", None)
    assert shares.mark_of(PurePosixPath("unit/test_fp8.py"), None) is None


def test_the_claims_of_a_program_stay_together() -> None:
    native = PurePosixPath("native/test_native.py")
    assert shares.group_of(native, "queue") != shares.group_of(native, "layout")
    assert shares.group_of(native, None) == "native/test_native.py"
