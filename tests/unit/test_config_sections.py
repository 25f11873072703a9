"""The sections of `EpConfig`, their settings' public names, and the native structure that they fill."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from pathlib import Path

import pytest

from tests.unit.setting_values import PARSED
from uccl_ep_train import Deadlines, EpConfig, Gpu, LoopFaults, Network, Topology, Wire
from uccl_ep_train.core.native import load_native, native_config, native_values
from uccl_ep_train.errors import ConfigError
from uccl_ep_train.settings.config import ALL_SETTINGS
from uccl_ep_train.settings.sections import SECTIONS, SETTINGS

ROOT = Path(__file__).resolve().parents[2]
BASE = {"num_experts": 8, "hidden": 256}

pytestmark = pytest.mark.usefixtures("clean_environment")

OTHER = {name: value for name, (_, value) in PARSED.items()}


def nested(name: str, value: object) -> dict[str, object]:
    entry = SETTINGS[name]
    return {entry.section: SECTIONS[entry.section](**{entry.field: value})}


@pytest.mark.parametrize("name", SETTINGS)
def test_both_names_of_a_setting_mean_the_same(name: str) -> None:
    value, entry = OTHER[name], SETTINGS[name]
    flat, inside = EpConfig(**BASE, **{name: value}), EpConfig(**BASE, **nested(name, value))
    assert flat == inside != EpConfig(**BASE)
    assert hash(flat) == hash(inside)
    assert getattr(inside, name) == getattr(getattr(flat, entry.section), entry.field) == value
    assert getattr(EpConfig, name) == getattr(EpConfig(**BASE), name) == entry.default
    assert flat.describe() == inside.describe() != EpConfig(**BASE).describe()
    assert EpConfig(**BASE).replace(**{name: value}) == flat
    assert dataclasses.replace(EpConfig(**BASE), **{name: value}) == flat
    assert EpConfig(**BASE).replace(**nested(name, value)) == flat


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_given_by_both_names_is_an_error_that_has_both(name: str) -> None:
    value, entry = OTHER[name], SETTINGS[name]
    # Also where they say the same, and where the section says what it is without it.
    for other in (value, entry.default):
        for make in (EpConfig, EpConfig.from_env, lambda **given: EpConfig(**BASE).replace(**given)):
            with pytest.raises(ConfigError) as caught:
                make(**BASE, **{name: value}, **nested(name, other))
            assert str(caught.value) == (
                f"{name} = {value!r} and {entry.path} = {other!r} are one setting: allowed is one of them"
            )


def test_other_settings_of_a_section_may_be_given_by_their_public_names() -> None:
    config = EpConfig(**BASE, gpu=Gpu(num_sms=8), stage_sms=4)
    assert config.gpu == Gpu(num_sms=8, stage_sms=4)


def test_what_is_no_section_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"^gpu = Wire\(.*\): allowed is a Gpu$"):
        EpConfig(**BASE, gpu=Wire())
    with pytest.raises(ConfigError, match=r"^faults = 1: allowed is a LoopFaults$"):
        EpConfig.from_env(**BASE, faults=1)
    assert EpConfig(**BASE, gpu=None) == EpConfig(**BASE)


def test_an_unknown_name_is_an_error() -> None:
    for unknown in ("num_smz", "seed"):  # the field of a section, without its prefix
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{unknown}'"):
            EpConfig(**BASE, **{unknown: 1})
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{unknown}'"):
            EpConfig(**BASE).replace(**{unknown: 1})
        with pytest.raises(AttributeError, match=unknown):
            getattr(EpConfig(**BASE), unknown)
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_smz'"):
        Gpu(num_smz=1)
    with pytest.raises(ConfigError, match="unknown configuration field 'seed'"):
        EpConfig.from_env(**BASE, seed=1)


def test_a_section_checks_its_values_and_names_them_as_everybody_does() -> None:
    with pytest.raises(ConfigError, match=r"^num_sms = 0: allowed is 1 \.\. 1024$"):
        Gpu(num_sms=0)
    with pytest.raises(ConfigError, match=r"^loop_seed = -1: allowed is 0 \(in order\) \.\. 2\^63 - 1$"):
        LoopFaults(seed=-1)
    assert Network(domains=[1, 0]).domains == (1, 0)
    assert isinstance(Deadlines(arrival_timeout_s=5).arrival_timeout_s, float)


def test_sections_and_flat_attributes_are_frozen() -> None:
    config = EpConfig(**BASE)
    for holder, name in ((config, "gpu"), (config, "num_sms"), (config.gpu, "num_sms")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(holder, name, 3)
    with pytest.raises(TypeError):
        Gpu("host")


def test_a_configuration_survives_pickle_copy_and_repr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCCL_EP_NUM_SMS", "8")
    config = EpConfig.from_env(**BASE, stage_sms=4, faults=LoopFaults(seed=3))
    for other in (pickle.loads(pickle.dumps(config)), copy.copy(config), copy.deepcopy(config)):
        assert other == config and hash(other) == hash(config)
        assert other.describe() == config.describe()
        assert "environment UCCL_EP_NUM_SMS" in other.describe()
    names = {owner.__name__: owner for owner in (EpConfig, *SECTIONS.values())}
    assert eval(repr(config), names) == config


def test_a_section_of_an_argument_leaves_its_other_settings_to_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCCL_EP_NUM_SMS", "8")
    monkeypatch.setenv("UCCL_EP_STAGE_SMS", "4")
    config = EpConfig.from_env(**BASE, gpu=Gpu(num_sms=24))  # said, though it is the default
    assert (config.gpu.num_sms, config.gpu.stage_sms) == (24, 4)
    monkeypatch.setenv("UCCL_EP_DOMAINS", "0,0")
    assert EpConfig.from_env(**BASE, network=Network(domain_size=2)).domains is None


def test_replacing_a_section_keeps_nothing_of_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCCL_EP_NUM_SMS", "8")
    monkeypatch.setenv("UCCL_EP_GRAD_DTYPE", "fp8")
    config = EpConfig.from_env(**BASE, stage_sms=4).replace(gpu=Gpu(bulk_copies=False))
    assert config == EpConfig(**BASE, bulk_copies=False, grad_dtype="fp8")
    sources = {line.split()[0]: line for line in config.describe().splitlines()}
    assert " default " in sources["num_sms"] and " argument " in sources["bulk_copies"]
    assert "environment UCCL_EP_GRAD_DTYPE" in sources["grad_dtype"]


def test_every_variable_is_named_by_the_one_rule() -> None:
    for name, entry in SETTINGS.items():
        assert entry.variable == "UCCL_EP_" + name.upper()
        prefix = "loop_" if entry.section == "faults" else ""
        assert name == prefix + entry.field


# ------------------------------------------------------------------------------------ the native structure


def bound_fields(structure: type, prefix: str = "") -> set[str]:
    """What a bound structure lets us set, "nic.window_ops" for fields of a structure inside."""
    found = set()
    for name, member in vars(structure).items():
        if not isinstance(member, property):
            continue
        value = getattr(structure(), name)
        if type(value).__module__ == load_native().__name__:
            found |= bound_fields(type(value), f"{prefix}{name}.")
        else:
            found.add(prefix + name)
    return found


def test_python_fills_every_field_that_the_native_structure_binds_and_no_other() -> None:
    filled = native_values(EpConfig(**BASE), Topology.split(2, 1), 0, 1)
    assert set(filled) == bound_fields(load_native().EngineConfig)


def test_a_field_that_one_side_lacks_is_found() -> None:
    """The comparison above, of two structures of which each has a field of its own."""

    class Inside:
        window_ops = property(lambda _: 0)

    class Structure:
        nic = property(lambda _: Inside())
        added = property(lambda _: 0)

    Inside.__module__ = load_native().__name__
    assert bound_fields(Structure) == {"nic.window_ops", "added"}
    bound = bound_fields(load_native().EngineConfig)
    assert bound - {"nic.window_ops"} != bound == bound | {"nic.window_ops"}
    with pytest.raises(AttributeError):
        load_native().EngineConfig().added = 1


# Of structures of the native core: what is C++'s alone, because it is found out or for tests in C++.
NATIVE_ONLY = {
    "EngineConfig": {"packets"},
    "LoopOptions": {"queue_depth", "cut", "clock_nsec"},
}


def declared_fields(structure: str, text: str) -> set[str]:
    (body,) = re.findall(rf"^struct {structure} \{{\n(.*?)^\}};", text, re.DOTALL | re.MULTILINE)
    code = re.sub(r"//[^\n]*", "", body)
    return set(re.findall(r"(\w+)\s*(?:=[^;]*)?;", code))


@pytest.mark.parametrize(
    ("structure", "header"),
    [
        ("EngineConfig", "engine/config.h"),
        ("LoopOptions", "transport/transport.h"),
        ("NicOptions", "transport/transport.h"),
    ],
)
def test_every_declared_field_is_bound(structure: str, header: str) -> None:
    text = (ROOT / "csrc" / header).read_text()
    bound = {
        name for name, member in vars(getattr(load_native(), structure)).items() if type(member) is property
    }
    assert declared_fields(structure, text) - NATIVE_ONLY.get(structure, set()) == bound
    added = text.replace(
        f"struct {structure} {{\n", f"struct {structure} {{\n  uint32_t added = 0;  // new\n"
    )
    assert declared_fields(structure, added) - declared_fields(structure, text) == {"added"}


def value_at(native: object, path: str) -> object:
    for name in path.split("."):
        native = getattr(native, name)
    return native


@pytest.mark.parametrize("name", [name for name, entry in ALL_SETTINGS.items() if entry.native])
def test_every_native_setting_reaches_its_field_and_no_other(name: str) -> None:
    value = (OTHER | {"num_experts": 16, "hidden": 512, "source_order": (1, 0)})[name]
    topology = Topology.split(2, 1)
    before = native_config(EpConfig(**BASE), topology, 0)
    after = native_config(EpConfig(**(BASE | {name: value})), topology, 0)
    told = {"bf16": 2, "fp32": 4}[value] if name == "max_dtype" else value
    told = list(told) if isinstance(told, tuple) else told
    assert value_at(after, ALL_SETTINGS[name].native) == told
    changed = {
        path
        for path in native_values(EpConfig(**BASE), topology, 0, 1)
        if value_at(before, path) != value_at(after, path)
    }
    assert changed == {ALL_SETTINGS[name].native}
