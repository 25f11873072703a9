"""The table of environment variables: UCCL-EP's beside our own, what is unknown, and how it is printed."""

import itertools
import os
import subprocess
import sys
import warnings

import pytest

from uccl_ep_train import EpConfig
from uccl_ep_train.errors import ConfigError
from uccl_ep_train.settings import env
from uccl_ep_train.settings.variables import VARIABLES, table

BASE = {"num_experts": 8, "hidden": 256}


pytestmark = pytest.mark.usefixtures("clean_environment")

# What operators of UCCL-EP set, in its text form; the field, our variable and the value.
THEIRS = {
    "UCCL_IB_GID_INDEX": ("3", "ib_gid_index", "UCCL_EP_IB_GID_INDEX", 3),
    "UCCL_IB_SL": ("5", "ib_service_level", "UCCL_EP_IB_SERVICE_LEVEL", 5),
    "UCCL_IB_TC": ("106", "ib_traffic_class", "UCCL_EP_IB_TRAFFIC_CLASS", 106),
    "UCCL_IB_MAX_INFLIGHT_BYTES": ("1572864", "nic_window_bytes", "UCCL_EP_NIC_WINDOW_BYTES", 1572864),
    "UCCL_IB_MAX_INFLIGHT_NORMAL": ("1", "nic_window_ops", "UCCL_EP_NIC_WINDOW_OPS", 1),
    "UCCL_SOCKET_IFNAME": ("eth0", "net_interface", "UCCL_EP_NET_INTERFACE", "eth0"),
}
IDLE = ["UCCL_IB_MAX_INFLIGHT_LOW_LATENCY", "UCCL_EP_ENABLE_AGGRESSIVE_ATOMIC", "UCCL_RDMA_ADAPTIVE_SLEEP"]


