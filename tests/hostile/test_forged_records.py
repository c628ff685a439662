"""Records that lie: each names memory or disk of an honest node, and becomes a counted miss."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from peercache.client.client import Client
from peercache.model.keys import KEY, Namespace, page_keys
from peercache.model.records import HAS_CHECKSUM, Records
from tests.system.nodes import LocalCluster, keys_of, pages_of, read

STORED, WANTED = keys_of("forged", 2)


def key_of(name: str) -> bytes:
    """Return the page key of a name in the clients' namespace."""
    key: bytes = page_keys([name], Namespace().digest()).tobytes()
    return key


def record_of(client: Client, name: str) -> Records:
    """Return the record that a client knows of a page."""
    records, known = client._wiring.cache.find(np.frombuffer(key_of(name), KEY))
    assert known.all()
    return records


def believe(client: Client, record: Records) -> None:
    """Give a client a record, as an owner that lies does."""
    client._wiring.cache.store(record, client._wiring.clock())


def another_key(record: Records) -> None:
    """Lead from the wanted page to the slot of the stored one."""
    record["key"] = np.frombuffer(key_of(WANTED), "V16")


def no_checksum(record: Records) -> None:
    """Lead there, and name no checksum that could tell."""
    another_key(record)
    record["flags"] &= np.uint32(~HAS_CHECKSUM & 0xFFFFFFFF)


def missed(client: Client, reason: str) -> float:
    """Return how many pages a client missed for a reason."""
    counted = client.metrics.pages_missed.labels(reason)._value.get()
    return float(counted)


@pytest.mark.parametrize("verify", ["generation", "full"])
@pytest.mark.parametrize("forge", [another_key, no_checksum])
@pytest.mark.parametrize("fabric", ["shm", "tcp"])
def test_a_record_that_leads_to_another_page_is_a_counted_miss(
    fabric: str, forge: Callable[[Records], None], verify: str
) -> None:
    """Honest nodes, an honest reader, and a record of page B that names the slot of page A."""
    with LocalCluster() as cluster:
        node = cluster.start()
        client = cluster.client(node, verify=verify, fabric=fabric)
        assert client.batch_set([STORED], pages_of([STORED])) == [True]
        assert read(client, [STORED]) == [True]
        record = record_of(client, STORED)
        forge(record)
        believe(client, record)

        assert read(client, [WANTED]) == [False]
        assert missed(client, "wrong_page") == 1
        assert read(client, [STORED]) == [True]


@pytest.mark.parametrize("fabric", ["shm", "tcp"])
def test_a_page_of_another_name_is_no_hit(fabric: str) -> None:
    """A reader of team B believes a record, key and all, of a page that team A has set."""
    with LocalCluster() as cluster:
        node = cluster.start()
        writer = cluster.client(node, fabric=fabric)
        reader = cluster.client(node, fabric=fabric)
        assert writer.batch_set([STORED], pages_of([STORED])) == [True]
        assert read(reader, [STORED]) == [True]

        reader._wiring.reader._space ^= 1

        assert read(reader, [STORED]) == [False]
        assert missed(reader, "wrong_page") == 1


def test_full_verification_refuses_a_record_without_a_checksum() -> None:
    """The right page, and a record that names no checksum: with verify=full that is no hit."""
    with LocalCluster() as cluster:
        node = cluster.start()
        writer = cluster.client(node, verify="generation")
        full = cluster.client(node, verify="full")
        assert writer.batch_set([STORED], pages_of([STORED])) == [True]

        assert read(writer, [STORED]) == [True]
        assert read(full, [STORED]) == [False]
        assert missed(full, "no_checksum") == 1
