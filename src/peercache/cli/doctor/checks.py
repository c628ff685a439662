"""`peercache doctor`: the table of checks, the finding of each, and the line that fixes it.

A check only judges facts, so tests can use recorded ones; `host` collects the facts of this host.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import attrs
import click

from peercache.cli.doctor.facts import Facts, PortFact, packet_bytes
from peercache.cli.doctor.host import gather
from peercache.cli.options import SettingsCommand, json_option, settings_options
from peercache.config.quantities import written_size
from peercache.config.settings import Config
from peercache.memory.kernel import SIZES, more
from peercache.memory.layout import Layout
from peercache.node.runner import DESCRIPTORS_MIN
from peercache.observability.log import configure_logging
from peercache.rdma.device import ROCE_V2
from peercache.trust.files import EXPIRY_WARNING_DAYS

GOOD = "good"
ADVICE = "advice"
"""A finding: it works, but not as well as it could."""
PROBLEM = "problem"
"""A finding: the configuration does not work here, or a device is unused."""

NOFILE_MIN = 4096
"""File descriptors for connections to a hundred peers, with a margin."""

DISK_MIN = 16 * 2**20
"""The least possible disk_size: with less room no page is ever written."""

MTU_MIN = 4200
"""With a smaller MTU, READs are cut into packets of 2048 or 1024 bytes."""

GIB = 2**30


@attrs.frozen
class Finding:
    """One verdict. fix: a command or a setting, "" for none."""

    level: str
    topic: str
    text: str
    fix: str = ""


Verdicts: TypeAlias = Iterator[tuple[str, str, str]]
"""The level, the sentence and the fix of each finding of a check."""

TOPIC_WIDTH = 14
_SIGNS = {GOOD: "ok  ", ADVICE: "note", PROBLEM: "FAIL"}


def _certificates(facts: Facts) -> Verdicts:
    trust = facts.trust
    if trust.problem:
        fix = "peercache certs show FILE  (of tls_cert), and the sentence above"
        yield PROBLEM, trust.problem, fix
    elif trust.insecure:
        text = "none, because of insecure: every process that connects may read every page"
        fix = f"peercache certs init DIR --cluster {trust.cluster}, and tls_ca, tls_cert, tls_key"
        yield ADVICE, text, fix
    elif not trust.has_tls:
        yield GOOD, "none: only processes of this host reach a node", ""
    elif trust.days_left < EXPIRY_WARNING_DAYS:
        text = f"{trust.identity} expires in {trust.days_left:.1f} days"
        yield ADVICE, text, "peercache certs issue DIR --renew  (with the flags of the first time)"
    else:
        text = f"{trust.identity}, for {trust.days_left:.0f} days; {trust.revoked} others revoked"
        yield GOOD, text, ""


def _joins(facts: Facts) -> Verdicts:
    certificates = "the same ca.crt on both hosts, and certificates of one cluster: "
    for join in facts.trust.joins:
        if not join.problem:
            yield GOOD, f"{join.address} is {join.identity}", ""
        elif join.is_silent:
            text = f"{join.address}: {join.problem}"
            yield ADVICE, text, "start that node, or open its port"
        else:
            text = f"{join.address} and this host refuse each other: {join.problem}"
            yield PROBLEM, text, f"{certificates}peercache certs show FILE"


def _parts(facts: Facts) -> Verdicts:
    for problem, remedy in facts.parts_missing:
        yield PROBLEM, problem, remedy


def _addresses(facts: Facts) -> Verdicts:
    for each in facts.addresses:
        named = f"{each.setting} names {each.written} ({', '.join(each.hosts)})"
        text = f"{named}, which is no address of this host:"
        if not each.hosts:
            text = f"{each.setting}: the name in {each.written} does not resolve on this host"
            host = each.written.rpartition(":")[0] or each.written
            yield PROBLEM, text, f"getent hosts {host}  (what the resolver says), or an IP address"
        elif each.is_own or each.setting == "discovery_addr":
            continue
        elif each.setting == "advertise":
            where = "other nodes reach it only where a router or a container's host forwards that"
            fix = "ip -brief address  (this host's), or leave advertise out"
            yield ADVICE, f"{text} {where} address", fix
        else:
            fix = f"ip -brief address  (this host's), or {each.setting} = :PORT for every interface"
            yield PROBLEM, f"{text} nothing can listen there", fix


def _sources(facts: Facts) -> Verdicts:
    for each in facts.sources:
        if each.ends_node:
            fix = "discovery_addr = dns://NAME, or HOST:PORT of other nodes"
            yield PROBLEM, each.problem, fix
        elif each.problem:
            text = f"{each.written}: {each.problem}; a node starts alone, and asks again"
            yield ADVICE, text, "start that server, or open its port"
        else:
            yield GOOD, f"a server of {each.written} takes connections", ""


def _disk(facts: Facts) -> Verdicts:
    disk = facts.disk
    if disk is None:
        return
    wanted, could = written_size(disk.wanted), disk.room + disk.held
    if disk.problem:
        fix = "disk_path in a folder that this user may write to, or disk_enabled = false"
        yield PROBLEM, f"disk_path {disk.path} cannot be used: {disk.problem}", fix
    elif could < DISK_MIN:
        room = f"above disk_free_floor there are {written_size(disk.room)}"
        fix = "free space there, name another disk_path, or lower disk_free_floor"
        yield PROBLEM, f"the file system of {disk.path} is full: {room}", fix
    elif could < disk.wanted:
        room = f"{disk.path} has room for {written_size(could)} above disk_free_floor"
        fix = f"--disk-size {could // GIB}GiB" if could >= GIB else "another disk_path"
        yield ADVICE, f"disk_size is {wanted}, and {room}", fix
    else:
        yield GOOD, f"{wanted} fit into {disk.path}", ""


def _home(facts: Facts) -> Verdicts:
    if facts.home is None:
        return
    if facts.home.problem:
        fix = "home = ipc://PATH in a folder that this user may write to, or the setting above"
        yield PROBLEM, f"{facts.home.path} cannot be used: {facts.home.problem}", fix
    else:
        yield GOOD, f"{facts.home.path} can be used by this user", ""


def _place_of_pool(facts: Facts) -> Verdicts:
    memory, folder, wanted = facts.memory, facts.shm_dir, facts.pool_size
    free = written_size(memory.shm_free)
    if facts.hugepages_wanted != "off":
        return
    if not memory.shm_type:
        yield PROBLEM, f"{folder} does not exist", f"mkdir -p {folder}"
    elif not memory.may_write_shm:
        text = f"this user cannot create files in {folder}"
        yield PROBLEM, text, f"chmod 1777 {folder}, or another shm_dir"
    elif memory.shm_free < wanted:
        text = (
            f"the pool of {written_size(wanted)} does not fit into {folder}, which has {free} free"
        )
        docker = f"(docker: --shm-size={_gib_up(wanted)}g)"
        fix = f"mount -o remount,size={_gib_up(wanted)}G {folder}  {docker}, or lower pool_size"
        yield PROBLEM, text, fix
    elif memory.shm_type != "tmpfs":
        text = f"{folder} is {memory.shm_type}, not tmpfs: pages would be written to it"
        yield ADVICE, text, "--shm-dir /dev/shm"
    else:
        yield GOOD, f"{written_size(wanted)} fit into {folder}, {free} are free there", ""


def _memory_of_pool(facts: Facts) -> Verdicts:
    memory, size = facts.memory, facts.pool_size
    pool, available = f"the pool of {written_size(size)}", written_size(memory.available)
    if memory.available < size:
        text = f"{pool} is larger than the free memory of this host, {available}"
        yield PROBLEM, text, "lower pool_size, or end what uses the memory"
    if 0 <= memory.cgroup_limit < memory.cgroup_used + size:
        limit, used = written_size(memory.cgroup_limit), written_size(memory.cgroup_used)
        enough = f"docker: --memory={_gib_up(memory.cgroup_used + size) + 1}g"
        text = f"this cgroup may use {limit} of memory, of which {used} are in use"
        fix = f"{enough}  (systemd: MemoryMax=), or lower pool_size"
        yield PROBLEM, f"{text}: {pool} would have it killed", fix


def _huge_pages(facts: Facts) -> Verdicts:
    name = facts.hugepages_wanted
    if name == "off":
        return
    size = SIZES[name]
    if not any(each == size for _, each in facts.memory.huge_mounts):
        fix = f"mount -t hugetlbfs -o pagesize={name} none /dev/hugepages"
        yield PROBLEM, f"no hugetlbfs of {name} pages is mounted", fix
    supply = {each: (total, free) for each, total, free in facts.memory.hugepages}
    total, free = supply.get(size, (0, 0))
    needed = Layout.of(max(facts.pool_size, size), facts.granule, size).total_bytes // size
    if free < needed:
        text = f"the pool needs {needed} huge pages of {name}, {free} are free"
        yield PROBLEM, text, more(name, total - free + needed)
    else:
        yield GOOD, f"{free} of {name} are free, the pool needs {needed}", ""


def _files(facts: Facts) -> Verdicts:
    # A node raises its soft limit to the hard one by itself.
    most = facts.nofile_hard
    if 0 <= most < NOFILE_MIN:
        fix = "LimitNOFILE=65536 in the systemd unit, or docker: --ulimit nofile=65536"
        level = PROBLEM if most < DESCRIPTORS_MIN else ADVICE
        yield level, f"at most {most}, enough for some {most // 40} peers", fix
    else:
        yield GOOD, f"{facts.nofile}, up to {'unlimited' if most < 0 else most}", ""


def _devices(facts: Facts) -> Verdicts:
    if not facts.ports and facts.fabric == "rdma":
        fix = "load the adapter's driver (docker: --device /dev/infiniband), or --fabric auto"
        yield PROBLEM, "this host has no RDMA device", fix
    elif not facts.ports:
        yield GOOD, "this host has no RDMA device: bytes go over tcp", ""
    elif not facts.chosen:
        for text in facts.choice_problems:
            yield PROBLEM, text, _fix_of_choice(text)
    chosen = dict(facts.chosen)
    for port in facts.ports:
        if port.name in chosen:
            yield from _chosen_port(port, chosen[port.name])


def _chosen_port(port: PortFact, gid_index: int) -> Verdicts:
    gid, kind = next(((text, kind) for at, text, kind in port.gids if at == gid_index), ("", ""))
    where = f"{port.link_layer}, {port.rate_gbps:g} Gb/s, GID {gid_index} {gid}"
    yield GOOD, f"{port.name} would be used: {where}", ""
    if not port.is_usable:
        text = f"{port.uverbs} cannot be opened for reading and writing"
        fix = "docker: --device /dev/infiniband; else chmod 666 /dev/infiniband/uverbs*"
        yield PROBLEM, text, fix
    if kind == ROCE_V2 and 0 < port.mtu < MTU_MIN:
        text = f"the network interface of {port.name} has an MTU of {port.mtu}"
        fix = "ip link set dev INTERFACE mtu 9000, on every host and switch between them"
        packets = f"packets of {packet_bytes(port.mtu)} bytes instead of 4096"
        yield ADVICE, f"{text}: {packets}", fix


def _fix_of_choice(text: str) -> str:
    if "GID" in text:
        return "ip address add ADDRESS/24 dev INTERFACE  (of that device)"
    if "link" in text:
        return "ip link set dev INTERFACE up  (of that device), and look at the cable"
    return "--rdma-device-names with the name of a device of this host, or none"


def _libraries(facts: Facts) -> Verdicts:
    found, enable = facts.libraries, "docs/how-to/enable-rdma.md"
    if not found.problem:
        pyverbs = found.pyverbs_release or "of the distribution"
        yield (
            GOOD,
            f"{pyverbs} with rdma-core {found.libibverbs_release or 'of unknown release'}",
            "",
        )
        return
    text, fix = found.problem, enable
    if not found.libibverbs:
        text = "libibverbs is not installed"
        fix = "apt-get install libibverbs1 ibverbs-providers librdmacm1 python3-pyverbs"
    elif not found.pyverbs:
        text = "pyverbs is not installed"
        fix = f"apt-get install python3-pyverbs, or build it: {enable}"
    elif found.wants and found.wants not in found.offers:
        offered = ", ".join(map(str, found.offers)) or "none"
        built = f"pyverbs {found.pyverbs_release} was built for IBVERBS_PRIVATE_{found.wants}"
        text = f"{built}, rdma-core {found.libibverbs_release} here has {offered}"
        fix = f"build pyverbs for {offered}: {enable}"
    if facts.fabric == "rdma" or (facts.fabric == "auto" and facts.ports):
        yield PROBLEM, text, fix
    else:
        yield GOOD, text, ""


def _locking(facts: Facts) -> Verdicts:
    memory = facts.memory
    if not facts.ports:
        return
    # Pool and host buffers are locked; the size of an engine's buffers is not known here.
    if memory.memlock < 0 or memory.may_lock_anything:
        yield GOOD, "without limit", ""
    elif memory.memlock >= facts.pool_size:
        yield GOOD, f"up to {written_size(memory.memlock)}", ""
    else:
        most, pool = written_size(memory.memlock), written_size(facts.pool_size)
        fix = "ulimit -l unlimited  (systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1)"
        yield PROBLEM, f"at most {most} may be locked, the pool has {pool}", fix


def _reads(facts: Facts) -> Verdicts:
    speed = facts.speed
    if speed.read_problem:
        # The verdict about the library explains why there is none.
        if not facts.libraries.problem:
            yield PROBLEM, speed.read_problem, "docs/how-to/enable-rdma.md"
    elif speed.read_gb_s:
        large, small = f"{speed.read_gb_s:.2f} GB/s", f"{speed.read_us:.0f} µs"
        itself = f"{speed.read_over} reads from itself"
        yield GOOD, f"{itself}: {large} in pages of 1 MiB, {small} for one of 4 KiB", ""


def _speed(facts: Facts) -> Verdicts:
    tcp, copy = facts.speed.tcp_gb_s, facts.speed.copy_gb_s
    if tcp:
        yield GOOD, f"tcp over the loopback {tcp:.2f} GB/s, memory copy {copy:.2f} GB/s", ""


def _gib_up(size: int) -> int:
    return -(-size // GIB)


CHECKS: tuple[tuple[str, Callable[[Facts], Verdicts]], ...] = (
    ("installation", _parts),
    ("certificates", _certificates),
    ("discovery", _joins),
    ("addresses", _addresses),
    ("discovery", _sources),
    ("huge pages", _huge_pages),
    ("pool", _place_of_pool),
    ("pool", _memory_of_pool),
    ("disk", _disk),
    ("home", _home),
    ("open files", _files),
    ("rdma", _devices),
    ("pyverbs", _libraries),
    ("locked memory", _locking),
    ("READ", _reads),
    ("speed", _speed),
)
"""Every check: its subject, and the function that judges it, in the order for an operator."""


def judge(facts: Facts) -> list[Finding]:
    """Return every verdict, in the order of the table."""
    return [
        Finding(level, topic, *rest) for topic, check in CHECKS for level, *rest in check(facts)
    ]


def as_text(facts: Facts, findings: Sequence[Finding]) -> str:
    """Return what `peercache doctor` prints."""
    lines = [f"peercache {facts.peercache}, Python {facts.python}, Linux {facts.kernel}", ""]
    for finding in findings:
        lines.append(f"{_SIGNS[finding.level]}  {finding.topic:{TOPIC_WIDTH}} {finding.text}")
        if finding.fix:
            lines.append(f"      {'':{TOPIC_WIDTH}} fix: {finding.fix}")
    if facts.ports:
        lines += ["", "RDMA ports"]
        for port in facts.ports:
            lines += _port_lines(port, dict(facts.chosen))
    problems = sum(finding.level == PROBLEM for finding in findings)
    notes = sum(finding.level == ADVICE for finding in findings)
    summary = f"{problems} problem{'s' * (problems != 1)}" if problems else "no problems"
    lines += ["", f"{summary}, {notes} note{'s' * (notes != 1)}" if notes else summary]
    return "\n".join(lines) + "\n"


def written(facts: Facts, findings: Sequence[Finding]) -> str:
    """Return facts and findings as one JSON object."""
    return json.dumps(
        {
            "problems": sum(finding.level == PROBLEM for finding in findings),
            "findings": [attrs.asdict(finding) for finding in findings],
            "facts": attrs.asdict(facts),
        }
    )


def _port_lines(port: PortFact, chosen: dict[str, int]) -> list[str]:
    address = f"LID {port.lid}" if port.lid else "interface MTU unknown"
    if port.mtu:
        address = f"interface MTU {port.mtu}, packets of {packet_bytes(port.mtu)}"
    head = f"  {port.name}  {port.state}  {port.link_layer}  {port.rate_gbps:g} Gb/s  {address}"
    marks = [
        f"    {'->' if chosen.get(port.name) == index else '  '} GID {index}  {text}  {kind}"
        for index, text, kind in port.gids
    ]
    return [head, *marks]


@click.command(cls=SettingsCommand)
@json_option
@click.option("--quick", is_flag=True, help="Measure nothing.")
@settings_options
def doctor(config: str | None, *, as_json: bool, quick: bool, **settings: str | None) -> int:
    """Check this host: show what it offers, what is wrong, and the line that fixes it."""
    # The report contains what a part logs while it is tried.
    configure_logging(log_format="auto", level="error")
    facts = gather(Config.load(settings, file=config, environment=os.environ), is_quick=quick)
    findings = judge(facts)
    text = written(facts, findings) + "\n" if as_json else as_text(facts, findings)
    print(text, end="")
    return int(any(finding.level == PROBLEM for finding in findings))
