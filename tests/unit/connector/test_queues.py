"""The two queues: what a poll reports, whose pages are whose, and that it never waits."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from examples.connector_scheduler import PAGE_TOKENS as EXAMPLE_TOKENS
from examples.connector_scheduler import Pool, Scheduler
from peercache.connector import (
    AsyncKVPrefetchQueue,
    AsyncKVStoreQueue,
    ConnectorMetadata,
    RemoteKVConnector,
)
from peercache.connector.queues import Prefetched, Stored
from peercache.errors import InvalidRequest
from tests.pace import TIMEOUT_S
from tests.unit.connector.rig import Engine, MemoryPages, mapping_of

TOKENS = list(range(100, 130))
PAGES = [5, 3, 9, 1, 0, 60, 7]


class Pages:
    """The engine's free pages."""

    def __init__(self, count: int = 20) -> None:
        self.free = list(range(20, 20 + count))

    def allocate(self, count: int) -> list[int] | None:
        if count > len(self.free):
            return None
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def release(self, pages: list[int]) -> None:
        self.free += pages


@pytest.fixture
def store() -> MemoryPages:
    return MemoryPages()


@pytest.fixture
def engine(store: MemoryPages) -> Iterator[Engine]:
    with Engine(store, get_threads=1) as engine:
        future, _ = engine.connector.store_kv_async("w", mapping_of(PAGES), TOKENS)
        assert future.result(TIMEOUT_S) == 28
        yield engine
        store.go.set()


def queue_of(engine: Engine, pages: Pages, **kw: Any) -> AsyncKVPrefetchQueue:
    return AsyncKVPrefetchQueue(
        engine.connector,
        pages.allocate,
        pages.release,
        **{"retrieve_remote_cache_threshold": 8, **kw},
    )


def polled(queue: Any) -> list[Any]:
    """Poll until the queue is empty."""
    until = time.monotonic() + TIMEOUT_S
    ended = []
    while queue:
        assert time.monotonic() < until, "the queue never ended"
        ended += queue.poll()
    return ended


def test_a_prefetch_brings_the_prefix(engine: Engine) -> None:
    """A request gets as many pages as were found, with the bytes that were stored."""
    pages = Pages()
    queue = queue_of(engine, pages)
    assert queue.add("r", TOKENS)

    (ended,) = polled(queue)

    assert ended == Prefetched("r", 28, [20, 21, 22, 23, 24, 25, 26])
    assert [engine.page(i) for i in ended.pages] == [engine.page(i) for i in PAGES]
    assert len(pages.free) == 13


def test_a_prefetch_begins_behind_what_the_engine_has(engine: Engine) -> None:
    """Local tokens are whole pages; the page that is computed in part is read."""
    queue = queue_of(engine, Pages())
    assert queue.add("r", TOKENS, 14)

    (ended,) = polled(queue)

    assert ended.tokens == 16
    assert [engine.page(i) for i in ended.pages] == [engine.page(i) for i in PAGES[3:]]


@pytest.mark.parametrize(("threshold", "tokens"), [(28, 28), (29, 0)])
def test_less_than_the_threshold_is_computed(engine: Engine, threshold: int, tokens: int) -> None:
    """A few tokens are computed faster than they are fetched."""
    pages = Pages()
    queue = queue_of(engine, pages, retrieve_remote_cache_threshold=threshold)
    queue.add("r", TOKENS)

    (ended,) = polled(queue)

    assert (ended.tokens, len(pages.free)) == (tokens, 20 - tokens // 4)


def test_without_room_the_request_is_computed(engine: Engine) -> None:
    """An allocation that fails ends the prefetch, and takes nothing."""
    pages = Pages(count=6)
    queue = queue_of(engine, pages)
    queue.add("r", TOKENS)

    assert polled(queue) == [Prefetched("r", 0, [])]
    assert len(pages.free) == 6


def _fails(_: object) -> Any:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    "given",
    [[30], list(range(30, 38)), list(range(60, 67)), [30] * 7, ["x"] * 7, 5, _fails],
    ids=["too few", "too many", "outside", "twice", "texts", "a number", "raises"],
)
def test_an_allocation_that_no_call_can_take_is_computed(engine: Engine, given: Any) -> None:
    """No token is reported that was not read, and the other requests are reported all the same."""
    released: list[int] = []

    def allocate(count: int) -> Any:
        if count == 6:
            return list(range(20, 26))
        return given(count) if callable(given) else given

    queue = AsyncKVPrefetchQueue(
        engine.connector, allocate, released.extend, retrieve_remote_cache_threshold=8
    )
    assert queue.add("wrong", TOKENS)
    assert queue.add("right", TOKENS[:24])

    right, wrong = sorted(polled(queue), key=lambda one: one.req_id)

    assert wrong == Prefetched("wrong", 0, [])
    assert right == Prefetched("right", 24, list(range(20, 26)))
    assert [engine.page(i) for i in right.pages] == [engine.page(i) for i in PAGES[:6]]
    assert released == (given if isinstance(given, list) else [])


