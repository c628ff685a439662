"""Which addresses a node binds, and which it tells others."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from peercache.config.quantities import DEFAULT_CONTROL_PORT
from peercache.config.settings import Config
from peercache.errors import AddressTaken, ConfigError
from peercache.net.sockets import Listener, reached
from peercache.node import addresses
from peercache.node.addresses import (
    NO_HEAD,
    advertised_host,
    default_home,
    head_rank,
    listen_control,
    listen_home,
)


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
    monkeypatch.setattr(addresses, "DEFAULT_CONTROL_PORT", port)

    host, bound = listen_control(listener, Config())

    assert host == ""
    assert bound not in (0, port)
    assert reached(f"tcp://127.0.0.1:{bound}", 1.0)


def test_a_default_port_that_is_free_is_taken(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others find it there; on every interface, IPv6 too where there is any."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    monkeypatch.setattr(addresses, "DEFAULT_CONTROL_PORT", free)

    assert listen_control(listener, Config()) == ("", free)
    if Path("/proc/net/if_inet6").exists() and socket.has_ipv6:
        assert reached(f"tcp://[::1]:{free}", 1.0)
    assert DEFAULT_CONTROL_PORT == 31998


def test_a_named_port_that_is_taken_is_an_error(listener: Listener, other: Listener) -> None:
    """A named port is taken literally."""
    port = other.listen_tcp("listen", "127.0.0.1", 0)

    with pytest.raises(AddressTaken, match=str(port)):
        listen_control(listener, Config(listen=f"127.0.0.1:{port}"))


def test_home_is_open_to_its_owner_alone(listener: Listener, tmp_path: Path) -> None:
    """A client that may connect may read every page."""
    home = listen_home(listener, Config(home=f"ipc://{tmp_path}/a/b/n.ipc"), 1)

    path = Path(home.removeprefix("ipc://"))
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert reached(home, 1.0)


def test_the_socket_of_a_dead_node_is_in_nobodys_way(listener: Listener, tmp_path: Path) -> None:
    """The address is the same after a restart, however the last node ended."""
    path = tmp_path / "n.ipc"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    assert reached(listen_home(listener, Config(home=f"ipc://{path}"), 1), 1.0)


def test_a_home_that_is_in_use_is_an_error(
    listener: Listener, other: Listener, tmp_path: Path
) -> None:
    """The living node keeps its clients."""
    config = Config(home=f"ipc://{tmp_path}/n.ipc")
    listen_home(other, config, 1)

    with pytest.raises(AddressTaken, match="home"):
        listen_home(listener, config, 1)
    assert reached(config.home, 1.0)


def test_a_file_in_the_place_of_the_socket_is_kept(listener: Listener, tmp_path: Path) -> None:
    """A typing error must not delete a file."""
    path = tmp_path / "thesis.txt"
    path.write_text("ten years")

    with pytest.raises((AddressTaken, ConfigError), match="home"):
        listen_home(listener, Config(home=f"ipc://{path}"), 1)
    assert path.read_text() == "ten years"


def test_a_folder_that_cannot_be_is_an_error(listener: Listener, tmp_path: Path) -> None:
    """It names the setting."""
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match="home"):
        listen_home(listener, Config(home=f"ipc://{tmp_path}/file/n.ipc"), 1)


def test_the_default_home_is_the_same_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """One a cluster and control port, of whatever the cluster is called."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")

    home = default_home("prod/eu 1", 31998)

    assert (
        home
        == default_home("prod/eu 1", 31998)
        == "ipc:///run/user/1/peercache-prod_eu_1-31998.ipc"
    )
    assert home != default_home("prod/eu 1", 31999)
    # sockaddr_un holds 108 bytes.
    assert len(default_home("\u00e9" * 255, 65_535).encode()) < 108


@pytest.mark.parametrize(
    ("config", "bound", "told"),
    [
        (Config(advertise="node1.cluster"), "", "node1.cluster"),
        (Config(advertise="node1.cluster"), "10.0.0.1", "node1.cluster"),
        (Config(), "10.0.0.1", "10.0.0.1"),
        (Config(discovery_addr=("127.0.0.1:1",)), "", "127.0.0.1"),
        (Config(discovery_addr=("no-such-host.invalid:1",)), "", "127.0.0.1"),
    ],
)
def test_others_are_told_an_address_that_they_can_dial(
    config: Config, bound: str, told: str
) -> None:
    """Never the wildcard: what is named, what is bound, or what the system would use."""
    assert advertised_host(config, bound) == told


def test_the_heads_of_a_cluster_are_its_discovery_addresses() -> None:
    """In their order, under whatever name; the founder is its own head."""
    named = Config(discovery_addr=("10.0.0.9:1", "127.0.0.1:5", "localhost:7"))

    assert head_rank(Config(), "10.0.0.1:5") == 0
    assert head_rank(named, "127.0.0.1:5") == 1
    assert head_rank(named, "127.0.0.1:7") == 2
    assert head_rank(named, "127.0.0.1:6") == NO_HEAD
    assert head_rank(named, "no-such-host.invalid:5") == NO_HEAD
