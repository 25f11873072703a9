"""A made-up /sys with RDMA NICs, as much as the package reads (tests/native/made_up_sysfs.h, in Python)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

V2_IPV4 = ("0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2")
V1_IPV4 = ("0000:0000:0000:0000:0000:ffff:0a00:0001", "IB/RoCE v1")
V1_LINK = ("fe80:0000:0000:0000:0c42:a1ff:fe00:0001", "IB/RoCE v1")
UNUSED = ("0000:0000:0000:0000:0000:0000:0000:0000", "")
INFINIBAND = ("fe80:0000:0000:0000:0c42:a103:0000:0001", "IB/RoCE v1")


def write(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line + "\n")


def add_nic(
    root: Path,
    name: str,
    *,
    state: str = "4: ACTIVE",
    link_layer: str = "Ethernet",
    rate: str = "400 Gb/sec (4X NDR)",
    gids: Mapping[int, tuple[str, str]] | None = None,
    mtu: int = 9000,
    numa_node: int = 0,
    slot: int = 1,
) -> None:
    """A ConnectX at its own PCI root. gids: by index, address and type."""
    device = root / "devices" / f"pci0000:{slot:02x}" / f"0000:{slot:02x}:00.0"
    write(device / "vendor", "0x15b3")
    write(device / "class", "0x020700")
    write(device / "numa_node", str(numa_node))
    port = device / "infiniband" / name / "ports" / "1"
    for entry, line in (("state", state), ("link_layer", link_layer), ("rate", rate)):
        write(port / entry, line)
    for index, (address, kind) in ({3: V2_IPV4} if gids is None else gids).items():
        write(port / "gids" / str(index), address)
        if kind:
            write(port / "gid_attrs" / "types" / str(index), kind)
            write(port / "gid_attrs" / "ndevs" / str(index), f"net_{name}")
    write(root / "class" / "net" / f"net_{name}" / "mtu", str(mtu))
    folder = root / "class" / "infiniband"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).symlink_to(device / "infiniband" / name)
    (device / "infiniband" / name / "device").symlink_to(device)
