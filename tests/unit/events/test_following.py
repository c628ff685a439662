"""The follower's end: what it believes, and the index that follows from it."""

from __future__ import annotations

import numpy as np
import pytest

from peercache.errors import RemoteProtocolError
from peercache.events.following import Index, NodeChanges, NodeFollower
from peercache.model.changes import CHANGE, GONE, IN_FILES, IN_MEMORY
from peercache.model.keys import KEY
from peercache.wire.messages.following import ALL_ROWS, ChangesTold

NODE, OTHER = "h1:7400", "h2:7400"
LIFE = 7


def key(name: int) -> bytes:
    return bytes([name + 1]) * 16


def changes(*told: tuple[int, int]) -> bytes:
    made = np.zeros(len(told), CHANGE)
    for row, (name, tier) in zip(made, told, strict=True):
        row["key"], row["tier"], row["length"] = key(name), tier, 100 if tier else 0
    return made.tobytes()


def begun(*names: int, node: str = NODE) -> tuple[NodeFollower, Index]:
    """Return a follower that has been told all, and its index."""
    follower, index = NodeFollower(node), Index()
    held = changes(*((name, IN_MEMORY) for name in names))
    batch = follower.take(ChangesTold(1, LIFE, True, 5, b"", held, ALL_ROWS))
    assert batch is not None
    assert batch.anew
    assert batch.is_whole
    index.apply(batch)
    return follower, index


def test_what_is_told_next_follows_what_was_told() -> None:
    """The question names the last change; changes are applied in their order."""
    follower, index = begun(1, 2)
    question = follower.question(3.0)
    assert (question.incarnation, question.after, question.row) == (LIFE, 5, ALL_ROWS)

    told = changes((3, IN_MEMORY), (1, GONE), (3, IN_FILES))
    batch = follower.take(ChangesTold(2, LIFE, False, 8, told, b"", ALL_ROWS))

    assert batch is not None
    index.apply(batch)
    assert index.pages(NODE) == {key(2): IN_MEMORY, key(3): IN_FILES}
    assert follower.take(ChangesTold(3, LIFE, False, 8, b"", b"", ALL_ROWS)) is None
    assert follower.question(1.0).after == 8


@pytest.mark.parametrize(
    ("incarnation", "after", "row"),
    [(LIFE, 7, ALL_ROWS), (LIFE, 5, ALL_ROWS), (LIFE + 1, 6, ALL_ROWS), (LIFE, 6, 0)],
)
def test_an_answer_that_does_not_follow_is_refused(incarnation: int, after: int, row: int) -> None:
    """A gap, a change told twice, another life, rows told again: the follower begins anew."""
    follower, _ = begun(1)
    told = ChangesTold(2, incarnation, False, after, changes((3, IN_MEMORY)), b"", row)

    with pytest.raises(RemoteProtocolError, match="do not follow"):
        follower.take(told)

    assert follower.question(1.0).after == 0


def test_a_node_that_begins_anew_replaces_what_it_told() -> None:
    """Nothing of before stays, and pages of other nodes do."""
    follower, index = begun(1, 2)
    _, other = begun(9, node=OTHER)
    for_other = NodeFollower(OTHER).take(
        ChangesTold(1, 3, True, 1, b"", changes((9, IN_MEMORY)), ALL_ROWS)
    )
    assert for_other is not None
    index.apply(for_other)

    batch = follower.take(ChangesTold(2, 8, True, 1, b"", changes((4, IN_FILES)), 4096))

    assert batch is not None
    assert not batch.is_whole
    index.apply(batch)
    assert index.pages(NODE) == {key(4): IN_FILES}
    assert index.pages(OTHER) == other.pages(OTHER) == {key(9): IN_MEMORY}
    assert len(index) == 2


def test_the_pages_of_a_node_that_is_gone_vanish() -> None:
    """It is told once; a node of which nothing was told goes without a word."""
    follower, index = begun(1, 2)

    batch = follower.gone()

    assert batch is not None
    index.apply(batch)
    assert (len(index), index.nodes(), index.holders(key(1))) == (0, [], {})
    assert follower.gone() is None
    assert follower.question(1.0).after == 0


def test_a_node_that_tells_wrong_and_then_dies_leaves_nothing() -> None:
    """What it told stays while it begins anew, and goes with the second silence."""
    follower, index = begun(1, 2)
    with pytest.raises(RemoteProtocolError):
        follower.take(ChangesTold(2, LIFE, False, 99, b"", b"", ALL_ROWS))

    batches = [follower.failed(), follower.failed()]

    assert batches[0] is None
    assert batches[1] is not None
    index.apply(batches[1])
    assert follower.is_silent
    assert (len(index), index.nodes()) == (0, [])
    assert follower.failed() is None


def test_a_prefix_ends_at_the_first_page_that_is_missing() -> None:
    """Whatever comes behind the gap."""
    _, index = begun(1, 2, 4)

    assert index.prefix(NODE, [key(1), key(2), key(3), key(4)]) == 2
    assert index.prefix(NODE, [key(1), key(2)]) == 2
    assert index.prefix(OTHER, [key(1)]) == 0
    array = np.frombuffer(key(1) + key(2) + key(3), KEY)
    assert index.prefix(NODE, array) == 2
    assert index.holders(array[0]) == index.holders(key(1)) == {NODE: IN_MEMORY}


def test_an_index_has_a_bound_over_all_nodes() -> None:
    """Pages beyond it are left out and counted; a page that goes makes room."""
    index = Index(pages_max=3)

    def tell(node: str, *told: tuple[int, int], anew: bool = False) -> None:
        rows = np.frombuffer(changes(*told), CHANGE)
        index.apply(NodeChanges(node=node, anew=anew, is_gone=False, is_whole=True, changes=rows))

    tell(NODE, (1, IN_MEMORY), (2, IN_MEMORY))
    tell(OTHER, (3, IN_MEMORY), (4, IN_MEMORY))
    assert (len(index), index.left_out) == (3, 1)
    tell(NODE, (1, GONE), (2, IN_FILES))
    tell(OTHER, (5, IN_MEMORY), (6, IN_MEMORY))
    assert (len(index), index.left_out) == (3, 2)
    assert index.holders(key(5)) == {OTHER: IN_MEMORY}
