"""The swarm: every option of a run, drawn from its seed.

The kinds of faults are also drawn: a run without loss finds what a run with loss hides, and vice
versa.
"""

from __future__ import annotations

import random

import attrs

from peercache.actors.pool.reservations import LATELY_S
from peercache.actors.runtime import MAILBOX_MESSAGES_MAX
from peercache.model.hash_ring import AUTO
from peercache.net.link import OUTBOX_BYTES_MAX, OUTBOX_MESSAGES_MAX
from peercache.node.switchboard import LINKS_MAX

GRANULE = 256
"""Bytes of a granule here: small, so that a run moves kilobytes and tears as many pages."""

LENGTHS = (40, 200, 256, 500, 700, 1500)
"""Bytes of pages, in 1 to 6 granules: extents must change their class."""


TENANTS = ("chat", "search", "batch")


@attrs.frozen(kw_only=True)
class Options:
    """One run. Rates are events a virtual second over the whole cluster; chances are 0 to 1."""

    seed: int
    hosts: int
    nodes: int
    clients: int
    workers: int
    keys: int
    lengths: tuple[int, ...]
    pool_granules: int
    virtual_nodes: int
    replicas: int | str
    max_masters: int
    summary_s: float
    republish_rate: int
    verify: str
    cache_entries: int
    uncommitted_granules: int
    think_s: float
    batch_max: int
    safety_s: float
    # --- network
    latency_min_s: float
    latency_mean_s: float
    loss: float
    duplication: float
    reordering: float
    successor_delivery: float
    partition_holds: bool
    # --- fabric
    step_s: float
    steps_a_page: int
    transfer_failure: float
    rdma: bool
    # --- faults
    crash_rate: float
    leave_rate: float
    node_pause_rate: float
    client_crash_rate: float
    client_pause_rate: float
    partition_rate: float
    clog_rate: float
    disconnect_rate: float
    skew: float
    # --- drawn last, so that older seeds keep their other options
    wire_slowness: float
    stop_in_copy: float
    disk_slabs: int
    """0: nodes have no disks."""
    disk_on_evict: bool
    disk_queue_bytes: int
    disk_step_s: float
    disk_failure: float
    disk_full: float
    disk_late: float
    disk_wipe: float
    disk_rot: float
    outbox_messages: int
    outbox_bytes: int
    mailbox_messages: int
    busy: float
    forge_rate: float
    ring_s: float
    """How long a thread takes to build a ring; 0: the loop builds it at once."""
    impostor_rate: float
    handover_s: float
    links_max: int
    mirror_pulls: str
    mirror_share: float
    mirror_lately_s: float
    portion_pages: int
    """Largest pages that fit into a portion of a set."""
    drain_rate: float
    spill: bool = False
    placement_min_age_s: float = 0.0
    copies: int = 1
    late: float = 0.0
    """The fraction of ticks that are late, as where the loop of a node stalls."""
    pools: int = 1
    """2: every exists asks how far a prefix reaches in two pools of a model. Never drawn."""
    quotas: str = ""
    """Quotas of TENANTS, the namespaces of clients in turn; "": all have one, no quota. Never
    drawn."""
    removals: float = 1.0
    """The fraction of removals and clears that are called: where there are many, no node takes
    pages of another one. Never drawn."""
    bandwidth: float = 0.0
    """Bytes a second that a host's network carries each way; 0: without bound. Never drawn."""
    paced: float = 1.0
    """The fraction of pages whose copy takes time; others are copied at once. Never drawn."""

    @property
    def tenants(self) -> int:
        """Return the number of namespaces."""
        return len(TENANTS) if self.quotas else 1

    def lines(self) -> list[str]:
        """Return the options as readable lines."""
        settings = attrs.asdict(self)
        return [f"  {name} = {settings[name]}" for name in settings]


def smaller(options: Options) -> Options:
    """Return the same run in at most five nodes and ten seconds: for tests and canaries."""
    nodes = min(options.nodes, 5)
    return attrs.evolve(
        options,
        nodes=nodes,
        hosts=min(options.hosts, nodes),
        safety_s=min(options.safety_s, 10.0),
    )


LARGER = 32
"""How many times larger the batches of `with_large_batches` are: up to 512 pages."""

PACED = 1 / 16
"""The fraction of their pages whose copy takes time: a real copy of a page takes microseconds."""


def with_large_batches(options: Options) -> Options:
    """Return the same run with batches as engines make them: all that counts pages grows with them.

    A message of hundreds of records fits into the real bound of an outbox only.
    """
    return attrs.evolve(
        options,
        batch_max=LARGER * options.batch_max,
        keys=LARGER * options.keys,
        pool_granules=LARGER * options.pool_granules,
        uncommitted_granules=LARGER * options.uncommitted_granules,
        portion_pages=LARGER * options.portion_pages,
        cache_entries=LARGER * options.cache_entries,
        republish_rate=LARGER * options.republish_rate,
        disk_queue_bytes=LARGER * options.disk_queue_bytes,
        outbox_bytes=OUTBOX_BYTES_MAX,
        paced=PACED,
    )


def draining(options: Options) -> Options:
    """Return a small run in which nodes with free room are drained all the time, and read slowly.

    Pages are removed while they are handed over, as often as calls remove at all.
    """
    return attrs.evolve(
        smaller(options),
        drain_rate=0.5,
        pool_granules=300,
        keys=16,
        think_s=0.02,
        step_s=0.01,
        steps_a_page=4,
        latency_mean_s=0.0005,
        crash_rate=0.0,
        leave_rate=0.0,
        partition_rate=0.0,
        loss=0.0,
    )


def spilling(options: Options) -> Options:
    """Return a small run in which half of the nodes hardly store anything, and the others evict.

    Pages move to the idle ones all the time, are removed meanwhile, and nodes are paused and cut
    off while they do, but not most of the time: a node that suspects another one offers nothing.
    """
    return attrs.evolve(
        smaller(options),
        spill=True,
        placement_min_age_s=0.0,
        nodes=4,
        hosts=4,
        clients=2,
        workers=2,
        pool_granules=120,
        uncommitted_granules=0,
        keys=300,
        batch_max=16,
        think_s=0.02,
        step_s=0.001,
        latency_mean_s=0.0005,
        wire_slowness=1.0,
        stop_in_copy=0.0,
        removals=0.05,
        loss=min(options.loss, 0.002),
        crash_rate=min(options.crash_rate, 0.05),
        partition_rate=min(options.partition_rate, 0.05),
        node_pause_rate=min(options.node_pause_rate, 0.05),
        drain_rate=0.0,
        busy=0.0,
        disk_slabs=0,
        mirror_pulls="off",
        quotas="",
    )


def with_rot(options: Options) -> Options:
    """Return a small run with disks that lose bits all the time, and pools that need them."""
    return attrs.evolve(
        smaller(options),
        disk_slabs=16,
        disk_on_evict=False,
        disk_queue_bytes=10**6,
        disk_step_s=0.0002,
        disk_full=0.0,
        disk_late=0.0,
        disk_rot=4.0,
        pool_granules=24,
        keys=40,
    )


def with_late_loads(options: Options) -> Options:
    """Return a small run with disks that often finish a load after its deadline."""
    return attrs.evolve(with_rot(options), disk_rot=0.0, disk_late=0.1)


def with_a_bound(options: Options) -> Options:
    """Return a small run in which one writer wants more than it may have, all the time."""
    return attrs.evolve(
        smaller(options),
        pool_granules=96,
        uncommitted_granules=16,
        batch_max=16,
        think_s=0.02,
        workers=2,
    )


def with_late_ticks(options: Options) -> Options:
    """Return a small run in which ticks are late, and a tick evicts pages that have second copies.

    All batches are alike, so that each asks for slots ahead, which a pool reserves in a tick. There
    are few other faults, so that many pages are stored.
    """
    return attrs.evolve(
        spilling(options),
        late=0.1,
        spill=False,
        copies=2,
        lengths=(256,),
        pool_granules=64,
        batch_max=1,
        clients=4,
        workers=3,
        think_s=0.005,
        latency_min_s=0.0001,
        crash_rate=0.0,
        leave_rate=0.0,
        partition_rate=0.0,
        clog_rate=0.0,
        client_crash_rate=0.0,
        client_pause_rate=0.0,
        transfer_failure=0.0,
        forge_rate=0.0,
    )


