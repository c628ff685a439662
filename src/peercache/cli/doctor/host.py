"""Collects the facts of this host for a configuration, without judging; needs no RDMA."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from importlib.util import find_spec
from pathlib import Path

import attrs
import numpy as np
import numpy.typing as npt

from peercache.cli.bench.limits import copy_gb_s, receive_stream, send_stream
from peercache.cli.doctor.facts import (
    AddressFact,
    DiskFact,
    Facts,
    HomeFact,
    JoinFact,
    Libraries,
    Memory,
    PortFact,
    SourceFact,
    Speed,
    TrustFact,
)
from peercache.config.entries import (
    EtcdAddress,
    KubernetesAddress,
    heads_of,
    hosts_to_ask,
    sources_of,
)
from peercache.config.home import nearest_home
from peercache.config.quantities import format_address, parse_address
from peercache.config.settings import Config
from peercache.discovery.kubernetes import ApiServer
from peercache.errors import BrokenInstallation, ConfigError, PeerCacheError, Rejected
from peercache.installation.library import load, load_tls, version
from peercache.memory.kernel import (
    filesystem_of,
    host_memory,
    mounted,
    own_cgroup_memory,
    supplies,
    text_of,
)
from peercache.node.addresses import is_ours, look_up
from peercache.observability.log import get_logger
from peercache.rdma import verbs
from peercache.rdma.device import SYSFS, Port, choose, read_ports
from peercache.rdma.loopback import Loopback
from peercache.trust.contexts import client_context, shake_hands
from peercache.trust.files import LiveTls
from peercache.trust.sharing import Sharing

_CAP_IPC_LOCK = 14

WILDCARDS = ("", "*", "0.0.0.0", "::")  # noqa: S104 - compared, not bound

NAMED_PORT = 1
"""The resolver requires a port: any will do."""

CONNECT_S = 1.0
"""How long a discovery server may take to accept a connection."""

JOINS_MAX = 8
"""The most nodes to join that are contacted."""

_PRIVATE = re.compile(rb"IBVERBS_PRIVATE_(\d+)")
_RELEASE = re.compile(r"libibverbs\.so\.1\.\d+\.(\d+\.\d+)$")

PAGE_BYTES = 2**20
PAGES = 32
ROUNDS = 5
SMALL_BYTES = 4096
SMALL_READS = 100
SMALL_PAGES = 16


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
        home=look_at_home(config),
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
    """Return the name of the device file of a device without a bus, such as Soft-RoCE."""
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
    with suppress(OSError):
        return shutil.disk_usage(folder).free
    return 0


def look_at_addresses(config: Config) -> tuple[AddressFact, ...]:
    """Return every address that the configuration names, and what it resolves to."""
    return tuple(
        AddressFact(name, written, tuple(sorted(hosts)), is_own=any(map(is_ours, hosts)))
        for name, written, address in _named(config)
        for hosts in [look_up(address)]
    )


def _named(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield (setting, text of the address, HOST:PORT) for the addresses that are looked up."""
    for name, written in (("listen", config.listen), ("http_listen", config.http_listen)):
        host, _ = parse_address(written, default_port=NAMED_PORT)
        if host not in WILDCARDS:
            yield name, written, format_address(host, NAMED_PORT)
    if config.advertise:
        yield "advertise", config.advertise, format_address(config.advertise, NAMED_PORT)
    for address in [each for entry in config.discovery_addr for each in hosts_to_ask(entry)]:
        yield "discovery_addr", address, address


def look_at_sources(config: Config) -> tuple[SourceFact, ...]:
    """Return every configured etcd and Kubernetes API, and whether it answers.

    Whether its name resolves is part of the addresses.
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
    """Return why none of these servers accepts a connection, "" if one does."""
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
    nearest = _nearest(path)
    problem = _problem_of(nearest)
    free = total = 0
    if not problem:
        total, _, free = shutil.disk_usage(nearest)
    return DiskFact(
        path=str(path),
        wanted=config.disk_size,
        problem=problem,
        held=_held_bytes(path),
        room=max(0, free - int(total * config.disk_free_floor)),
    )


def look_at_home(config: Config) -> HomeFact:
    """Return whether a node, or a client of one, of this user can use the home address."""
    home = config.home or nearest_home()
    path = Path(home.removeprefix("ipc://"))
    sharing = Sharing.of_config(config)
    try:
        sharing.check_listener(str(path))
        if path.is_socket():
            return HomeFact(str(path))  # Its folder may be another sharing user's.
        nearest = _nearest(path.parent)
        if nearest == path.parent:
            os.close(sharing.open_folder(nearest, follow=bool(config.home)))
    except Rejected as refusal:
        return HomeFact(str(path), refusal.detail)
    except OSError as error:
        return HomeFact(str(path), f"{path.parent}: {error.strerror}")
    return HomeFact(str(path), _problem_of(nearest))


def _nearest(folder: Path) -> Path:
    """Return a folder, or the nearest one above it that exists."""
    return next(
        each for each in (folder, *folder.absolute().parents) if each.exists() or each.is_symlink()
    )


def _problem_of(folder: Path) -> str:
    """Return why a node cannot keep files in an existing folder, "" if it can."""
    if not folder.is_dir():
        return f"{folder} is not a folder"
    try:
        # Only a write shows it: root may ignore permissions, but not the limits of the file system.
        # The file has no name, so nothing is left of it.
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(4096))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return f"no file can be written in {folder}: {error.strerror}"
    return ""


def _held_bytes(path: Path) -> int:
    """Return the bytes that nodes' folders use already: they count as free room."""
    held = 0
    for entry in path.glob("[0-9]*/*"):
        try:
            held += entry.lstat().st_blocks * 512
        except OSError:  # noqa: PERF203 - a running node removes files
            continue
    return held


