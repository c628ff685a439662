"""Judges the facts: a sentence for each, and for each problem the one line that fixes it."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from peercache.cli.doctor.facts import (
    AddressFact,
    DiskFact,
    Facts,
    JoinFact,
    PortFact,
    TrustFact,
    packet_bytes,
)
from peercache.config.quantities import written_size
from peercache.memory.kernel import SIZES, more
from peercache.memory.layout import Layout
from peercache.node.standalone import DESCRIPTORS_MIN
from peercache.rdma.device import ROCE_V2

GOOD = "good"
ADVICE = "advice"
"""It works, but not as well as it could."""
PROBLEM = "problem"
"""The configuration does not work here, or a device lies idle."""

NOFILE_MIN = 4096
"""Connections of a hundred peers, with room."""

DISK_MIN = 16 * 2**20
"""The least disk_size there is: with less room no page is ever written."""

MTU_MIN = 4200
"""An interface that carries less cuts READs into packets of 2048 bytes or 1024."""

EXPIRY_DAYS = 14.0
"""A certificate that ends sooner is renewed now."""

GIB = 2**30


@attrs.frozen
class Finding:
    """One verdict. fix: a command or a setting, "" for none."""

    level: str
    topic: str
    text: str
    fix: str = ""


def judge(facts: Facts) -> list[Finding]:
    """Return every verdict, in the order in which a person would look."""
    return [
        *_parts(facts),
        *judge_trust(facts.trust),
        *_addresses(facts),
        *_sources(facts),
        *_pool(facts),
        *_disk(facts.disk),
        *_files(facts),
        *_devices(facts),
        *_libraries(facts),
        *_locking(facts),
        *_reads(facts),
    ]


def judge_trust(trust: TrustFact) -> Iterator[Finding]:
    """Yield how a node with these settings is protected."""
    if trust.problem:
        fix = "peercache certs show FILE  (of tls_cert), and the sentence above"
        yield Finding(PROBLEM, "certificates", trust.problem, fix)
    elif trust.insecure:
        yield Finding(
            ADVICE,
            "certificates",
            f"the trial {trust.insecure!r} has none: every process that connects may read every "
            "page",
            f"peercache certs init DIR --cluster {trust.insecure}, and tls_ca, tls_cert, tls_key",
        )
    elif not trust.has_tls:
        yield Finding(GOOD, "certificates", "none: only processes of this host reach a node")
    elif trust.days_left < EXPIRY_DAYS:
        yield Finding(
            ADVICE,
            "certificates",
            f"{trust.identity} expires in {trust.days_left:.1f} days",
            "peercache certs issue DIR --renew  (with the flags of the first time)",
        )
    else:
        text = f"{trust.identity}, for {trust.days_left:.0f} days; {trust.revoked} others revoked"
        yield Finding(GOOD, "certificates", text)
    for join in trust.joins:
        yield _joined(join)


def _joined(join: JoinFact) -> Finding:
    if not join.problem:
        return Finding(GOOD, "discovery", f"{join.address} is {join.identity}")
    if join.is_silent:
        text = f"{join.address}: {join.problem}"
        return Finding(ADVICE, "discovery", text, "start that node, or open its port")
    return Finding(
        PROBLEM,
        "discovery",
        f"{join.address} and this host refuse each other: {join.problem}",
        "the same ca.crt on both hosts, and certificates of one cluster: peercache certs show FILE",
    )


def _parts(facts: Facts) -> Iterator[Finding]:
    for problem, remedy in facts.parts_missing:
        yield Finding(PROBLEM, "installation", problem, remedy)


def _addresses(facts: Facts) -> Iterator[Finding]:
    for each in facts.addresses:
        if not each.hosts:
            yield Finding(
                PROBLEM,
                "addresses",
                f"{each.setting}: the name in {each.written} does not resolve on this host",
                f"getent hosts {each.written.rpartition(':')[0] or each.written}  (what the "
                "resolver says), or an IP address",
            )
        elif each.setting != "discovery_addr" and not each.is_own:
            yield _not_own(each)


def _sources(facts: Facts) -> Iterator[Finding]:
    for each in facts.sources:
        if each.ends_node:
            fix = "discovery_addr = dns://NAME, or HOST:PORT of other nodes"
            yield Finding(PROBLEM, "discovery", each.problem, fix)
        elif each.problem:
            text = f"{each.written}: {each.problem}; a node starts alone, and asks again"
            yield Finding(ADVICE, "discovery", text, "start that server, or open its port")
        else:
            yield Finding(GOOD, "discovery", f"a server of {each.written} takes connections")


def _not_own(each: AddressFact) -> Finding:
    of_whom = f"{each.setting} names {each.written} ({', '.join(each.hosts)})"
    if each.setting == "advertise":
        return Finding(
            ADVICE,
            "addresses",
            f"{of_whom}, which is no address of this host: other nodes reach it only where a "
            "router or a container's host forwards that address",
            "ip -brief address  (this host's), or leave advertise out",
        )
    return Finding(
        PROBLEM,
        "addresses",
        f"{of_whom}, which is no address of this host: nothing can listen there",
        f"ip -brief address  (this host's), or {each.setting} = :PORT for every interface",
    )


def _disk(disk: DiskFact | None) -> Iterator[Finding]:
    if disk is None:
        return
    could = disk.room + disk.held
    if disk.problem:
        yield Finding(
            PROBLEM,
            "disk",
            f"disk_path {disk.path} cannot be used: {disk.problem}",
            "disk_path in a folder that this user may write to, or disk_enabled = false",
        )
    elif could < DISK_MIN:
        yield Finding(
            PROBLEM,
            "disk",
            f"the file system of {disk.path} is full: above disk_free_floor there are "
            f"{written_size(disk.room)}",
            "free space there, name another disk_path, or lower disk_free_floor",
        )
    elif could < disk.wanted:
        yield Finding(
            ADVICE,
            "disk",
            f"disk_size is {written_size(disk.wanted)}, and {disk.path} has room for "
            f"{written_size(could)} above disk_free_floor",
            f"--disk-size {could // GIB}GiB" if could >= GIB else "another disk_path",
        )
    else:
        yield Finding(GOOD, "disk", f"{written_size(disk.wanted)} fit into {disk.path}")


def _pool(facts: Facts) -> Iterator[Finding]:
    memory, wanted = facts.memory, facts.pool_size
    if facts.hugepages_wanted != "off":
        yield from _huge_pool(facts)
    elif not memory.shm_type:
        yield Finding(
            PROBLEM, "pool", f"{facts.shm_dir} does not exist", f"mkdir -p {facts.shm_dir}"
        )
    elif not memory.may_write_shm:
        text = f"this user cannot create files in {facts.shm_dir}"
        yield Finding(PROBLEM, "pool", text, f"chmod 1777 {facts.shm_dir}, or another shm_dir")
    elif memory.shm_free < wanted:
        resize = f"mount -o remount,size={_gib_up(wanted)}G {facts.shm_dir}"
        yield Finding(
            PROBLEM,
            "pool",
            f"the pool of {written_size(wanted)} does not fit into {facts.shm_dir}, which has "
            f"{written_size(memory.shm_free)} free",
            f"{resize}  (docker: --shm-size={_gib_up(wanted)}g), or lower pool_size",
        )
    elif memory.shm_type != "tmpfs":
        yield Finding(
            ADVICE,
            "pool",
            f"{facts.shm_dir} is {memory.shm_type}, not tmpfs: pages would be written to it",
            "--shm-dir /dev/shm",
        )
    else:
        free = written_size(memory.shm_free)
        yield Finding(
            GOOD, "pool", f"{written_size(wanted)} fit into {facts.shm_dir}, {free} are free there"
        )
    if memory.available < wanted:
        yield Finding(
            PROBLEM,
            "pool",
            f"the pool of {written_size(wanted)} is larger than the free memory of this host, "
            f"{written_size(memory.available)}",
            "lower pool_size, or end what uses the memory",
        )
    if 0 <= memory.cgroup_limit < memory.cgroup_used + wanted:
        yield Finding(
            PROBLEM,
            "pool",
            f"this cgroup may use {written_size(memory.cgroup_limit)} of memory, of which "
            f"{written_size(memory.cgroup_used)} are in use: the pool of {written_size(wanted)} "
            "would have it killed",
            f"docker: --memory={_gib_up(memory.cgroup_used + wanted) + 1}g  (systemd: MemoryMax=), "
            "or lower pool_size",
        )


def _huge_pool(facts: Facts) -> Iterator[Finding]:
    name = facts.hugepages_wanted
    size = SIZES[name]
    if not any(each == size for _, each in facts.memory.huge_mounts):
        yield Finding(
            PROBLEM,
            "huge pages",
            f"no hugetlbfs of {name} pages is mounted",
            f"mount -t hugetlbfs -o pagesize={name} none /dev/hugepages",
        )
    total, free = next(
        ((total, free) for each, total, free in facts.memory.hugepages if each == size), (0, 0)
    )
    pool = max(facts.pool_size, size)
    needed = Layout.of(pool, facts.granule, size).total_bytes // size
    if free < needed:
        text = f"the pool needs {needed} huge pages of {name}, {free} are free"
        yield Finding(PROBLEM, "huge pages", text, more(name, total - free + needed))
    else:
        text = f"{free} of {name} are free, the pool needs {needed}"
        yield Finding(GOOD, "huge pages", text)


def _files(facts: Facts) -> Iterator[Finding]:
    # A node raises its soft limit to the hard one by itself.
    if 0 <= facts.nofile_hard < NOFILE_MIN:
        yield Finding(
            PROBLEM if facts.nofile_hard < DESCRIPTORS_MIN else ADVICE,
            "open files",
            f"at most {facts.nofile_hard}, enough for some {facts.nofile_hard // 40} peers",
            "LimitNOFILE=65536 in the systemd unit, or docker: --ulimit nofile=65536",
        )
    else:
        yield Finding(GOOD, "open files", f"{facts.nofile}, up to {_unlimited(facts.nofile_hard)}")


def _devices(facts: Facts) -> Iterator[Finding]:
    wants_rdma = facts.fabric == "rdma"
    if not facts.ports:
        yield Finding(
            PROBLEM if wants_rdma else GOOD,
            "rdma",
            "this host has no RDMA device" + ("" if wants_rdma else ": bytes go over tcp"),
            "load the adapter's driver (docker: --device /dev/infiniband), or --fabric auto"
            if wants_rdma
            else "",
        )
        return
    chosen = dict(facts.chosen)
    for port in facts.ports:
        if port.name in chosen:
            yield from _chosen_port(port, chosen[port.name])
    if not chosen:
        for text in facts.choice_problems:
            yield Finding(PROBLEM, "rdma", text, _fix_of_choice(text))


def _chosen_port(port: PortFact, gid_index: int) -> Iterator[Finding]:
    gid = next((text for index, text, _ in port.gids if index == gid_index), "")
    where = f"{port.link_layer}, {port.rate_gbps:g} Gb/s, GID {gid_index} {gid}"
    yield Finding(GOOD, "rdma", f"{port.name} would be used: {where}")
    if not port.is_usable:
        yield Finding(
            PROBLEM,
            "rdma",
            f"{port.uverbs} cannot be opened for reading and writing",
            "docker: --device /dev/infiniband; else chmod 666 /dev/infiniband/uverbs*",
        )
    is_roce = any(index == gid_index and kind == ROCE_V2 for index, _, kind in port.gids)
    if is_roce and 0 < port.mtu < MTU_MIN:
        yield Finding(
            ADVICE,
            "rdma",
            f"the network interface of {port.name} has an MTU of {port.mtu}: packets of "
            f"{packet_bytes(port.mtu)} bytes instead of 4096",
            "ip link set dev INTERFACE mtu 9000, on every host and switch between them",
        )


def _fix_of_choice(text: str) -> str:
    if "GID" in text:
        return "ip address add ADDRESS/24 dev INTERFACE  (of that device)"
    if "link" in text:
        return "ip link set dev INTERFACE up  (of that device), and look at the cable"
    return "--rdma-device-names with the name of a device of this host, or none"


def _libraries(facts: Facts) -> Iterator[Finding]:
    found = facts.libraries
    is_needed = bool(facts.ports) or facts.fabric == "rdma"
    level = PROBLEM if is_needed and facts.fabric in ("rdma", "auto") else GOOD
    if not found.problem:
        yield Finding(
            GOOD,
            "pyverbs",
            f"{found.pyverbs_release or 'of the distribution'} beside rdma-core "
            f"{found.libibverbs_release or 'of unknown release'}",
        )
    elif not found.libibverbs:
        yield Finding(
            level, "pyverbs", "libibverbs is not installed", _if(level, "apt-get install "
            "libibverbs1 ibverbs-providers librdmacm1 python3-pyverbs")
        )  # fmt: skip
    elif not found.pyverbs:
        fix = "apt-get install python3-pyverbs, or build it: docs/how-to/enable-rdma.md"
        yield Finding(level, "pyverbs", "pyverbs is not installed", _if(level, fix))
    elif found.wants and found.wants not in found.offers:
        offered = ", ".join(map(str, found.offers)) or "none"
        yield Finding(
            level,
            "pyverbs",
            f"pyverbs {found.pyverbs_release} was built for IBVERBS_PRIVATE_{found.wants}, "
            f"rdma-core {found.libibverbs_release} here has {offered}",
            _if(level, f"build pyverbs for {offered}: docs/how-to/enable-rdma.md"),
        )
    else:
        fix = "docs/how-to/enable-rdma.md"
        yield Finding(level, "pyverbs", found.problem, _if(level, fix))


def _locking(facts: Facts) -> Iterator[Finding]:
    memory = facts.memory
    if not facts.ports:
        return
    # Pool and host buffers are locked; the size of an engine's buffers is not known here.
    enough = memory.memlock < 0 or memory.may_lock_anything or memory.memlock >= facts.pool_size
    if enough:
        text = "without limit" if memory.memlock < 0 or memory.may_lock_anything else ""
        yield Finding(GOOD, "locked memory", text or f"up to {written_size(memory.memlock)}")
        return
    yield Finding(
        PROBLEM,
        "locked memory",
        f"at most {written_size(memory.memlock)} may be locked, "
        f"the pool has {written_size(facts.pool_size)}",
        "ulimit -l unlimited  (systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1)",
    )


def _reads(facts: Facts) -> Iterator[Finding]:
    speed = facts.speed
    if speed.read_problem:
        # The verdict about the library says why there are none.
        if not facts.libraries.problem:
            yield Finding(PROBLEM, "READ", speed.read_problem, "docs/how-to/enable-rdma.md")
    elif speed.read_gb_s:
        yield Finding(
            GOOD,
            "READ",
            f"{speed.read_over} reads from itself: {speed.read_gb_s:.2f} GB/s in pages of 1 MiB, "
            f"{speed.read_us:.0f} µs for one of 4 KiB",
        )
    if speed.tcp_gb_s:
        yield Finding(
            GOOD,
            "speed",
            f"tcp over the loopback {speed.tcp_gb_s:.2f} GB/s, memory copy "
            f"{speed.copy_gb_s:.2f} GB/s",
        )


def _if(level: str, fix: str) -> str:
    return fix if level == PROBLEM else ""


def _gib_up(size: int) -> int:
    return -(-size // GIB)


def _unlimited(number: int) -> str:
    return "unlimited" if number < 0 else str(number)
