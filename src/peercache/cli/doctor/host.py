"""Gathers the facts of this host; it judges nothing, and needs no RDMA."""

from __future__ import annotations

import os
import platform
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from peercache.cli.doctor.facts import Facts, Memory, PortFact
from peercache.cli.doctor.libraries import find_libraries
from peercache.cli.doctor.places import look_at_addresses, look_at_disk, look_at_sources
from peercache.cli.doctor.speed import measure
from peercache.cli.doctor.trust import look_at_trust
from peercache.config.settings import Config
from peercache.errors import BrokenInstallation
from peercache.installation.library import load, load_tls, version
from peercache.memory.kernel import (
    filesystem_of,
    host_memory,
    mounted,
    own_cgroup_memory,
    supplies,
    text_of,
)
from peercache.rdma.device import SYSFS, Port, choose, read_ports

_CAP_IPC_LOCK = 14


def gather(config: Config, *, is_quick: bool) -> Facts:
    """Return the facts of this host for a configuration; measure unless quick."""
    ports = read_ports()
    choice = choose(ports, config.rdma_device_names, config.rdma_gid_index)
    chosen = tuple([(each.port.name, each.gid.index) for each in choice.ports])
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Facts(
        peercache=version(),
        python=f"{platform.python_version()} {platform.machine()}",
        kernel=platform.release(),
        fabric=config.fabric,
        pool_size=config.pool_size,
        granule=config.granule,
        shm_dir=config.shm_dir,
        hugepages_wanted=config.hugepages,
        libraries=find_libraries(),
        ports=tuple([_port(port) for port in ports]),
        chosen=chosen,
        choice_problems=choice.problems,
        memory=_memory(config),
        nofile=files[0],
        nofile_hard=files[1],
        speed=measure(config, chosen, is_quick=is_quick),
        trust=look_at_trust(config),
        addresses=look_at_addresses(config),
        sources=look_at_sources(config),
        disk=look_at_disk(config),
        parts_missing=tuple(_parts_missing(config)),
    )


def _parts_missing(config: Config) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the compiled parts that a node with these settings needs."""
    for loads in (load, load_tls) if config.has_tls else (load,):
        try:
            loads()
        except BrokenInstallation as error:  # noqa: PERF203 - two at most
            yield error.problem, error.remedy


def _port(port: Port) -> PortFact:
    folder = SYSFS / port.device
    uverbs = next(iter(sorted((folder / "device" / "infiniband_verbs").glob("uverbs*"))), None)
    file = Path("/dev/infiniband") / (uverbs.name if uverbs else _uverbs_of(port.device))
    gids = tuple([(gid.index, gid.text(), gid.kind) for gid in port.gids])
    return PortFact(
        name=port.name,
        state=port.state,
        link_layer=port.link_layer,
        rate_gbps=port.rate_gbps,
        lid=port.lid,
        mtu=_mtu(folder / "ports" / str(port.number) / "gid_attrs" / "ndevs"),
        gids=gids,
        uverbs=str(file),
        is_usable=os.access(file, os.R_OK | os.W_OK),
    )


def _uverbs_of(device: str) -> str:
    """Return the device file's name of a device without a bus, such as Soft-RoCE."""
    for entry in sorted(Path("/sys/class/infiniband_verbs").glob("uverbs*")):
        if text_of(entry / "ibdev") == device:
            return entry.name
    return "uverbs?"


def _mtu(interfaces: Path) -> int:
    for entry in sorted(interfaces.glob("*"), key=lambda path: int(path.name)):
        name = text_of(entry)
        if name:
            return int(text_of(Path("/sys/class/net") / name / "mtu") or 0)
    return 0


def _memory(config: Config) -> Memory:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit, used = own_cgroup_memory()
    return Memory(
        memlock=soft,
        memlock_hard=hard,
        may_lock_anything=bool(_capabilities() >> _CAP_IPC_LOCK & 1),
        shm_type=filesystem_of(config.shm_dir, text_of(Path("/proc/mounts"))),
        shm_free=_free(config.shm_dir),
        may_write_shm=os.access(config.shm_dir, os.R_OK | os.W_OK | os.X_OK),
        available=host_memory("MemAvailable"),
        cgroup_limit=limit,
        cgroup_used=used,
        hugepages=tuple([(each.page_bytes, each.total, each.free) for each in supplies()]),
        huge_mounts=mounted(text_of(Path("/proc/mounts"))),
    )


def _capabilities() -> int:
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", text_of(Path("/proc/self/status")), re.MULTILINE)
    return int(match[1], 16) if match else 0


def _free(folder: str) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize
