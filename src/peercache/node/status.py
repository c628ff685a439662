"""Status: what a node reports about itself: its health, its figures, and its whole status.

It includes the clients that write to this node, with what they reported, and details of its process
for an operator: its threads, its environment and its settings.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import final

import attrs
import numpy as np

from peercache.config.settings import SETTINGS, Config
from peercache.config.table import FILE, FOLDER
from peercache.http.pages import Health
from peercache.installation.library import version
from peercache.model.ids import name_of
from peercache.model.member import ALIVE
from peercache.model.status import (
    DEGRADED,
    DRAINING,
    LEAVING,
    LISTED_MAX,
    OK,
    UNAVAILABLE,
    Copied,
    Detail,
    Draining,
    Latencies,
    NamespaceUse,
    PeerStatus,
    Reuse,
    Shard,
    Spilled,
    Status,
    Thread,
    Tier,
    Worker,
)
from peercache.model.view import STATE_NAMES
from peercache.node.actors import NodeActors
from peercache.node.addresses import Reach
from peercache.node.admission import Admission
from peercache.node.disk import OPENING, NodeDisk
from peercache.node.housekeeping import Housekeeping
from peercache.observability.latency import (
    LATENCY_BUCKETS_S,
    OBJECTIVES,
    bound_for,
    times_of,
)
from peercache.observability.metrics import PEER_FABRIC, Metrics, is_increase
from peercache.observability.reasons import FABRICS
from peercache.trust.files import LiveTls
from peercache.wire.envelope import WIRE_VERSION, WIRE_VERSION_OLDEST
from peercache.wire.messages.session import Counted

SHOWN = ("PEERCACHE_", "SGLANG_", "PYTHON", "UCX_", "NCCL_", "RDMAV_", "IBV_", "OMP_", "MALLOC_")
"""Prefixes of environment variables that affect a node. Others are not shown, because they do not
concern the cluster."""

MASKED = "(masked)"

_SECRET = re.compile(r"SECRET|TOKEN|PASSW|CREDENTIAL|PRIVATE|_KEY\b|APIKEY", re.IGNORECASE)
_USER = re.compile(r"//[^/\s]+@")
"""Up to the last @ before the path: a password may contain one."""

THREADS_MAX = 128


def details(config: Config) -> Detail:
    """Return the current details of this process."""
    settings = {name: row.kind.written(getattr(config, name)) for name, row in SETTINGS.items()}
    # The path of a file with a secret is never shown.
    paths = {
        name: settings.pop(name) for name, row in SETTINGS.items() if row.kind in (FILE, FOLDER)
    }
    return Detail(
        threads=threads(),
        environment=masked(shown(os.environ)),
        settings=dict(sorted((masked(settings) | paths).items())),
    )


def shown(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that affect a node, by name."""
    return {name: environment[name] for name in sorted(environment) if name.startswith(SHOWN)}


def masked(values: Mapping[str, str]) -> dict[str, str]:
    """Return values with secrets masked: by name, and the part before @ in an address."""
    return {
        name: MASKED if value and _SECRET.search(name) else _USER.sub(f"//{MASKED}@", value)
        for name, value in values.items()
    }


def threads() -> tuple[Thread, ...]:
    """Return the threads of this process, the busiest first; the compiled ones too."""
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            text = (task / "stat").read_text(errors="replace")
        except OSError:
            continue  # It has ended in the meantime.
        name, _, rest = text.partition("(")[2].rpartition(")")
        fields = rest.split()
        cpu_s = (int(fields[11]) + int(fields[12])) * tick_s
        found.append(Thread(name=name, cpu_s=cpu_s, state=fields[0]))
    return tuple(sorted(found, key=lambda thread: -thread.cpu_s)[:THREADS_MAX])


TRACKED_MAX = 1024
"""As many clients as may attach; further ones are shown without figures."""

RATE_S = 0.5
"""Least time between two reports from which a rate is computed."""


@attrs.define(eq=False)
class _Reports:
    seen_at: float
    hits: float = 0.0
    misses: float = 0.0
    sets: float = 0.0
    rates: tuple[float, float, float] = (0.0, 0.0, 0.0)
    keys: float = 0.0
    fabrics: dict[str, str] = attrs.field(factory=dict)
    """By the name of a peer: how the client last read from it."""


