"""Block events of stored pages: what a router reads of them."""

from __future__ import annotations

from peercache.connector.block_events import block_stored
from peercache.connector.metadata import StoredPages
from peercache.content.chain import Chain, page_keys_of, token_ids
from peercache.events.blocks import EventBatch, decode, encode


def told_of(first: int, pages: int, salts: dict[str, str]) -> StoredPages:
    chain = Chain("m", "int8", 2, salts)
    digests, ids = chain.digests(range(10)), token_ids(range(10))
    parent = digests[first - 1].tobytes() if first else None
    end = first + pages
    told = digests[first:end]
    return StoredPages(told, parent, ids[first * 2 : end * 2], 2, chain.salts, page_keys_of(told))


def test_events_chain_and_travel() -> None:
    """A later event's parent is the last block of the one before, and every field is read again."""
    events = [block_stored(told_of(0, 3, {})), block_stored(told_of(3, 2, {}))]

    assert events[0].parent is None
    assert events[1].parent == events[0].hashes[-1]
    assert (events[0].tokens, events[1].tokens) == ((0, 1, 2, 3, 4, 5), (6, 7, 8, 9))
    assert all(0 <= number < 2**63 for event in events for number in event.hashes)
    assert len({number for event in events for number in event.hashes}) == 5
    told = decode(encode(EventBatch(1.0, tuple(events))))
    assert (told.events, told.skipped) == (tuple(events), ())


def test_salts_are_told() -> None:
    """An adapter has a field of its own; other salts keep blocks of the same tokens apart."""
    event = block_stored(told_of(0, 2, {"lora": "x", "tenant": "t"}))

    assert (event.lora, event.extra) == ("x", ("tenant=t", "tenant=t"))
    assert not set(event.hashes) & set(block_stored(told_of(0, 2, {})).hashes)
