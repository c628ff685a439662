"""The connector's methods: what moves, what is refused, and when a Future is done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from peercache.connector import ConnectorMetadata, RemoteKVConnector
from peercache.connector.metadata import StoredPages
from peercache.content.chain import Chain
from peercache.errors import InvalidRequest
from tests.pace import TIMEOUT_S
from tests.unit.connector.rig import Engine, MemoryPages, mapping_of

TOKENS = list(range(100, 130))
"""Seven pages of four, and two tokens more."""
PAGES = [5, 3, 9, 1, 0, 60, 7]


@pytest.fixture
def store() -> MemoryPages:
    return MemoryPages()


@pytest.fixture
def engine(store: MemoryPages) -> Iterator[Engine]:
    with Engine(store) as engine:
        yield engine
        store.go.set()


def stored(engine: Engine, tokens: Any = TOKENS, **kw: Any) -> int:
    future, _ = engine.connector.store_kv_async("writer", mapping_of(PAGES), tokens, **kw)
    return future.result(TIMEOUT_S)


def test_another_engine_reads_what_one_has_stored(store: MemoryPages, engine: Engine) -> None:
    """Pages of all layers come back where the reader wants them, and nothing else is touched."""
    future, end = engine.connector.store_kv_async("a", mapping_of(PAGES), TOKENS)
    assert (future.result(TIMEOUT_S), end) == (28, 28)

    with Engine(store, seed=1) as reader:
        before = [reader.page(index) for index in range(64)]
        assert reader.connector.num_external_matched_tokens("b", TOKENS, 0) == 28
        into = [20, 21, 22, 23, 24, 25, 26]
        read = reader.connector.retrieve_kv_async("b", mapping_of(into), np.array(TOKENS))

        assert read.result(TIMEOUT_S) == 28
        assert [reader.page(i) for i in into] == [engine.page(i) for i in PAGES]
        rest = [i for i in range(64) if i not in into]
        assert [reader.page(i) for i in rest] == [before[i] for i in rest]


def test_a_missing_page_ends_the_run(store: MemoryPages, engine: Engine) -> None:
    """What is behind a miss counts for nothing: a prefix has no holes."""
    assert stored(engine) == 28
    del store.pages[list(store.pages)[3]]

    assert engine.connector.num_external_matched_tokens("b", TOKENS, 0) == 12
    read = engine.connector.retrieve_kv_async("b", mapping_of(PAGES), TOKENS)
    assert read.result(TIMEOUT_S) == 12


@pytest.mark.parametrize(("local", "found"), [(0, 28), (4, 24), (6, 22), (28, 0), (30, 0)])
def test_what_is_computed_locally_is_not_counted(engine: Engine, local: int, found: int) -> None:
    """The answer is what comes on top; a page that is computed in part is there as a whole."""
    assert stored(engine) == 28

    assert engine.connector.num_external_matched_tokens("b", TOKENS, local) == found


def test_a_span_may_begin_within_the_prompt(engine: Engine) -> None:
    """The pages behind the local ones are stored and read alone, under the prefix's addresses."""
    assert stored(engine) == 28

    mapping = mapping_of([40, 41], first=3)
    read = engine.connector.retrieve_kv_async("b", mapping, TOKENS)

    assert read.result(TIMEOUT_S) == 8
    assert [engine.page(i) for i in (40, 41)] == [engine.page(i) for i in PAGES[3:5]]


def test_a_last_slice_short_of_a_page_is_left_out(engine: Engine) -> None:
    """Half a page has no address; the rest of the mapping has."""
    mapping = [*mapping_of(PAGES), (8, slice(28, 30))]
    future, end = engine.connector.store_kv_async("a", mapping, TOKENS)

    assert (future.result(TIMEOUT_S), end) == (28, 28)
    future, end = engine.connector.store_kv_async("a", [(8, slice(28, 30))], TOKENS)
    assert (future.result(TIMEOUT_S), end) == (0, 28)
    assert engine.connector.retrieve_kv_async("a", [], TOKENS).result(TIMEOUT_S) == 0