@final
class AttachedWorkers:
    """What each attached client has reported. Times are of one monotonic clock."""

    def __init__(self) -> None:
        """Start without reports."""
        self._reports: dict[int, _Reports] = {}

    def note(self, client: int, counted: Counted, now: float) -> None:
        """Record a client's report."""
        known = self._reports.get(client)
        if known is None:
            if len(self._reports) >= TRACKED_MAX:
                return
            known = self._reports[client] = _Reports(now)
        hits, misses, sets = (
            _sum(counted, name) for name in ("pages_hit", "pages_missed", "pages_set")
        )
        known.keys += sets
        if latest := _fabrics(counted):
            # The newest ones, if a client reads from more peers than a status lists.
            known.fabrics = dict([*{**known.fabrics, **latest}.items()][-LISTED_MAX:])
        known.hits, known.misses, known.sets = (
            known.hits + hits, known.misses + misses, known.sets + sets,
        )  # fmt: skip
        if (passed_s := now - known.seen_at) >= RATE_S:
            known.rates = (known.hits / passed_s, known.misses / passed_s, known.sets / passed_s)
            known.hits = known.misses = known.sets = 0.0
            known.seen_at = now

    def fabrics(self) -> dict[str, str]:
        """Return by the name of a peer how clients read from it: `tcp`, or `shm+tcp` for both."""
        found: dict[str, set[str]] = {}
        for known in self._reports.values():
            for peer, fabric in known.fabrics.items():
                found.setdefault(peer, set()).add(fabric)
        return {peer: "+".join(sorted(names)) for peer, names in found.items()}

    def listed(
        self, attached: Iterable[tuple[int, str, int]], now: float
    ) -> tuple[tuple[Worker, ...], int]:
        """Return the attached clients (identity, namespace, pid), and how many are not listed.

        Clients that are no longer attached are forgotten.
        """
        clients = {identity: (namespace, pid) for identity, namespace, pid in attached}
        self._reports = {c: known for c, known in self._reports.items() if c in clients}
        found = []
        for identity, (namespace, pid) in sorted(clients.items())[:LISTED_MAX]:
            known = self._reports.get(identity) or _Reports(now)
            silent_s = now - known.seen_at
            # A client without new counts sends no report: its last rates are outdated.
            hits, misses, sets = known.rates if silent_s < SILENT_S else (0.0, 0.0, 0.0)
            found.append(
                Worker(
                    name=name_of(identity), pid=pid, namespace=namespace, keys=int(known.keys),
                    hits=hits, misses=misses, sets=sets, report_age_s=silent_s,
                )
            )  # fmt: skip
        return tuple(found), max(0, len(clients) - LISTED_MAX)


SILENT_S = 3.0
"""A client reports every second while its counters change."""


def _fabrics(counted: Counted) -> dict[str, str]:
    return {
        path.removeprefix(f"{PEER_FABRIC}/"): fabric
        for path, fabric in counted.counts.items()
        if path.startswith(f"{PEER_FABRIC}/") and isinstance(fabric, str) and fabric in FABRICS
    }


def _sum(counted: Counted, name: str) -> float:
    return sum(
        float(value)
        for path, value in counted.counts.items()
        if path.partition("/")[0] == name and is_increase(value)
    )


PREFIX = "peercache_"
SAMPLED = 4096
"""Sampled keys for the share of a ring: accurate to a percent or two."""

_SAMPLE = np.random.default_rng(0).integers(0, 256, (SAMPLED, 16), np.uint8).view("V16").ravel()

LATE_S = 5.0
"""If the loop's housekeeping is this late, the node counts as not serving."""


