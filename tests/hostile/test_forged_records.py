"""Records that lie: each names memory or disk of an honest node, and becomes a counted miss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from peercache.client.client import Client
from peercache.model.keys import Namespace, PageKeys, page_keys
from peercache.model.records import HAS_CHECKSUM, Records
from peercache.paths.lookup import LocationCache
from tests.system.nodes import LocalCluster, keys_of, pages_of, read

STORED, WANTED = keys_of("forged", 2)


PLAIN, TEAM_B = Namespace(), Namespace("team-b")


def key_of(name: str, namespace: Namespace = PLAIN) -> bytes:
    """Return the page key of a name in a namespace."""
    key: bytes = page_keys([name], namespace.digest()).tobytes()
    return key


class Belief:
    """What the clients of this process believe of pages, as of an owner that is wrong."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Note every record that a client knows; give it others where the test requests it."""
        self.known: dict[bytes, Records] = {}
        self.forged: dict[bytes, Records] = {}
        find = LocationCache.find

        def find_or_believe(cache: LocationCache, keys: PageKeys, **more: Any) -> Any:
            records, known = find(cache, keys, **more)
            for at, name in enumerate(key.tobytes() for key in keys):
                if name in self.forged:
                    records[at], known[at] = self.forged[name][0], True
                elif known[at]:
                    self.known[name] = records[at : at + 1].copy()
            return records, known

        monkeypatch.setattr(LocationCache, "find", find_or_believe)


@pytest.fixture
def belief(monkeypatch: pytest.MonkeyPatch) -> Belief:
    """What clients believe."""
    return Belief(monkeypatch)


def another_key(record: Records) -> None:
    """Lead from the wanted page to the slot of the stored one."""
    record["key"] = np.frombuffer(key_of(WANTED), "V16")


def no_checksum(record: Records) -> None:
    """Lead there, and name no checksum that could differ."""
    another_key(record)
    record["flags"] &= np.uint32(~HAS_CHECKSUM & 0xFFFFFFFF)


def missed(client: Client, reason: str) -> object:
    """Return how many pages a client missed for a reason."""
    return client.stats().get(f"pages_missed_{reason}")


@pytest.mark.parametrize("verify", ["generation", "full"])
@pytest.mark.parametrize("forge", [another_key, no_checksum])
@pytest.mark.parametrize("fabric", ["shm", "tcp"])
def test_a_record_that_leads_to_another_page_is_a_counted_miss(
    belief: Belief, fabric: str, forge: Callable[[Records], None], verify: str
) -> None:
    """Honest nodes, an honest reader, and a record of page B that names the slot of page A."""
    with LocalCluster() as cluster:
        node = cluster.start()
        client = cluster.client(node, verify=verify, fabric=fabric)
        assert client.batch_set([STORED], pages_of([STORED])) == [True]
        # The second time it knows where the page is.
        assert [read(client, [STORED]) for _ in range(2)] == [[True]] * 2
        record = belief.known[key_of(STORED)].copy()
        forge(record)
        belief.forged[key_of(WANTED)] = record

        assert read(client, [WANTED]) == [False]
        assert missed(client, "wrong_page") == 1
        assert read(client, [STORED]) == [True]


@pytest.mark.parametrize("fabric", ["shm", "tcp"])
def test_a_page_of_another_name_is_no_hit(belief: Belief, fabric: str) -> None:
    """A reader of team B believes a record, key and all, of a page that team A has set."""
    with LocalCluster() as cluster:
        node = cluster.start()
        writer = cluster.client(node, fabric=fabric)
        reader = cluster.client(node, fabric=fabric, namespace=TEAM_B)
        assert writer.batch_set([STORED], pages_of([STORED])) == [True]
        assert [read(writer, [STORED]) for _ in range(2)] == [[True]] * 2
        belief.forged[key_of(STORED, TEAM_B)] = belief.known[key_of(STORED)]

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
