"""The pool against an obvious slow oracle, under whatever Hypothesis comes up with.

`World` holds the oracle: it applies the effects to words and memory, lets every granted client
scribble, and after each effect tries every record ever published, looks for overlapping slots, for
even words under writers, and adds everything up to the byte.
"""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, rule

from peercache.actors.mailboxes import PagesCommitted
from peercache.wire.messages.pool import (
    ABORTED,
    COMMITTED,
    HERE,
    REFUSED_FULL,
    REFUSED_SIZE,
    REFUSED_TOO_LARGE,
    REPEATED,
    RESERVED,
    Granted,
    Reserve,
)
from peercache.wire.messages.session import Refused
from tests.examples import examples
from tests.unit.actors.pool_world import GRANULE, World, key, packed

clients = st.integers(1, 3)
pages = st.lists(st.integers(0, 11), min_size=1, max_size=6)
usual = st.sampled_from([1, GRANULE, 2 * GRANULE, 3 * GRANULE])
unusual = st.sampled_from([0, GRANULE - 1, 5 * GRANULE, 8 * GRANULE + 7, 40 * GRANULE])
lengths = st.one_of(usual, usual, usual, unusual)


class PoolMachine(RuleBasedStateMachine):
    """Clients reserve, write, commit, repeat themselves, fall silent and die."""

    def __init__(self) -> None:
        """Make the world in the first step, when its sizes are drawn."""
        super().__init__()
        self.world: World
        self.granules = 0
        self.sent: list[tuple[int, Reserve]] = []
        self.outcomes: dict[tuple[int, int], bytes] = {}
        self.dead: set[int] = set()

    reservations = Bundle("reservations")
    aheads = Bundle("aheads")

    @initialize(
        granules=st.integers(1, 30),
        share=st.sampled_from([4, 4, 4, 2, 0]),
        allowed=st.sampled_from([30, 30, 12, 0]),
        units_about=st.sampled_from([3, 5, 256]),
    )
    def start(self, granules: int, share: int, allowed: int, units_about: int) -> None:
        """Draw a small pool, most often wholly populated."""
        self.granules = granules
        self.world = World(
            granules=granules,
            usable=granules * share // 4,
            uncommitted_max=allowed * GRANULE,
            units_about=units_about,
        )

    @rule(
        target=reservations,
        client=clients,
        keys=pages,
        sizes=st.lists(lengths, min_size=6, max_size=6),
        same=st.booleans(),
        namespace=st.integers(0, 1),
        skip=st.integers(0, 1),
    )
    def reserve(
        self, client: int, keys: list[int], sizes: list[int], same: bool, namespace: int, skip: int
    ) -> tuple[int, int]:
        """Reserve a batch; sequences rise, some are never seen."""
        world = self.world
        sequence = world.sequences.get(client, 0) + 1 + skip
        world.sequences[client] = sequence
        asked = [sizes[0]] * len(keys) if same else sizes[: len(keys)]
        held = {number: world.here.get(key(number)) for number in keys}
        held_sizes = {n: int(r["length"]) for n, r in held.items() if r is not None}
        message = Reserve(9, sequence, namespace, b"".join(map(key, keys)), packed(asked))
        self.sent.append((client, message))

        answer = world.reserve_again(client, message)

        if client in self.dead:
            assert isinstance(answer, Refused)
            return client, sequence
        assert isinstance(answer, Granted)
        first: dict[int, int] = {}
        for number, length, state in zip(keys, asked, answer.states, strict=True):
            if number in first:
                assert state == (REPEATED if first[number] == length else REFUSED_SIZE)
                continue
            first[number] = length
            if number in held_sizes:
                assert state == (HERE if held_sizes[number] == length else REFUSED_SIZE)
                if state == HERE:
                    assert world.holds(number) == [True], "a batch does not evict what it found"
            elif length == 0:
                assert state == REFUSED_SIZE
            elif length > self.granules * GRANULE:
                assert state == REFUSED_TOO_LARGE
            else:
                assert state in {RESERVED, REFUSED_FULL}
        if RESERVED not in answer.states:
            self.outcomes[client, sequence] = answer.states
        return client, sequence

    @rule(reservation=reservations, chosen=st.sets(st.integers(0, 5)))
    def write(self, reservation: tuple[int, int], chosen: set[int]) -> None:
        """A client copies some of its pages, at any time before it reports that it is done."""
        if reservation in self.world.writing:
            self.world.write(*reservation, pages=sorted(chosen))

    @rule(
        target=aheads,
        reservation=reservations,
        absent=st.sets(st.integers(0, 5)),
        sums=st.booleans(),
        next_too=st.booleans(),
    )
    def commit(
        self, reservation: tuple[int, int], absent: set[int], sums: bool, next_too: bool
    ) -> object:
        """Commit, for the first time or again; what has ended stays as it ended.

        next_too: have slots for a next batch reserved, under a number of their own.
        """
        client, sequence = reservation
        world = self.world
        ahead: tuple[int, ...] = ()
        if next_too:
            world.sequences[client] = world.sequences.get(client, 0) + 1
            ahead = (world.sequences[client],)
        open_now = world.writing.get(reservation)
        if open_now is None:
            message = next(m for c, m in self.sent if (c, m.sequence) == reservation)
            count = len(message.keys) // 16
            done = world.commit(client, sequence, count=count, ahead=ahead)
            assert isinstance(done, PagesCommitted)
            expected = self.outcomes.get(reservation, done.states)
            assert done.states == expected or client in self.dead
            assert len(done.records) == 0
            assert COMMITTED not in done.states or COMMITTED in expected
            return multiple()
        granted = open_now[1]
        count = len(granted.states)
        written = [index not in absent for index in range(count)]
        world.write(client, sequence, [index for index in range(count) if written[index]])
        keys = [open_now[0].keys[16 * i : 16 * i + 16] for i in range(count)]
        held = {name: world.here.get(name) for name in keys}

        checksums = [7 * sums] * count
        done = world.commit(
            client, sequence, written=bytes(written), checksums=checksums, ahead=ahead
        )

        assert isinstance(done, PagesCommitted)
        for index, (before, after) in enumerate(zip(granted.states, done.states, strict=True)):
            if before != RESERVED:
                assert after == before
            elif not written[index]:
                assert after == ABORTED
            elif held[keys[index]] is not None:
                assert after in {HERE, REFUSED_SIZE}
            else:
                assert after == COMMITTED
        assert len(done.records) == done.states.count(COMMITTED)
        self.outcomes[reservation] = done.states
        return multiple(*((client, number) for number in ahead))

    @rule(target=aheads, client=clients, sizes=st.lists(lengths, min_size=1, max_size=3))
    def reserve_ahead(self, client: int, sizes: list[int]) -> tuple[int, int]:
        """Reserve slots for pages that have no names yet: all together an eighth of the pool."""
        world = self.world
        sequence = world.sequences[client] = world.sequences.get(client, 0) + 1
        message = Reserve(9, sequence, 1, b"", packed(sizes))
        self.sent.append((client, message))

        answer = world.reserve_again(client, message)

        assert isinstance(answer, Granted) != (client in self.dead)
        if isinstance(answer, Granted):
            assert set(answer.states) <= {RESERVED, REFUSED_FULL}
        ahead = [
            -(-int(length) // GRANULE)
            for reserve, granted in world.writing.values()
            if not reserve.keys
            for index, length in enumerate(np.frombuffer(reserve.lengths, "<u8"))
            if granted.states[index] == RESERVED
        ]
        assert 8 * sum(ahead) <= self.granules, "too much is reserved ahead"
        return client, sequence

    @rule(
        reservation=aheads,
        numbers=st.lists(st.integers(0, 11), min_size=1, max_size=3),
        absent=st.sets(st.integers(0, 2)),
    )
    def commit_named(
        self, reservation: tuple[int, int], numbers: list[int], absent: set[int]
    ) -> None:
        """Name pages and commit them; one key may come twice, or be there already."""
        client, sequence = reservation
        world = self.world
        open_now = world.writing.get(reservation)
        written = bytes(index not in absent for index in range(len(numbers)))
        held = {number for number in numbers if key(number) in world.here}
        if open_now is not None:
            world.write(client, sequence)

        done = world.commit(client, sequence, written=written, named=numbers)

        if open_now is not None and len(numbers) > len(open_now[1].states):
            assert isinstance(done, Refused), "more names than slots"
            return
        assert isinstance(done, PagesCommitted)
        if open_now is None:
            assert len(done.records) == 0
            return
        granted = open_now[1].states
        for index, number in enumerate(numbers):
            # Committed from the last to the first, and the first to commit a key stays.
            later = any(
                number == numbers[i] and written[i] and granted[i] == RESERVED
                for i in range(index + 1, len(numbers))
            )
            if granted[index] != RESERVED:
                assert done.states[index] == granted[index]
            elif not written[index]:
                assert done.states[index] == ABORTED
            elif number in held or later:
                assert done.states[index] in {HERE, REFUSED_SIZE}
            else:
                assert done.states[index] == COMMITTED
        assert len(done.records) == done.states.count(COMMITTED)
        self.outcomes[reservation] = done.states

    @rule(numbers=pages, size=usual)
    def store(self, numbers: list[int], size: int) -> None:
        """A client that never dies stores pages in one go, as most do."""
        self.world.store(4, numbers, size)

    @rule(reservation=reservations)
    def abort(self, reservation: tuple[int, int]) -> None:
        """Abort, whatever the state."""
        self._over(reservation)
        self.world.abort(*reservation)

    @rule(number=st.integers(0, 200))
    def deliver_again(self, number: int) -> None:
        """Any Reserve ever sent may come a second time; one that has ended gets no slot."""
        if not self.sent:
            return
        client, message = self.sent[number % len(self.sent)]
        name = (client, message.sequence)
        before = self.world.figure("pool_bytes_reserved")

        answer = self.world.reserve_again(client, message)

        assert self.world.figure("pool_bytes_reserved") == before
        if name in self.world.writing:
            assert answer == self.world.writing[name][1]
        elif isinstance(answer, Granted):
            assert RESERVED not in answer.states

    @rule(client=clients, back=st.integers(0, 3), kept=st.sets(st.integers(0, 30)))
    def list_live(self, client: int, back: int, kept: set[int]) -> None:
        """A client reports what it may still write; the rest comes back."""
        newest = max(0, self.world.sequences.get(client, 0) - back)
        listed = sorted(s for c, s in self.world.writing if c == client and s in kept)
        for owner, sequence in list(self.world.writing):
            if owner == client and sequence <= newest and sequence not in listed:
                self._over((owner, sequence))
        self.world.list_live(client, newest, listed)

    @rule(client=clients)
    def exit(self, client: int) -> None:
        """A client's process exits; its id never comes back."""
        if client == 1:
            return  # or long runs would have no client left
        self.dead.add(client)
        self.world.exit(client)

    @rule(numbers=pages, stale=st.booleans())
    def touch(self, numbers: list[int], stale: bool) -> None:
        """Readers report what they read."""
        self.world.touch(*numbers, stale=stale)

    @rule(numbers=pages, namespace=st.integers(0, 1))
    def remove(self, numbers: list[int], namespace: int) -> None:
        """Pages of one namespace are removed, then those of the other; both counts are right."""
        held = sum(self.world.holds(*dict.fromkeys(numbers)))

        first = self.world.remove(*numbers, namespace=namespace)
        left = sum(self.world.holds(*dict.fromkeys(numbers)))
        second = self.world.remove(*numbers, namespace=1 - namespace)

        assert (first, second) == (held - left, left)
        assert not any(self.world.holds(*numbers))

    @rule(namespace=st.integers(0, 1))
    def clear(self, namespace: int) -> None:
        """A namespace is cleared, and no other page goes."""
        others = len(self.world.here)

        assert self.world.clear(namespace) == others - len(self.world.here)

    @rule(granules=st.integers(0, 30))
    def grow(self, granules: int) -> None:
        """More memory is populated."""
        self.world.grow(min(granules, self.granules))

    def _over(self, reservation: tuple[int, int]) -> None:
        """Note how a reservation ends that is not committed."""
        if reservation in self.world.writing:
            states = self.world.writing[reservation][1].states
            self.outcomes[reservation] = states.replace(bytes((RESERVED,)), bytes((ABORTED,)))


PoolMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=60)
TestPoolAgainstItsOracle = PoolMachine.TestCase
