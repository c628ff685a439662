"""The codec: every message survives, and nothing else gets in."""

from __future__ import annotations

from typing import Any

import attrs
import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peercache.errors import LocalProtocolError, RemoteProtocolError
from peercache.model.member import Member
from peercache.wire import codec
from peercache.wire.envelope import ENVELOPE_VERSION, MESSAGES, Envelope
from peercache.wire.messages.directory import Lookup
from peercache.wire.messages.membership import Join
from peercache.wire.messages.pool import Commit
from peercache.wire.messages.session import ReportStats
from tests.examples import examples

U64 = st.integers(0, 2**64 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
UNITS = {
    "keys": 16,
    "records": 56,
    "drops": 24,
    "lengths": 8,
    "offsets": 8,
    "checksums": 8,
    "ages": 8,
    "calls": 5,
    "regions": 24,
    "changes": 24,
    "held": 24,
}

members = st.builds(
    Member,
    incarnation=st.integers(1, 2**64 - 1),
    counter=U64,
    state=st.integers(0, 3),
    head_rank=st.integers(0, 255),
    host_name=TEXT,
    control=TEXT,
    data=TEXT,
    boot_id=TEXT,
    segment=TEXT,
)

BY_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "int": U64,
    "bool": st.booleans(),
    "float": st.floats(allow_nan=False, allow_infinity=False),
    "str": TEXT,
    "bytes": st.binary(max_size=64),
    "Tag": st.integers(0, 2**96 - 1),
    "Member": members,
    "tuple[int, ...]": st.lists(U64, max_size=5).map(tuple),
    "tuple[Member, ...]": st.lists(members, max_size=3).map(tuple),
    "dict[str, int | float | str]": st.dictionaries(
        TEXT, st.one_of(st.integers(-(2**63), 2**63), st.floats(allow_nan=False), TEXT), max_size=5
    ),
}


def fields_of(kind: type[Any]) -> dict[str, st.SearchStrategy[Any]]:
    """Return a strategy a field, from the field's declared type."""
    found = {}
    for field in attrs.fields(kind):
        unit = UNITS.get(field.name)
        if unit is not None and field.type == "bytes":
            found[field.name] = st.integers(0, 4).flatmap(
                lambda n, unit=unit: st.binary(min_size=n * unit, max_size=n * unit)
            )
        else:
            found[field.name] = BY_TYPE[str(field.type)]
    return found


any_message = st.one_of([st.builds(kind, **fields_of(kind)) for kind in MESSAGES])
any_envelope = st.builds(Envelope, sender=U64, target=U64, message=any_message)


def raw_of(*parts: Any) -> bytes:
    """Return an envelope with these parts after version, cluster, sender and target."""
    return cbor2.dumps([ENVELOPE_VERSION, "c", 1, 2, *parts])


LOOKUP = MESSAGES.index(Lookup)
STATS = MESSAGES.index(ReportStats)


@given(any_envelope)
def test_every_message_survives_the_wire(envelope: Envelope) -> None:
    """Decoding what was encoded gives an equal envelope, for every kind of message."""
    assert codec.decode(codec.encode(envelope, cluster="c"), cluster="c") == envelope


@settings(max_examples=examples(60))
@given(any_envelope, st.data())
def test_every_truncation_is_refused(envelope: Envelope, data: st.DataObject) -> None:
    """A message that lost its end is refused, wherever it was cut."""
    raw = codec.encode(envelope, cluster="c")
    cut = data.draw(st.integers(0, len(raw) - 1))

    with pytest.raises(RemoteProtocolError):
        codec.decode(raw[:cut], cluster="c")


@given(st.binary(max_size=200))
def test_noise_is_refused_with_the_one_exception(raw: bytes) -> None:
    """Whatever bytes a stranger sends, the only exception is RemoteProtocolError."""
    with pytest.raises(RemoteProtocolError):
        codec.decode(raw, cluster="c")


@settings(max_examples=examples(60))
@given(any_envelope, st.data())
def test_a_flipped_bit_is_refused_or_gives_another_valid_message(
    envelope: Envelope, data: st.DataObject
) -> None:
    """No flipped bit makes any other exception, or a message that would not encode again."""
    raw = bytearray(codec.encode(envelope, cluster="c"))
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << (bit % 8)

    try:
        found = codec.decode(bytes(raw), cluster="c")
    except RemoteProtocolError:
        return

    assert codec.decode(codec.encode(found, cluster="c"), cluster="c") == found