def look_at_trust(config: Config) -> TrustFact:
    """Return how a node with these settings is protected."""
    if not config.has_tls:
        return TrustFact(cluster=config.cluster, insecure=config.insecure)
    try:
        # The certificate may be a client's: the settings do not show their purpose.
        tls = LiveTls.open(config, is_node=False, log=get_logger())
    except ConfigError as error:
        return TrustFact(cluster=config.cluster, has_tls=True, problem=str(error))
    assert tls is not None, "there are certificates"
    context, heads = client_context(tls), heads_of(config.discovery_addr)[:JOINS_MAX]
    results = [(address, shake_hands(address, context, tls)) for address in heads]
    return TrustFact(
        cluster=tls.files.identity.cluster,
        has_tls=True,
        identity=tls.files.identity.uri(),
        days_left=tls.days_left,
        revoked=len(tls.revocations),
        joins=tuple(
            JoinFact(address, each.identity, each.problem, is_silent=each.is_silent)
            for address, each in results
        ),
    )


def find_libraries() -> Libraries:
    """Look at this process's libraries."""
    library = _mapped_libibverbs()
    package = _package()
    wants = private_numbers(_device_module(package)) if package else ()
    problem = verbs.load()
    return Libraries(
        libibverbs=str(library or ""),
        libibverbs_release=release_of(library.name) if library else "",
        offers=private_numbers(library),
        pyverbs=str(package or ""),
        pyverbs_release=_pyverbs_release(),
        wants=wants[0] if wants else 0,
        problem=problem if isinstance(problem, str) else "",
    )


def private_numbers(file: Path | None) -> tuple[int, ...]:
    """Return the private interfaces of libibverbs that a shared library names, in order."""
    if file is None:
        return ()
    try:
        found = set(_PRIVATE.findall(file.read_bytes()))
    except OSError:
        return ()
    return tuple(sorted(int(number) for number in found))


def release_of(name: str) -> str:
    """Return rdma-core's release from the name of libibverbs' file: libibverbs.so.1.14.44.0."""
    match = _RELEASE.search(name)
    return match[1] if match else ""


def _mapped_libibverbs() -> Path | None:
    """Return the file that the loader has mapped for libibverbs."""
    try:
        ctypes.CDLL("libibverbs.so.1")
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return None
    for line in maps.splitlines():
        path = line.split(maxsplit=5)[-1]
        if "/libibverbs.so" in path:
            return Path(path).resolve()
    return None


def _package() -> Path | None:
    spec = find_spec("pyverbs")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None


def _device_module(package: Path) -> Path | None:
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        if (package / f"device{suffix}").exists():
            return package / f"device{suffix}"
    # It is built for another Python, but still names its interface of libibverbs.
    return next(iter(sorted(package.glob("device*.so"))), None)


def _pyverbs_release() -> str:
    try:
        return importlib.metadata.version("pyverbs")
    except importlib.metadata.PackageNotFoundError:
        return ""  # A package of the distribution has no metadata.


def measure(config: Config, chosen: Sequence[tuple[str, int]], *, is_quick: bool) -> Speed:
    """Measure each rate; READs only if a port is chosen."""
    if is_quick:
        return Speed()
    source = np.arange(PAGES * PAGE_BYTES // 8, dtype=np.uint64).view(np.uint8)
    target = np.zeros_like(source)
    copy, tcp = copy_gb_s(source, target, PAGE_BYTES), _tcp_gb_s(source, target)
    if not chosen:
        return Speed(tcp_gb_s=tcp, copy_gb_s=copy)
    name, gid_index = chosen[0]
    speed = Speed(tcp_gb_s=tcp, copy_gb_s=copy, read_over=name)
    try:
        gb_s, one_us = _reads(
            attrs.evolve(config, rdma_device_names=(name,), rdma_gid_index=gid_index)
        )
    except (PeerCacheError, OSError) as error:
        return attrs.evolve(speed, read_problem=str(error))
    return attrs.evolve(speed, read_gb_s=gb_s, read_us=one_us)


def _tcp_gb_s(source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]) -> float:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        sender = threading.Thread(target=send_stream, args=(port, source, PAGE_BYTES))
        sender.start()
        try:
            return receive_stream(listener, target)
        finally:
            sender.join()


def _reads(config: Config) -> tuple[float, float]:
    """Return GB/s of whole pages and the µs of a small one; raise if a page is wrong."""

    def loopback(page_bytes: int, pages: int) -> Loopback:
        return Loopback(
            near=config, far=config, shm_dir=config.shm_dir, granule=SMALL_BYTES,
            page_bytes=page_bytes, pages=pages,
        )  # fmt: skip

    times = []
    with closing(loopback(PAGE_BYTES, PAGES)) as large:
        for _ in range(ROUNDS):
            large.clear()
            started = time.perf_counter()
            fetched = large.read(0, PAGES)
            times.append(time.perf_counter() - started)
            if not large.arrived(0, PAGES, fetched):
                why = fetched.failure or "a page arrived with wrong bytes"
                raise PeerCacheError(f"READs of {PAGES} pages: {why}")
    small_times = []
    with closing(loopback(SMALL_BYTES, SMALL_PAGES)) as small:
        for number in range(SMALL_READS):
            started = time.perf_counter()
            fetched = small.read(number % SMALL_PAGES, 1)
            small_times.append(time.perf_counter() - started)
            if fetched.failure:
                raise PeerCacheError(f"READs of {SMALL_BYTES} bytes: {fetched.failure}")
    gb_s = PAGES * PAGE_BYTES / statistics.median(times[1:]) / 1e9
    return gb_s, statistics.median(small_times) * 1e6
