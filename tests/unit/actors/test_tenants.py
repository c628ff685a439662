"""Tenants of the pool: what each is guaranteed, what it borrows, and who gives first."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peercache.actors.mailboxes import NamespaceNamed
from peercache.actors.pool.size_classes import Slot
from peercache.actors.tenants import OTHERS, TENANTS_MAX, Tenant, Tenants
from peercache.config.entries import parse_quotas, written_quotas
from peercache.model.keys import Namespace, tags_of
from peercache.observability.metrics import Metrics
from peercache.wire.messages.pool import REFUSED_FULL, Granted
from tests.examples import examples
from tests.unit.actors.pool_world import GRANULE, World
from tests.unit.actors.slots_rig import Rig


def tenants_of(text: str, whole: int = 64) -> Tenants:
    return Tenants(parse_quotas(text), whole=whole)


def tenant_of(tenants: Tenants, name: str) -> Tenant:
    return tenants.of(Namespace(name).space_tag())


def rig_of(text: str, *, whole: int = 64, units: int = 16) -> tuple[Rig, dict[str, Tenant]]:
    """Return a pool of `units` units, and its tenants a, b, c and the others."""
    tenants = tenants_of(text, whole)
    named = {name: tenant_of(tenants, name) for name in "abc"}
    return Rig(whole, units_about=units, tenants=tenants), named | {"-": tenants.others}


def fill(rig: Rig, tenant: Tenant, count: int) -> list[Slot]:
    return [rig.put(1, tenant) for _ in range(count)]


def taken(rig: Rig) -> Counter[Tenant]:
    """Count again what the extents of each tenant take."""
    counted: Counter[Tenant] = Counter()
    for extent, granules in rig.extents():
        counted[extent.size_class.tenant] += granules
    return counted


def largest_extents(rig: Rig) -> Counter[Tenant]:
    """Return the granules of the largest extent of each tenant."""
    largest: Counter[Tenant] = Counter()
    for extent, granules in rig.extents():
        largest[extent.size_class.tenant] = max(largest[extent.size_class.tenant], granules)
    return largest


# --- stories -------------------------------------------------------------------------------------


def test_room_that_is_free_may_be_borrowed() -> None:
    """A quota is no limit while nothing else wants the room."""
    rig, named = rig_of("a=25%;b=25%")

    fill(rig, named["a"], 64)

    assert named["a"].taken == 64
    assert not rig.evicted


def test_borrowed_room_goes_back_to_a_tenant_within_its_quota() -> None:
    """It gets all that it is guaranteed, and the borrower keeps what it is guaranteed itself."""
    rig, named = rig_of("a=50%;b=50%")
    fill(rig, named["a"], 64)

    fill(rig, named["b"], 400)

    assert (named["a"].taken, named["b"].taken) == (32, 32)


def test_a_tenant_over_its_quota_evicts_its_own_oldest_pages() -> None:
    """Pages of a tenant within its quota stay, be they ever so old."""
    rig, named = rig_of("a=50%;b=50%")
    old = fill(rig, named["a"], 32)
    own = fill(rig, named["b"], 32)

    fill(rig, named["b"], 100)

    assert set(rig.evicted) == {slot.first for slot in own}, "none of the other's"
    assert all(slot.first in rig.held for slot in old)


def test_the_borrower_of_the_lowest_priority_gives_first() -> None:
    """Its pages go before colder ones of a borrower that counts for more."""
    rig, named = rig_of("a=50%;b=10%,priority=2;c=10%,priority=1")
    high = fill(rig, named["b"], 32)
    fill(rig, named["c"], 32)

    fill(rig, named["a"], 24)

    assert all(slot.first in rig.held for slot in high), "colder, and of a higher priority"


def test_a_higher_priority_borrows_from_a_lower_one_and_not_the_other_way() -> None:
    """What is left of all quotas goes by priority; each keeps what it is guaranteed."""
    rig, named = rig_of("a=25%,priority=2;b=25%,priority=1")
    fill(rig, named["b"], 64)

    fill(rig, named["a"], 400)
    assert (named["a"].taken, named["b"].taken) == (48, 16)
    before = len(rig.evicted)
    fill(rig, named["b"], 100)

    assert (named["a"].taken, named["b"].taken) == (48, 16)
    assert len(rig.evicted) == before + 100


def test_namespaces_without_a_quota_share_what_is_left() -> None:
    """They may fill the pool, and give before any tenant within its quota evicts its own."""
    rig, named = rig_of("a=75%")
    fill(rig, named["-"], 64)

    own = fill(rig, named["a"], 48)

    assert all(slot.first in rig.held for slot in own)
    assert (named["a"].taken, named["-"].taken) == (48, 16)


def test_a_new_page_size_takes_room_from_its_own_tenant() -> None:
    """Else it would come from a quota, or the size could never be stored."""
    rig, named = rig_of("a=50%;b=50%")
    kept = fill(rig, named["a"], 32)
    fill(rig, named["b"], 32)

    rig.put(3, named["b"])

    assert all(slot.first in rig.held for slot in kept)
    assert (named["a"].taken, named["b"].taken) == (32, 32)


def test_a_page_of_several_units_takes_no_more_than_what_was_borrowed() -> None:
    """One extent at most is given beyond it, though the page wants four."""
    rig, named = rig_of("a=50%;b=50%")
    fill(rig, named["a"], 36)
    fill(rig, named["b"], 28)

    assert rig.take(16, tenant=named["b"]) is not None, "in its own room"
    assert named["a"].taken >= 32


# --- who is a tenant ------------------------------------------------------------------------------


def test_each_name_that_fits_a_pattern_has_a_quota_of_its_own() -> None:
    """Until all that is left of exact names is given away."""
    tenants = tenants_of("team-*=30%;sure=50%", whole=100)

    quotas = [tenants.named(name) for name in ("team-a", "team-b", "team-c", "other", "team-a")]

    assert [one and one.quota for one in quotas] == [30, 20, 0, None, None]
    assert tenant_of(tenants, "sure").quota == 50
    assert tenant_of(tenants, "other") is tenants.others


def test_an_exact_name_goes_before_a_pattern() -> None:
    """Wherever it stands."""
    tenants = tenants_of("*=1%;a=30%", whole=100)

    assert tenants.named("a") is None, "it was there from the start"
    assert tenant_of(tenants, "a").quota == 30


def test_names_beyond_the_bound_replace_idle_ones_or_share() -> None:
    """A name costs room and lines of metrics, and is a client's to choose."""
    tenants = tenants_of("*=1KiB", whole=2**20)
    first = [tenants.named(f"n{number}") for number in range(TENANTS_MAX)]
    for tenant in first[1:]:
        assert tenant is not None
        tenant.taken = 1

    late = tenants.named("late")
    assert late is not None, "the first one is idle"
    late.taken = 1
    assert tenants.named("later") is None
    assert tenant_of(tenants, "later") is tenants.others
    assert tenant_of(tenants, "n0") is tenants.others


