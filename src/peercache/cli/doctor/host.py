"""Gathers the facts of this host; it judges nothing, and needs no RDMA."""

from __future__ import annotations

import os
import platform
import re
import resource
from pathlib import Path

from peercache.cli.doctor.facts import Facts, Memory, PortFact
from peercache.cli.doctor.libraries import find_libraries
from peercache.cli.doctor.speed import measure
from peercache.cli.doctor.trust import look_at_trust
from peercache.config.settings import Config
from peercache.installation.distribution import version
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
    )


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
    limit, used = _cgroup()
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


def _cgroup() -> tuple[int, int]:
    """Return the memory limit of this container (-1: none), and the memory that it uses."""
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        text = _text(Path(limit))
        # Version 1 writes "no limit" as a number that no machine has.
        if text.isdigit() and int(text) < 2**60:
            return int(text), int(_text(Path(used)) or 0)
    return -1, 0


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
