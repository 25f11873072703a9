"""What the project declares of libibverbs, libefa and libfabric is what their own headers say.

Where those are installed, each field, value and function of csrc/transport/*/abi.h and what includes it
becomes a static_assert in a file that includes both. A build needs none of these headers: nothing but
this test looks at them.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.native import building
from tests.native.declarations import Declarations, read

HERE = Path(__file__).resolve().parent
TRANSPORT = building.CSRC / "transport"


@dataclass(frozen=True, kw_only=True)
class Library:
    ours: tuple[str, ...]  # headers in csrc/transport
    theirs: tuple[str, ...]
    namespace: str
    exact: tuple[str, ...]  # structures that we allocate, and it reads or fills: no byte more or less
    roomy: tuple[str, ...] = ()  # likewise, by its version: ours have room for the newest
    backwards: tuple[
        tuple[str, str], ...
    ] = ()  # structures that grow at their beginning, and their last field
    other: tuple[str, ...] = ()  # functions that are not the library's own of that name


LIBRARIES = {
    "verbs": Library(
        ours=("verbs/abi.h", "verbs/extended.h", "verbs/efa_abi.h", "verbs/library.h"),
        theirs=("infiniband/verbs.h", "infiniband/efadv.h"),
        namespace="uccl_ep::verbs",
        exact=(
            "ibv_gid", "ibv_gid_entry", "ibv_device_attr", "ibv_global_route", "ibv_ah_attr",
            "ibv_srq_attr", "ibv_srq_init_attr", "ibv_qp_cap", "ibv_qp_init_attr_ex", "ibv_qp_attr",
            "ibv_async_event", "ibv_wc", "ibv_sge", "ibv_recv_wr",
        ),
        backwards=(("verbs_context", "context"),),
        other=("ibv_query_port",),  # a macro there
    ),
    "ofi": Library(
        ours=("ofi/abi.h", "ofi/calls.h", "ofi/library.h"),
        theirs=(
            "rdma/fabric.h", "rdma/fi_cm.h", "rdma/fi_domain.h", "rdma/fi_endpoint.h", "rdma/fi_eq.h",
            "rdma/fi_errno.h", "rdma/fi_rma.h",
        ),
        namespace="uccl_ep::ofi",
        exact=(
            "fi_context2", "fi_av_attr", "fi_cq_attr", "fi_cq_data_entry", "fi_mr_dmabuf", "fi_msg",
            "fi_rma_iov", "fi_msg_rma",
        ),
        roomy=("fi_cq_err_entry", "fi_mr_attr"),
        other=("fi_version_of",),
    ),
}  # fmt: skip


def compiled(source: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    includes = [f"-I{folder}" for folder in (*folders, building.CSRC, HERE)]
    command = [building.compiler(), "-std=c++20", "-Wno-deprecated", "-Wno-invalid-offsetof", *includes]
    return subprocess.run(
        [*command, "-fsyntax-only", "-x", "c++", "-"],
        input=source, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def includes_of(headers: tuple[str, ...]) -> str:
    return "".join(f"#include <{header}>\n" for header in headers)


@cache
def obstacle(name: str) -> str:
    """Why there is nothing to compare with; "" if there is."""
    try:
        done = compiled(includes_of(LIBRARIES[name].theirs))
    except building.CannotBuild as reason:
        return str(reason)
    found = re.search(r"error: (.*)", done.stderr)
    return "" if done.returncode == 0 else found.group(1) if found else done.stderr


@cache
def words_of(name: str) -> frozenset[str]:
    """All that the library's own headers name."""
    command = [building.compiler(), "-E", "-dD", "-x", "c++", "-"]
    done = subprocess.run(
        command, input=includes_of(LIBRARIES[name].theirs), capture_output=True, text=True, check=True
    )
    return frozenset(re.findall(r"\w+", done.stdout))


def declared(name: str) -> Declarations:
    return read([TRANSPORT / header for header in LIBRARIES[name].ours])


def checks_of(name: str) -> list[str]:
    library, found = LIBRARIES[name], declared(name)

    def older(*names: str) -> bool:
        return any(one in found.young and one not in words_of(name) for one in names)

    lines = []
    backwards = dict(library.backwards)
    for structure, fields in found.fields.items():
        if older(structure):
            continue
        for field in fields:
            if field.split(".")[-1] in found.young:
                lines.append(f"YOUNG_FIELD({structure}, {field});")
            elif structure in backwards:
                lines.append(f"FIELD_BEFORE({structure}, {field}, {backwards[structure]});")
            else:
                lines.append(f"FIELD({structure}, {field});")
        relation = "==" if structure in library.exact else "<=" if structure in library.roomy else ">="
        lines.append(f"SIZE({structure}, {relation});")
    lines += [f"VALUE({ours}, {theirs});" for ours, theirs in found.values.items() if not older(ours, theirs)]
    lines += [f"FUNCTION({one});" for one in found.functions if one not in library.other]
    lines += [f"FUNCTION_TYPE({one});" for one in found.function_types if one in words_of(name)]
    return lines


def source_of(name: str) -> str:
    """Ours first: the library's macros do not reach them."""
    library = LIBRARIES[name]
    lines = [f'#include "transport/{header}"' for header in library.ours]
    lines += [includes_of(library.theirs), '#include "alike.h"', f"namespace ours = {library.namespace};"]
    return "\n".join([*lines, *checks_of(name), ""])


