"""The examples for clusters: what they set exists, what they run parses, and what can run here does."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from uccl_ep_train.settings.variables import VARIABLES

ROOT = Path(__file__).resolve().parents[2]
SLURM, KUBERNETES, RAY = (ROOT / "scripts" / name for name in ("slurm", "kubernetes", "ray"))
PAGE = ROOT / "docs" / "launch.md"
FABRICS = ("infiniband", "roce", "efa", "slingshot", "tcp", "none")
LIMIT_S = 110


def unknown_variables(text: str) -> set[str]:
    """UCCL_* names that the table of settings does not have."""
    named = set(re.findall(r"\bUCCL_[A-Z0-9_]*[A-Z0-9]\b", text))
    return named - {variable.name for variable in VARIABLES}


def examples() -> list[Path]:
    return [
        PAGE,
        *(path for folder in (SLURM, KUBERNETES, RAY) for path in sorted(folder.iterdir()) if path.is_file()),
    ]


def test_every_variable_that_the_examples_set_is_in_the_table() -> None:
    assert len(examples()) >= 5
    assert {path.name: unknown_variables(path.read_text()) for path in examples()} == {
        path.name: set() for path in examples()
    }
    assert unknown_variables("export UCCL_EP_GID=3 UCCL_EP_NICS=a") == {"UCCL_EP_GID"}


@pytest.mark.parametrize("path", sorted(SLURM.iterdir()), ids=lambda path: path.name)
def test_the_scripts_parse(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    checker = shutil.which("shellcheck")
    if checker:
        subprocess.run([checker, "-x", str(path)], check=True, cwd=ROOT)


def fabric(name: str, **given: str) -> tuple[int, dict[str, str]]:
    """What `fabric.sh` exports."""
    done = subprocess.run(
        ["bash", "-euc", f". {SLURM / 'fabric.sh'}; env -0"], text=True, capture_output=True, check=False,
        env={"PATH": os.environ["PATH"], "FABRIC": name} | given,
    )  # fmt: skip
    return done.returncode, dict(entry.split("=", 1) for entry in done.stdout.split("\0") if entry)


@pytest.mark.parametrize("name", FABRICS)
def test_each_fabric_sets_values_that_the_table_allows(
    name: str, monkeypatch: pytest.MonkeyPatch, clean_environment: None
) -> None:
    from uccl_ep_train import EpConfig

    status, exported = fabric(name, INTERFACE="eth7")
    assert status == 0 and exported["GLOO_SOCKET_IFNAME"] == exported["NCCL_SOCKET_IFNAME"] == "eth7"
    for variable, value in exported.items():
        if variable.startswith("UCCL_"):
            monkeypatch.setenv(variable, value)
    EpConfig.from_env(num_experts=8, hidden=256)  # raises for what is not allowed
    assert fabric(name, GLOO_SOCKET_IFNAME="ib0")[1]["GLOO_SOCKET_IFNAME"] == "ib0"


def test_on_roce_the_gid_index_is_said_to_both_or_to_none() -> None:
    ours, theirs = "UCCL_EP_IB_GID_INDEX", "NCCL_IB_GID_INDEX"
    assert not {ours, theirs} & fabric("roce")[1].keys()
    for given in (ours, theirs):
        exported = fabric("roce", **{given: "5"})[1]
        assert exported[ours] == exported[theirs] == "5"


def test_an_unknown_fabric_is_refused() -> None:
    assert fabric("carrier-pigeon")[0] == 2


SRUN = """#!/usr/bin/env bash
# As many "nodes" as the job has, all on this machine.
while [[ "$1" == --* ]]; do shift; done
for ((node = 0; node < SLURM_JOB_NUM_NODES; ++node)); do SLURM_NODEID=$node "$@" & pids+=($!); done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit $status
"""


def sbatch(tmp_path: Path, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """train.sbatch on two nodes of one rank each, with a srun that starts both here."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/sh\nprintf '127.0.0.1\\n127.0.0.1\\n'\n")):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("UCCL_", "NCCL_", "SLURM_"))
    }
    job = {
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_SUBMIT_DIR": str(ROOT), "RANKS_PER_NODE": "1", "PYTHON": sys.executable, "INTERFACE": "lo",
        "OMP_NUM_THREADS": "1", "PATH": f"{tools}:{os.environ['PATH']}",
    }  # fmt: skip
    return subprocess.run(
        ["bash", str(SLURM / "train.sbatch"), *arguments], env=kept | job | changes, text=True,
        capture_output=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip


def test_the_slurm_script_checks_then_runs_its_program_on_all_nodes(tmp_path: Path) -> None:
    from tests.machine import lacks_tcp

    if lacks_tcp():
        pytest.skip(lacks_tcp())
    done = sbatch(tmp_path, "uccl_ep_train.env", FABRIC="tcp", UCCL_EP_DOMAIN_SIZE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 domains over ofi" in done.stdout
    # The program: the table of settings, by each of the two ranks.
    assert len(re.findall(r"^UCCL_EP_TRANSPORT +ofi +environment", done.stdout, re.MULTILINE)) == 2


def test_the_slurm_script_refuses_a_python_that_only_ends_well(tmp_path: Path) -> None:
    done = sbatch(tmp_path, "uccl_ep_train.env", PYTHON="/bin/true")
    assert done.returncode == 2 and "PYTHON = /bin/true: allowed is an interpreter" in done.stderr


@pytest.mark.slow
def test_the_slurm_script_does_not_start_what_the_doctor_advises_against(tmp_path: Path) -> None:
    done = sbatch(tmp_path, "uccl_ep_train.env", UCCL_EP_GRAD_DTYPE="fp7")
    assert done.returncode != 0 and "FIX      environment" in done.stdout
    assert "UCCL_EP_TRANSPORT " not in done.stdout


@pytest.mark.slow
@pytest.mark.megatron
def test_the_slurm_script_trains(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    recipe = [
        "recipes.launch",
        "--recipe",
        "tiny_host",
        "--num-ranks",
        "2",
        "--device",
        "cpu",
        "--steps",
        "2",
    ]
    done = sbatch(tmp_path, *recipe, f"--run-dir={tmp_path / 'run'}", DOCTOR_ARGS="skip")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished at step 2" in done.stdout


def test_the_pytorchjob_has_what_the_page_says() -> None:
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((KUBERNETES / "pytorchjob.yaml").read_text())
    assert (job["kind"], job["apiVersion"], job["spec"]["nprocPerNode"]) == (
        "PyTorchJob",
        "kubeflow.org/v1",
        "8",
    )
    for kind in ("Master", "Worker"):
        pod = job["spec"]["pytorchReplicaSpecs"][kind]["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch" and pod["hostNetwork"] is True
        assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        (shm,) = [volume for volume in pod["volumes"] if volume["name"] == "shm"]
        assert shm["emptyDir"]["medium"] == "Memory"
        limits = container["resources"]["limits"]
        assert limits["nvidia.com/gpu"] == job["spec"]["nprocPerNode"] and any(
            "rdma" in name for name in limits
        )
        script = container["args"][0]
        assert script.index("uccl_ep_train.doctor") < script.index("recipes.launch")
        subprocess.run(["bash", "-n", "-c", script], check=True)
        assert all(isinstance(entry["value"], str) for entry in container["env"])


@pytest.fixture
def ray_example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, without Ray: what it tells the ranks is plain Python."""
    if importlib.util.find_spec("ray") is None:
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())  # type: ignore[arg-type]
    spec = importlib.util.spec_from_file_location("ray_example", RAY / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("isolate", [False, True], ids=["together", "isolated"])
def test_ray_ranks_of_a_host_follow_each_other_and_have_gpus_of_their_own(
    ray_example: ModuleType, isolate: bool
) -> None:
    """Whatever order Ray has placed the actors in."""
    places: list[Any] = [
        ray_example.Where(host, (gpu,)) for host, gpu in (("a", "1"), ("b", "0"), ("a", "0"), ("b", "3"))
    ]
    order, told = ray_example.environments(places, isolate=isolate)
    assert [places[actor].host for actor in order] == ["a", "a", "b", "b"]
    assert [entry["RANK"] for entry in told] == ["0", "1", "2", "3"]
    assert {entry["WORLD_SIZE"] for entry in told} == {"4"}
    if isolate:
        assert {entry["LOCAL_RANK"] for entry in told} == {"0"}
        assert not any("CUDA_VISIBLE_DEVICES" in entry for entry in told)
        return
    used = []
    for actor, entry in zip(order, told, strict=True):
        visible = entry["CUDA_VISIBLE_DEVICES"].split(",")
        used.append((places[actor].host, visible[int(entry["LOCAL_RANK"])]))
        assert used[-1] == (places[actor].host, places[actor].gpus[0])
    assert len(set(used)) == 4