def test_a_release_that_raises_keeps_no_report_back(store: MemoryPages, engine: Engine) -> None:
    """Pages that did not come are the engine's again, whether it can take them or not."""
    store.pages.popitem()
    queue = AsyncKVPrefetchQueue(
        engine.connector, Pages().allocate, _fails, retrieve_remote_cache_threshold=8
    )
    exists = store.exists
    store.exists = lambda keys, size: exists(keys, size) + 1  # type: ignore[method-assign]
    queue.add("r", TOKENS)

    assert polled(queue) == [Prefetched("r", 24, [20, 21, 22, 23, 24, 25])]


def test_an_allocator_may_return_an_array(engine: Engine) -> None:
    """Allocators of engines keep their free pages in arrays."""
    queue = AsyncKVPrefetchQueue(
        engine.connector,
        lambda count: np.arange(20, 20 + count),
        lambda _: None,
        retrieve_remote_cache_threshold=8,
    )
    queue.add("r", TOKENS)

    assert polled(queue) == [Prefetched("r", 28, list(range(20, 27)))]


def test_a_prefetch_wants_buffers(store: MemoryPages) -> None:
    """A scheduler gets the error at once that it has registered none, not from a poll later."""
    metadata = ConnectorMetadata(model="m", dtype="int8", page_tokens=4, store=lambda _: store)
    connector = RemoteKVConnector(metadata)
    queue = AsyncKVPrefetchQueue(connector, lambda _: None, lambda _: None)
    try:
        with pytest.raises(InvalidRequest, match="register_kv_buffers comes first"):
            queue.add("r", TOKENS)
    finally:
        connector.close()


def test_a_poll_whose_collective_fails_ends_nothing(store: MemoryPages, engine: Engine) -> None:
    """What the other ranks have is not known; the next poll asks them again."""
    is_down = [True]

    def reduce(numbers: Any) -> Any:
        if is_down[0]:
            raise RuntimeError("connection reset by peer")
        return numbers

    with Engine(store, seed=0, all_reduce_min=reduce) as rank:
        prefetches, stores = queue_of(rank, Pages()), AsyncKVStoreQueue(rank.connector)
        assert prefetches.add("r", TOKENS)
        assert stores.add("s", mapping_of(PAGES), TOKENS)
        for _ in range(3):
            assert (prefetches.poll(), stores.poll()) == ([], [])
        assert (len(prefetches), len(stores)) == (1, 1)
        is_down[0] = False
        assert [one.tokens for one in polled(prefetches)] == [28]
        assert [one.tokens for one in polled(stores)] == [28]


@pytest.mark.parametrize("ends", ["stop", "cancel"])
def test_what_is_no_request_ends_no_prefetch(engine: Engine, ends: str) -> None:
    """A caller that has lost its id must not end what all others have under way."""
    queue = queue_of(engine, Pages())
    queue.add("r", TOKENS)

    with pytest.raises(InvalidRequest, match="a request's id is a text, not None"):
        getattr(queue, ends)(None)

    (ended,) = polled(queue)
    assert ended.tokens == 28


def test_a_mapping_may_be_a_zip(engine: Engine) -> None:
    """Its pages are reported: pages that are not stay locked in the engine forever."""
    queue = AsyncKVStoreQueue(engine.connector)
    assert queue.add("r", zip(*zip(*mapping_of(PAGES), strict=True), strict=True), TOKENS)  # type: ignore[arg-type]

    assert polled(queue) == [Stored("r", 28, PAGES)]


