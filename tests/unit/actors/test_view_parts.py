"""How a view is cut into messages: none is too large, and none of the entries is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peercache.actors.membership.view_parts import PART_MEMBERS_MAX, bytes_of, parts_of
from peercache.actors.origin import Origin
from peercache.model.view import View
from peercache.wire.codec import MESSAGE_BYTES_MAX, decode, encode
from peercache.wire.envelope import Envelope
from peercache.wire.messages.membership import ViewAsked, ViewCompared, ViewShared
from tests.unit.actors.membership_cluster import member
from tests.unit.actors.membership_node import ME, ONE, TWO, Node, sends

LARGE = {"host_name": "h" * 200, "boot_id": "b" * 36, "segment": "/dev/shm/" + "s" * 400}


def size_of(message: ViewShared) -> int:
    return len(encode(Envelope(2**64 - 1, 2**64 - 1, message), cluster="c" * 200))


@pytest.mark.parametrize("more", [{}, LARGE])
def test_every_part_of_a_view_of_thousands_fits_into_a_message(more: dict[str, str]) -> None:
    """Entries keep their order, and each is in one part."""
    members = [member(number, nonce=bytes(16), name="n" * 60, **more) for number in range(1, 4000)]

    parts = parts_of(members)

    assert [entry for part in parts for entry in part] == members
    assert all(len(part) <= PART_MEMBERS_MAX for part in parts)
    for part in parts:
        raw = encode(Envelope(1, 2, ViewShared(0, part)), cluster="c")
        assert len(raw) <= MESSAGE_BYTES_MAX
        assert decode(raw, cluster="c").message == ViewShared(0, part)


@given(
    st.integers(1, 2**64 - 1),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=300),
    st.binary(max_size=20),
)
def test_the_size_of_an_entry_is_never_less_than_on_the_wire(
    number: int, text: str, nonce: bytes
) -> None:
    """Texts count as UTF-8."""
    entry = member(number, counter=number, segment=text, name=text, nonce=nonce)

    assert size_of(ViewShared(0, (entry,))) - size_of(ViewShared(0, ())) <= bytes_of(entry)


def test_a_large_view_is_shared_in_parts_that_each_say_whose_they_are() -> None:
    """A node that does not know the sender learns it from whichever part comes first."""
    node = Node(ONE).knows(TWO)
    node.actor._merge([member(number) for number in range(100, 3000)], node.now)

    shares = sends(
        node.hears(TWO, ViewCompared(View.of([member(TWO)]).bucket_digests())), ViewShared
    )

    assert len(shares) > 1
    assert all(node.actor.me in share.message.view for share in shares)
    told = {entry.incarnation for share in shares for entry in share.message.view}
    assert told == {ONE, TWO, *range(100, 3000)}
    assert all(size_of(share.message) <= MESSAGE_BYTES_MAX for share in shares)


def test_a_client_gets_a_large_view_part_by_part() -> None:
    """It asks for what comes after the last entry that it has."""
    node = Node(ME).knows(ONE, TWO)
    node.actor._merge([member(number) for number in range(100, 3000)], node.now)
    got: list[ViewShared] = []
    after = 0
    while not got or got[-1].more:
        asked = ViewAsked(1, b"", after)
        (effect,) = node.actor.on_message(Origin(77, 5), asked, node.now)
        answer = effect.message  # type: ignore[union-attr]
        assert isinstance(answer, ViewShared)
        got.append(answer)
        after = answer.view[-1].incarnation

    members = [entry for part in got for entry in part.view]

    assert len(got) > 1
    assert View.of(members).digest() == node.actor.view.digest()
    assert all(size_of(part) <= MESSAGE_BYTES_MAX for part in got)