def with_tenants(options: Options) -> Options:
    """Return a small run in which three namespaces with quotas want more of each pool than it has.

    All nodes' writers are of all three, so that each borrows and gives back all the time.
    """
    return attrs.evolve(
        smaller(options),
        quotas="chat=40%,priority=2;search=30%,priority=1;batch=15%",
        pools=1,
        nodes=3,
        hosts=3,
        clients=9,
        workers=1,
        keys=120,
        pool_granules=120,
        uncommitted_granules=0,
        batch_max=8,
        think_s=0.03,
        disk_slabs=0,
        mirror_pulls="off",
        crash_rate=0.0,
    )


def spilling_tenants(options: Options) -> Options:
    """Return a run as `with_tenants` makes it, in which pages move to nodes that store little."""
    return attrs.evolve(
        with_tenants(options),
        spill=True,
        placement_min_age_s=0.0,
        nodes=4,
        hosts=4,
        clients=6,
        step_s=0.001,
    )


def with_tenants_on_disk(options: Options) -> Options:
    """Return a run as `with_tenants` makes it, in which they want more of each disk than it has.

    Pages have one size in granules: in such a small pool a larger page finds no room if its
    namespace has only small extents, so pages on disk could not be read again.
    """
    return attrs.evolve(
        with_tenants(options),
        lengths=(1300, 1500),
        disk_slabs=6,
        disk_on_evict=False,
        disk_queue_bytes=10**6,
        disk_step_s=0.0002,
        disk_failure=0.0,
        disk_full=0.0,
        disk_late=0.0,
        disk_rot=0.0,
    )


def with_tables(options: Options) -> Options:
    """Return the same run, but clients read tables all the time, with few other faults.

    Two nodes share a host, so that owners change within it; hand-overs take a second; processes are
    stopped for seconds; pages come and go.
    """
    return attrs.evolve(
        smaller(options),
        nodes=5,
        hosts=3,
        clients=8,
        workers=2,
        keys=60,
        pool_granules=96,
        uncommitted_granules=0,
        replicas=AUTO,
        republish_rate=40,
        cache_entries=0,
        think_s=0.03,
        batch_max=4,
        latency_mean_s=min(options.latency_mean_s, 0.0005),
        loss=max(options.loss, 0.02),
        step_s=0.0002,
        wire_slowness=1.0,
        transfer_failure=0.0,
        stop_in_copy=0.0,
        outbox_messages=min(options.outbox_messages, 32),
        crash_rate=max(options.crash_rate, 0.1),
        leave_rate=0.0,
        drain_rate=0.0,
        node_pause_rate=0.4,
        client_crash_rate=0.0,
        client_pause_rate=0.0,
        busy=0.0,
        forge_rate=0.0,
        impostor_rate=0.0,
        disk_slabs=0,
        mirror_pulls="off",
    )