@pytest.mark.parametrize("name", THEIRS)
def test_a_variable_of_uccl_ep_means_the_same_here(monkeypatch, name):
    text, field, _, value = THEIRS[name]
    assert getattr(EpConfig.from_env(**BASE), field) != value
    monkeypatch.setenv(name, text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = EpConfig.from_env(**BASE)
    assert getattr(config, field) == value
    (line,) = [line for line in config.describe().splitlines() if line.split()[0] == field]
    assert f"environment {name} " in line


def test_no_limit_of_bytes_may_be_said_as_there(monkeypatch):
    """SIZE_MAX, UCCL-EP's default."""
    monkeypatch.setenv("UCCL_IB_MAX_INFLIGHT_BYTES", str((1 << 64) - 1))
    assert EpConfig.from_env(**BASE).nic_window_bytes == (1 << 64) - 1


@pytest.mark.parametrize("name", THEIRS)
def test_both_names_may_say_the_same_but_not_different_things(monkeypatch, name):
    text, field, ours, value = THEIRS[name]
    monkeypatch.setenv(name, text)
    monkeypatch.setenv(ours, text)
    assert getattr(EpConfig.from_env(**BASE), field) == value
    other = "7" if text != "7" and isinstance(value, int) else "lo"
    monkeypatch.setenv(ours, other)
    with pytest.raises(ConfigError) as caught:
        EpConfig.from_env(**BASE)
    assert str(caught.value) == (
        f"environment variables {ours} = {other!r} and {name} = {text!r} both set {field}: "
        "allowed is one of them, or one value"
    )


def test_the_same_value_in_another_form_is_the_same(monkeypatch):
    monkeypatch.setenv("UCCL_EP_NIC_WINDOW_BYTES", "2M")
    monkeypatch.setenv("UCCL_IB_MAX_INFLIGHT_BYTES", "2097152")
    assert EpConfig.from_env(**BASE).nic_window_bytes == 2 << 20


def test_a_bad_value_is_blamed_on_the_variable_that_has_it(monkeypatch):
    monkeypatch.setenv("UCCL_IB_SL", "16")
    with pytest.raises(ConfigError, match=r"variable UCCL_IB_SL: ib_service_level = 16: allowed is"):
        EpConfig.from_env(**BASE)
    monkeypatch.setenv("UCCL_IB_SL", "high")
    with pytest.raises(ConfigError, match=r"variable UCCL_IB_SL = 'high': allowed is integer"):
        EpConfig.from_env(**BASE)


@pytest.mark.parametrize("name", IDLE)
def test_a_variable_without_effect_here_is_known_and_said_to_have_none_once(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    with pytest.warns(UserWarning, match=f"{name} has no effect here: ") as caught:
        config = EpConfig.from_env(**BASE)
    assert len(caught) == 1 and config == EpConfig(**BASE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EpConfig.from_env(**BASE)


def test_every_unknown_variable_of_the_family_is_warned_about_once(monkeypatch):
    monkeypatch.setenv("UCCL_IB_GID_INDX", "3")
    monkeypatch.setenv("UCCL_EP_NUM_PROXYS", "2")
    monkeypatch.setenv("UCCLIKE", "1")
    with pytest.warns(UserWarning, match="unknown environment variable UCCL_") as caught:
        EpConfig.from_env(**BASE)
    assert len(caught) == 2
    messages = " ".join(str(entry.message) for entry in caught)
    assert "did you mean UCCL_IB_GID_INDEX?" in messages and "did you mean UCCL_EP_NUM_PROXIES?" in messages
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EpConfig.from_env(**BASE)


def printed(**environ):
    """Cells of each variable's line, printed by a process in which torch cannot be imported."""
    code = (
        "import sys; sys.modules['torch'] = None; import runpy;"
        "runpy.run_module('uccl_ep_train.env', run_name='__main__')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("UCCL_")} | environ,
    )
    lines = result.stdout.splitlines()
    starts = [lines[0].index(title) for title in ("value", "source", "unit", "default", "form", "meaning")]
    cells = {}
    for line in lines[1:]:
        edges = [0, *starts, len(line)]
        name, *rest = [line[a:b].strip() for a, b in itertools.pairwise(edges)]
        cells[name] = rest
    return cells


def test_the_table_prints_value_source_unit_and_default_of_every_variable_without_torch():
    cells = printed(
        UCCL_IB_SL="4", UCCL_EP_NIC_WINDOW_BYTES="1M", UCCL_RDMA_ADAPTIVE_SLEEP="1", UCCL_EP_NUM_SMS="8"
    )
    assert set(cells) == {variable.name for variable in VARIABLES}
    assert cells["UCCL_EP_BUDGET_BYTES"][:4] == [str(512 << 20), "default", "bytes", str(512 << 20)]
    assert cells["UCCL_EP_NIC_WINDOW_BYTES"][:4] == [
        str(1 << 20),
        "environment UCCL_EP_NIC_WINDOW_BYTES",
        "bytes",
        "None",
    ]
    for name in ("UCCL_IB_SL", "UCCL_EP_IB_SERVICE_LEVEL"):
        assert cells[name][:2] == ["4", "environment UCCL_IB_SL"]
    assert cells["UCCL_IB_SL"][5] == "of UCCL-EP; as UCCL_EP_IB_SERVICE_LEVEL"
    assert cells["UCCL_RDMA_ADAPTIVE_SLEEP"][0] == "1"
    assert "no effect here: an idle proxy" in cells["UCCL_RDMA_ADAPTIVE_SLEEP"][5]
    assert all(meaning for *_, meaning in cells.values())


def test_the_table_shows_what_would_be_refused():
    cells = printed(UCCL_IB_SL="16", UCCL_EP_NUM_SMS="many", UCCL_IB_TC="1", UCCL_EP_IB_TRAFFIC_CLASS="2")
    assert cells["UCCL_IB_SL"][0] == "16 (refused: allowed is -1 (the NIC family's) .. 15)"
    assert cells["UCCL_EP_NUM_SMS"][0] == "many (refused: allowed is 1 .. 1024)"
    assert cells["UCCL_IB_TC"][0] == "refused: UCCL_EP_IB_TRAFFIC_CLASS and UCCL_IB_TC differ"


LONG = "7" * 100_000  # the kernel allows 128 KiB
CUT = 1000


@pytest.mark.parametrize(
    "text", [LONG, LONG.replace("77", "7,"), LONG.replace("77", "x/")], ids=["digits", "numbers", "path"]
)
def test_a_long_value_is_cut_where_it_is_refused_and_in_the_table(monkeypatch, text):
    for variable in VARIABLES:
        with monkeypatch.context() as set_for:
            set_for.setenv(variable.name, text)
            warnings.simplefilter("ignore")
            try:
                said = EpConfig.from_env(**BASE).describe()
            except ConfigError as error:
                said = str(error)
                assert variable.name in said
            assert max(map(len, [*said.splitlines(), *table().splitlines()])) < CUT, variable.name


def test_a_value_with_line_breaks_stays_in_its_line_of_the_table():
    assert printed(UCCL_EP_WINDOWS_FILE="a\nb")["UCCL_EP_WINDOWS_FILE"][0] == repr("a\nb")


def test_two_long_values_of_one_setting_are_cut(monkeypatch):
    monkeypatch.setenv("UCCL_EP_NET_INTERFACE", "a" * 100_000)
    monkeypatch.setenv("UCCL_SOCKET_IFNAME", "b" * 100_000)
    with pytest.raises(ConfigError, match="both set net_interface") as caught:
        EpConfig.from_env(**BASE)
    assert len(str(caught.value)) < CUT


def test_the_module_runs_without_the_package():
    """As the build runs it, which has neither the package nor torch."""
    code = (
        "import runpy, sys; sys.modules['torch'] = sys.modules['uccl_ep_train'] = None;"
        "runpy.run_path(sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, env.__file__], check=True, cwd="/")
