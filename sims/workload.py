"""The calls of clients in a run, and the checks of their results."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt
import trio

from peercache.client.client import RETURN_MARGIN_S
from peercache.model.keys import KEY, PageKeys, from_bytes, page_keys
from peercache.model.prefix import ALL_PAGES, SidePages, prefix_of
from peercache.model.runs import PageRuns
from peercache.observability.reasons import ABSENT, INTERNAL, MISS_REASONS, VERIFY_FAILED
from peercache.paths.cluster import Cluster
from peercache.paths.search import ANSWERS_MAX
from peercache.wire.messages.declared import Message
from peercache.wire.messages.pool import Clear, Remove, Retain
from sims.client import Answers, SimClient
from sims.content import POISON, content_of
from sims.memory import Buffers, Region, Truth
from sims.swarm import Options
from sims.trace import Trace, Violation

LATE_S = 1e-6
"""A call may end this much after its deadline: sums of floats."""

READS_FROM: Final = 0.38
"""Of a number from 0 to 1 that decides on a call: what is less sets pages."""

REMOVALS_FROM: Final = 0.97

OTHER_LENGTH = 0.02
"""Chance that a client sets a page with another length than the other clients."""

RETAINED_S: Final = (0.0, 0.5, 8.0, 60.0)
"""For how long pages are retained; most runs take ten seconds."""


@attrs.frozen
class Library:
    """The pages of a run: their keys, and how long each is."""

    keys: PageKeys
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, options: Options, rng: random.Random) -> Library:
        """Make as many as `options` say."""
        names = [f"page-{number}" for number in range(options.keys)]
        lengths = tuple(rng.choice(options.lengths) for _ in names)
        return cls(page_keys(names, bytes(16)), lengths)


@attrs.define(eq=False)
class Calls:
    """Makes calls in the name of clients, and checks the results."""

    options: Options
    library: Library
    buffers: Buffers
    truth: Truth
    trace: Trace
    now_in_flight: int = 0
    counts: dict[str, int] = attrs.field(factory=dict)
    _version: int = 0

    # --- lifetime of one client -------------------------------------------------------------------

    async def work(
        self, client: SimClient, rng: random.Random, is_over: Callable[[], bool]
    ) -> None:
        """Make one call after another until it `is_over`."""
        while True:
            await trio.sleep(rng.expovariate(1 / self.options.think_s))
            await client.place.awake()
            if is_over():
                return
            self.now_in_flight += 1
            try:
                await self._one(client, rng)
            finally:
                self.now_in_flight -= 1

    async def _one(self, client: SimClient, rng: random.Random) -> None:
        drawn = rng.random()
        if drawn >= REMOVALS_FROM and self.options.removals < 1.0:
            drawn = drawn if rng.random() < self.options.removals else READS_FROM
        count = rng.randint(1, self.options.batch_max)
        places = self.own_places(client, self._choose(rng, count))
        if drawn < READS_FROM:
            await self.set(client, places, rng)
        elif drawn < 0.85:
            await self.get(client, places, rng)
        elif 0.9 < drawn < REMOVALS_FROM and self.options.tenants > 1:
            keys = self.library.keys[places].tobytes()
            seconds = rng.choice(RETAINED_S)
            await self.ask_all(client, Retain(0, client.namespace.tag(), keys, seconds, 0.0))
        elif drawn < REMOVALS_FROM and self.options.pools == 2:
            await self.prefix(client, places, rng)
        elif drawn < REMOVALS_FROM:
            await self.exists(client, places)
        elif drawn < 0.995 or self.options.tenants > 1:  # `removals` distinguishes no namespaces.
            await self.ask_all(
                client,
                Remove(0, client.namespace.tag(), self.library.keys[places[:2]].tobytes(), 0.0),
            )
        else:
            await self.ask_all(client, Clear(0, client.namespace.tag(), 0.0))

    def _choose(self, rng: random.Random, count: int) -> list[int]:
        """Return consecutive places, like a prompt's pages, or random ones; some are repeated."""
        total = len(self.library.keys)
        if rng.random() < 0.5:
            first = rng.randrange(total)
            return [(first + step) % total for step in range(min(count, total))]
        return [rng.randrange(total) for _ in range(count)]

    def own_places(self, client: SimClient, places: Sequence[int]) -> list[int]:
        """Return a client's page for each of these: the namespaces share the library in turn."""
        turns = self.options.tenants
        last = len(self.library.keys) - turns
        return [min(place - place % turns, last) + client.tenant for place in places]

    # --- calls ------------------------------------------------------------------------------------

    async def set(
        self,
        client: SimClient,
        places: Sequence[int],
        rng: random.Random,
        timeout_s: float = 0.0,
        *,
        version: int = 0,
    ) -> list[bool]:
        """Store a new version of each page, or a version that exists; check the answer."""
        keys = self.library.keys[list(places)]
        regions = []
        for place, key in zip(places, keys.tolist(), strict=True):
            length = self.library.lengths[place]
            if rng.random() < OTHER_LENGTH and not version:
                length = rng.choice(self.options.lengths)
            self._version += 1
            region = self.buffers.take(length, client.place.name)
            region.data[:] = content_of(key, version or self._version, length)
            regions.append(region)
        attached = client.attached
        timeout_s = timeout_s or rng.choice([0.15, 2.0, 2.0])
        started = trio.current_time()
        if attached is None:
            client.look_now()
            return [False] * len(keys)
        path = client.writer.set(
            keys,
            _runs(regions, rng),
            home=attached.incarnation,
            reservations=attached.reservations,
            until=_until(client, timeout_s),
        )
        outcome = await client.drive(path, attached.memory)
        self._close(regions)
        for region in regions:
            # A read of the source after the call would store this.
            region.data[:] = POISON
        self._ended(client, "set", started, timeout_s, outcome.stored, outcome.reasons)
        for key, stored in zip(keys.tolist(), outcome.stored.tolist(), strict=True):
            if stored and not self.truth.committed_at(key, attached.incarnation):
                raise Violation("lost-set", f"{client.place.name}: {key.hex()} is not at home")
        if "no_home" in outcome.reasons:
            client.look_now()
        stored_all: list[bool] = outcome.stored.tolist()
        return stored_all

    async def get(
        self,
        client: SimClient,
        places: Sequence[int],
        rng: random.Random,
        timeout_s: float = 0.0,
        lengths: Sequence[int] = (),
    ) -> list[str]:
        """Read pages; check every byte of every hit; return the miss reasons, "" for a hit."""
        keys = self.library.keys[list(places)]
        wanted = lengths or [self.library.lengths[place] for place in places]
        regions = [self.buffers.take(length, client.place.name) for length in wanted]
        timeout_s = timeout_s or rng.choice([0.05, 2.0, 2.0])
        started = trio.current_time()
        until = _until(client, timeout_s)
        cluster = client.cluster
        attached, home = client.attached, client.mirror_home()
        path = client.reader.get(keys, _runs(regions, rng), cluster, until, home)
        answers = Answers(tuple(cluster.members))
        outcome = await client.drive(path, attached.memory if attached else None, answers)
        self.counts["mirrored"] = self.counts.get("mirrored", 0) + outcome.mirrored
        self._close(regions)
        clusters, has_time = (cluster, client.cluster), client.place.now() < until
        check_absent(clusters, keys, outcome.reasons, answers, has_time=has_time)
        self._ended(client, "get", started, timeout_s, outcome.hits, outcome.reasons)
        ended = trio.current_time()
        for key, region, hit in zip(keys.tolist(), regions, outcome.hits.tolist(), strict=True):
            if hit:
                self.truth.judge_hit(key, region.data, started, ended, client.place.name)
        return outcome.reasons

    async def exists(
        self, client: SimClient, places: Sequence[int], timeout_s: float = 0.0
    ) -> list[str]:
        """Ask whether pages are held; return the reasons why not, "" for a page that is."""
        keys = self.library.keys[list(places)]
        timeout_s = timeout_s or client.config.exists_timeout_s
        started = trio.current_time()
        cluster, until = client.cluster, _until(client, timeout_s)
        path = client.reader.exists(keys, cluster, until)
        answers = Answers(tuple(cluster.members))
        known, reasons, _ = await client.drive(path, None, answers)
        clusters, has_time = (cluster, client.cluster), client.place.now() < until
        check_absent(clusters, keys, reasons, answers, has_time=has_time)
        self._ended(client, "exists", started, timeout_s, known, reasons)
        return reasons

    async def leading(self, client: SimClient, places: Sequence[int], stored: int) -> None:
        """Ask how many leading pages are held: at least those that were stored before the call."""
        keys = self.library.keys[list(places)]
        timeout_s = client.config.exists_timeout_s
        started = trio.current_time()
        cluster, until = client.cluster, _until(client, timeout_s)
        answers = Answers(tuple(cluster.members))
        path = client.reader.leading(keys, cluster, until)
        found = await client.drive(path, None, answers)
        if found.run < stored:
            detail = f"{client.place.name}: {found.run} pages of {stored} that were stored before"
            raise Violation("run-not-found", detail)
        if found.run < len(keys):
            clusters, has_time = (cluster, client.cluster), client.place.now() < until
            end = keys[found.run : found.run + 1]
            check_absent(clusters, end, [found.why], answers, has_time=has_time)
        self._ended(client, "exists", started, timeout_s, np.array([not found.why]), [found.why])

    async def prefix(self, client: SimClient, places: Sequence[int], rng: random.Random) -> None:
        """Ask how far a prefix reaches in two pools, and read it; missing pages are counted.

        The second half of the library is the side pool, page for page.
        """
        side = len(self.library.keys) // 2
        first = places[0] % side
        chain = range(first, min(first + len(places), side))
        both = [place for page in chain for place in (page, page + side)]
        timeout_s = client.config.exists_timeout_s
        started = trio.current_time()
        path = client.reader.exists(
            self.library.keys[both], client.cluster, _until(client, timeout_s), touch=True
        )
        known, reasons, _ = await client.drive(path, None)
        self._ended(client, "exists", started, timeout_s, known, reasons)
        reported = prefix_of(known[::2], len(chain), [SidePages(ALL_PAGES, known[1::2])]).pages
        lacking = [place for place, there in zip(both, known.tolist(), strict=True) if not there]
        if set(both[: 2 * reported]) & set(lacking):
            raise Violation(
                "prefix-not-whole", f"{client.place.name}: {reported} without {lacking}"
            )
        if reported:
            short = sum(map(bool, await self.get(client, both[: 2 * reported], rng, 2.0)))
            for name, pages in (("prefix:reported", 2 * reported), ("prefix:short", short)):
                self.counts[name] = self.counts.get(name, 0) + pages

    async def ask_all(self, client: SimClient, message: Remove | Clear | Retain) -> Message | None:
        """Remove, clear or retain at every live member; return the home node's answer."""
        timeout_s = client.config.op_timeout_s
        answer: Message | None = None
        started = trio.current_time()
        attached = client.tie.attached
        if attached is not None:
            message = attrs.evolve(message, timeout_s=timeout_s / 2)
            asked = [(attached.incarnation, message)]
            answer = (await client.asker.ask(asked, _until(client, timeout_s)))[0]
        if isinstance(message, Remove):
            client.cache.end(np.frombuffer(message.keys, KEY))
        elif isinstance(message, Clear):
            client.cache.end()
        self._ended(client, type(message).__name__, started, timeout_s, np.ones(0, np.bool_), [])
        return answer

    # --- checks -----------------------------------------------------------------------------------

    def _ended(
        self,
        client: SimClient,
        call: str,
        started: float,
        timeout_s: float,
        done: npt.NDArray[np.bool_],
        reasons: list[str],
    ) -> None:
        """Check that a call ended in time, with a reason for each page that it did not serve."""
        now = trio.current_time()
        took_s = now - started - client.place.paused_s(started, now)
        took_s *= client.place.rate
        if took_s > timeout_s + LATE_S:
            detail = f"{client.place.name}: {call} of {timeout_s} s took {took_s:.4f} s"
            raise Violation("deadline", detail)
        if done.dtype != np.bool_ or len(done) != len(reasons):
            raise Violation("answer-form", f"{call}: {done} {reasons}")
        for is_done, reason in zip(done.tolist(), reasons, strict=True):
            if is_done != (reason == "") or (reason and reason not in MISS_REASONS):
                raise Violation("answer-form", f"{call}: {is_done} because of {reason!r}")
            if reason in (VERIFY_FAILED, INTERNAL):
                raise Violation("never-expected", f"{client.place.name}: {call}: {reason}")
        shares = {reason: reasons.count(reason) for reason in sorted(set(reasons))}
        for reason, count in shares.items():
            name = f"{call}:{reason or 'done'}"
            self.counts[name] = self.counts.get(name, 0) + count
        self.trace.line("call", client.place.name, call, f"{took_s:.6f}", shares)

    def _close(self, regions: Sequence[Region]) -> None:
        for region in regions:
            self.buffers.close(region)


