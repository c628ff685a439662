"""Tenants of the disk: the same promises as in the pool, page by page."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from peercache.actors.disk.actor import DiskTier
from peercache.actors.disk.index import DONORS_MAX, DiskIndex
from peercache.actors.disk.slabs import BLOCK_BYTES
from peercache.actors.mailboxes import DiskIndexed, NamespaceNamed
from peercache.actors.origin import Origin
from peercache.actors.ports import DiskOpened
from peercache.actors.tenants import OTHERS, Tenants
from peercache.config.entries import parse_quotas
from peercache.model.keys import Namespace, parts_of, tags_of
from peercache.observability.metrics import Metrics
from tests.examples import examples
from tests.unit.actors.disk_world import DiskWorld

SLAB = 64 * BLOCK_BYTES
TAGS = {name: Namespace(name, "geometry").tag() for name in "abc-"}


class Shared:
    """An index that tenants share, and what a dictionary says of it."""

    def __init__(self, text: str, slabs: int = 4) -> None:
        self.index = DiskIndex(capacity_bytes=slabs * SLAB, slab_bytes=SLAB)
        self.tenants = Tenants(parse_quotas(text), whole=slabs * SLAB, disk=True)
        self.index.share_between(self.tenants)
        self.owner: dict[bytes, str] = {}
        self.count = 0

    def add(self, name: str, count: int, blocks: int = 2) -> list[str]:
        """Store pages whose slots have so many blocks; return whose pages went for them."""
        keys = [(self.count + at).to_bytes(16, "big") for at in range(count)]
        self.count += count
        begun = self.index.begin(
            b"".join(keys),
            tags_of([TAGS[name]] * count),
            np.array([(blocks - 1) * BLOCK_BYTES] * count, np.uint64),
            np.array([self.count] * count, np.uint64),
            100,
        )
        went = [
            self.owner.pop(begun.gone.keys[at : at + 16])
            for at in range(0, 16 * begun.gone.count, 16)
        ]
        assert begun.gone.namespaces.tolist() == [parts_of(TAGS[owner]) for owner in went]
        self.index.finish(begun.entries[begun.entries >= 0])
        for key, entry in zip(keys, begun.entries.tolist(), strict=True):
            if entry >= 0:
                self.owner[key] = name
        self.index.check()
        return went

    def pages(self) -> Counter[str]:
        """Return how many pages each has."""
        return Counter(self.owner.values())

    def taken(self) -> dict[str, int]:
        """Return the bytes of each, as the index counts them."""
        return {name: self.tenants.of(tag).taken for name, tag in TAGS.items()}


def test_borrowed_room_goes_back_to_a_tenant_within_its_quota() -> None:
    """And no more than what was borrowed."""
    shared = Shared("a=50%;b=50%")
    shared.add("a", 200)

    for _ in range(30):
        shared.add("b", 7)

    half = 2 * SLAB // (2 * BLOCK_BYTES)
    assert shared.pages()["a"] == half
    assert shared.pages()["b"] >= half - 4, "a slab's own block holds no page"


def test_the_borrower_of_the_lowest_priority_gives_first() -> None:
    """Its pages go before colder ones of a borrower that counts for more."""
    shared = Shared("a=50%;b=10%,priority=2;c=10%,priority=1")
    shared.add("b", 60)
    shared.add("c", 64)

    assert set(shared.add("a", 40)) == {"c"}


def test_a_flood_without_a_quota_evicts_nothing_that_is_sure() -> None:
    """Pages of all sizes."""
    shared = Shared("a=50%")
    shared.add("a", 60)

    went = [
        name for blocks in (2, 3, 9, 2) for _ in range(20) for name in shared.add("-", 8, blocks)
    ]

    assert set(went) == {"-"}
    assert shared.pages()["a"] == 60


def test_borrowed_room_of_another_size_goes_back_however_busy_its_borrower_is() -> None:
    """Models differ in the size of their pages: a quota that one size of them gets is none."""
    shared = Shared("a=60%", slabs=40)
    for _ in range(60):
        shared.add("-", 31)

    for _ in range(400):
        shared.add("a", 2, 9)
        shared.add("-", 31)

    sure = shared.tenants.of(TAGS["a"])
    assert sure.taken > 0.95 * sure.quota
    assert shared.pages()["-"] > 13 * 31


def test_of_busy_borrowers_of_another_size_the_lowest_priority_gives() -> None:
    shared = Shared("a=60%;b=1%,priority=2;c=1%,priority=1", slabs=40)
    for name in "cb":
        for _ in range(20):
            shared.add(name, 31)

    went = [name for _ in range(90) for name in shared.add("a", 1, 9)]

    assert set(went) == {"a", "c"}


def test_a_new_size_gets_room_however_many_colder_slabs_cannot_go() -> None:
    """The coldest slabs are of a tenant within its quota, and more than are looked at closely."""
    shared = Shared("a=70%", slabs=2 * DONORS_MAX)
    a_slab = 31
    for name, slabs in (("a", DONORS_MAX + 8), ("-", DONORS_MAX - 8)):
        for _ in range(slabs):
            assert shared.add(name, a_slab) == []

    went = shared.add("-", 7, 9)

    assert set(went) == {"-"}
    assert shared.pages() == {"a": (DONORS_MAX + 8) * a_slab, "-": (DONORS_MAX - 9) * a_slab + 7}


def test_a_new_size_gets_room_though_colder_slabs_count_for_more() -> None:
    """They are of a borrower of a higher priority, which keeps them."""
    shared = Shared("a=1%,priority=2;b=1%,priority=1", slabs=2 * DONORS_MAX)
    for name in "ab":
        for _ in range(DONORS_MAX):
            shared.add(name, 31)

    assert set(shared.add("b", 7, 9)) == {"b"}


@given(
    st.lists(
        st.tuples(st.sampled_from("abc-"), st.integers(1, 12), st.sampled_from([2, 3, 5, 9])),
        max_size=30,
    )
)
@settings(max_examples=examples(25))
def test_no_page_goes_for_another_tenant_while_its_own_is_within_its_quota(
    steps: list[tuple[str, int, int]],
) -> None:
    """In every order of writers and sizes; and the sums are those of a slow count."""
    shared = Shared("a=50%,priority=1;b=25%;c=25%,priority=2")
    for name, count, blocks in steps:
        before = shared.taken()
        for victim in set(shared.add(name, count, blocks)) - {name}:
            assert before[victim] > shared.tenants.of(TAGS[victim]).quota
            # A page at most is given beyond what was borrowed.
            left = shared.tenants.of(TAGS[victim])
            assert left.taken > left.quota - 9 * BLOCK_BYTES
        entries = shared.index._entries
        slow = {
            tag: sum(entries.slot_bytes(np.array([entry])) for entry in entries.held().tolist()
                     if entries.rows["namespace"][entry].item() == parts_of(tag))
            for tag in TAGS.values()
        }  # fmt: skip
        assert shared.taken() == {name: slow[tag] for name, tag in TAGS.items()}


def test_pages_evicted_from_the_disk_are_counted_by_tenant() -> None:
    """Seven of a borrower go for seven of a tenant that is sure of the disk, and then its own."""
    world = DiskWorld(slabs=1, quotas=parse_quotas("sure=100%"))
    sure = Namespace("sure").tag()
    world.set(*range(7))
    world.finish()

    def evicted() -> tuple[float, float]:
        return tuple(
            world.count("namespace_pages_evicted_total", namespace=name, tier="disk")
            for name in ("sure", OTHERS)
        )

    assert evicted() == (0, 0)
    world.set(*range(100, 107), namespace=sure)
    world.finish()
    assert evicted() == (0, 7)
    world.set(*range(200, 203), namespace=sure)
    world.finish()
    assert evicted() == (3, 7)
    assert world.count("disk_pages_lost_total", reason="evicted") == 10


def test_a_name_that_is_told_later_finds_its_pages() -> None:
    """A restart knows tags only; a writer that says its name gets what its pages are due."""
    metrics = Metrics()
    tier = DiskTier(
        queue_bytes_max=SLAB, tell_rate=1000, metrics=metrics, quotas=parse_quotas("team-*=50%")
    )
    tag = Namespace("team-1").tag()
    index = DiskIndex(capacity_bytes=4 * SLAB, slab_bytes=SLAB)
    lengths, sequences = np.array([BLOCK_BYTES], np.uint64), np.ones(1, np.uint64)
    index.begin(bytes(16), tags_of([tag]), lengths, sequences, 1)
    entries = index.entries(np.array([0]))
    fresh = DiskIndex(capacity_bytes=4 * SLAB, slab_bytes=SLAB)
    fresh.load(entries)
    opened = DiskOpened(4 * SLAB, SLAB, entries, 100)
    tier.on_message(Origin(0), DiskIndexed(opened, fresh), 0.0)
    assert fresh.tenants.of(tag) is fresh.tenants.others

    tier.on_message(Origin(0), NamespaceNamed("team-1"), 0.0)

    assert fresh.tenants.of(tag).taken == 2 * BLOCK_BYTES
    assert fresh.tenants.others.taken == 0
    labels = {"namespace": "team-1", "tier": "disk"}
    shown = metrics.registry.get_sample_value("peercache_namespace_bytes", labels)
    assert shown == 2 * BLOCK_BYTES
