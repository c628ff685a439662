"""Which addresses a node listens on, and which it tells others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from peercache.config.entries import heads_of
from peercache.config.quantities import format_address, parse_address
from peercache.config.settings import Config
from peercache.errors import AddressTaken, ConfigError, Rejected
from peercache.memory.client_lock import make_folder
from peercache.net.sockets import Listener, remove_dead_socket
from peercache.node.reach import is_ours, routed_host
from peercache.trust.sharing import (
    GROUP_FILE_MODE,
    GROUP_FOLDER_MODE,
    PRIVATE_FILE_MODE,
    PRIVATE_FOLDER_MODE,
    Sharing,
)

NO_HEAD = 255
"""Head rank of a node that no discovery address names."""

_WILDCARDS = ("", "0.0.0.0", "::", "*")  # noqa: S104 - compared, not bound


def listen_control(listener: Listener, config: Config) -> tuple[str, int]:
    """Bind the control port; return (host, port), host "" for every interface."""
    host, port = config.listen_address()
    host = "" if host in _WILDCARDS else host
    try:
        return host, _listen(listener, host, port)
    except AddressTaken:
        if config.listen:
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
    # A host without an address of IPv4 is no error either.
    with suppress(AddressTaken, ConfigError):
        listener.listen_tcp("listen", everywhere, bound)
    return bound


def listen_home(listener: Listener, config: Config, control_port: int, sharing: Sharing) -> str:
    """Listen for the clients of this host; return the ipc:// address.

    Raises ConfigError where another uid's folder, file or socket is in the way: nothing that a
    stranger could replace or listen at is used.
    """
    home = config.home or default_home(config.cluster, control_port)
    path = Path(home.removeprefix("ipc://"))
    try:
        _open_home_folder(path.parent, sharing, is_default=not config.home)
        remove_dead_socket(home, sharing)
        listener.listen_local(home)
        # Within a folder that only sharing uids may change.
        path.chmod(GROUP_FILE_MODE if sharing.has_group else PRIVATE_FILE_MODE)
        if sharing.has_group:
            os.chown(path, -1, sharing.gid)
        make_folder(home, sharing)
    except OSError as error:
        raise ConfigError("home", f"cannot use {path}: {error.strerror}: choose another") from error
    return home


def _open_home_folder(folder: Path, sharing: Sharing, *, is_default: bool) -> None:
    """Make the folder of the home socket if it is missing, and check whose it is."""
    try:
        folder.parent.mkdir(mode=PRIVATE_FOLDER_MODE, parents=True, exist_ok=True)
        folder.mkdir(mode=PRIVATE_FOLDER_MODE)
        is_new = True
    except FileExistsError:
        is_new = False
    try:
        # The default lies in /tmp, where every user may put a link.
        opened = sharing.open_folder(folder, follow=not is_default)
    except Rejected as refusal:
        raise ConfigError("home", refusal.detail) from refusal
    try:
        if is_new:
            sharing.open_to_group(opened, GROUP_FOLDER_MODE)
    finally:
        os.close(opened)


def home_folder() -> Path:
    """Return the folder where the nodes of this user have their home addresses by default."""
    run_time = os.environ.get("XDG_RUNTIME_DIR")
    return Path(run_time) if run_time else Path(f"/tmp/peercache-{os.getuid()}")  # noqa: S108 - checked before it is used


def home_prefix(cluster: str) -> str:
    """Return the beginning of the name of a home address of this cluster."""
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in cluster)[:32]
    return f"peercache-{safe}-"


def default_home(cluster: str, control_port: int) -> str:
    """Return the home address of a node on this control port: the same after a restart."""
    return f"ipc://{home_folder()}/{home_prefix(cluster)}{control_port}.ipc"


def advertised_host(config: Config, bound_host: str, known: Mapping[str, set[str]]) -> str:
    """Return the host that others should dial.

    known: the numeric hosts of each discovery address, as far as names resolve.
    """
    if config.advertise:
        return config.advertise
    if bound_host:
        return bound_host
    heads = heads_of(config.discovery_addr)
    return routed_host(host for address in heads for host in sorted(known[address]))


def names_to_resolve(config: Config, control_port: int) -> tuple[str, ...]:
    """Return each HOST:PORT whose numeric hosts a node wants to know: its heads', and its own."""
    own = (format_address(config.advertise, control_port),) if config.advertise else ()
    return (*heads_of(config.discovery_addr), *own)


def is_host_fixed(config: Config, bound_host: str) -> bool:
    """Return whether the configuration says which host others dial."""
    return bool(config.advertise or bound_host)


def head_rank(config: Config, control: str, known: Mapping[str, set[str]]) -> int:
    """Return the rank among the discovery addresses: a cluster's founder is its head.

    A name that stands for several hosts, such as a headless service, is no node's own.
    """
    if not config.discovery_addr:
        return 0
    host, port = parse_address(control)
    own = {host, *known.get(control, ())}
    for rank, address in enumerate(heads_of(config.discovery_addr)):
        hosts = known[address]
        is_own = bool(own & hosts) and parse_address(address)[1] == port
        if address == control or (is_own and all(each in own or is_ours(each) for each in hosts)):
            return min(rank, NO_HEAD)
    return NO_HEAD