@given(st.lists(st.sampled_from(["a", "b", "c", "d", "e"])))
def test_tenants_of_a_batch_are_those_of_each(names: list[str]) -> None:
    """The vectorised answer is that of one after the other."""
    tenants = tenants_of("a=1%;c=1%;b*=2%")
    tenants.named("b")
    tags = [Namespace(name, "geometry").tag() for name in names]

    numbers = tenants.numbers(tags_of(tags))

    assert [tenants.all()[number] for number in numbers] == [tenants.of(tag) for tag in tags]


# --- every order ----------------------------------------------------------------------------------

SIZES = (1, 2, 4, 5)

STEPS = st.lists(
    st.tuples(st.sampled_from("abc-"), st.sampled_from(SIZES), st.integers(1, 24)), max_size=25
)


@given(STEPS, st.randoms(use_true_random=False))
@settings(max_examples=examples(25))
def test_no_page_goes_for_another_tenant_while_its_own_is_within_its_quota(
    steps: list[tuple[str, int, int]], rng: random.Random
) -> None:
    """Nor does a tenant with a quota ever fail to store a page that fits into a unit."""
    rig, named = rig_of("a=50%,priority=1;b=25%;c=25%,priority=2", units=16)
    owner: dict[int, Tenant] = {}
    for name, size, count in steps:
        tenant = named[name]
        for _ in range(count):
            before, evicted = taken(rig), len(rig.evicted)
            largest = largest_extents(rig)
            slot = rig.take(size, tenant=tenant)
            for first in rig.evicted[evicted:]:
                victim = owner.pop(first)
                assert victim is tenant or before[victim] > victim.quota
                # Whole extents are given: the last one may be more than what was borrowed.
                assert victim is tenant or taken(rig)[victim] > victim.quota - largest[victim]
            assert all(one.taken == taken(rig)[one] for one in named.values())
            if slot is None:
                assert size > rig.slots.unit or not tenant.quota
                continue
            rig.hold(slot)
            owner[slot.first] = tenant
            if rng.random() < 0.1:
                gone = rng.choice(list(rig.held.values()))
                rig.release(gone)
                del owner[gone.first]
    rig.check()