def check_absent(
    clusters: Sequence[Cluster],
    keys: PageKeys,
    reasons: Sequence[str],
    answers: Answers,
    *,
    has_time: bool,
) -> None:
    """A page is absent if a complete owner reports it, or several owners, or if no other is left.

    An owner that was asked and has not answered is left: silence does not mean "absent".

    clusters: as the client knew it before the call and after it. A call that finds a record of an
              unknown holder requests the view, and then asks the owners of that view.
    """
    if not has_time:
        return
    for key, reason in zip(keys.tolist(), reasons, strict=True):
        if reason != ABSENT:
            continue
        # Owners from before a view change count, too: the call may have asked them.
        asked = set().union(*(_asked(each, key) for each in clusters))
        if len(asked & answers.behind[key]) >= ANSWERS_MAX:
            continue
        trusted = [_without_answer(each, key, answers) for each in clusters]
        if all(trusted):
            detail = f"{key.hex()}: only owners that are behind said so, {trusted[0]} did not"
            raise Violation("absent-on-trust", detail)


def _asked(cluster: Cluster, key: bytes) -> set[int]:
    """Return the owners of a key in a view, those from before its last change included."""
    members = cluster.ring.members
    if not members:
        return set()
    (arc,) = cluster.ring.arcs(np.frombuffer(key, KEY))
    return {members[at] for at in cluster.query_order[arc].tolist()}


def _without_answer(cluster: Cluster, key: bytes, answers: Answers) -> int:
    """Return how many owners have not answered, 0 if a complete one has."""
    owners = set(cluster.ring.owners(from_bytes(key))[0].tolist())
    return 0 if owners & answers.final[key] else len(owners - answers.behind[key] - answers.closed)


def _until(client: SimClient, timeout_s: float) -> float:
    """Return the deadline of a path that begins now, by its own clock, as `client.client` does."""
    return client.place.now() + timeout_s - min(RETURN_MARGIN_S, timeout_s / 10)


def _runs(regions: Sequence[Region], rng: random.Random) -> PageRuns:
    """Return each buffer as one run, or cut into two or three."""
    pages = []
    for region in regions:
        size = len(region.data)
        cuts = sorted({0, size, *(rng.randrange(1, size) for _ in range(rng.choice([0, 0, 1, 2])))})
        pages.append([(region.address + begin, end - begin) for begin, end in pairwise(cuts)])
    return PageRuns.of(pages)
