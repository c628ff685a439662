"""Each checker fails on a small offender: a checker that cannot fail checks nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest

from peercache.actors.effects import StoreWords
from peercache.actors.runtime import SELF, Mailbox
from peercache.model.records import RECORD, RESIDENT, Records
from sims.canaries import planted_canary
from sims.clock import VirtualClock
from sims.content import content_of, version_of
from sims.link import SimLink
from sims.memory import Buffers, NodeMemory, Stay, Truth
from sims.network import Network
from sims.places import Place
from sims.swarm import draw
from sims.trace import SimLog, Trace, Violation
from sims.watch import check_bounds

KEY = b"0123456789abcdef"
GRANULE = 256
TRACE = Trace(VirtualClock().current_time, show=None)


def memory() -> NodeMemory:
    """Return a node's memory of eight granules."""
    return NodeMemory(1, host="h0", granules=8, granule=GRANULE, truth=Truth())


def words(*pairs: tuple[int, int]) -> StoreWords:
    """Return words to store, as (index, value)."""
    return StoreWords(
        np.array([index for index, _ in pairs], np.int64),
        np.array([value for _, value in pairs], np.uint64),
    )


def record(*, index: int = 0, generation: int = 10, length: int = 300) -> Records:
    """Return the record of a page that is at a granule."""
    made = np.zeros(1, RECORD)
    made["key"], made["holder"] = np.void(KEY), 1
    made["offset"], made["length"] = index * GRANULE, length
    made["generation"], made["flags"] = generation, RESIDENT
    return made


def commit(node: NodeMemory, *, index: int = 0, generation: int = 10) -> None:
    """Put a page into memory as a correct node and client do."""
    node.store_words(words((index, generation | 1)), 0.0)
    offset = index * GRANULE
    node.write(offset, offset, content_of(KEY, 1, 300), 7)
    node.store_words(words((index, generation)), 1.0)
    node.published(record(index=index, generation=generation), 1.0)


def found_by(caught: pytest.ExceptionInfo[Violation]) -> str:
    """Return which checker it was."""
    return caught.value.checker


def test_content_shows_whose_it_is() -> None:
    """The bytes of one page are those of no other key or version, and no mixture is a page."""
    page, other = content_of(KEY, 1, 300), content_of(KEY, 2, 300)
    torn = np.concatenate([page[:150], other[150:]])

    assert version_of(KEY, page) == 1
    assert version_of(b"x" * 16, page) is None
    assert version_of(KEY, torn) is None


def write_under_committed(node: NodeMemory) -> None:
    """Break the first rule of the pool: it is noticed at the very write."""
    commit(node)
    node.write(GRANULE, 0, content_of(KEY, 2, 24), 7)


def write_without_reservation(node: NodeMemory) -> None:
    """Write into another client's slot, even where it does no harm this time."""
    node.store_words(words((0, 11)), 0.0)
    node.may_write = lambda client, index: (client, index) == (7, 0)
    node.write(0, 0, content_of(KEY, 1, 300), 7)
    node.write(0, 0, content_of(KEY, 1, 300), 8)


def write_under_even_word(node: NodeMemory) -> None:
    """Write where no page is any more: only an odd word indicates that the bytes may change."""
    node.write(0, 0, content_of(KEY, 2, 24), 7)


def generation(node: NodeMemory) -> None:
    """Let an even value come back: in all of a cluster one generation is one page."""
    commit(node)
    node.store_words(words((0, 11)), 2.0)
    node.store_words(words((3, 10)), 3.0)


def torn_commit(node: NodeMemory) -> None:
    """Publish a page of which not every byte is there."""
    node.store_words(words((0, 11)), 0.0)
    node.write(0, 0, content_of(KEY, 1, 300)[:200], 7)
    node.store_words(words((0, 10)), 1.0)
    node.published(record(), 1.0)


def publish_order(node: NodeMemory) -> None:
    """Publish a record before its word: the order of the pool's effects is a promise."""
    node.store_words(words((0, 11)), 0.0)
    node.write(0, 0, content_of(KEY, 1, 300), 7)
    node.published(record(), 1.0)