def put(world: World, client: int, keys: range, length: int, *, namespace: int) -> None:
    """Reserve, write and commit."""
    world.reserve(client, keys, length, namespace=namespace)
    world.commit(client)


# --- the pool -------------------------------------------------------------------------------------


def test_a_pool_keeps_the_pages_of_a_tenant_within_its_quota() -> None:
    """A flood of another namespace evicts nothing of it, and is notified when there is no room."""
    world = World(granules=64, units_about=16, quotas=parse_quotas("a=50%;b=50%"))
    a, b = Namespace("a").tag(), Namespace("b").tag()
    put(world, 1, range(32), GRANULE, namespace=a)

    for start in range(1000, 1400, 8):
        put(world, 2, range(start, start + 8), GRANULE, namespace=b)

    here = world.pool.pages.of_namespace(a)
    assert len(here) == 32
    pages = {tenant.name: count for tenant, count in world.pool.pages_of_tenants().items()}
    assert pages == {"a": 32, "b": 32, OTHERS: 0}
    assert len(world.pool.pages.of_namespace(b)) == 32
    answer = world.reserve(2, range(2000, 2001), 40 * GRANULE, namespace=b)
    assert isinstance(answer, Granted)
    assert answer.states == bytes((REFUSED_FULL,))


def test_gauges_show_each_tenant_once_its_name_is_known() -> None:
    """And none where there are no quotas."""
    metrics = Metrics()
    world = World(granules=64, units_about=16, metrics=metrics, quotas=parse_quotas("t-*=25%"))
    world.say(0, NamespaceNamed("t-1"))
    put(world, 1, range(3), GRANULE, namespace=Namespace("t-1").tag())

    def shown(name: str) -> float | None:
        labels = {"namespace": name, "tier": "pool"}
        return metrics.registry.get_sample_value("peercache_namespace_bytes", labels)

    assert shown("t-1") == 4 * GRANULE, "an extent"
    assert shown(OTHERS) == 0
    assert shown("t-2") is None


def test_evicted_pages_are_counted_by_tenant() -> None:
    """A borrower's pages that go for those of a tenant within its quota, and a tenant's own."""
    metrics = Metrics()
    world = World(granules=64, units_about=16, metrics=metrics, quotas=parse_quotas("a=50%"))
    a = Namespace("a").tag()

    def evicted() -> tuple[float | None, ...]:
        return tuple(
            metrics.registry.get_sample_value(
                "peercache_namespace_pages_evicted_total", {"namespace": name, "tier": "pool"}
            )
            for name in ("a", OTHERS)
        )

    for start in range(0, 64, 8):
        put(world, 1, range(start, start + 8), GRANULE, namespace=1)
    assert evicted() == (0, 0)
    for start in range(100, 132, 8):
        put(world, 1, range(start, start + 8), GRANULE, namespace=a)
    assert evicted() == (0, 32)
    put(world, 1, range(200, 205), GRANULE, namespace=a)

    assert evicted() == (5, 32)
    assert metrics.registry.get_sample_value("peercache_pages_evicted_total") == 37