@pytest.fixture
def library(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if obstacle(name):
        pytest.skip(f"nothing to compare with: {obstacle(name)}")
    return name


@pytest.mark.timeout(300)
@pytest.mark.parametrize("library", LIBRARIES, indirect=True)
def test_the_declarations_are_those_of_the_library(library: str) -> None:
    done = compiled(source_of(library))
    assert done.returncode == 0, done.stderr


# (library, file, what it says, what a mutant says instead, the claim that fails)
MUTANTS = {
    "two fields are exchanged": (
        "verbs", "verbs/abi.h", "  uint32_t lkey;\n  uint32_t rkey;\n",
        "  uint32_t rkey;\n  uint32_t lkey;\n", "ibv_mr.lkey: offset",
    ),
    "a table lacks an entry": (
        "verbs", "verbs/abi.h", "void* unused_queues[8];", "void* unused_queues[7];",
        "ibv_context_ops.post_srq_recv: offset",
    ),
    "the extension is one function too long": (
        "verbs", "verbs/extended.h", "void* unused_functions[32];", "void* unused_functions[33];",
        "verbs_context.query_port: offset",
    ),
    "a value is another one": (
        "verbs", "verbs/abi.h", "IBV_QP_DEST_QPN = 1 << 20", "IBV_QP_DEST_QPN = 1 << 21",
        "IBV_QP_DEST_QPN: value",
    ),
    "what the library reads is too short": (
        "verbs", "verbs/abi.h", "  ibv_sge* sg_list;\n  int num_sge;\n", "  ibv_sge* sg_list;\n",
        "ibv_recv_wr: size",
    ),
    "a function of a table takes less": (
        "verbs", "verbs/abi.h", "uint32_t lkey, uint64_t addr, uint32_t length);", "uint32_t lkey);",
        "ibv_qp_ex.wr_set_sge: type",
    ),
    "a function's parameters are exchanged": (
        "verbs", "verbs/library.h", "void* cookie, ibv_comp_channel* channel, int vector",
        "int vector, void* cookie, ibv_comp_channel* channel", "ibv_create_cq: parameters",
    ),
    "a flag is another one": (
        "ofi", "ofi/abi.h", "kFiRemoteCqData = uint64_t{1} << 17", "kFiRemoteCqData = uint64_t{1} << 16",
        "kFiRemoteCqData: value",
    ),
    "there is no room for what the library tells": (
        "ofi", "ofi/abi.h", "  size_t err_data_size;\n  fi_addr_t src_addr;  // since 1.20\n", "",
        "fi_cq_err_entry: size",
    ),
    "an object has its tables in another order": (
        "ofi", "ofi/calls.h", "  fi_ops_msg* msg;\n  fi_ops_rma* rma;\n",
        "  fi_ops_rma* rma;\n  fi_ops_msg* msg;\n", "fid_ep.rma: offset",
    ),
    "a number is narrower": (
        "ofi", "ofi/abi.h", "  size_t cq_data_size;\n", "  uint32_t cq_data_size;\n",
        "fi_domain_attr.cq_data_size: type",
    ),
}  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize("library", LIBRARIES, indirect=True)
def test_a_wrong_declaration_is_found(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: names what differs."""
    copy = tmp_path / "transport"
    monkeypatch.setattr("tests.native.test_abi.TRANSPORT", copy)
    for mutant, (name, header, right, wrong, finds) in MUTANTS.items():
        if name != library:
            continue
        building.shutil.copytree(building.CSRC / "transport", copy, dirs_exist_ok=True)
        text = (copy / header).read_text()
        assert text.count(right) == 1, mutant
        (copy / header).write_text(text.replace(right, wrong))
        done = compiled(source_of(library), tmp_path)
        assert done.returncode != 0 and finds in done.stderr, f"{mutant}: {done.stderr}"


def test_the_declarations_are_read_whole() -> None:
    """Or what is not seen would not be compared. By hand: a table, a nested field, a value, functions."""
    verbs, ofi = declared("verbs"), declared("ofi")
    assert verbs.fields["ibv_context_ops"] == ["poll_cq", "post_srq_recv", "post_recv"]
    assert verbs.fields["ibv_gid"] == ["raw", "global", "global.subnet_prefix", "global.interface_id"]
    assert verbs.fields["verbs_context"] == ["query_port", "create_qp_ex", "sz", "context"]
    assert {"ibv_poll_cq", "ibv_reg_mr_iova2", "ibv_wc_status_str", "ibv_get_device_list"} <= set(
        verbs.functions
    )
    assert verbs.function_types == ["efadv_create_qp_ex", "efadv_query_device", "efadv_query_ah"]
    assert "sl" in verbs.young and "max_sq_wr" not in verbs.young
    assert ofi.fields["fid_ep"] == ["fid", "cm", "msg", "rma"]
    assert ofi.fields["fi_mr_attr"][:3] == ["mr_iov", "dmabuf", "iov_count"]
    assert ofi.values["kFiRemoteCqData"] == "FI_REMOTE_CQ_DATA" and ofi.values["kFiContext2"] == "FI_CONTEXT2"
    assert {"fi_getinfo", "fi_dupinfo", "fi_strerror", "fi_writemsg", "fi_cq_strerror"} <= set(ofi.functions)