@final
@attrs.frozen(eq=False)
class NodeStatus:
    """Reads the health and the figures of one node."""

    incarnation: int
    crew: NodeActors
    disk: NodeDisk | None
    housekeeping: Housekeeping
    reach: Reach = attrs.field(kw_only=True)
    disk_trouble: Callable[[], str] = attrs.field(kw_only=True)
    config: Config = attrs.field(kw_only=True)
    tls: LiveTls | None = attrs.field(kw_only=True)
    is_leaving: Callable[[], bool] = attrs.field(kw_only=True)
    admission: Admission | None = attrs.field(default=None, kw_only=True)
    metrics: Metrics = attrs.field(factory=Metrics, kw_only=True)
    draining: Callable[[], Draining] = attrs.field(default=Draining, kw_only=True)
    workers: AttachedWorkers = attrs.field(factory=AttachedWorkers, init=False)
    _started_at: float = attrs.field(factory=time.monotonic, init=False)
    _version: str = attrs.field(factory=version, init=False)
    _shares: dict[bytes, float] = attrs.field(factory=dict, init=False)
    """This node's share of the newest ring, by its version."""

    def status(self, *, detail: bool = False) -> Status:
        """Return the current status of this node."""
        health, figures = self.health(), self.figures()
        me, now = self.crew.membership.me, time.monotonic()
        attached = [] if self.admission is None else self.admission.attached()
        listed, more = self.workers.listed(attached, now)
        counters, latency = _counted(self.metrics)
        return Status(
            name=me.control, incarnation=name_of(self.incarnation), host=me.host_name,
            cluster=self.config.cluster, version=self._version,
            wire=(WIRE_VERSION_OLDEST, WIRE_VERSION),
            state=self._state(health),
            reasons=tuple(filter(None, (health.reason, health.degraded))),
            insecure=self.config.insecure, age_s=now - self._started_at,
            pool=_pool(figures), disk=self._disk_tier(figures, counters),
            workers=listed, workers_more=more, counters=counters, latency=latency,
            objectives=times_of((self.metrics.latency_s, self.metrics.page_s)),
            limits_s={
                each.name: bound_for(getattr(self.config, f"objective_{each.name}_s"))
                for each in OBJECTIVES
            },
            peers=self._peers(),
            namespaces=self._namespaces(),
            shard=Shard(
                records=self.crew.directory.record_count,
                share=self._share(),
                authority=bool(self.crew.directory.authority.ring),
            ),
            certificate_days=-1.0 if self.tls is None else self.tls.days_left,
            rdma=str(figures.get("rdma", "")),
            draining=self.draining(),
            spilled=self._spilled(counters),
            copied=self._copied(),
            reuse=self._reuse(),
            detail=self._detail(attached, now) if detail else Detail(),
        )  # fmt: skip

    def _detail(self, attached: Sequence[tuple[int, str, int]], now: float) -> Detail:
        clients = {name_of(client): (namespace, pid) for client, namespace, pid in attached}
        slow = [
            attrs.evolve(call, namespace=namespace, pid=pid)
            for call in self.metrics.slow.listed(now)
            for namespace, pid in [clients.get(call.client, ("", 0))]
        ]
        return attrs.evolve(details(self.config), slow=tuple(slow))

    def _spilled(self, counters: Mapping[str, float]) -> Spilled:
        placement = self.crew.placement
        return Spilled(
            **attrs.asdict(placement.spilling.progress),
            not_moved=_by_label(counters, "pages_not_moved"),
            taken=int(counters.get("pages_taken_over", 0)),
            taken_bytes=int(counters.get("bytes_taken_over", 0)),
            not_taken=_by_label(counters, "pages_not_taken_over"),
            peers=placement.figures.peers(),
        )

    def _copied(self) -> Copied:
        made = self.crew.placement.copying.progress
        return Copied(
            copies=self.config.copies,
            copied=made.moved,
            there=made.there,
            refused=made.refused,
            failed=made.failed,
            copied_bytes=made.moved_bytes,
            single=self.crew.pool.copies.single_count,
        )

    def _reuse(self) -> Reuse:
        uses = self.crew.pool.reuse.uses()
        return Reuse(uses=uses, hit_rates=self.crew.pool.hit_rates()) if uses else Reuse()

    def _state(self, health: Health) -> str:
        if self.is_leaving():
            return LEAVING
        if self.draining().active:
            return DRAINING
        if not health.serving:
            return UNAVAILABLE
        return DEGRADED if health.degraded else OK

    def _disk_tier(
        self, figures: Mapping[str, int | float | str], counters: Mapping[str, float]
    ) -> Tier:
        if self.disk is None:
            return Tier()
        lost = sum(v for name, v in counters.items() if name.startswith("disk_pages_lost"))
        usable, used = (int(figures.get(f"disk_bytes_{of}", 0)) for of in ("usable", "used"))
        return Tier(
            # Not disk_size: on a small file system it would be a disk that never fills.
            size=usable,
            used=used,
            free=max(0, usable - used),
            pages=int(figures.get("disk_pages", 0)),
            evicted=int(lost),
            problem=OPENING if self.disk.is_opening else self._disk_trouble(),
        )

    def _peers(self) -> tuple[PeerStatus, ...]:
        me, lagging = self.crew.membership.me, self.crew.publisher.lagging()
        read_by = self.workers.fabrics()
        return tuple(
            [
                PeerStatus(
                    name=member.control,
                    # The fabrics by which clients have read; without reads, shm is possible on this
                    # host.
                    fabric=read_by.get(
                        name_of(member.incarnation),
                        "shm" if member.boot_id == me.boot_id else "",
                    ),
                    state=STATE_NAMES[member.state],
                    lagging=member.incarnation in lagging,
                )
                for member in self.crew.membership.view.live()
                if member.incarnation != me.incarnation
            ][:LISTED_MAX]
        )

    def _namespaces(self) -> tuple[NamespaceUse, ...]:
        """Return the use of each namespace with a quota, and of all others together."""
        tenants = self.crew.pool.tenants
        if not tenants.are_several:
            return ()
        index = self.crew.disk.index
        on_disk = {one.name: one.taken for one in index.tenants.all()} if index is not None else {}
        pages = self.crew.pool.pages_of_tenants()
        return tuple(
            [
                NamespaceUse(
                    name=tenant.name,
                    bytes=tenant.taken * self.config.granule,
                    pages=pages[tenant],
                    disk_bytes=on_disk.get(tenant.name, 0),
                    quota=tenant.quota * self.config.granule,
                    priority=tenant.priority,
                    retained=tenant.retained * self.config.granule,
                )
                for tenant in tenants.all()
            ][:LISTED_MAX]
        )

    def _share(self) -> float:
        """Return the part of the ring that this node owns, estimated from SAMPLED keys.

        Of a key with several owners each has a part, so the shares of all members add up to 1.
        """
        ring = self.crew.ring.current
        if ring.version not in self._shares:
            self._shares.clear()
            owners = ring.owners(_SAMPLE)
            mine = owners == np.uint64(self.incarnation)
            self._shares[ring.version] = float(mine.mean()) if mine.size else 0.0
        return self._shares[ring.version]

    def health(self) -> Health:
        """Return whether this node serves, and why not."""
        facts = self.figures()
        late_s = time.monotonic() - self.housekeeping.last_at
        if self.is_leaving():
            return Health(serving=False, reason="leaving the cluster", facts=facts)
        if late_s > LATE_S:
            return Health(serving=False, reason=f"the loop is {late_s:.0f} s late", facts=facts)
        if self.tls is not None and self.tls.own_problem:
            return Health(serving=False, reason=self.tls.own_problem, facts=facts)
        if not self.crew.pool.figures()["pool_bytes_usable"]:
            return Health(serving=False, reason="no page memory is populated yet", facts=facts)
        unreached = self.unreached()
        return Health(
            serving=not unreached, reason=unreached, degraded=self._disk_trouble(), facts=facts
        )

    def _disk_trouble(self) -> str:
        """Return why the configured disk does not accept pages, "" if it does."""
        if self.disk is None or self.disk.is_opening:
            return ""
        problem = self.disk.problem or self.disk_trouble()
        return f"the disk tier of {self.config.disk_path}: {problem}" if problem else ""

    def unreached(self) -> str:
        """Return why this node is not in its cluster, "" if there is no problem."""
        membership = self.crew.membership
        return "" if membership.is_joined else self.reach.problem(membership.me.control)

    def figures(self) -> dict[str, int | float | str]:
        """Return named figures about this node."""
        members = self.crew.membership.view.members()
        return {
            "node": name_of(self.incarnation),
            "control": self.crew.membership.me.control,
            "cluster": self.config.cluster,
            "insecure": int(self.config.insecure),
            **({} if self.tls is None else {"certificate_days": round(self.tls.days_left, 2)}),
            "members_alive": sum(member.state == ALIVE for member in members),
            "masters": len(self.crew.membership.masters()),
            "directory_records": self.crew.directory.record_count,
            "directory_shared": int(self.crew.directory.table.is_shared),
            **self.crew.pool.figures(),
            **self._disk_figures(),
            **self.crew.rdma.figures(),
        }

    def _disk_figures(self) -> dict[str, int | float | str]:
        if self.disk is None:
            return {}
        return {**self.crew.disk.figures(), "disk_problem": self.disk.problem}