def test_metrics_of_a_tenant_go_with_it() -> None:
    """One that comes later takes the place of one without pages, in each metric."""
    metrics = Metrics()
    world = World(granules=64, units_about=16, metrics=metrics, quotas=parse_quotas("t-*=1%"))
    for number in range(TENANTS_MAX):
        world.say(0, NamespaceNamed(f"t-{number}"))

    def names() -> dict[str, set[str]]:
        shown: dict[str, set[str]] = {}
        for family in metrics.registry.collect():
            for sample in family.samples:
                if "namespace" in sample.labels and not sample.name.endswith("_created"):
                    shown.setdefault(sample.name, set()).add(sample.labels["namespace"])
        return shown

    assert len(names()) == 5
    world.say(0, NamespaceNamed("t-later"))

    wanted = {f"t-{number}" for number in range(1, TENANTS_MAX)} | {"t-later", OTHERS}
    assert all(shown == wanted for shown in names().values())


def test_without_quotas_there_are_no_metrics_of_tenants() -> None:
    """The whole pool is one tenant's, which `pool_bytes` shows already."""
    metrics = Metrics()
    World(granules=64, metrics=metrics)

    assert not [
        sample
        for family in metrics.registry.collect()
        if family.name.startswith("peercache_namespace_")
        for sample in family.samples
    ]


# --- the setting ----------------------------------------------------------------------------------


def test_quotas_are_read_as_they_are_written() -> None:
    """Shares, sizes, a share of the disk apart, priorities, times to live."""
    text = "a=20%,priority=2,ttl=90s;team-*=4GiB;*=1%/5%,ttl=1h/10d"
    rules = parse_quotas(text)

    assert [rule.pattern for rule in rules] == ["a", "team-*", "*"]
    assert rules[0].pool.of(1000) == 200
    assert rules[0].priority == 2
    assert rules[1].disk.of(2**40) == 4 * 2**30
    assert (rules[2].pool.of(1000), rules[2].disk.of(1000)) == (10, 50)
    assert [rule.ttl_s for rule in rules] == [90.0, None, 3600.0]
    assert [rule.disk_ttl_s for rule in rules] == [90.0, None, 864_000.0]
    assert parse_quotas("a=20%, ttl=90s, priority=2") == rules[:1], "in any order"
    assert written_quotas(parse_quotas("a=1%,ttl=1000001/0")) == "a=1%,ttl=1000001s/0s"
    assert written_quotas(rules) == text
    assert parse_quotas(text.split(";")) == rules


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a", "must be NAME=20%"),
        ("a=110%", "more than all"),
        ("a=60%;b=50%", "110%"),
        ("a=1%;a=2%", "two rules"),
        ("a=lots", "must be a size"),
        ("a=1%,priority=1000", "at most 100"),
        ("a=1%,prio=1", "must be NAME=20%"),
        ("a=1%,priority=", "must be NAME=20%"),
        ("a=1%,ttl=1h,ttl=2h", "must be NAME=20%"),
        ("a=1%,ttl=500ms", "of 1s or more, or 0"),
        ("a=1%,ttl=-5", "of 1s or more, or 0"),
        ("a=1%,ttl=1h/2h/3h", "of 1s or more, or 0"),
        ("a=1%,ttl=soon", "a duration"),
    ],
)
def test_a_wrong_quota_is_named(text: str, why: str) -> None:
    """One sentence that states what is allowed."""
    with pytest.raises(ValueError, match=why):
        parse_quotas(text)
