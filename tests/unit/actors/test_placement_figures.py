"""What is shown of pages that move between nodes: between which, how many, and why others stay."""

from __future__ import annotations

import attrs
import pytest

from peercache.actors.mailboxes import DrainBegan, PagesStored, PagesToGive, PullDone
from peercache.actors.origin import Origin
from peercache.actors.placement.offers import LOOK_S, OFFER_S, reasons_of
from peercache.actors.placement.takings import PEERS_MAX, PlacementFigures
from peercache.model.keys import tag_of
from peercache.model.status import MovedPages
from peercache.observability.metrics import Metrics
from peercache.observability.reasons import OFFER_FAILURES, TAKE_FAILURES
from peercache.wire.messages.membership import OfferPages, OfferSpill, PagesTaken, ReportRoom
from peercache.wire.messages.pool import (
    ABORTED,
    COMMITTED,
    HERE,
    REFUSED_DRAINING,
    REFUSED_FULL,
    REFUSED_SIZE,
    REFUSED_TOO_LARGE,
    REPEATED,
    RESERVED,
    Granted,
)
from tests.unit.actors.placement_story import ME, ONE, PAGE, TWO, member, records_of
from tests.unit.actors.test_spilling import Story, begun, committed, take


@attrs.define(eq=False)
class Counts:
    """The metrics of an actor that are not zero, by reason."""

    metrics: Metrics = attrs.field(factory=Metrics)

    def of(self, name: str) -> dict[str, float]:
        """Return a counter's totals."""
        samples = getattr(self.metrics, name).collect()[0].samples
        return {s.labels["reason"]: s.value for s in samples if s.name.endswith("_total")}


def counted(story: Story) -> Counts:
    """Show the figures of a story's actor from now on."""
    counts = Counts()
    story.actor.show(counts.metrics)
    return counts


def test_each_reason_for_which_an_offered_page_stays_is_counted() -> None:
    """By the node that offered it."""
    story = begun()
    counts = counted(story)
    to, offer = story.offered(*range(1, 9))
    states = COMMITTED, HERE, REFUSED_FULL, REFUSED_DRAINING, REFUSED_SIZE, ABORTED, REPEATED, 99

    story.take(PagesTaken(offer.number, bytes(states)), Origin(to))

    assert counts.of("pages_not_moved") == {
        "full": 1, "draining": 1, "other_bytes": 1, "not_read": 1, "malformed": 1,
    }  # fmt: skip
    assert story.actor.figures.peers() == (MovedPages(name=f"a:{to}", given=1, given_bytes=PAGE),)
    assert set(dict(reasons_of(bytes(range(256))))) <= {*OFFER_FAILURES, *TAKE_FAILURES}
    assert dict(reasons_of(bytes((REFUSED_TOO_LARGE,)) * 2)) == {"too_large": 2}


@pytest.mark.parametrize("reason", ["no_room", "no_node", "no_answer", "malformed"])
def test_pages_that_no_node_takes_are_counted_by_the_reason(reason: str) -> None:
    """No room, no node that answers, no answer, and one that does not fit."""
    story = begun()
    counts = counted(story)
    if reason == "no_room":
        for effect in story.name(1, 2):
            story.take(ReportRoom(effect.message.number, 0, 0.0), Origin(effect.to))
    else:
        to, offer = story.offered(1, 2)
    if reason == "malformed":
        story.take(PagesTaken(offer.number, bytes(3)), Origin(to))
    elif reason == "no_answer":
        story.wait(OFFER_S + LOOK_S)
    elif reason == "no_node":
        story.see(to)
        story.wait(OFFER_S + LOOK_S)
        story.name(3, 4)

    assert counts.of("pages_not_moved")[reason] == 2
    assert reason in OFFER_FAILURES