def _pool(figures: Mapping[str, int | float | str]) -> Tier:
    return Tier(
        size=int(figures["pool_bytes"]),
        used=int(figures["pool_bytes_used"]),
        free=int(figures["pool_bytes_free"]),
        pages=int(figures["pool_pages"]),
        evicted=int(figures["pool_pages_evicted"]),
    )


def _by_label(counters: Mapping[str, float], counter: str) -> dict[str, float]:
    """Return the totals of a counter by its label."""
    within = f"{counter}/"
    return {k.removeprefix(within): v for k, v in counters.items() if k.startswith(within)}


def _counted(metrics: Metrics) -> tuple[dict[str, float], dict[str, Latencies]]:
    """Return every counter that is not zero, and the histogram of calls by operation only."""
    counters: dict[str, float] = {}
    for family in metrics.registry.collect():
        if not family.name.startswith(PREFIX):
            continue
        name = family.name.removeprefix(PREFIX)
        for sample in family.samples:
            if sample.name.endswith("_total") and sample.value:
                label = "/".join(sample.labels.values())
                counters[f"{name}/{label}" if label else name] = sample.value
    cumulative: dict[str, list[int]] = {}
    sums: dict[str, float] = {}
    for (operation, _, _), (counts, seconds) in metrics.latency_s.snapshot().items():
        before = cumulative.get(operation, [0] * len(counts))
        cumulative[operation] = [sum(both) for both in zip(before, counts, strict=True)]
        sums[operation] = sums.get(operation, 0.0) + seconds
    latency = {
        operation: Latencies(
            bounds=LATENCY_BUCKETS_S, counts=tuple(counts), seconds=sums[operation]
        )
        for operation, counts in cumulative.items()
    }
    return counters, latency
