"""Holders and owners over a network that loses, repeats and reorders, until it stops.

The oracle is the pools themselves: after the faults every shard must hold exactly the records of
the running holders whose keys it owns, and every commit must have been answered once.
"""

from __future__ import annotations

from collections import Counter

import attrs
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from peercache.actors.directory import actor as directory
from peercache.actors.mailboxes import Republish, ViewChanged
from peercache.actors.origin import Origin
from peercache.actors.publisher import actor as publisher
from peercache.actors.publisher import streams
from peercache.model.member import DEAD
from peercache.wire.messages.directory import (
    Acknowledged,
    Repair,
    ReportStale,
    StreamSummary,
    SummaryMatches,
)
from tests.examples import examples
from tests.unit.actors.record_cluster import Cluster, located

NAMES = st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True)
NODES_MAX = 5


class DirectoryMachine(RuleBasedStateMachine):
    """Drives a small cluster; `teardown` is the liveness phase."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster(summary_s=1.0, republish_rate=100.0)
        self.last = 0
        self.asked: list[int] = []
        self.patched = pytest.MonkeyPatch()

    @initialize(tight=st.booleans())
    def two_nodes(self, tight: bool) -> None:
        """With tight limits even these few records are cut, forgotten and published again."""
        if tight:
            self.patched.setattr(streams, "PENDING_MAX", 2)
            self.patched.setattr(publisher, "RECORDS_A_MESSAGE_MAX", 3)
            self.patched.setattr(directory, "SWEEP_KEYS_MAX", 2)
            self.patched.setattr(streams, "LOOKED_AT_MAX", 4)
            self.patched.setattr(streams, "BIN_ROWS", 3)
            self.patched.setattr(streams, "RINGS_MAX", 2)
            self.patched.setattr(publisher, "SCATTERED_OWNERS", 1)
            self.patched.setattr(publisher, "SCATTERED_ROWS_MAX", 2)
            self.patched.setattr(streams, "_ROWS_AT_FIRST", 16)
        for _ in range(2):
            self.last += 1
            self.cluster.add(self.last)
        self.cluster.show_all()

    def chosen(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.cluster.nodes)))

    @rule(data=st.data(), names=NAMES)
    def commit(self, data: st.DataObject, names: list[int]) -> None:
        self.asked.append(self.cluster.commit(self.chosen(data), names))

    @rule(data=st.data(), names=NAMES)
    def drop(self, data: st.DataObject, names: list[int]) -> None:
        self.cluster.drop(self.chosen(data), names)

    @precondition(lambda self: len(self.cluster.nodes) < NODES_MAX)
    @rule()
    def join(self) -> None:
        self.last += 1
        self.cluster.add(self.last)
        self.cluster.show(self.last, self.cluster.truth())

    @precondition(lambda self: len(self.cluster.nodes) > 1)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        self.cluster.kill(self.chosen(data))

    @rule(data=st.data())
    def learn_the_view(self, data: st.DataObject) -> None:
        self.cluster.show(self.chosen(data), self.cluster.truth())

    @rule(data=st.data())
    def suspect_wrongly(self, data: st.DataObject) -> None:
        """One node believes for a while that another one is dead."""
        who, whom = self.chosen(data), self.chosen(data)
        believed = [
            attrs.evolve(m, state=DEAD) if m.incarnation == whom != who else m
            for m in self.cluster.truth().members
        ]
        self.cluster.show(who, ViewChanged(tuple(believed)))

    @rule(data=st.data())
    def republish(self, data: st.DataObject) -> None:
        self.cluster.notify(self.chosen(data), "publisher", Republish())

    @rule(data=st.data(), name=st.integers(0, 30))
    def dispute(self, data: st.DataObject, name: int) -> None:
        shard = self.cluster.nodes[self.chosen(data)].shard
        shard.on_message(
            Origin(99), ReportStale(located(shard, [name]).tobytes()), self.cluster.now
        )

    @precondition(lambda self: self.cluster.flying)
    @rule(data=st.data(), twice=st.booleans())
    def arrive(self, data: st.DataObject, twice: bool) -> None:
        at = data.draw(st.integers(0, len(self.cluster.flying) - 1))
        self.cluster.deliver(at, twice=twice)

    @precondition(lambda self: self.cluster.flying)
    @rule()
    def arrive_in_order(self) -> None:
        for envelope in list(self.cluster.flying):
            self.cluster.flying.remove(envelope)
            self.cluster.arrive(envelope)

    @precondition(lambda self: self.cluster.flying)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        del self.cluster.flying[data.draw(st.integers(0, len(self.cluster.flying) - 1))]

    @rule(seconds=st.sampled_from([0.01, 0.06, 0.3, 1.5]))
    def wait(self, seconds: float) -> None:
        self.cluster.now += seconds
        self.cluster.tick()

    @invariant()
    def no_commit_is_answered_twice(self) -> None:
        assert max(self.answered().values(), default=0) <= 1

    @invariant()
    def no_answer_names_a_node_that_the_view_has_dead(self) -> None:
        for node in self.cluster.nodes.values():
            named = set(located(node.shard, list(range(31)))["holder"].tolist())
            assert named <= {*node.ring.current.members, node.incarnation}

    def answered(self) -> Counter[int]:
        return Counter(answer.request for _, answer in self.cluster.answers)

    def teardown(self) -> None:
        """Faults stop: within a few summaries all is whole, and stays so without repairs."""
        try:
            self.heal()
        finally:
            self.patched.undo()

    def heal(self) -> None:
        cluster = self.cluster
        cluster.show_all()
        cluster.run(12.0)
        cluster.assert_whole()
        lasting = {n.incarnation for n in cluster.nodes.values()}
        if lasting == set(range(1, self.last + 1)):
            assert self.answered() == Counter(self.asked)
        quiet = cluster.run(5.0)
        assert not any(isinstance(message, Repair) for message in quiet)
        assert {type(m) for m in quiet} <= {StreamSummary, SummaryMatches, Acknowledged}
        cluster.assert_whole()


TestDirectoryMachine = DirectoryMachine.TestCase
TestDirectoryMachine.settings = settings(
    TestDirectoryMachine.settings, max_examples=examples(60), stateful_step_count=40
)
