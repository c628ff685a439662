"""What the doctor finds out about the places that a configuration names: addresses, the disk."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from peercache.cli.doctor.facts import AddressFact, DiskFact, SourceFact
from peercache.config.entries import EtcdAddress, KubernetesAddress, hosts_to_ask, sources_of
from peercache.config.quantities import format_address, parse_address
from peercache.config.settings import Config
from peercache.discovery.kubernetes import ApiServer
from peercache.errors import ConfigError
from peercache.node.reach import is_ours, look_up

WILDCARDS = ("", "*", "0.0.0.0", "::")  # noqa: S104 - compared, not bound

NAMED_PORT = 1
"""The resolver wants a port: which one does not matter."""

CONNECT_S = 1.0
"""How long a server of a source may take to accept a connection."""


def look_at_addresses(config: Config) -> tuple[AddressFact, ...]:
    """Return every address that the configuration names, and what its name stands for."""
    return tuple(
        AddressFact(name, written, tuple(sorted(hosts)), is_own=any(map(is_ours, hosts)))
        for name, written, address in _named(config)
        for hosts in [look_up(address)]
    )


def _named(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield (setting, as it is written, HOST:PORT) of addresses that are looked up."""
    for name, written in (("listen", config.listen), ("http_listen", config.http_listen)):
        host, _ = parse_address(written, default_port=NAMED_PORT)
        if host not in WILDCARDS:
            yield name, written, format_address(host, NAMED_PORT)
    if config.advertise:
        yield "advertise", config.advertise, format_address(config.advertise, NAMED_PORT)
    for address in [each for entry in config.discovery_addr for each in hosts_to_ask(entry)]:
        yield "discovery_addr", address, address


def look_at_sources(config: Config) -> tuple[SourceFact, ...]:
    """Return every etcd and every Kubernetes API that is to be asked, and whether one answers.

    That a name resolves is among the addresses.
    """
    facts = []
    for source in sources_of(config.discovery_addr):
        if isinstance(source, EtcdAddress):
            facts.append(SourceFact(source.text, _silence(source.servers)))
        elif isinstance(source, KubernetesAddress):
            try:
                api = ApiServer.of_this_pod(source.text)
            except ConfigError as error:
                facts.append(SourceFact(source.text, error.problem, ends_node=True))
            else:
                facts.append(SourceFact(source.text, _silence([(api.host, api.port)])))
    return tuple(facts)


def _silence(servers: Iterable[tuple[str, int]]) -> str:
    """Return why none of these servers takes a connection, "" if one does."""
    problems = []
    for server in servers:
        if not (problem := _refusal(server)):
            return ""
        problems.append(f"{format_address(*server)}: {problem}")
    return f"nothing answers ({'; '.join(problems)})"


def _refusal(server: tuple[str, int]) -> str:
    try:
        socket.create_connection(server, CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def look_at_disk(config: Config) -> DiskFact | None:
    """Return what the folder of the disk tier offers; None without a disk tier."""
    if not config.disk_enabled:
        return None
    path = Path(config.disk_path)
    nearest = next(
        each for each in (path, *path.absolute().parents) if each.exists() or each.is_symlink()
    )
    problem = _problem_of(nearest)
    free = total = 0
    if not problem:
        found = os.statvfs(nearest)
        free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    return DiskFact(
        path=str(path),
        wanted=config.disk_size,
        problem=problem,
        held=_held_bytes(path),
        room=max(0, free - int(total * config.disk_free_floor)),
    )


def _problem_of(folder: Path) -> str:
    """Return why a node can keep no file below a folder that exists, "" if it can."""
    if not folder.is_dir():
        return f"{folder} is not a folder"
    try:
        # Only a write tells: root may do all that permissions forbid, and not what the file system
        # does. The file has no name, so nothing is left of it.
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(4096))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return f"no file can be written in {folder}: {error.strerror}"
    return ""


def _held_bytes(path: Path) -> int:
    """Return the bytes that nodes' folders take already: they count as room."""
    held = 0
    for entry in path.glob("[0-9]*/*"):
        try:
            held += entry.lstat().st_blocks * 512
        except OSError:  # noqa: PERF203 - a running node removes files
            continue
    return held