@pytest.mark.parametrize(
    "raw",
    [
        cbor2.dumps({}),
        cbor2.dumps([]),
        cbor2.dumps([ENVELOPE_VERSION, "c", 1, 2]),
        raw_of(len(MESSAGES), 1, b""),
        raw_of(-1, 1, b""),
        raw_of(True, 1, b""),
        raw_of("Lookup", 1, b""),
        raw_of(LOOKUP, 1),
        raw_of(LOOKUP, 1, b"", b""),
        raw_of(LOOKUP, -1, b""),
        raw_of(LOOKUP, 2**64, b""),
        raw_of(LOOKUP, 1.0, b""),
        raw_of(LOOKUP, True, b""),
        raw_of(LOOKUP, 1, "text"),
        raw_of(LOOKUP, 1, b"x" * 17),  # not whole keys
        raw_of(STATS, 1, {"a": [1]}),
        raw_of(STATS, 1, {"a": True}),
        raw_of(STATS, 1, {1: 1}),
        raw_of(STATS, 1, [1]),
        cbor2.dumps([ENVELOPE_VERSION, "c", -1, 2, LOOKUP, 1, b""]),
        cbor2.dumps([ENVELOPE_VERSION, "c", 1, None, LOOKUP, 1, b""]),
        raw_of(LOOKUP, 1, b"")[:-1] + b"\x40\x00",  # something follows the envelope
        raw_of(LOOKUP, 1, cbor2.CBORTag(64, b"")),
        b"\x9f" + raw_of(LOOKUP, 1, b"")[1:] + b"\xff",  # an array of indefinite length
        b"\x81" * 3000 + b"\x00",
        b"\xd8\x1c" * 50 + b"\x00",
        b"\x9b\x7f\xff\xff\xff\xff\xff\xff\xff",  # an array that claims 2**63 items
        b"\x5b\x7f\xff\xff\xff\xff\xff\xff\xff",  # a byte string that claims 2**63 bytes
    ],
)
def test_what_no_peer_sends_is_refused(raw: bytes) -> None:
    """Wrong types, counts, tags and lengths are the peer's fault, and named so."""
    with pytest.raises(RemoteProtocolError):
        codec.decode(raw, cluster="c")


def test_oversized_message_is_refused_before_it_is_parsed() -> None:
    """The limit is checked on the raw bytes."""
    with pytest.raises(RemoteProtocolError, match="bytes"):
        codec.decode(b"\x00" * (codec.MESSAGE_BYTES_MAX + 1), cluster="c")


def test_member_without_identity_or_in_no_known_state_is_refused() -> None:
    """A view never contains node 0, nor a state that does not exist."""
    good = Member(1, 1, 0, 255, "h", "a:1", "a:2", "b", "/dev/shm/x")
    tag = MESSAGES.index(Join)
    for bad in (attrs.evolve(good, incarnation=0), attrs.evolve(good, state=4)):
        with pytest.raises(RemoteProtocolError, match="member"):
            codec.decode(raw_of(tag, list(attrs.astuple(bad))), cluster="c")
    assert codec.decode(raw_of(tag, list(attrs.astuple(good))), cluster="c").message.member == good  # type: ignore[union-attr]


def test_another_version_and_another_cluster_are_distinguished() -> None:
    """Both sides can say loudly what does not fit, so each has an exception of its own."""
    newer = cbor2.dumps([ENVELOPE_VERSION + 1, "c", 1, 2, LOOKUP, 1, b""])

    with pytest.raises(codec.WrongVersion) as version:
        codec.decode(newer, cluster="c")
    with pytest.raises(codec.WrongCluster) as cluster:
        codec.decode(raw_of(LOOKUP, 1, b""), cluster="other")

    assert version.value.version == ENVELOPE_VERSION + 1
    assert cluster.value.cluster == "c"
    assert "ours is 'other': name the same one with cluster" in cluster.value.what


def test_tags_are_append_only() -> None:
    """A class's place in MESSAGES is its tag on the wire: the first ones never move."""
    assert [kind.__name__ for kind in MESSAGES[:32]] == [
        "Hello", "Welcome", "Refused", "HelloRequired",
        "Join", "Heartbeat", "HeartbeatSeen", "ShareView", "RequestView",
        "Lookup", "Located", "ReportStale", "Put", "Delete", "Acknowledged",
        "StreamSummary", "SummaryDiffers", "Repair",
        "Reserve", "Granted", "Commit", "Committed", "Abort", "LiveReservations",
        "Touched", "Remove", "Clear", "Removed", "RequestStats", "ReportStats",
        "SummaryMatches", "Counted",
    ]  # fmt: skip


def test_a_question_is_sent_with_the_number_that_its_connection_gives_it() -> None:
    """In place of its own, and nothing else changes; without one it keeps its own."""
    question = Commit(5, 6, b"1", bytes(8), 0.5, bytes(16), (7, 8))

    numbered = codec.encode(Envelope(1, 2, question), cluster="c", request=99)
    kept = codec.encode(Envelope(1, 2, question), cluster="c")

    assert codec.decode(numbered, cluster="c").message == attrs.evolve(question, request=99)
    assert codec.decode(kept, cluster="c").message == question


def test_a_message_that_no_peer_would_take_is_not_encoded() -> None:
    """Its sender has a bug: it must cut."""
    with pytest.raises(LocalProtocolError, match="Lookup"):
        codec.encode(Envelope(1, 2, Lookup(1, bytes(codec.MESSAGE_BYTES_MAX))), cluster="c")


def test_more_items_than_any_sender_needs_are_refused_in_milliseconds() -> None:
    """Each may be one byte: the bound of bytes alone would leave a quarter of a million."""
    raw = raw_of(0, [[0] * 1000] * 250)

    with pytest.raises(RemoteProtocolError, match="items"):
        codec.decode(raw, cluster="c")


def test_a_member_with_endless_texts_is_refused() -> None:
    """A view of a thousand of them would not fit anywhere."""
    member = Member(1, 1, 0, 255, "h", "a:1", "a:2", "b", "/" * codec.MEMBER_TEXT_MAX)
    raw = codec.encode(Envelope(1, 2, Join(member)), cluster="c")

    with pytest.raises(RemoteProtocolError, match="texts"):
        codec.decode(raw, cluster="c")