def test_pages_that_came_from_a_node_are_counted_as_its_pages() -> None:
    """With their bytes; those that were not taken are counted by the reason."""
    story = Story()
    counts = counted(story)
    story.see(ONE)
    (notified,) = take(story, 1, 2, 3, 4)
    sequence = notified.fact.reserve.sequence
    states = bytes((RESERVED, RESERVED, HERE, REFUSED_FULL))
    (pull,) = story.take(Granted(0, sequence, states, bytes(32)))
    story.take(PullDone(pull.job, b"\1\0"))
    outcome = [COMMITTED, ABORTED, HERE, REFUSED_FULL]
    story.take(committed(sequence, outcome, (1, 101), (3, 7), published=2))

    assert story.actor.figures.peers() == (MovedPages(name="a:21", taken=1, taken_bytes=PAGE),)
    assert counts.of("pages_not_taken_over") == {"not_read": 1, "full": 1, "other_bytes": 1}
    value = counts.metrics.registry.get_sample_value
    assert value("peercache_pages_taken_over_total") == 1
    assert value("peercache_bytes_taken_over_total") == PAGE


def test_a_page_of_which_owners_do_not_know_yet_counts_as_taken_only() -> None:
    """Its holder keeps it, and it is here."""
    story = Story()
    counts = counted(story)
    story.see(ONE)
    (notified,) = take(story, 1)
    sequence = notified.fact.reserve.sequence
    (pull,) = story.take(Granted(0, sequence, bytes((RESERVED,)), bytes(8)))
    story.take(PullDone(pull.job, b"\1"))
    story.take(committed(sequence, [COMMITTED], (1, 101), published=0))

    assert story.actor.figures.peers()[0].taken == 1
    assert counts.of("pages_not_taken_over") == {}


def test_each_reason_for_which_an_offer_is_refused_is_counted() -> None:
    """By the node that was asked to take it."""
    story = Story(spaces=frozenset({7}))
    counts = counted(story)
    records = records_of(1, 2, holder=ONE).tobytes()
    ages = bytes(16)

    story.take(OfferSpill(5, tag_of(7, 1), records, ages), Origin(ONE))
    story.see(ONE)
    story.take(OfferSpill(5, tag_of(8, 1), records, ages), Origin(ONE))
    story.take(OfferSpill(5, tag_of(7, 1), records, b""), Origin(ONE))
    story.take(OfferPages(6, tag_of(7, 1), records), Origin(ONE))
    story.take(DrainBegan(story.now + 60.0))
    story.take(OfferSpill(5, tag_of(7, 1), records, ages), Origin(ONE))

    assert counts.of("pages_not_taken_over") == {
        "not_a_member": 2, "namespace": 2, "malformed": 2, "draining": 4,
    }  # fmt: skip
    assert set(counts.of("pages_not_taken_over")) <= set(TAKE_FAILURES)


def test_pages_of_a_drain_count_as_given_too() -> None:
    """A second drain begins at zero, and the figures of the peer go on."""
    story = Story()
    story.see(ONE)
    story.take(DrainBegan(story.now + 60.0))
    pages = PagesToGive((PagesStored(records_of(1, 2), 1),), 0, 0)
    (offer,) = (e for e in story.take(pages) if isinstance(getattr(e, "message", 0), OfferPages))

    story.take(PagesTaken(offer.message.number, bytes((COMMITTED, HERE))), Origin(ONE))

    assert story.actor.figures.peers() == (MovedPages(name="a:21", given=1, given_bytes=PAGE),)


def test_a_node_that_starts_again_keeps_its_row_and_rows_are_bounded() -> None:
    """The rest is one row, the last one."""
    figures = PlacementFigures()
    figures.gave(None, 1, PAGE)
    figures.gave(member(TWO), 0, 0)
    assert figures.peers() == ()

    first = attrs.evolve(member(ME), control="first:1")
    for pages in (3, 4):
        figures.gave(attrs.evolve(first, incarnation=pages), pages, pages * PAGE)
    for number in range(PEERS_MAX + 5):
        figures.took(member(1000 + number), 1, PAGE)
        assert len(figures.peers()) <= PEERS_MAX + 1

    first_row, *rows, others = figures.peers()
    assert first_row == MovedPages(name="first:1", given=7, given_bytes=7 * PAGE)
    assert len(rows) == PEERS_MAX - 1
    assert others == MovedPages(name="", taken=6, taken_bytes=6 * PAGE)