def test_pages_that_did_not_come_are_released(store: MemoryPages, engine: Engine) -> None:
    """A page that is evicted between lookup and retrieve ends the run."""
    pages = Pages()
    queue = queue_of(engine, pages)
    exists = store.exists

    def then_lose(keys: Any, page_bytes: int) -> int:
        found = exists(keys, page_bytes)
        del store.pages[list(store.pages)[2]]
        return found

    store.exists = then_lose  # type: ignore[method-assign]
    queue.add("r", TOKENS)

    assert polled(queue) == [Prefetched("r", 8, [20, 21])]
    assert sorted(pages.free) == list(range(22, 40))


def test_a_request_that_is_wanted_now_takes_what_has_come(store: MemoryPages) -> None:
    """`stop` cuts a retrieve at its chunk; the rest of its pages goes back."""
    page = 3 * (32 + 48)
    with Engine(store, chunk_bytes=2 * page) as engine:
        future, _ = engine.connector.store_kv_async("w", mapping_of(PAGES), TOKENS)
        assert future.result(TIMEOUT_S) == 28
        pages = Pages()
        queue = queue_of(engine, pages)
        queue.add("r", TOKENS)
        hang_at_retrieve(store, queue)

        queue.stop("r")
        assert queue.poll() == []
        store.go.set()

        assert polled(queue) == [Prefetched("r", 8, [20, 21])]
        assert sorted(pages.free) == list(range(22, 40))


def test_a_request_that_has_gone_is_not_reported(store: MemoryPages, engine: Engine) -> None:
    """Its pages go back only when nothing writes to them any more."""
    pages = Pages()
    queue = queue_of(engine, pages)
    queue.add("r", TOKENS)
    hang_at_retrieve(store, queue)

    queue.cancel("r")
    queue.cancel("never seen")
    assert queue.poll() == []
    assert len(pages.free) == 13
    store.go.set()

    assert polled(queue) == []
    assert len(pages.free) == 20
    queue.add("again", TOKENS)
    queue.cancel("again")
    assert polled(queue) == []
    assert len(pages.free) == 20


def hang_at_retrieve(store: MemoryPages, queue: AsyncKVPrefetchQueue) -> None:
    """Poll until a retrieve is in the store, and leave it there."""
    get_into, inside = store.get_into, threading.Event()

    def hung(keys: Any, runs: Any) -> list[bool]:
        if not inside.is_set():
            store.go.clear()
        inside.set()
        return get_into(keys, runs)

    store.get_into = hung  # type: ignore[method-assign]
    until = time.monotonic() + TIMEOUT_S
    while not inside.wait(0.001):
        assert time.monotonic() < until
        assert queue.poll() == []


def test_queues_are_bounded(store: MemoryPages, engine: Engine) -> None:
    """A full queue is reported; a request that is in it is no second one."""
    prefetches = queue_of(engine, Pages(), requests_max=2)
    stores = AsyncKVStoreQueue(engine.connector, requests_max=1)
    store.go.clear()
    assert [prefetches.add(name, TOKENS) for name in "abc"] == [True, True, False]
    with pytest.raises(InvalidRequest, match="request a is being prefetched already"):
        prefetches.add("a", TOKENS)
    with pytest.raises(InvalidRequest, match="token 0 is -1"):
        prefetches.add("d", [-1])
    with pytest.raises(InvalidRequest, match="requests_max is a whole number from 1 on, not 0"):
        queue_of(engine, Pages(), requests_max=0)
    assert stores.add("s", mapping_of(PAGES), TOKENS)
    assert not stores.add("t", mapping_of(PAGES), TOKENS)
    store.go.set()

    assert polled(stores) == [Stored("s", 28, PAGES)]
    assert {ended.req_id for ended in polled(prefetches)} == {"a", "b"}


class Ranks:
    """Two ranks in one thread: the second polls when the first reduces."""

    def __init__(self) -> None:
        self.given: list[list[int]] = []
        self.go_on: Callable[[], None] = lambda: None

    def first(self, numbers: Sequence[int]) -> list[int]:
        self.given = [list(numbers)]
        self.go_on()
        return [min(pair) for pair in zip(*self.given, strict=True)]

    def second(self, numbers: Sequence[int]) -> list[int]:
        self.given.append(list(numbers))
        return [min(pair) for pair in zip(*self.given, strict=True)]


