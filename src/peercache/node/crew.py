"""The actors of one node and their mailboxes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import final

import trio

from peercache.actors._actor import Mailbox, run_actor
from peercache.actors.directory import DirectoryShard
from peercache.actors.membership import Membership
from peercache.actors.pool import Pool
from peercache.actors.publisher import Publisher
from peercache.actors.ring import RingActor
from peercache.config import Config
from peercache.ids import Incarnation
from peercache.messages import Member
from peercache.observe import Metrics
from peercache.ports import Effect, StateActor


@final
class Crew:
    """Every state actor of a node, made from its configuration."""

    def __init__(
        self,
        config: Config,
        me: Member,
        *,
        page_bytes: int,
        rng: random.Random,
        metrics: Metrics,
    ) -> None:
        """Make them; the pool has no memory yet: it hears of it as it is populated."""
        self.membership = Membership(
            me=me,
            discovery_addr=config.discovery_addr,
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
        self.directory = DirectoryShard(incarnation=me.incarnation, metrics=metrics)
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
        )
        self.actors: dict[str, StateActor] = {
            "membership": self.membership,
            "ring": self.ring,
            "directory": self.directory,
            "publisher": self.publisher,
            "pool": self.pool,
        }
        self.mailboxes = {name: Mailbox() for name in self.actors}

    def start(self, nursery: trio.Nursery, perform: Callable[[Effect], None]) -> None:
        """Run each actor in a task of its own, and let membership begin."""
        for name, actor in self.actors.items():
            nursery.start_soon(run_actor, actor, self.mailboxes[name], perform)
        for effect in self.membership.start(trio.current_time()):
            perform(effect)
