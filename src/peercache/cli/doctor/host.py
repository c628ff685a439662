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
from peercache.cli.doctor.places import look_at_addresses, look_at_disk
from peercache.cli.doctor.speed import measure
from peercache.cli.doctor.trust import look_at_trust
from peercache.config.settings import Config
from peercache.errors import BrokenInstallation
from peercache.installation.distribution import version
from peercache.installation.library import load, load_tls
from peercache.memory.huge_pages import mounted, supplies
from peercache.rdma.device import SYSFS, Port, choose, read_ports

_CAP_IPC_LOCK = 14
_KIB = 1024


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
        if _text(entry / "ibdev") == device:
            return entry.name
    return "uverbs?"


def _mtu(interfaces: Path) -> int:
    for entry in sorted(interfaces.glob("*"), key=lambda path: int(path.name)):
        name = _text(entry)
        if name:
            return int(_text(Path("/sys/class/net") / name / "mtu") or 0)
    return 0


def _memory(config: Config) -> Memory:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit, used = cgroup_memory(_text(Path("/proc/self/cgroup")), Path("/sys/fs/cgroup"))
    return Memory(
        memlock=soft,
        memlock_hard=hard,
        may_lock_anything=bool(_capabilities() >> _CAP_IPC_LOCK & 1),
        shm_type=filesystem_of(config.shm_dir, _text(Path("/proc/mounts"))),
        shm_free=_free(config.shm_dir),
        may_write_shm=os.access(config.shm_dir, os.R_OK | os.W_OK | os.X_OK),
        available=_meminfo("MemAvailable") * _KIB,
        cgroup_limit=limit,
        cgroup_used=used,
        hugepages=tuple([(each.page_bytes, each.total, each.free) for each in supplies()]),
        huge_mounts=mounted(_text(Path("/proc/mounts"))),
    )


def filesystem_of(folder: str, mounts: str) -> str:
    """Return the type of the file system that a folder lies on, from the text of /proc/mounts."""
    path = os.path.realpath(folder)
    best, kind = "", ""
    for line in mounts.splitlines():
        _, place, found, *_ = line.split()
        inside = path == place or path.startswith(place.rstrip("/") + "/")
        # The last of several on one place hides the others.
        if inside and len(place) >= len(best):
            best, kind = place, found
    return kind if Path(folder).is_dir() else ""


def cgroup_memory(groups: str, root: Path) -> tuple[int, int]:
    """Return the memory limit that ends this process first (-1: none), and what is used of it.

    groups: the text of /proc/self/cgroup; root: where the cgroup file systems are mounted. A group
    is bound by the limits of all groups above it. In a container its own group may be the root.
    """
    limits = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, used = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, used = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = base / path.strip("/")
        while folder.is_relative_to(base):
            text = _text(folder / limit)
            # Version 1 writes "no limit" as a number that no machine has.
            if text.isdigit() and int(text) < 2**60:
                limits.append((int(text), int(_text(folder / used) or 0)))
            folder = folder.parent
    return min(limits, key=lambda each: each[0] - each[1], default=(-1, 0))


def _capabilities() -> int:
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", _text(Path("/proc/self/status")), re.MULTILINE)
    return int(match[1], 16) if match else 0


def _meminfo(name: str) -> int:
    match = re.search(rf"^{name}:\s*(\d+)", _text(Path("/proc/meminfo")), re.MULTILINE)
    return int(match[1]) if match else 0


def _free(folder: str) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
