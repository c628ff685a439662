"""Which addresses a node binds, and which it announces to others."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peercache.config import settings
from peercache.config.quantities import DEFAULT_CONTROL_PORT, DEFAULT_DATA_PORT
from peercache.config.settings import Config
from peercache.errors import AddressTaken, ConfigError
from peercache.fabric.tcp.sockets import set_congestion
from peercache.memory.client_lock import folder_of
from peercache.net.sockets import Listener, reached
from peercache.node import addresses
from peercache.node.addresses import (
    NO_HEAD,
    advertised_host,
    head_rank,
    is_host_fixed,
    listen_control,
    listen_data,
    listen_home,
)
from peercache.trust.sharing import Sharing


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener(on_removed=lambda _: None)
    yield listener
    listener.close()


@pytest.fixture
def other() -> Iterator[Listener]:
    other = Listener(on_removed=lambda _: None)
    yield other
    other.close()


def test_a_default_port_gives_way_to_a_free_one(
    listener: Listener, other: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines on one host need not agree on ports."""
    port = other.listen_tcp("listen", "0.0.0.0", 0)
    monkeypatch.setattr(settings, "DEFAULT_CONTROL_PORT", port)

    host, bound = listen_control(listener, Config())

    assert host == "127.0.0.1"
    assert bound not in (0, port)
    assert reached(f"tcp://127.0.0.1:{bound}", 1.0)


def test_a_default_port_that_is_free_is_taken(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others find it there; in a trial on every interface, IPv6 too where there is any."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    monkeypatch.setattr(settings, "DEFAULT_CONTROL_PORT", free)

    assert listen_control(listener, Config(insecure=True)) == ("", free)
    if Path("/proc/net/if_inet6").exists() and socket.has_ipv6:
        assert reached(f"tcp://[::1]:{free}", 1.0)
    assert DEFAULT_CONTROL_PORT == 31998


def test_without_certificates_only_this_host_reaches_the_default_port(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another address of this very host stands for other hosts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    monkeypatch.setattr(settings, "DEFAULT_CONTROL_PORT", free)

    assert listen_control(listener, Config()) == ("127.0.0.1", free)
    for address in ("127.0.0.2", "::1"):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as stranger:
            assert stranger.connect_ex((address, free)) != 0


async def _data_port(config: Config) -> tuple[int, list[Any]]:
    """Return the data port that a node of these settings binds on loopback, and its warnings."""
    warnings: list[Any] = []
    log = SimpleNamespace(warning=lambda event, **facts: warnings.append((event, facts)))
    listeners = await listen_data("127.0.0.1", config, log)
    try:
        return int(listeners[0].socket.getsockname()[1]), warnings
    finally:
        for listener in listeners:
            listener.socket.close()


async def test_the_default_data_port_is_the_one_that_a_firewall_opens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unless the control port is any free one, as on hosts with several nodes, or it is named."""
    assert DEFAULT_DATA_PORT == 31999
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    monkeypatch.setattr(addresses, "DEFAULT_DATA_PORT", free)

    assert await _data_port(Config()) == (free, [])
    assert await _data_port(Config(listen="127.0.0.1:7")) == (free, [])
    for config in (Config(listen="127.0.0.1:0"), Config(data_port=0)):
        port, warnings = await _data_port(config)
        assert port not in (0, free)
        assert not warnings


async def test_a_default_data_port_that_is_taken_gives_way_to_a_free_one_and_is_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second node on the host serves; one that is named must be free."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        monkeypatch.setattr(addresses, "DEFAULT_DATA_PORT", taken)

        port, warnings = await _data_port(Config())

        assert port not in (0, taken)
        assert warnings == [("node.data_port_taken", {"taken": taken})]
        with pytest.raises(AddressTaken, match="data_port"):
            await _data_port(Config(data_port=taken))


async def test_connections_for_pages_have_the_congestion_control_of_the_setting() -> None:
    """A client's connection inherits it."""
    listeners = await listen_data("127.0.0.1", Config(data_port=0, tcp_congestion="reno"), None)
    try:
        with socket.create_connection(listeners[0].socket.getsockname()):
            accepted, _ = await listeners[0].socket.accept()
            used = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            accepted.close()
    finally:
        for listener in listeners:
            listener.socket.close()

    assert used.rstrip(b"\0") == b"reno"


async def test_a_congestion_control_that_the_kernel_lacks_is_an_error_that_names_the_setting() -> (
    None
):
    """The message has the command to try, and the port is free again."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]

    with pytest.raises(ConfigError, match=r"'tcp_congestion': .*modprobe tcp_nothing"):
        await listen_data("127.0.0.1", Config(data_port=port, tcp_congestion="nothing"), None)

    assert await _data_port(Config(data_port=port)) == (port, [])


def test_a_congestion_control_that_is_not_allowed_is_an_error_that_names_the_setting() -> None:
    """Only root may use one that the administrator has not allowed."""

    def refuse(*_: object) -> None:
        raise PermissionError

    listener: Any = SimpleNamespace(setsockopt=refuse)

    with pytest.raises(ConfigError, match=r"'tcp_congestion': .*tcp_allowed_congestion_control"):
        set_congestion(listener, "bbr")


def test_home_is_open_to_its_owner_alone(listener: Listener, tmp_path: Path) -> None:
    """A client that may connect may read every page."""
    home = listen_home(listener, Config(home=f"ipc://{tmp_path}/a/b/n.ipc"), Sharing.of())

    path = Path(home.removeprefix("ipc://"))
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert reached(home, 1.0)


def test_a_folder_that_cannot_be_is_an_error(listener: Listener, tmp_path: Path) -> None:
    """It names the setting."""
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match="home"):
        listen_home(listener, Config(home=f"ipc://{tmp_path}/file/n.ipc"), Sharing.of())


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a folder of another user")
def test_a_home_folder_of_another_uid_is_not_used(
    listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user may make /tmp/peercache-UID first, and would own all that comes into it."""
    folder = tmp_path / "peercache-0"
    folder.mkdir(mode=0o777)
    os.chown(folder, 65_534, 65_534)
    monkeypatch.setattr(addresses, "default_home", lambda: f"ipc://{folder}/n.ipc")

    for config in (Config(), Config(home=f"ipc://{folder}/n.ipc")):
        with pytest.raises(ConfigError, match=r"home.*65534.*share_uids"):
            listen_home(listener, config, Sharing.of())
    assert not list(folder.iterdir())


def test_a_default_home_folder_that_is_a_link_is_not_used(
    listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user may put one into /tmp, and would choose where the node works."""
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("elsewhere")
    monkeypatch.setattr(addresses, "default_home", lambda: f"ipc://{tmp_path}/link/n.ipc")

    with pytest.raises(ConfigError, match="home"):
        listen_home(listener, Config(), Sharing.of())
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another group")
def test_with_a_group_its_members_reach_the_home_node(listener: Listener, tmp_path: Path) -> None:
    sharing = Sharing.of(share_group="65532")
    home = listen_home(listener, Config(home=f"ipc://{tmp_path}/a/n.ipc"), sharing)

    path = Path(home.removeprefix("ipc://"))
    wanted = ((path, 0o660), (path.parent, 0o770), (folder_of(home), 0o770))
    for each, mode in wanted:
        assert (each.stat().st_gid, each.stat().st_mode & 0o777) == (65_532, mode), each


@pytest.mark.parametrize(
    ("config", "bound", "reported"),
    [
        (Config(advertise="node1.cluster"), "", "node1.cluster"),
        (Config(advertise="node1.cluster"), "10.0.0.1", "node1.cluster"),
        (Config(), "10.0.0.1", "10.0.0.1"),
        (Config(), "", "10.5.0.1 towards []"),
        (Config(discovery_addr=("10.0.0.9:1", "head:1")), "", "10.5.0.1 towards ['10.0.0.9']"),
    ],
)
def test_others_are_notified_an_address_that_they_can_dial(
    config: Config, bound: str, reported: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never the wildcard: what is named, what is bound, or what the system would use."""
    monkeypatch.setattr(
        addresses, "routed_host", lambda towards: f"10.5.0.1 towards {list(towards)}"
    )

    known = {"10.0.0.9:1": {"10.0.0.9"}, "head:1": set[str]()}
    assert advertised_host(config, bound, known) == reported
    assert is_host_fixed(config, bound) == (bool(config.advertise) or bool(bound))


def test_the_heads_of_a_cluster_are_its_discovery_addresses() -> None:
    """In their order, under whatever name; the founder is its own head."""
    named = Config(discovery_addr=("10.0.0.9:1", "127.0.0.1:5", "localhost:7", "late:8"))
    known = {
        "10.0.0.9:1": {"10.0.0.9"}, "127.0.0.1:5": {"127.0.0.1"},
        "localhost:7": {"127.0.0.1", "::1"}, "late:8": set[str](),
        "node1:7": {"127.0.0.1"},
    }  # fmt: skip

    assert head_rank(Config(), "10.0.0.1:5", {}) == 0
    assert head_rank(named, "127.0.0.1:5", known) == 1
    assert head_rank(named, "127.0.0.1:7", known) == 2
    assert head_rank(named, "node1:7", known) == 2
    assert head_rank(named, "late:8", known) == 3
    assert head_rank(named, "127.0.0.1:6", known) == NO_HEAD
    assert head_rank(named, "no-such-host.invalid:5", known) == NO_HEAD


def test_a_name_of_several_hosts_is_no_node_s_own() -> None:
    """A headless service names every node: each would be the first head, and dial no other."""
    config = Config(discovery_addr=("nodes:5",))

    assert head_rank(config, "127.0.0.1:5", {"nodes:5": {"127.0.0.1", "10.99.99.99"}}) == NO_HEAD
