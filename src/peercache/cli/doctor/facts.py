"""The facts about a host, as plain values: tests judge recorded ones."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class Libraries:
    """The libraries of RDMA.

    libibverbs:  its file, "" if it is missing; libibverbs_release: "44.0", "" if unknown.
    offers:      the private interfaces of libibverbs, by number.
    pyverbs: its folder, "" if it is missing; pyverbs_release: "59.0", "" if unknown.
    wants:       the private interface of libibverbs that pyverbs was built for, 0 for none.
    problem:     why pyverbs cannot be used, "" if it can.
    """

    libibverbs: str = ""
    libibverbs_release: str = ""
    offers: tuple[int, ...] = ()
    pyverbs: str = ""
    pyverbs_release: str = ""
    wants: int = 0
    problem: str = ""


@attrs.frozen(kw_only=True)
class PortFact:
    """One port of an RDMA device.

    mtu: that of its network interface, 0 if unknown. gids: (index, address, kind) each.
    uverbs: its device file; is_usable: whether this user may open it.
    """

    name: str
    state: str
    link_layer: str
    rate_gbps: float
    lid: int = 0
    mtu: int = 0
    gids: tuple[tuple[int, str, str], ...] = ()
    uverbs: str = ""
    is_usable: bool = True


@attrs.frozen(kw_only=True)
class Memory:
    """Limits and locations of memory, in bytes; -1 means no limit.

    shm_type:   the file system of shm_dir, "" if shm_dir is missing.
    may_write_shm: whether this user may make a file there.
    cgroup_limit, cgroup_used: the memory of this container.
    hugepages:  (page size, all, free) of each size that the kernel has.
    huge_mounts: (folder, page size) of each hugetlbfs.
    """

    memlock: int
    memlock_hard: int
    may_lock_anything: bool
    shm_type: str
    shm_free: int
    available: int
    may_write_shm: bool = True
    cgroup_limit: int = -1
    cgroup_used: int = 0
    hugepages: tuple[tuple[int, int, int], ...] = ()
    huge_mounts: tuple[tuple[str, int], ...] = ()


@attrs.frozen(kw_only=True)
class Speed:
    """Measured rates. GB/s are for 1 MiB pages; 0 means not measured or failed.

    read_problem: why READs failed; read_us: one READ of a page of 4 KiB, median.
    """

    tcp_gb_s: float = 0.0
    copy_gb_s: float = 0.0
    read_over: str = ""
    read_gb_s: float = 0.0
    read_us: float = 0.0
    read_problem: str = ""


@attrs.frozen
class JoinFact:
    """A node to join. identity: the one in its certificate, "" if unknown.

    problem: why it cannot be joined, "" if it can; is_silent: whether it gives no answer at all.
    """

    address: str
    identity: str = ""
    problem: str = ""
    is_silent: bool = False


@attrs.frozen(kw_only=True)
class TrustFact:
    """How a node with these settings is protected.

    insecure: other hosts may connect without certificates.
    problem:  why its certificates cannot be used, "" if they can.
    """

    cluster: str = ""
    insecure: bool = False
    has_tls: bool = False
    problem: str = ""
    identity: str = ""
    days_left: float = 0.0
    revoked: int = 0
    joins: tuple[JoinFact, ...] = ()


@attrs.frozen
class AddressFact:
    """An address that a setting names. hosts: the IP addresses that it resolves to; () if none.

    is_own: whether one of them is this host's.
    """

    setting: str
    written: str
    hosts: tuple[str, ...] = ()
    is_own: bool = attrs.field(default=False, kw_only=True)


@attrs.frozen
class SourceFact:
    """A source of addresses that `discovery_addr` names.

    problem:   why it returns no addresses now, "" if it answers.
    ends_node: whether a node refuses to start with it.
    """

    written: str
    problem: str = ""
    ends_node: bool = False


@attrs.frozen(kw_only=True)
class DiskFact:
    """The folder of the disk tier, in bytes.

    wanted:  disk_size; held: the size of nodes' folders there.
    room:    free on the file system, above disk_free_floor.
    problem: why no node can keep pages there, "" if it can.
    """

    path: str
    wanted: int
    problem: str = ""
    held: int = 0
    room: int = 0


@attrs.frozen
class HomeFact:
    """The home address of a node. problem: why it cannot be used by this user, "" if it can."""

    path: str
    problem: str = ""


@attrs.frozen(kw_only=True)
class Facts:
    """A host, and the configuration that is checked on it."""

    peercache: str
    python: str
    kernel: str
    fabric: str
    pool_size: int
    granule: int
    shm_dir: str
    hugepages_wanted: str
    libraries: Libraries
    ports: tuple[PortFact, ...]
    chosen: tuple[tuple[str, int], ...]
    """(port, GID index) of the ports that a node would use."""
    choice_problems: tuple[str, ...]
    memory: Memory
    nofile: int
    nofile_hard: int
    speed: Speed
    trust: TrustFact = TrustFact()
    addresses: tuple[AddressFact, ...] = ()
    sources: tuple[SourceFact, ...] = ()
    disk: DiskFact | None = None
    """None without a disk tier."""
    home: HomeFact | None = None
    parts_missing: tuple[tuple[str, str], ...] = ()
    """(problem, remedy) of compiled parts that these settings need."""


def packet_bytes(mtu: int) -> int:
    """Return the largest payload of a RoCE v2 packet over an interface with this MTU."""
    # A packet has up to 80 bytes in addition to the payload.
    return next((size for size in (4096, 2048, 1024, 512) if size + 80 <= mtu), 256)