def test_ranks_end_a_prefetch_together(store: MemoryPages) -> None:
    """Each rank gets the shorter run of the two, in the same poll."""
    ranks = Ranks()
    with (
        Engine(store, tp_size=2, all_reduce_min=ranks.first) as one,
        Engine(store, tp_rank=1, tp_size=2, all_reduce_min=ranks.second) as two,
    ):
        for engine, count in ((one, 7), (two, 5)):
            future, _ = engine.connector.store_kv_async("w", mapping_of(PAGES[:count]), TOKENS)
            assert future.result(TIMEOUT_S) == count * 4
        free = (Pages(), Pages())
        queues = [queue_of(engine, pages) for engine, pages in zip((one, two), free, strict=True)]
        ended: list[list[Prefetched]] = [[], []]
        ranks.go_on = lambda: ended[1].extend(queues[1].poll())
        for queue in queues:
            queue.add("r", TOKENS)
        until = time.monotonic() + TIMEOUT_S
        while queues[0]:
            assert time.monotonic() < until
            ended[0] += queues[0].poll()
            assert len(ended[0]) == len(ended[1])

        assert ended == [[Prefetched("r", 20, [20, 21, 22, 23, 24])]] * 2


def test_no_poll_waits_for_a_store_that_hangs(store: MemoryPages, engine: Engine) -> None:
    """While every call of the store hangs, a scheduler polls, adds, stops and finishes."""
    stores = AsyncKVStoreQueue(engine.connector)
    prefetches = queue_of(engine, Pages())
    store.go.clear()
    took: list[float] = []
    ended: list[Any] = []
    done = threading.Event()

    def scheduler() -> None:
        for number in range(200):
            prefetches.add(f"r{number}", TOKENS)
            stores.add(f"s{number}", mapping_of(PAGES), TOKENS)
            begun = time.perf_counter()
            ended.extend(prefetches.poll() + stores.poll())
            took.append(time.perf_counter() - begun)
            prefetches.stop(f"r{number // 2}")
            engine.connector.finish_req(f"s{number // 2}")
        done.set()

    thread = threading.Thread(target=scheduler, daemon=True)
    thread.start()
    # Had a poll taken a lock that a call of the store holds, it would never end.
    assert done.wait(TIMEOUT_S)
    store.go.set()
    # Of the loop's own work: a busy machine takes single polls away, not half of them.
    assert statistics.median(took) < 0.001
    thread.join(TIMEOUT_S)
    ended += polled(stores) + polled(prefetches)
    assert len(ended) == 400


def test_the_example_reuses_what_it_has_stored(store: MemoryPages) -> None:
    """The second turn of the same prompts computes nothing, with right bytes."""
    connector = RemoteKVConnector(
        ConnectorMetadata(
            model="m", dtype="int8", page_tokens=EXAMPLE_TOKENS, store=lambda _: store
        )
    )
    scheduler = Scheduler(connector, Pool(512))
    prompts = [[seed * 1000 + i for i in range(200)] for seed in range(5)]
    until = time.monotonic() + TIMEOUT_S
    for turn in range(2):
        scheduler.reused = scheduler.computed = 0
        for number, prompt in enumerate(prompts):
            scheduler.submit(f"{turn}/{number}", prompt)
        while not scheduler.is_idle():
            assert time.monotonic() < until
            scheduler.step()
        assert (scheduler.reused, scheduler.computed) == ((0, 960), (960, 0))[turn]
    connector.close()

    assert scheduler.wrong == 0
    assert sorted(scheduler.pool.free) == list(range(512))
    assert statistics.median(scheduler.polls_s) < 0.001


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_no_retrieve_begins_after_a_stop(
    store: MemoryPages, engine: Engine, *, is_cancelled: bool
) -> None:
    """A lookup that was under way finds pages that no one waits for any more."""
    pages = Pages(100)
    queue = queue_of(engine, pages)
    before = list(pages.free)
    while store.entered.acquire(blocking=False):
        pass
    store.go.clear()
    queue.add("r", TOKENS)
    assert store.entered.acquire(timeout=TIMEOUT_S)
    (queue.cancel if is_cancelled else queue.stop)("r")
    store.go.set()

    assert polled(queue) == ([] if is_cancelled else [Prefetched("r", 0, [])])
    # Pages that were taken and given back would stand last.
    assert pages.free == before
