"""The exception classes: what catches them, what they carry, and that both survive the ways errors travel."""

import pickle

import pytest

from uccl_ep_train import errors

COMMUNICATION = [
    errors.ArrivalTimeout,
    errors.PeerDied,
    errors.PeerFailed,
    errors.PlanMismatchError,
    errors.ProgressTimeout,
    errors.RankMismatchError,
    errors.TransportError,
]


def test_every_error_is_an_ep_error_and_a_runtime_error():
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.EpError)
        assert issubclass(getattr(errors, name), RuntimeError)


@pytest.mark.parametrize(
    ("name", "bases"),
    [
        ("ConfigError", [ValueError]),
        ("InputError", [ValueError]),
        ("DtypeError", [errors.InputError, TypeError]),
        ("ShapeError", [errors.InputError]),
        ("RoutingError", [errors.InputError]),
        ("DeviceError", [errors.InputError]),
        ("MemoryBudgetError", [errors.ConfigError]),
    ],
)
def test_errors_are_caught_by_the_builtin_classes_that_callers_expect(name, bases):
    for base in bases:
        assert issubclass(getattr(errors, name), base)


def test_input_errors_and_communication_errors_are_apart():
    assert not issubclass(errors.CommunicationError, errors.InputError)
    assert not issubclass(errors.InputError, errors.CommunicationError)


@pytest.mark.parametrize("cls", COMMUNICATION)
def test_communication_errors_carry_their_fields_through_pickle_and_again(cls):
    fields = {
        "rank": 1,
        "epoch": 7,
        "step": "place",
        "chunk": 3,
        "peer": 2,
        "expected": 9,
        "seen": 8,
    }
    error = cls("rank 2 is late", **fields)
    for copy in (pickle.loads(pickle.dumps(error)), error.again()):
        assert type(copy) is cls
        assert str(copy) == "rank 2 is late"
        assert copy.fields() == fields
        assert copy is not error


def test_kinds_differ():
    kinds = [cls.kind for cls in COMMUNICATION]
    assert len(set(kinds)) == len(kinds)


def test_again_does_not_share_the_traceback():
    try:
        raise errors.PeerDied("gone", peer=1)
    except errors.PeerDied as error:
        assert error.__traceback__ is not None
        assert error.again().__traceback__ is None


def test_fields_that_nobody_knows_have_defaults():
    error = errors.TransportError("x")
    assert (error.rank, error.peer, error.step, error.expected) == (-1, -1, "", None)