@pytest.mark.parametrize(
    "offend",
    [
        write_under_committed,
        write_without_reservation,
        write_under_even_word,
        generation,
        torn_commit,
        publish_order,
    ],
)
def test_what_a_correct_node_never_does_to_its_memory_is_noticed(
    offend: Callable[[NodeMemory], None],
) -> None:
    """Each offender is named by its checker."""
    with pytest.raises(Violation) as caught:
        offend(memory())

    assert found_by(caught) == offend.__name__.replace("_", "-")


def test_wrong_uncommitted_and_stale_hits_are_noticed() -> None:
    """Bytes of no page, of a version that was never committed, of one that had ended before."""
    truth = Truth()
    truth.stays[KEY] = [Stay(1, 1, since=1.0, until=2.0)]
    right = content_of(KEY, 1, 300)
    torn = right.copy()
    torn[100] ^= 1

    truth.judge_hit(KEY, right, 1.5, 3.0, "reader")
    checkers = []
    for page, since in ((torn, 1.5), (content_of(KEY, 2, 300), 1.5), (right, 2.5)):
        with pytest.raises(Violation) as caught:
            truth.judge_hit(KEY, page, since, 3.0, "reader")
        checkers.append(found_by(caught))

    assert checkers == ["wrong-bytes", "uncommitted", "stale-hit"]


def test_buffers_are_not_touched_after_their_call() -> None:
    """Neither written nor read."""
    buffers = Buffers()
    region = buffers.take(64, "reader")
    buffers.write(region.address, content_of(KEY, 1, 24))
    buffers.close(region)

    with pytest.raises(Violation) as written:
        buffers.write(region.address, content_of(KEY, 1, 24))
    with pytest.raises(Violation) as read:
        buffers.read(region.address, 8)

    assert (found_by(written), found_by(read)) == ("write-after-return", "read-after-return")


def test_a_call_is_judged_by_the_time_of_its_caller() -> None:
    """A clock that goes at half the pace gives a call twice the time of the world."""
    place = Place("c0", "h0", rate=0.5, offset_s=1000.0)

    shown = [place.local(now) for now in (0.0, 4.0)]

    assert shown == [1000.0, 1002.0]
    assert place.world(1002.0) == 4.0


def test_a_mailbox_beyond_its_bound_is_noticed() -> None:
    """Facts from inside may be more; what the network brought may not."""
    mailbox: Mailbox[Any] = Mailbox(messages_max=2)
    for _ in range(5):
        mailbox.put(SELF, "a fact")
    check_bounds(mailbox, "pool")
    for _ in range(3):
        mailbox.waiting.append((SELF, "from the network", 10))

    with pytest.raises(Violation) as caught:
        check_bounds(mailbox, "pool")

    assert found_by(caught) == "mailbox-bound"


@pytest.mark.parametrize("bounds", [(2, 10**6), (10**3, 250)])
def test_an_outbox_beyond_its_bound_is_noticed(bounds: tuple[int, int]) -> None:
    """In messages or in bytes: the planted one keeps everything."""
    options = attrs.evolve(
        draw(random.Random(1), 1), outbox_messages=bounds[0], outbox_bytes=bounds[1]
    )
    dropped: list[int] = []
    link = SimLink(
        "tcp://n0:1",
        hello=bytes,
        on_answer=lambda _: None,
        on_dropped=dropped.append,
        options=options,
        network=Network(options=options, rng=random.Random(1), trace=TRACE),
        place=Place("n1", "h1"),
        rng=random.Random(1),
    )
    for _ in range(4):
        link.send(bytes(100))
    within = list(dropped)

    with planted_canary("outbox-without-bound"), pytest.raises(Violation) as caught:
        link.send(bytes(100))

    assert found_by(caught) == "outbox-bound"
    assert within == [1, 1]


def test_an_error_in_the_log_ends_a_run() -> None:
    """Warnings are normal trouble; an error is a bug."""
    log = SimLog(Trace(VirtualClock().current_time, show=None), "n0")
    log.warning("peer.refused", reason="cluster")

    with pytest.raises(Violation) as caught:
        log.error("call.failed")

    assert found_by(caught) == "error-log"
