"""Which port is used, from recorded trees of sysfs."""

from __future__ import annotations

from pathlib import Path

import pytest

from peercache.rdma.device import (
    EMPTY_MAX,
    ETHERNET,
    INFINIBAND,
    Port,
    best_gid,
    choose,
    is_up,
    read_ports,
)

V2, V1 = "RoCE v2", "IB/RoCE v1"
LINK_LOCAL = "fe80:0000:0000:0000:5054:00ff:fe12:3456"
GLOBAL_V6 = "2001:0db8:0000:0000:0000:0000:0000:0007"
IPV4 = "0000:0000:0000:0000:0000:ffff:0a01:0203"
EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"
PREFIX_ONLY = "fe80:0000:0000:0000:0000:0000:0000:0000"


def add_port(
    root: Path, device: str, number: int = 1, *, state: str = "4: ACTIVE",
    layer: str = ETHERNET, node: str = "1: CA", lid: str = "0x0", rate: str = "100 Gb/sec (4X EDR)",
    gids: dict[int, tuple[str, str]] | None = None, table: int = 8,
) -> None:  # fmt: skip
    """Record one port, as the kernel shows it."""
    folder = root / device / "ports" / str(number)
    (folder / "gids").mkdir(parents=True)
    (folder / "gid_attrs" / "types").mkdir(parents=True)
    (root / device / "node_type").write_text(node + "\n")
    facts = {"state": state, "link_layer": layer, "lid": lid, "rate": rate}
    for name, text in facts.items():
        (folder / name).write_text(text + "\n")
    known = {3: (IPV4, V2)} if gids is None else gids
    for index in range(table):
        gid, kind = known.get(index, (EMPTY, ""))
        (folder / "gids" / str(index)).write_text(gid + "\n")
        if kind:
            (folder / "gid_attrs" / "types" / str(index)).write_text(kind + "\n")


def test_host_without_rdma_has_no_port(tmp_path: Path) -> None:
    """No folder, or an empty one, is no error; the choice explains it in a sentence."""
    assert read_ports(tmp_path / "nowhere") == ()
    assert read_ports(tmp_path) == ()
    assert choose(()).problems == ("this host has no RDMA device",)


def test_port_is_read_as_the_kernel_shows_it(tmp_path: Path) -> None:
    """Entries that are empty, or have only a prefix, are no entries."""
    add_port(
        tmp_path, "mlx5_0", layer=INFINIBAND, lid="0x1f",
        gids={0: (LINK_LOCAL, V1), 1: (PREFIX_ONLY, V1)},
    )  # fmt: skip

    (port,) = read_ports(tmp_path)

    assert (port.name, port.state, port.lid, port.rate_gbps) == ("mlx5_0", "ACTIVE", 31, 100.0)
    assert [(gid.index, gid.text()) for gid in port.gids] == [(0, LINK_LOCAL)]


@pytest.mark.parametrize(
    ("gids", "index"),
    [
        ({0: (LINK_LOCAL, V1), 1: (LINK_LOCAL, V2), 2: (IPV4, V1), 3: (IPV4, V2)}, 3),
        ({0: (LINK_LOCAL, V2), 5: (GLOBAL_V6, V2)}, 5),
        ({0: (LINK_LOCAL, V2)}, 0),
        ({2: (IPV4, V2), 4: (IPV4, V2)}, 2),
    ],
)
def test_best_gid_is_routed_and_ipv4_if_there_is_one(
    tmp_path: Path, gids: dict[int, tuple[str, str]], index: int
) -> None:
    """RoCE v2, IPv4 before global IPv6 before link-local, then the lowest index."""
    add_port(tmp_path, "mlx5_0", gids=gids)

    (port,) = read_ports(tmp_path)
    found = best_gid(port)

    assert found is not None
    assert found.index == index


def test_long_table_is_not_read_to_its_end(tmp_path: Path) -> None:
    """Some have a thousand entries, a file each."""
    far = 2 * EMPTY_MAX + 5
    add_port(tmp_path, "rxe0", gids={1: (IPV4, V2), far: (GLOBAL_V6, V2)}, table=far + 1)

    (port,) = read_ports(tmp_path)

    assert [gid.index for gid in port.gids] == [1]


def chosen(root: Path, *names: str, gid_index: int = -1) -> tuple[list[str], tuple[str, ...]]:
    """Return the names of the ports chosen, and the problems."""
    choice = choose(read_ports(root), names, gid_index)
    return [each.port.name for each in choice.ports], choice.problems


def test_fastest_port_that_is_up_is_chosen(tmp_path: Path) -> None:
    """Ports that are down, speak iWARP or have no address say why they are not used."""
    add_port(tmp_path, "bnxt_0", rate="25 Gb/sec (1X EDR)")
    add_port(tmp_path, "irdma0", node="4: RNIC", rate="400 Gb/sec")
    add_port(tmp_path, "mlx5_0", state="1: DOWN", rate="400 Gb/sec")
    add_port(tmp_path, "mlx5_1", rate="200 Gb/sec (4X HDR)")
    add_port(tmp_path, "mlx5_2", rate="200 Gb/sec (4X HDR)")
    add_port(tmp_path, "mlx5_3", rate="400 Gb/sec", gids={0: (IPV4, V1)})

    names, problems = chosen(tmp_path)

    assert names == ["mlx5_1"]
    assert problems == (
        "irdma0 is an iWARP device, which cannot be connected without rdma_cm",
        "the link of mlx5_0 is DOWN",
        "mlx5_3 has no RoCE v2 GID: does its interface have an IP address?",
    )


def test_named_devices_are_rails_in_their_order(tmp_path: Path) -> None:
    """A second port has its number; one whose link is down may come up; a wrong name fails."""
    add_port(tmp_path, "mlx5_0")
    add_port(tmp_path, "mlx5_0", 2, state="1: DOWN")
    add_port(tmp_path, "mlx5_1")

    names, problems = chosen(tmp_path, "mlx5_1", "mlx5_0:2", "mlx5_9", "mlx5_1")

    assert names == ["mlx5_1", "mlx5_0:2"]
    assert problems == ("there is no RDMA device mlx5_9; there is mlx5_0, mlx5_0:2, mlx5_1",)


def test_gid_index_is_taken_literally(tmp_path: Path) -> None:
    """Of whatever kind; one that is not there is reported."""
    add_port(tmp_path, "mlx5_0", gids={0: (LINK_LOCAL, V1), 3: (IPV4, V2)})

    there = choose(read_ports(tmp_path), ("mlx5_0",), 0).ports[0].gid.index
    names, problems = chosen(tmp_path, "mlx5_0", gid_index=5)

    assert there == 0
    assert (names, problems) == ([], ("mlx5_0 has no GID at index 5",))


def test_infiniband_needs_no_ip_address(tmp_path: Path) -> None:
    """Its first GID is what the port is."""
    add_port(tmp_path, "ib0", layer=INFINIBAND, gids={0: (LINK_LOCAL, V1)})

    assert chosen(tmp_path)[0] == ["ib0"]


def test_link_is_looked_at_again_each_time(tmp_path: Path) -> None:
    """One small file shows it; a device that went away is down."""
    add_port(tmp_path, "mlx5_0")
    before = is_up("mlx5_0", 1, tmp_path)
    (tmp_path / "mlx5_0" / "ports" / "1" / "state").write_text("1: DOWN\n")

    assert before
    assert not is_up("mlx5_0", 1, tmp_path)
    assert not is_up("mlx5_7", 1, tmp_path)


def test_ports_of_the_real_host_can_be_read() -> None:
    """Whatever there is."""
    assert all(isinstance(port, Port) for port in read_ports())
