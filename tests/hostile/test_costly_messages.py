"""Messages that are cheap to send and would be dear to take."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import attrs
import cbor2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peercache.actors.directory.actor import DirectoryShard
from peercache.actors.membership.gossip import PART_MEMBERS_MAX
from peercache.actors.origin import Origin
from peercache.errors import RemoteProtocolError
from peercache.model.member import Member
from peercache.model.records import RECORD
from peercache.node.switchboard import STRANGER_BYTES_MAX
from peercache.wire import codec
from peercache.wire.codec import ITEMS_MAX, MESSAGE_BYTES_MAX, decode
from peercache.wire.messages.directory import Located, Lookup, ReportStale
from peercache.wire.messages.membership import ShareView
from peercache.wire.messages.session import HelloRequired, Welcome
from tests.hostile.garbage import any_member, any_message, enveloped, hello
from tests.hostile.strangers import MIB, Caller, Vitals, metric, one_node
from tests.pace import FACTOR, assert_within


def bomb(filler: bytes, size: int = MESSAGE_BYTES_MAX) -> bytes:
    """Return an array of as many one-byte items as a message can hold."""
    count = size - 5
    return b"\x9a" + count.to_bytes(4, "big") + filler * count


@pytest.mark.parametrize("filler", [b"\x00", b"\x80", b"\xa0", b"\xf6", b"\x40"])
def test_a_message_of_a_quarter_million_items_is_refused_before_any_is_made(filler: bytes) -> None:
    """Empty lists of any connecting process would take 20 MB and a tenth of a second each."""
    raw = bomb(filler)
    tracemalloc.start()

    with pytest.raises(RemoteProtocolError, match="items"):
        decode(raw, cluster="c")

    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < MIB


def items_in(decoded: Any) -> int:
    """Return how many CBOR items made this, the slow way."""
    if isinstance(decoded, list):
        return 1 + sum(items_in(item) for item in decoded)
    if isinstance(decoded, dict):
        return 1 + sum(items_in(part) for pair in decoded.items() for part in pair)
    return 1


def has_too_many_items(raw: bytes) -> bool:
    """Return whether a message is refused for that; other damage is found after it."""
    try:
        decode(raw, cluster="c")
    except RemoteProtocolError as error:
        return "more than" in str(error)
    return False


@given(st.randoms(use_true_random=False))
def test_items_are_counted_as_the_decoder_would_find_them(rng: Any) -> None:
    """The count of heads is the count of items: honest messages are never refused by it."""
    raw = enveloped(any_message(rng), cluster="c", sender=1)
    if "nan" in repr(cbor2.loads(raw)) or b"\xc2" in raw or b"\xc3" in raw:
        return  # A tag, or what the encoder makes of it, is no item of ours.
    count = items_in(cbor2.loads(raw))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "ITEMS_MAX", count)
        assert not has_too_many_items(raw)
        patch.setattr(codec, "ITEMS_MAX", count - 1)
        assert has_too_many_items(raw)


def test_the_largest_part_of_a_view_has_fewer_items_than_are_allowed() -> None:
    """Else a cluster would stop to know itself one day."""
    fields = len(attrs.fields(Member))
    assert PART_MEMBERS_MAX * (fields + 1) + 10 < ITEMS_MAX


def test_a_dispute_about_very_many_holders_takes_its_time_only_once() -> None:
    """To look through every record for each holder took 1.3 s for 20,000, and squared for more."""
    records = np.zeros(MESSAGE_BYTES_MAX // RECORD.itemsize - 10, RECORD)
    records["holder"] = np.arange(len(records))
    shard = DirectoryShard(incarnation=1)
    started = time.thread_time()

    effects = shard.on_message(Origin(5, 7), ReportStale(records.tobytes()), 0.0)

    assert effects == []
    assert_within(time.thread_time() - started, FACTOR)


def test_what_no_hello_can_be_is_not_even_decoded() -> None:
    """A stranger's hundred thousand lists are dropped as a stranger's, and it is asked to send
    Hello.

    Had they been decoded, they would have been found malformed.
    """
    with one_node() as (cluster, node), Caller.at(node, "control") as stranger:
        long = bomb(b"\x80", STRANGER_BYTES_MAX + 1)
        stranger.connection.sendall(stranger.framed(long))
        answer = stranger.answer()
        dropped = metric(node, "peercache_messages_dropped")

        for said in (hello(cluster.name), Lookup(2, bytes(16 * 2000))):
            stranger.say(said, sender=5)
        welcome, located = (stranger.answer() for _ in range(2))

        assert isinstance(answer, HelloRequired)
        assert {reason: count for reason, count in dropped.items() if count} == {"stranger": 1.0}
        assert isinstance(welcome, Welcome)
        assert isinstance(located, Located)


def test_a_quarter_million_items_from_an_admitted_client_stall_no_other() -> None:
    """A reader's bombs cost it the connection's time, not the node's memory."""
    with one_node() as (cluster, node), Caller.at(node, "home") as reader:
        name = cluster.name
        reader.say(hello(name), sender=5)
        reader.hear()
        before = Vitals.of(node)

        for filler in (b"\x80", b"\xa0", b"\x00"):
            reader.connection.sendall(reader.framed(bomb(filler, MESSAGE_BYTES_MAX - 64)))
        keys = bytes(16)
        reader.say(Lookup(9, keys), sender=5)
        answer = reader.answer()

        assert answer == Located(9, b"")
        assert Vitals.of(node).rss_bytes - before.rss_bytes < 64 * MIB
        assert metric(node, "peercache_messages_dropped")["malformed"] >= 3


def test_views_of_bogus_members_are_still_views() -> None:
    """The generator of these tests makes what the codec takes: else they would test nothing."""
    import random

    rng = random.Random(7)
    for _ in range(200):
        view = ShareView(0, tuple(any_member(rng) for _ in range(3)))
        raw = enveloped(view, cluster="c", sender=1)
        assert decode(raw, cluster="c").message == view
