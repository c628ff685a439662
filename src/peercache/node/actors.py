"""The state actors of one node and their mailboxes."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Any, final

import trio

from peercache.actors.directory.actor import DirectoryShard
from peercache.actors.directory.table import SEED_BYTES
from peercache.actors.disk.actor import DiskTier
from peercache.actors.effects import Effect
from peercache.actors.membership.actor import Membership
from peercache.actors.placement.actor import Placement
from peercache.actors.placement.offers import Offers
from peercache.actors.pool.actor import Pool
from peercache.actors.promote.actor import Promoter
from peercache.actors.publisher.actor import Publisher
from peercache.actors.rdma.actor import RdmaActor
from peercache.actors.removal.actor import Remover
from peercache.actors.ring.actor import RingActor
from peercache.actors.runtime import NamedActor, run_actor
from peercache.config.entries import heads_of
from peercache.config.settings import Config
from peercache.model.ids import Incarnation
from peercache.model.member import Member
from peercache.node.switchboard import NodeMailboxes
from peercache.observability.metrics import Metrics

WRITE_DELAY_S = 0.02
"""A commit is published and answered in a few milliseconds; then its pages may go to disk."""

CHANNELS_FACTOR = 16
"""Channels that a client may have to this node, in units of max_channels_per_peer: for this many
rails, or fewer rails and channels that are dropped but still listed."""


@final
class NodeActors:
    """Every state actor of a node, made from its configuration."""

    def __init__(
        self,
        config: Config,
        me: Member,
        *,
        page_bytes: int,
        rng: random.Random,
        metrics: Metrics,
        table_file: int = -1,
        spaces: Callable[[], frozenset[int] | None] = lambda: None,
    ) -> None:
        """Create them; the pool has no memory yet: it is notified as memory is populated.

        table_file: descriptor of the file for the directory's table; -1 for private memory.
        spaces: those that the node's certificate allows now; None: all.
        """
        self._metrics = metrics
        self.membership = Membership(
            me=me,
            discovery_addr=heads_of(config.discovery_addr),
            max_masters=config.max_masters,
            heartbeat_s=config.heartbeat_s,
            suspect_s=config.suspect_s,
            dead_s=config.dead_s,
            rng=rng,
            metrics=metrics,
        )
        self.ring = RingActor(
            virtual_nodes=config.virtual_nodes, replicas=config.directory_replicas
        )
        self.directory = _shard(me.incarnation, metrics, table_file)
        self.publisher = Publisher(
            incarnation=me.incarnation,
            republish_rate=config.republish_rate,
            summary_s=config.summary_s,
            rng=rng,
            metrics=metrics,
        )
        self.pool = Pool(
            incarnation=Incarnation(me.incarnation),
            granule=config.granule,
            page_bytes=page_bytes,
            usable_bytes=0,
            client_uncommitted_max=config.client_uncommitted_max,
            rng=rng,
            metrics=metrics,
            has_disk=config.disk_enabled,
            mirror_share=config.mirror_share,
            quotas=config.quotas,
            copies=config.copies,
            # Not from `rng`, as the seed of the directory.
            reuse_seed=secrets.randbits(64),
        )
        self.disk = _disk(config, metrics)
        self.promote = Promoter(wish_rate=config.disk_promote_rate, metrics=metrics)
        self.rdma = RdmaActor(channels_a_client_max=CHANNELS_FACTOR * config.max_channels_per_peer)
        self.removal = Remover(dead_s=config.dead_s)
        self.placement = _placement(config, me, rng, spaces)
        self.placement.show(metrics)
        self.mailboxes = NodeMailboxes()
        self.actors = tuple(
            [
                NamedActor[Any](name, getattr(self, name), box)
                for name, box in self.mailboxes.named().items()
            ]
        )

    def start(self, nursery: trio.Nursery, perform: Callable[[Effect], None], log: Any) -> None:
        """Run each actor in a task of its own, and start membership."""
        for named in self.actors:
            report = partial(self.tick_in_past, log, named.name)
            nursery.start_soon(run_actor, named.actor, named.mailbox, perform, report)
        for effect in self.membership.start(trio.current_time()):
            perform(effect)

    def tick_in_past(self, log: Any, name: str, by_s: float) -> None:
        """Count and log a bug: after a tick, this actor has asked for another one in the past."""
        self._metrics.ticks_in_past.labels(name).inc()
        log.error("node.tick_in_past", actor=name, by_s=round(by_s, 3))


def _placement(
    config: Config,
    me: Member,
    rng: random.Random,
    spaces: Callable[[], frozenset[int] | None],
) -> Placement:
    spilling = Offers(
        rate=config.placement_rate if config.spill else 0,
        min_age_s=config.placement_min_age,
        rng=rng,
    )
    copying = Offers(
        rate=config.placement_rate if config.copies > 1 else 0,
        min_age_s=config.placement_min_age,
        rng=rng,
        is_copying=True,
    )
    return Placement(me.incarnation, spaces, spilling, copying)


def _disk(config: Config, metrics: Metrics) -> DiskTier:
    return DiskTier(
        writes_through=config.write_policy == "through",
        queue_bytes_max=config.disk_queue,
        report_rate=config.republish_rate,
        ttl_s=config.disk_ttl,
        write_delay_s=WRITE_DELAY_S,
        metrics=metrics,
        quotas=config.quotas,
    )


def _shard(incarnation: int, metrics: Metrics, table_file: int) -> DirectoryShard:
    # Its seed must not come from the node's `rng`, because peers see other numbers of it: an
    # attacker that knows the seed can make keys that collide.
    return DirectoryShard(
        incarnation=incarnation,
        metrics=metrics,
        seed=secrets.token_bytes(SEED_BYTES),
        table_file=table_file,
        clock=time.monotonic,
    )