def test_salts_models_and_ranks_share_no_page(store: MemoryPages, engine: Engine) -> None:
    """A page of another adapter, model, layout or rank would be wrong bytes."""
    assert stored(engine) == 28

    ask = engine.connector.num_external_matched_tokens
    assert ask("b", TOKENS, 0, salts={"lora": "x"}) == 0
    assert ask("b", TOKENS, 0, salts={}) == 28
    others: list[dict[str, Any]] = [
        {"model": "n"},
        {"dtype": "int8"},
        {"layout": "v first"},
        {"namespace": "other"},
        {"salts": {"tenant": "t"}},
        {"tp_rank": 1, "tp_size": 2},
    ]
    for facts in others:
        with Engine(store, **facts) as other:
            assert other.connector.num_external_matched_tokens("b", TOKENS, 0) == 0
    with Engine(store, tp_size=2, is_replicated=True) as first:
        assert stored(first) == 28
    with Engine(store, tp_rank=1, tp_size=2, is_replicated=True) as second:
        assert second.connector.num_external_matched_tokens("b", TOKENS, 0) == 28
    with Engine(store, tp_rank=3, tp_size=4, is_replicated=True) as third:
        assert third.connector.num_external_matched_tokens("b", TOKENS, 0) == 28


def test_a_grown_request_is_hashed_from_where_it_has_grown(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode step costs the hash of its new pages, and other tokens get other addresses."""
    hashed: list[int] = []
    whole = Chain.digests

    def counted(self: Chain, tokens: Any, parent: bytes | None = None) -> Any:
        hashed.append(len(tokens))
        return whole(self, tokens, parent)

    monkeypatch.setattr(Chain, "digests", counted)
    ask = engine.connector.num_external_matched_tokens
    tokens = np.array(TOKENS, np.uint32)
    for length in (12, 13, 20, 30):
        ask("r", tokens[:length], 0)
    assert hashed == [12, 8, 8]

    assert stored(engine, tokens) == 28
    # The same array with another content, in place: nothing of the old prefix may answer.
    tokens[5] += 1
    assert ask("writer", tokens, 0) == 4
    engine.connector.finish_req("r")
    ask("r", tokens[:12], 0)
    assert hashed[-2:] == [24, 12]


@pytest.mark.parametrize("req_id", [None, 7, ["r"]])
def test_what_is_no_request_ends_no_request(engine: Engine, req_id: Any) -> None:
    """A caller that has lost its id must not end what all others have under way."""
    engine.connector.core.store.go.clear()  # type: ignore[attr-defined]
    futures = [engine.connector.retrieve_kv_async(one, mapping_of(PAGES), TOKENS) for one in "ab"]

    with pytest.raises(InvalidRequest, match="a request's id is a text, not"):
        engine.connector.finish_req(req_id)

    engine.connector.core.store.go.set()  # type: ignore[attr-defined]
    assert [future.result(TIMEOUT_S) for future in futures] == [0, 0]
    assert engine.connector.core.counts["get_cancelled"] == 0


def test_finish_req_cancels_what_waits_and_cuts_what_moves(
    store: MemoryPages, engine: Engine
) -> None:
    """A transfer that moves ends behind its chunk, with its run; those behind it never begin."""
    assert stored(engine) == 28
    page = sum(buffer.shape[1] for buffer in engine.buffers)
    with Engine(store, seed=1, chunk_bytes=2 * page, get_threads=1) as reader:
        while store.entered.acquire(blocking=False):
            pass
        store.go.clear()
        first = reader.connector.retrieve_kv_async("r", mapping_of(range(7)), TOKENS)
        assert store.entered.acquire(timeout=TIMEOUT_S)
        second = reader.connector.retrieve_kv_async("r", mapping_of(range(10, 17)), TOKENS)
        other = reader.connector.retrieve_kv_async("s", mapping_of(range(20, 27)), TOKENS)
        before = reader.page(10)

        reader.connector.finish_req("r")
        assert not first.done()
        with pytest.raises(CancelledError):
            second.result(TIMEOUT_S)
        reader.connector.finish_req("r")
        reader.connector.finish_req("never seen")
        store.go.set()

        assert first.result(TIMEOUT_S) == 8
        assert other.result(TIMEOUT_S) == 28
        assert reader.page(10) == before
        assert reader.connector.core.counts["get_cancelled"] == 1


def test_a_future_that_its_caller_cancels_moves_nothing(store: MemoryPages, engine: Engine) -> None:
    """`Future.cancel` works while a transfer waits, as for every executor."""
    store.go.clear()
    moving, _ = engine.connector.store_kv_async("a", mapping_of(PAGES), TOKENS)
    assert store.entered.acquire(timeout=TIMEOUT_S)
    waiting, _ = engine.connector.store_kv_async("b", mapping_of(PAGES), TOKENS)

    assert waiting.cancel()
    assert not moving.cancel()
    store.go.set()

    assert moving.result(TIMEOUT_S) == 28
    engine.connector.close()
    assert store.calls == [7]


@pytest.mark.parametrize("closes", ["cancel", "set_result"])
def test_a_future_that_its_caller_closes_ends_no_thread(store: MemoryPages, closes: str) -> None:
    """One that moves, one that is ended, one that comes too late, and one whose turn it is."""
    with Engine(store, get_threads=1) as engine:
        assert stored(engine) == 28
        assert store.entered.acquire(timeout=TIMEOUT_S)
        store.go.clear()
        retrieve = engine.connector.retrieve_kv_async
        moving = retrieve("moving", mapping_of(PAGES), TOKENS)
        assert store.entered.acquire(timeout=TIMEOUT_S)
        ended = retrieve("ended", mapping_of(PAGES), TOKENS)
        late = retrieve("late", mapping_of(PAGES), TOKENS, timeout_s=0.05)
        queued = retrieve("queued", mapping_of(PAGES), TOKENS)
        for future in (moving, ended, late, queued):
            getattr(future, closes)(*([7] if closes == "set_result" else []))
        engine.connector.finish_req("ended")
        engine.connector.finish_req("ended")
        # The thread of deadlines lives on.
        later = retrieve("later", mapping_of(PAGES), TOKENS, timeout_s=0.1)
        assert later.result(TIMEOUT_S) == 0
        store.go.set()

        again = retrieve("again", mapping_of(PAGES), TOKENS)
        assert again.result(TIMEOUT_S) == 28


def test_a_full_queue_takes_nothing(store: MemoryPages) -> None:
    """Back-pressure is an answer at once, and room comes back with every transfer's end."""
    with Engine(store, queued_pages=10) as engine:
        store.go.clear()
        first, end = engine.connector.store_kv_async("a", mapping_of(PAGES), TOKENS)
        assert end == 28
        refused, end = engine.connector.store_kv_async("b", mapping_of(PAGES[3:], 3), TOKENS)
        assert (refused.result(0), end) == (0, 12)
        read = engine.connector.retrieve_kv_async("b", mapping_of(PAGES), TOKENS)
        store.go.set()

        assert first.result(TIMEOUT_S) == 28
        assert read.result(TIMEOUT_S) in {0, 28}
        assert engine.connector.core.counts["set_refused"] == 1
        again, end = engine.connector.store_kv_async("b", mapping_of(PAGES), TOKENS)
        assert (again.result(TIMEOUT_S), end) == (28, 28)


@pytest.mark.parametrize("timeout_s", [1e6, float("inf"), 10**400])
def test_a_transfer_behind_a_hung_one_ends_at_its_deadline(
    store: MemoryPages, timeout_s: float
) -> None:
    """A call of the store that hangs keeps its own Future open, and no other."""
    with Engine(store, get_threads=1) as engine:
        store.go.clear()
        hung = engine.connector.retrieve_kv_async("a", mapping_of(PAGES), TOKENS)
        assert store.entered.acquire(timeout=TIMEOUT_S)
        retrieve = engine.connector.retrieve_kv_async
        patient = retrieve("b", mapping_of(PAGES), TOKENS, timeout_s=timeout_s)
        time.sleep(0.05)  # The thread that watches deadlines waits for this one alone.
        late = retrieve("c", mapping_of(PAGES), TOKENS, timeout_s=0.05)

        assert late.result(TIMEOUT_S) == 0
        assert not hung.done()
        assert not patient.done()
        assert engine.connector.core.counts["get_late"] == 1
        store.go.set()
        assert hung.result(TIMEOUT_S) == patient.result(TIMEOUT_S) == 0


def test_no_chunk_begins_after_the_deadline(store: MemoryPages) -> None:
    """A slow store gives the run that came in time."""
    with Engine(store) as engine:
        assert stored(engine) == 28
    page = sum(buffer.shape[1] for buffer in engine.buffers)
    with Engine(store, chunk_bytes=page) as reader:
        now = [0.0]
        core = reader.connector.core
        # One thread's clock is paused but for what the store takes.
        core.clock = core.gets._clock = lambda: now[0]
        get_into = store.get_into

        def slow(keys: Any, runs: Any) -> list[bool]:
            now[0] += 1.0
            return get_into(keys, runs)

        store.get_into = slow  # type: ignore[method-assign]
        read = reader.connector.retrieve_kv_async("a", mapping_of(PAGES), TOKENS, timeout_s=2.5)

        assert read.result(TIMEOUT_S) == 12


def test_a_failing_store_is_a_miss(store: MemoryPages, engine: Engine) -> None:
    """No exception of a store comes to the engine through a Future."""
    assert stored(engine) == 28
    store.fails = True

    read = engine.connector.retrieve_kv_async("a", mapping_of(PAGES), TOKENS)
    kept, _ = engine.connector.store_kv_async("a", mapping_of(PAGES), TOKENS)

    assert read.result(TIMEOUT_S) == kept.result(TIMEOUT_S) == 0
    assert engine.connector.num_external_matched_tokens("b", TOKENS, 0) == 0
    store.fails = False
    assert stored(engine) == 28


def test_close_ends_everything_and_may_be_repeated(store: MemoryPages) -> None:
    """Each Future is done or cancelled, memory is deregistered, the store is closed once."""
    engine = Engine(store)
    assert len(store.registered) == len(engine.buffers)
    store.go.clear()
    futures = [
        engine.connector.store_kv_async(name, mapping_of(PAGES), TOKENS)[0] for name in "abcd"
    ]
    assert store.entered.acquire(timeout=TIMEOUT_S)

    def goes_on(_: Any) -> None:
        if all(future.done() for future in futures[1:]):
            store.go.set()

    for future in futures[1:]:
        future.add_done_callback(goes_on)
    engine.connector.close()
    engine.connector.close()

    assert [future.done() for future in futures] == [True] * 4
    assert [future.cancelled() for future in futures] == [False, True, True, True]
    assert (store.registered, store.closed) == ([], 1)
    with pytest.raises(InvalidRequest, match="is closed"):
        engine.connector.store_kv_async("a", mapping_of(PAGES), TOKENS)
    with pytest.raises(InvalidRequest, match="is closed"):
        engine.connector.num_external_matched_tokens("a", TOKENS, 0)
    engine.connector.finish_req("a")


def test_memory_stays_registered_while_a_hung_call_may_write(
    store: MemoryPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that hangs at the end is left with what it uses, and `close` returns."""
    monkeypatch.setattr("peercache.connector.connector.CLOSE_S", 0.05)
    engine = Engine(store)
    store.go.clear()
    hung, _ = engine.connector.store_kv_async("a", mapping_of(PAGES), TOKENS)
    assert store.entered.acquire(timeout=TIMEOUT_S)
    engine.connector.close()

    assert not hung.done()
    assert len(store.registered) == len(engine.buffers)
    assert store.closed == 0
    store.go.set()
    assert hung.result(TIMEOUT_S) == 28


def test_what_is_stored_is_reported_with_its_tokens(store: MemoryPages) -> None:
    """A router learns blocks, parent and tokens; a publisher that fails hurts no transfer."""
    reported: list[StoredPages] = []
    page = 3 * (32 + 48)
    with Engine(store, on_stored=reported.append, chunk_bytes=4 * page) as engine:
        assert stored(engine, salts={"lora": "x"}) == 28
        digests = engine.connector.core.chain.salted({"lora": "x"}).digests(TOKENS)
    assert [(len(each.digests), each.tokens.tolist()) for each in reported] == [
        (4, TOKENS[:16]),
        (3, TOKENS[16:28]),
    ]
    assert [each.parent for each in reported] == [None, digests[3].tobytes()]
    assert (np.concatenate([each.digests for each in reported]) == digests).all()
    assert dict(reported[0].salts) == {"lora": "x"}

    def fails(_: StoredPages) -> None:
        raise OSError("the publisher is gone")

    with Engine(store, on_stored=fails) as engine:
        assert stored(engine) == 28


def _no_collective(_: Any) -> Any:
    raise RuntimeError("connection reset by peer")


def test_ranks_agree_on_the_smallest(store: MemoryPages, engine: Engine) -> None:
    """What one rank lacks, none retrieves."""
    assert stored(engine) == 28
    asked: list[list[int]] = []

    def smallest(numbers: Any) -> list[int]:
        asked.append(list(numbers))
        return [min(number, 3) for number in numbers]

    with Engine(store, all_reduce_min=smallest) as rank:
        assert rank.connector.num_external_matched_tokens("a", TOKENS, 6) == 10
        assert rank.connector.num_external_matched_tokens("a", TOKENS[:3], 0) == 0
    # Every rank reduces as often, also one that has nothing to ask its store for.
    assert asked == [[6], [0]]


def test_pages_of_another_size_are_not_counted(store: MemoryPages, engine: Engine) -> None:
    """Another engine has stored them under these keys: none of them can be retrieved."""
    assert stored(engine) == 28
    for key in list(store.pages)[2:]:
        store.pages[key] += b"more"

    assert engine.connector.num_external_matched_tokens("a", TOKENS, 0) == 8


@pytest.mark.parametrize("reduce", [_no_collective, lambda numbers: [*numbers, 7], lambda _: ["x"]])
def test_a_collective_that_fails_is_nothing_found(
    store: MemoryPages, engine: Engine, reduce: Any
) -> None:
    """A rank that is gone must not end the engine of another one."""
    assert stored(engine) == 28
    with Engine(store, all_reduce_min=reduce) as rank:
        assert rank.connector.num_external_matched_tokens("a", TOKENS, 0) == 0


@pytest.mark.parametrize(
    ("mapping", "why"),
    [
        (7, "a list of"),
        ([5], "a list of"),
        ([(5, slice(4.0, 8))], "a list of"),
        ([(5, 4)], "a list of"),
        ([(5, slice(0, 4), 1)], "a list of"),
        ([("5", slice(0, 4))], "a list of"),
        ([(5.5, slice(0, 4))], "a list of"),
        ([(5, slice(0, None))], "a list of"),
        ([(5, slice(0, 4, 2))], "a list of"),
        ([(5, slice(2, 6))], "slice 0 is 2:6"),
        ([(5, slice(0, 8))], "slice 0 is 0:8"),
        ([(5, slice(4, 4))], "slice 0 is 4:4"),
        ([(5, slice(4, 0))], "slice 0 is 4:0"),
        ([(5, slice(-4, 0))], "slice 0 is -4:0"),
        ([(5, slice(0, 4)), (6, slice(8, 12))], "slice 1 is 8:12"),
        ([(5, slice(0, 2)), (6, slice(4, 8))], "slice 0 is 0:2"),
        ([(5, slice(0, 4)), (6, slice(4, 9))], "slice 1 is 4:9"),
        (mapping_of(range(8)), "names 32 tokens, the list has 30"),
        ([(64, slice(0, 4))], "page index 64 is no page of 64"),
        ([(-1, slice(0, 4))], "page index -1"),
        ([(2**63, slice(0, 4))], "page index|a list of"),
    ],
)
def test_a_wrong_mapping_is_said(engine: Engine, mapping: Any, why: str) -> None:
    """The caller reads which slice is wrong, and no byte moves."""
    with pytest.raises(InvalidRequest, match=why):
        engine.connector.store_kv_async("a", mapping, TOKENS)
    with pytest.raises(InvalidRequest, match=why):
        engine.connector.retrieve_kv_async("a", mapping, TOKENS)


def test_one_index_is_read_into_once(engine: Engine) -> None:
    """Two pages in one place would both be reported, and one of them be gone."""
    with pytest.raises(InvalidRequest, match="twice"):
        engine.connector.retrieve_kv_async("a", mapping_of([5, 5]), TOKENS)


@pytest.mark.parametrize(
    ("req_id", "tokens", "local", "kw", "why"),
    [
        (7, TOKENS, 0, {}, "a request's id is a text, not 7"),
        ("a", [1, -2], 0, {}, "token 1 is -2"),
        ("a", TOKENS, 31, {}, "31 of 30 tokens"),
        ("a", TOKENS, -1, {}, "-1 of 30 tokens"),
        ("a", TOKENS, True, {}, "True of 30"),
        ("a", TOKENS, 0, {"priority": 1}, "'priority' is no option"),
        ("a", TOKENS, 0, {"salts": "x"}, "salts are texts"),
        ("a", TOKENS, 0, {"salts": {"a": 1}}, "salts are texts"),
        ("a", TOKENS, 0, {"timeout_s": 0}, "timeout_s is more than 0"),
        ("a", TOKENS, 0, {"timeout_s": "1"}, "timeout_s is more than 0"),
        ("a", TOKENS, 0, {"timeout_s": float("nan")}, "timeout_s is more than 0"),
    ],
)
def test_a_wrong_request_is_said(
    engine: Engine, req_id: Any, tokens: Any, local: Any, kw: Any, why: str
) -> None:
    """Each argument has a sentence of its own."""
    with pytest.raises(InvalidRequest, match=why):
        engine.connector.num_external_matched_tokens(req_id, tokens, local, **kw)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kv_data_ptrs": None}, "kv_data_ptrs is a list of numbers"),
        ({"kv_data_ptrs": "abc"}, "kv_data_ptrs is a list of numbers"),
        ({"kv_data_ptrs": []}, "1 to 4096 numbers, not 0"),
        ({"kv_data_ptrs": [0]}, r"kv_data_ptrs\[0\] is 0"),
        ({"kv_item_lens": [1.5]}, r"kv_item_lens\[0\] is 1.5"),
        ({"kv_item_lens": [8, 8]}, "1 kv_data_ptrs, 1 kv_data_lens and 2 kv_item_lens"),
        ({"kv_item_lens": [7]}, "64 bytes, which are no pages of 7 bytes"),
        ({"kv_item_lens": [128]}, "no pages of 128 bytes"),
    ],
)
def test_wrong_buffers_are_said(store: MemoryPages, change: dict[str, Any], why: str) -> None:
    """An invalid address would be memory of another part of the engine."""
    facts = {"kv_data_ptrs": [4096], "kv_data_lens": [64], "kv_item_lens": [8]}
    metadata = ConnectorMetadata(model="m", dtype="int8", page_tokens=4, store=lambda _: store)
    connector = RemoteKVConnector(metadata)
    try:
        with pytest.raises(InvalidRequest, match="register_kv_buffers comes first"):
            connector.retrieve_kv_async("a", mapping_of([1]), TOKENS)
        with pytest.raises(InvalidRequest, match=why):
            connector.register_kv_buffers(SimpleNamespace(**{**facts, **change}))
        connector.register_kv_buffers(SimpleNamespace(**facts))
        with pytest.raises(InvalidRequest, match="registered already"):
            connector.register_kv_buffers(SimpleNamespace(**facts))
    finally:
        connector.close()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tp_rank": 2, "tp_size": 2}, "rank 2 is not one of 2"),
        ({"tp_rank": "0"}, "tp_rank is a whole number from 0 on, not '0'"),
        ({"tp_size": 2.0}, "tp_size is a whole number from 1 on, not 2.0"),
        ({"namespace": None}, "namespace is a text, not None"),
        ({"layout": 5}, "layout is a text, not 5"),
        ({"store": "ipc:///run/home.ipc"}, "store is called, and 'ipc:///run/home.ipc' cannot be"),
        ({"store": None}, "store is called, and None cannot be"),
        ({"on_stored": []}, r"on_stored is called, and \[\] cannot be"),
        ({"all_reduce_min": 5}, "all_reduce_min is called, and 5 cannot be"),
        ({"queued_pages": 0}, "queued_pages is a whole number from 1 on, not 0"),
        ({"chunk_bytes": 1.5}, "chunk_bytes is a whole number from 1 on, not 1.5"),
        ({"get_threads": 2.5}, "get_threads is a whole number from 1 on, not 2.5"),
        ({"set_threads": True}, "set_threads is a whole number from 1 on, not True"),
        ({"timeout_s": "5"}, "timeout_s is more than 0 seconds, not '5'"),
        ({"timeout_s": float("nan")}, "timeout_s is more than 0"),
        ({"dtype": "bfloat17"}, "no dtype of a KV cache"),
        ({"page_tokens": 0}, "1 to 1048576 tokens"),
        ({"page_tokens": 1.0}, "1 to 1048576 tokens, not 1.0"),
    ],
)
def test_wrong_metadata_is_said(store: MemoryPages, fields: dict[str, Any], why: str) -> None:
    """Nothing is opened for a connector that cannot work."""
    facts = {"model": "m", "dtype": "int8", "page_tokens": 4, "store": lambda _: store}
    with pytest.raises(InvalidRequest, match=why):
        RemoteKVConnector(ConnectorMetadata(**{**facts, **fields}))


class HintedPages(MemoryPages):
    """A store that obeys hints for the pages that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.hints: list[tuple[str, int, float]] = []

    def hint(self, hint: str, keys: Any, seconds: float) -> int:
        self._enter(keys)
        self.hints.append((hint, len(keys), seconds))
        return sum(key in self.pages for key in keys.tolist())


def test_hints_are_obeyed_for_the_whole_pages_of_a_prompt() -> None:
    """In a lane of the connector; a store without hints does nothing."""
    hinted = HintedPages()
    with Engine(hinted) as engine:
        assert stored(engine) == 28
        ask = engine.connector.hint_kv_async
        assert ask("a", "retain", TOKENS, 60.0).result(TIMEOUT_S) == 28
        assert ask("a", "prefetch", TOKENS[:9]).result(TIMEOUT_S) == 8
        assert ask("a", "demote", [1, *TOKENS]).result(TIMEOUT_S) == 0
        assert ask("a", "share", TOKENS[:3]).result(TIMEOUT_S) == 0
        hinted.fails = True
        assert ask("a", "retain", TOKENS, 60.0).result(TIMEOUT_S) == 0
    assert hinted.hints == [("retain", 7, 60.0), ("prefetch", 2, 0.0), ("demote", 7, 0.0)]
    with Engine(MemoryPages()) as engine:
        assert engine.connector.hint_kv_async("a", "retain", TOKENS, 1).result(TIMEOUT_S) == 0


@pytest.mark.parametrize(
    ("hint", "seconds"), [("forget", 1.0), ("retain", "long"), ("retain", True)]
)
def test_a_hint_that_is_none_is_refused(engine: Engine, hint: str, seconds: Any) -> None:
    with pytest.raises(InvalidRequest):
        engine.connector.hint_kv_async("a", hint, TOKENS, seconds)