def draw(rng: random.Random, seed: int) -> Options:
    """Draw every option."""

    def sometimes(chance: float, low: float, high: float) -> float:
        drawn = rng.uniform(low, high)
        return drawn if rng.random() < chance else 0.0

    nodes = rng.choices(
        [rng.randint(3, 5), rng.randint(6, 9), rng.randint(10, 16), rng.randint(30, 50)],
        [70, 24, 5, 1],
    )[0]
    large = nodes > 9
    hosts = rng.randint(max(2, nodes // 2), nodes)
    kinds = rng.randint(1, 4)
    replicas: list[int | str] = [1, 2, AUTO, AUTO, AUTO]
    return Options(
        seed=seed,
        hosts=hosts,
        nodes=nodes,
        clients=rng.randint(2, 4) if large else rng.randint(2, min(6, nodes + 1)),
        workers=rng.randint(1, 2),
        keys=rng.choice([6, 16, 40, 40, 100]),
        lengths=tuple(sorted(rng.sample(LENGTHS, kinds))),
        pool_granules=rng.choice([12, 24, 48, 96, 300]),
        virtual_nodes=rng.choice([4, 16, 16, 40]),
        replicas=rng.choice(replicas),
        max_masters=rng.choice([1, 2, 3, 3, 3]),
        summary_s=rng.choice([1.0, 2.0, 2.0]),
        republish_rate=rng.choice([40, 400, 50_000]),
        verify=rng.choice(["generation", "sampled", "full"]),
        cache_entries=rng.choice([0, 8, 1000, 1000]),
        uncommitted_granules=rng.choice([0, 0, 16]),
        think_s=rng.choice([0.02, 0.1, 0.1, 0.4]) * (3 if large else 1),
        batch_max=rng.choice([1, 4, 8, 16]),
        safety_s=rng.uniform(8.0, 12.0) if large else rng.uniform(12.0, 30.0),
        latency_min_s=rng.choice([0.0001, 0.001]),
        latency_mean_s=rng.choice([0.0001, 0.0005, 0.005]),
        loss=sometimes(0.5, 0.001, 0.08),
        duplication=sometimes(0.4, 0.001, 0.1),
        reordering=sometimes(0.4, 0.01, 0.3),
        successor_delivery=sometimes(0.7, 0.2, 1.0),
        partition_holds=rng.random() < 0.5,
        step_s=rng.choice([0.0002, 0.001, 0.01]),
        steps_a_page=rng.randint(1, 4),
        transfer_failure=sometimes(0.4, 0.001, 0.05),
        rdma=rng.random() < 0.5,
        crash_rate=sometimes(0.5, 0.02, 0.2),
        leave_rate=sometimes(0.25, 0.01, 0.1),
        node_pause_rate=sometimes(0.4, 0.02, 0.15),
        client_crash_rate=sometimes(0.4, 0.02, 0.3),
        client_pause_rate=sometimes(0.5, 0.05, 0.5),
        partition_rate=sometimes(0.5, 0.03, 0.2),
        clog_rate=sometimes(0.3, 0.05, 0.3),
        disconnect_rate=sometimes(0.4, 0.1, 1.0),
        skew=sometimes(0.4, 0.001, 0.05),
        wire_slowness=rng.choice([1.0, 1.0, 10.0]),
        stop_in_copy=sometimes(0.4, 0.001, 0.02),
        disk_slabs=rng.choice([0, 1, 2, 4, 16]),
        disk_on_evict=rng.random() < 0.2,
        disk_queue_bytes=rng.choice([2_000, 20_000, 10**6]),
        disk_step_s=rng.choice([0.0002, 0.002, 0.02]),
        disk_failure=sometimes(0.3, 0.001, 0.05),
        disk_full=sometimes(0.3, 0.001, 0.05),
        disk_late=sometimes(0.3, 0.001, 0.03),
        disk_wipe=sometimes(0.3, 0.1, 1.0),
        disk_rot=sometimes(0.5, 0.2, 2.0),
        # The real bounds, or ones that are reached in a run.
        outbox_messages=rng.choice([OUTBOX_MESSAGES_MAX, OUTBOX_MESSAGES_MAX, 32, 8]),
        outbox_bytes=rng.choice([OUTBOX_BYTES_MAX, OUTBOX_BYTES_MAX, 4096]),
        mailbox_messages=rng.choice([MAILBOX_MESSAGES_MAX, MAILBOX_MESSAGES_MAX, 8, 3]),
        busy=sometimes(0.5, 0.02, 0.2),
        forge_rate=sometimes(0.6, 1.0, 20.0),
        ring_s=rng.choice([0.0, 0.03, 0.5]),
        impostor_rate=sometimes(0.5, 0.2, 3.0),
        handover_s=rng.choice([0.5, 10.0]),
        # Twice the bound reaches every member: with fewer links a large cluster may never settle.
        links_max=rng.choice([LINKS_MAX, LINKS_MAX, max(8, nodes // 2)]),
        mirror_pulls=rng.choice(["off", "hot", "all"]),
        mirror_share=rng.choice([0.1, 0.25, 0.5]),
        # The real time, or one that passes often in a run.
        mirror_lately_s=rng.choice([LATELY_S, 1.0, 0.1]),
        portion_pages=rng.choice([1, 2, 4]),
        drain_rate=sometimes(0.5, 0.02, 0.15),
        spill=rng.random() < 0.5,
        placement_min_age_s=rng.choice([0.0, 1.0, 10.0]),
        copies=rng.choice([1, 1, 2]),
        late=rng.choice([0.0, 0.01, 0.1, 0.5]),
    )
