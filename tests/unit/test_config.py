"""`EpConfig`: ranges, sources of values, and the table of environment variables."""

import dataclasses
import enum
import inspect
import warnings

import pytest

from tests.unit.setting_values import PARSED
from uccl_ep_train import EpConfig, Topology
from uccl_ep_train.core.native import native_config
from uccl_ep_train.errors import ConfigError
from uccl_ep_train.settings import fields, sections
from uccl_ep_train.settings.config import ALL_SETTINGS
from uccl_ep_train.settings.fields import field_texts
from uccl_ep_train.settings.variables import VARIABLES

BASE = {"num_experts": 8, "hidden": 256}


pytestmark = pytest.mark.usefixtures("clean_environment")

BAD = [
    ("num_experts", 0),
    ("num_experts", "8"),
    ("num_experts", True),
    ("num_experts", 8.0),
    ("hidden", 100),
    ("hidden", 0),
    ("hidden", -128),
    ("dispatch_dtype", "fp16"),
    ("dispatch_dtype", None),
    ("grad_dtype", "fp32"),
    ("combine_wire_dtype", "fp8"),
    ("fp8_scale", "e8m0"),
    ("max_dtype", "fp8"),
    ("budget_bytes", 0),
    ("budget_bytes", 1.5e9),
    ("chunk_bytes", 0),
    ("window_chunks", 0),
    ("arrival_timeout_s", 0),
    ("arrival_timeout_s", float("nan")),
    ("arrival_timeout_s", float("inf")),
    ("progress_timeout_s", -1.0),
    ("progress_timeout_s", "20"),
    ("progress_timeout_s", b"20"),
    ("backend", "gpu"),
    ("num_sms", 0),
    ("domain_size", 0),
    ("domains", ()),
    ("domains", 2),
    ("domains", "0,1"),
    ("domains", (0, -1)),
    ("domains", (0, 0.5)),
    ("transport", "carrier pigeon"),
    ("nics", ()),
    ("nics", "mlx5_0"),
    ("nics", ("mlx5_0,mlx5_1",)),
    ("nics", ("mlx5_0", 1)),
    ("nic_window_bytes", 0),
    ("nic_window_bytes", 1 << 64),
    ("nic_window_ops", 0),
    ("nic_window_ops", 1 << 32),
    ("ib_gid_index", -2),
    ("ib_gid_index", 256),
    ("ib_service_level", 16),
    ("ib_traffic_class", 256),
    ("ofi_provider", ""),
    ("net_interface", "an interface"),
    ("net_interface", "longer_than_15_c"),
    ("loop_gbytes_per_s", -1),
    ("loop_latency_us", -1),
    ("loop_seed", -1),
    ("loop_seed", 1 << 63),
    ("loop_refuse_rate", 1.0),
    ("loop_duplicate_rate", 1.1),
    ("loop_loss_rate", -0.1),
    ("loop_drop_peer", -2),
    ("num_proxies", 5),
    ("stage_sms", 0),
    ("low_latency_sms", 257),
    ("low_latency_fold_pairs", -1),
    ("low_latency_tokens", 4097),
    ("low_latency_topk", 33),
    ("mask_timeout_s", -1.0),
    ("window_tokens", 65537),
    ("bulk_copies", 1),
    ("source_order", (0, 2)),
    ("source_order", (0, 0)),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_is_named_with_what_is_allowed(name, value):
    with pytest.raises(ConfigError) as caught:
        EpConfig(**{**BASE, name: value})
    message = str(caught.value)
    assert message == f"{name} = {value!r}: allowed is {ALL_SETTINGS[name].info.allowed}"


@pytest.mark.parametrize(
    "value",
    ["x" * 100_000, list(range(100_000)), 10**5000, [10**5000]],
    ids=["text", "list", "integer", "digits"],
)
def test_a_value_too_long_to_print_is_refused_by_the_same_error(value):
    """Python prints no integer of more than 4,300 digits."""
    for name in ALL_SETTINGS:
        with pytest.raises(ConfigError) as caught:
            EpConfig(**(BASE | {name: value}))
        assert str(caught.value).startswith(f"{name} = ") and len(str(caught.value)) < 500


def test_every_field_has_a_bad_value_above():
    assert {name for name, _ in BAD} == set(ALL_SETTINGS)


def test_edges_of_ranges_are_allowed():
    EpConfig(num_experts=1, hidden=128, loop_refuse_rate=0.99, loop_duplicate_rate=1.0, num_proxies=4)
    EpConfig(**BASE, domains=[1, 0, 1], source_order=[2, 0, 1], loop_seed=(1 << 63) - 1)


def test_lists_become_tuples_and_integers_floats():
    config = EpConfig(**BASE, domains=[1, 0], arrival_timeout_s=5)
    assert config.domains == (1, 0)
    assert isinstance(config.arrival_timeout_s, float)
    hash(config)


def test_members_of_enumerations_are_their_values():
    """The text of a `str` member is its name, which no comparison knows."""

    class Wires(str, enum.Enum):  # noqa: UP042  # StrEnum has other texts
        FP32, LOOP = "fp32", "loop"

    class Sizes(enum.IntEnum):
        MANY = 64

    config = EpConfig(num_experts=Sizes.MANY, hidden=256, combine_wire_dtype=Wires.FP32, transport=Wires.LOOP)
    plain = EpConfig(num_experts=64, hidden=256, combine_wire_dtype="fp32", transport="loop")
    assert config == plain and config.describe() == plain.describe()
    with pytest.raises(ConfigError, match="max_dtype"):
        EpConfig(**BASE, combine_wire_dtype=Wires.FP32, max_dtype="bf16")


def test_fp32_partial_sums_need_fp32_slots():
    with pytest.raises(ConfigError, match="max_dtype"):
        EpConfig(**BASE, combine_wire_dtype="fp32", max_dtype="bf16")
    EpConfig(**BASE, combine_wire_dtype="fp32", max_dtype="fp32")


def test_it_is_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EpConfig(**BASE).hidden = 128
    with pytest.raises(TypeError):
        EpConfig(8, 256)


def test_every_field_has_a_text_with_its_range_and_reason_and_numbers_a_unit():
    for entry in ALL_SETTINGS.values():
        info = field_texts(entry.owner)[entry.field]
        assert info.allowed and info.reason
        assert info.unit or entry.form != "" or isinstance(entry.default, str)


def test_errors_say_what_the_text_below_the_field_says():
    source = " ".join(inspect.getsource(sections).split())
    for name, value in BAD:
        if name not in BASE and name != "source_order":
            with pytest.raises(ConfigError) as caught:
                EpConfig(**BASE, **{name: value})
            assert f"Allowed: {str(caught.value).split(': allowed is ', 1)[1]}." in source


def test_without_its_source_the_package_still_names_field_and_value(monkeypatch):
    monkeypatch.setattr(fields, "field_texts", lambda _: {})
    with pytest.raises(ConfigError, match=r"^num_sms = 0: allowed is what the documentation says$"):
        EpConfig(**BASE, num_sms=0)


def test_argument_beats_environment_beats_default(monkeypatch):
    monkeypatch.setenv("UCCL_EP_NUM_PROXIES", "2")
    monkeypatch.setenv("UCCL_EP_DISPATCH_DTYPE", "bf16")
    config = EpConfig.from_env(**BASE, num_proxies=3)
    assert (config.num_proxies, config.dispatch_dtype, config.grad_dtype) == (3, "bf16", "bf16")


def test_the_environment_does_not_leak_into_direct_construction(monkeypatch):
    monkeypatch.setenv("UCCL_EP_NUM_PROXIES", "2")
    assert EpConfig(**BASE).num_proxies == 1


def lines_of(config):
    return {line.split()[0]: line for line in config.describe().splitlines()}


def test_describe_names_the_source_of_every_value(monkeypatch):
    monkeypatch.setenv("UCCL_EP_BUDGET_BYTES", "64M")
    lines = lines_of(EpConfig.from_env(**BASE, num_proxies=1))
    assert set(lines) == set(ALL_SETTINGS)
    assert "environment UCCL_EP_BUDGET_BYTES" in lines["budget_bytes"]
    assert str(64 << 20) in lines["budget_bytes"]
    assert " argument " in lines["num_proxies"]  # Given, though it equals the default.
    assert " default " in lines["grad_dtype"]


def test_replace_keeps_the_sources_of_the_other_values(monkeypatch):
    monkeypatch.setenv("UCCL_EP_NUM_SMS", "8")
    config = EpConfig.from_env(**BASE).replace(domain_size=2)
    lines = lines_of(config)
    assert "environment UCCL_EP_NUM_SMS" in lines["num_sms"]
    assert " argument " in lines["domain_size"]
    assert config == EpConfig(**BASE, num_sms=8, domain_size=2)


def test_replace_validates():
    with pytest.raises(ConfigError, match="num_proxies = 9"):
        EpConfig(**BASE).replace(num_proxies=9)


def test_a_bad_variable_is_named(monkeypatch):
    monkeypatch.setenv("UCCL_EP_NUM_PROXIES", "many")
    with pytest.raises(ConfigError, match="UCCL_EP_NUM_PROXIES = 'many'"):
        EpConfig.from_env(**BASE)
    monkeypatch.setenv("UCCL_EP_NUM_PROXIES", "99")
    with pytest.raises(ConfigError, match=r"UCCL_EP_NUM_PROXIES.*num_proxies = 99"):
        EpConfig.from_env(**BASE)


def test_a_bad_argument_is_not_blamed_on_the_environment(monkeypatch):
    monkeypatch.setenv("UCCL_EP_NUM_PROXIES", "2")
    with pytest.raises(ConfigError) as caught:
        EpConfig.from_env(**BASE, num_proxies=99)
    assert "UCCL_EP" not in str(caught.value)


def test_an_empty_variable_counts_as_not_set(monkeypatch):
    monkeypatch.setenv("UCCL_EP_NUM_PROXIES", "")
    assert EpConfig.from_env(**BASE).num_proxies == 1


def test_a_misspelt_variable_is_warned_about_once(monkeypatch):
    monkeypatch.setenv("UCCL_EP_NUM_PROXYS", "2")
    with pytest.warns(UserWarning, match="UCCL_EP_NUM_PROXYS"):
        EpConfig.from_env(**BASE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EpConfig.from_env(**BASE)


def test_an_unknown_argument_is_named():
    with pytest.raises(ConfigError, match="'hiden'"):
        EpConfig.from_env(num_experts=8, hiden=256)


def test_a_domain_size_argument_is_not_overridden_by_domains_of_the_environment(monkeypatch):
    monkeypatch.setenv("UCCL_EP_DOMAINS", "0,0,0,0")
    assert EpConfig.from_env(**BASE).domains == (0, 0, 0, 0)
    assert EpConfig.from_env(**BASE, domain_size=2).domains is None


def test_the_table_covers_every_field_but_those_the_model_decides():
    assert {variable.field for variable in VARIABLES if variable.field} == set(PARSED)
    assert set(ALL_SETTINGS) - set(PARSED) == {"num_experts", "hidden", "source_order"}


@pytest.mark.parametrize("name", PARSED)
def test_every_variable_sets_its_field(monkeypatch, name):
    text, value = PARSED[name]
    monkeypatch.setenv(f"UCCL_EP_{name.upper()}", text)
    assert getattr(EpConfig.from_env(**BASE), name) == value


def test_agreed_values_leave_out_what_may_differ_per_rank():
    agreed = EpConfig(**BASE).agreed_values()
    assert "hidden" in agreed and "domains" in agreed
    assert "loop_drop_peer" not in agreed and "progress_timeout_s" not in agreed
    # Hosts may have other NICs; a rank that takes another way than its peers is an error.
    assert "nics" not in agreed and "ib_gid_index" not in agreed
    assert "transport" in agreed and "ofi_provider" in agreed


def test_nic_settings_reach_the_core():
    told = EpConfig(
        **BASE,
        nics=["mlx5_1"],
        nic_window_bytes=(1 << 64) - 1,
        nic_window_ops=7,
        ib_gid_index=3,
        ib_service_level=4,
        ib_traffic_class=5,
        ofi_provider="efa",
        net_interface="eth1",
    )
    nic = native_config(told, Topology.split(2, 1), 0).nic
    assert (nic.devices, nic.provider, nic.interface) == (["mlx5_1"], "efa", "eth1")
    assert (nic.window_bytes, nic.window_ops) == ((1 << 64) - 1, 7)
    assert (nic.gid_index, nic.service_level, nic.traffic_class) == (3, 4, 5)
    nic = native_config(EpConfig(**BASE), Topology.split(2, 1), 0).nic
    assert (nic.devices, nic.provider, nic.interface) == ([], "", "")
    assert (nic.window_bytes, nic.window_ops) == (0, 0)
    assert (nic.gid_index, nic.service_level, nic.traffic_class) == (-1, -1, -1)
