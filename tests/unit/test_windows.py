"""Windows of NICs that were measured: chosen, kept by topology, and used by the buffers that follow."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.machine import lacks_tcp
from uccl_ep_train import EpConfig
from uccl_ep_train.core.topology import Topology
from uccl_ep_train.errors import ConfigError
from uccl_ep_train.group import windows
from uccl_ep_train.group.windows import Windows
from uccl_ep_train.tools.calibrate import CANDIDATES, best

TOPOLOGY = Topology.from_config(EpConfig(num_experts=8, hidden=128, domains=(0, 0, 1)), 3)
CONFIG = EpConfig(num_experts=8, hidden=128, transport="verbs")
KEY = windows.topology_key("verbs", "mlx5_0 (RC)", TOPOLOGY)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "deep" / "windows.json"
    monkeypatch.setenv("UCCL_EP_WINDOWS_FILE", str(path))
    return path


def test_the_least_window_near_the_best_time_wins() -> None:
    assert [window.num_bytes * window.ops for window in CANDIDATES] == sorted(
        window.num_bytes * window.ops for window in CANDIDATES
    )
    times = dict(zip(CANDIDATES, (2.0, 1.5, 1.02, 1.0, 1.01, 4.0), strict=True))
    assert best(times) == CANDIDATES[2]
    times[CANDIDATES[2]] = 1.04  # Beyond the tolerance.
    assert best(times) == CANDIDATES[3]
    with pytest.raises(ConfigError, match="at least one"):
        best({})


def test_what_was_measured_is_found_again_for_its_topology_alone(file: Path) -> None:
    assert windows.lookup(KEY) is None
    windows.store("verbs: another; domains of 8, 8 ranks", Windows(5, 6), {})
    assert windows.store(KEY, Windows(1 << 20, 2), {"milliseconds": {}}) == file
    assert windows.lookup(KEY) == Windows(1 << 20, 2)
    assert windows.lookup("verbs: another; domains of 8, 8 ranks") == Windows(5, 6)
    assert windows.lookup(windows.topology_key("verbs", "mlx5_1 (RC)", TOPOLOGY)) is None
    assert KEY.endswith("domains of 1, 2 ranks")


def test_a_setting_beats_the_measurement_and_loop_has_none(file: Path) -> None:
    windows.store(KEY, Windows(1 << 20, 2), {})
    settled = windows.settle(CONFIG, "mlx5_0 (RC)", TOPOLOGY)
    assert (settled.nic_window_bytes, settled.nic_window_ops) == (1 << 20, 2)
    for given in (CONFIG.replace(nic_window_ops=9), CONFIG.replace(transport="loop")):
        assert windows.settle(given, "mlx5_0 (RC)", TOPOLOGY) == given
    assert windows.settle(CONFIG, "another", TOPOLOGY) == CONFIG


@pytest.mark.parametrize("which", ["a pipe", "/dev/zero"])
def test_what_is_no_regular_file_is_not_read_to_its_end(file: Path, which: str) -> None:
    file.parent.mkdir()
    if which == "a pipe":
        os.mkfifo(file)
    else:
        file.symlink_to(which)
    with pytest.warns(UserWarning, match="is no file of measured windows and is ignored: it is no regular"):
        assert windows.lookup(KEY) is None
    with pytest.raises(ConfigError, match="it is no regular file"):
        windows.store(KEY, Windows(1, 1), {})


@pytest.mark.parametrize("kind", ["pipe", "text", "folder", "none", "kept"])
def test_a_file_that_cannot_keep_a_measurement_is_found_before_it(file: Path, kind: str) -> None:
    makes: dict[str, Callable[[], object]] = {
        "pipe": lambda: os.mkfifo(file),
        "text": lambda: file.write_text("junk"),
        "folder": file.mkdir,
        "none": lambda: None,
        "kept": lambda: windows.store(KEY, Windows(1, 1), {}),
    }
    file.parent.mkdir()
    makes[kind]()
    assert bool(windows.problem_of(file)) == (kind not in ("none", "kept"))


def test_a_user_without_a_home_has_no_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "UCCL_EP_WINDOWS_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    assert windows.lookup(KEY) is None
    with pytest.raises(ConfigError, match="UCCL_EP_WINDOWS_FILE = '': allowed is a file"):
        windows.store(KEY, Windows(1, 1), {})
    monkeypatch.setenv("HOME", os.devnull)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert windows.lookup(KEY) is None


@pytest.mark.parametrize("text", ["", "[]", json.dumps({KEY: {"num_bytes": "many"}}), "{"])
def test_a_file_that_cannot_be_understood_is_warned_about_and_ignored(file: Path, text: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    with pytest.warns(UserWarning, match="is no file of measured windows"):
        assert windows.lookup(KEY) is None


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("num_bytes", "many", "1 .. 2^64 - 1"),
        ("num_bytes", 0, "1"),
        ("ops", -3, "1 .. 2^32 - 1"),
        ("ops", 1.5, "1"),
        ("ops", True, "1"),
        ("ops", 1 << 32, "1"),
        ("ops", None, "1"),
    ],
)
def test_a_bad_number_of_a_file_is_named(file: Path, field: str, value: object, allowed: str) -> None:
    file.parent.mkdir()
    file.write_text(json.dumps({KEY: {"num_bytes": 5, "ops": 6, field: value}}))
    with pytest.warns(UserWarning) as said:
        assert windows.lookup(KEY) is None
    assert f"{field} = {value!r}: allowed is {allowed}" in str(said[0].message)


def test_a_file_that_cannot_be_written_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain").write_text("")
    monkeypatch.setenv("UCCL_EP_WINDOWS_FILE", str(tmp_path / "plain" / "windows.json"))
    with pytest.raises(ConfigError, match="UCCL_EP_WINDOWS_FILE"):
        windows.store(KEY, Windows(1, 1), {})


BUFFER = """
import torch.distributed as dist
from uccl_ep_train import Buffer, EpConfig
dist.init_process_group("gloo")
with Buffer(None, EpConfig.from_env(num_experts=4, hidden=128)) as buffer:
    print(f"ops {buffer._settled.nic_window_ops};", end="", flush=True)
dist.destroy_process_group()
"""


def torchrun(*program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *program]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_a_calibration_over_a_real_network_is_kept_and_used(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacks_tcp():
        pytest.skip(lacks_tcp())
    for name, value in {
        "TRANSPORT": "ofi",
        "OFI_PROVIDER": "tcp",
        "DOMAIN_SIZE": "1",
        "BACKEND": "host",
    }.items():
        monkeypatch.setenv(f"UCCL_EP_{name}", value)
    sizes = ("--tokens=64", "--hidden=128", "--experts=4", "--topk=2", "--rounds=3")
    done = torchrun("-m", "uccl_ep_train.calibrate", *sizes)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("[calibrate]") == len(CANDIDATES) + 1
    ((_, kept),) = json.loads(file.read_text()).items()
    assert len(kept["milliseconds"]) == len(CANDIDATES)
    (tmp_path / "buffer.py").write_text(BUFFER)
    after = torchrun(str(tmp_path / "buffer.py"))
    assert after.stdout.count(f"ops {kept['ops']};") == 2, after.stdout + after.stderr
