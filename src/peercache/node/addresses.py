"""Which addresses a node listens on, and which it tells others."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from peercache.config.quantities import DEFAULT_CONTROL_PORT, format_address, parse_address
from peercache.config.settings import Config
from peercache.errors import AddressTaken, ConfigError
from peercache.net.sockets import Listener, remove_dead_socket

NO_HEAD = 255
"""Head rank of a node that no discovery address names."""

_WILDCARDS = ("", "0.0.0.0", "::", "*")  # noqa: S104 - compared, not bound


def listen_control(listener: Listener, config: Config) -> tuple[str, int]:
    """Bind the control port; return (host, port), host "" for every interface."""
    host, port = ("", DEFAULT_CONTROL_PORT)
    if config.listen:
        host, port = parse_address(config.listen, default_port=DEFAULT_CONTROL_PORT)
        named = True
    else:
        named = False
    host = "" if host in _WILDCARDS else host
    try:
        return host, _listen(listener, host, port)
    except AddressTaken:
        if named:
            raise
    # A default gives way: two engines on one host need not agree on ports.
    return host, _listen(listener, host, 0)


def _listen(listener: Listener, host: str, port: int) -> int:
    if host:
        return listener.listen_tcp("listen", host, port)
    everywhere = "0.0.0.0"  # noqa: S104 - every interface is asked for
    try:
        # First: on most systems it takes in IPv4, and could not be bound beside it.
        bound = listener.listen_tcp("listen", "::", port)
    except ConfigError:
        # IPv6 is switched off.
        return listener.listen_tcp("listen", everywhere, port)
    with suppress(AddressTaken):
        listener.listen_tcp("listen", everywhere, bound)
    return bound


def listen_home(listener: Listener, config: Config, control_port: int) -> str:
    """Listen for local clients; return the ipc:// address."""
    home = config.home or default_home(config.cluster, control_port)
    path = Path(home.removeprefix("ipc://"))
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_dead_socket(home)
        if path.exists() and not path.is_socket():
            # nng would remove it.
            raise ConfigError("home", f"{path} is there already, and no socket")
    except OSError as error:
        raise ConfigError("home", f"cannot use {path}: {error.strerror}") from error
    listener.listen_local(home)
    # A process that may connect may read every page: the node's user, and root.
    path.chmod(0o600)
    return home


def default_home(cluster: str, control_port: int) -> str:
    """Return the home address of a node on this control port: the same after a restart."""
    run_time = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(run_time) if run_time else Path(f"/tmp/peercache-{os.getuid()}")  # noqa: S108 - mode 0700
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in cluster)[:32]
    return f"ipc://{folder}/peercache-{safe}-{control_port}.ipc"


def advertised_host(config: Config, bound_host: str) -> str:
    """Return the host that others should dial."""
    if config.advertise:
        return config.advertise
    if bound_host:
        return bound_host
    # Which address of this host the system would use; a UDP socket sends nothing by connecting.
    towards = config.discovery_addr[0] if config.discovery_addr else "192.0.2.1:9"
    host, port = parse_address(towards)
    try:
        for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    except OSError:
        pass
    return "127.0.0.1"


def head_rank(config: Config, control: str) -> int:
    """Return the rank among the discovery addresses: a cluster's founder is its head."""
    if not config.discovery_addr:
        return 0
    own = _resolved(control)
    for rank, address in enumerate(config.discovery_addr):
        if address == control or own & _resolved(address):
            return min(rank, NO_HEAD)
    return NO_HEAD


def _resolved(address: str) -> set[str]:
    host, port = parse_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return {address}
    return {format_address(str(sockaddr[0]), port) for *_, sockaddr in found}
