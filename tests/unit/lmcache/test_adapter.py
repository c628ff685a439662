"""The L2 adapter: tasks, results, addresses, and nothing raised, over stand-ins of LMCache."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from peercache.client.home import HomeState
from peercache.errors import ConfigError
from tests.pace import TIMEOUT_S, wait_until
from tests.unit.engines.fake_client import FakeClient
from tests.unit.lmcache import fake_lmcache
from tests.unit.lmcache.fake_lmcache import MemoryObject, ObjectKey, layout, readable

HELD = b"0123456789abcdef"
KEY = ObjectKey(b"k" * 32)


@pytest.fixture
def fake() -> FakeClient:
    """Return the client of the adapter."""
    return FakeClient()


@pytest.fixture
def adapter(fake: FakeClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return an adapter over the fake client."""
    fake_lmcache.install(monkeypatch)
    module = importlib.import_module("peercache.lmcache")
    # A lookup or load that waits for a quarter of it before a thread takes it is a miss.
    settings = {"op_timeout_s": 4 * TIMEOUT_S}
    adapter = module.PeerCacheL2Adapter(settings, client_factory=fake.open)
    yield adapter
    fake.may_answer.set()
    adapter.close()
    fake_lmcache.forget()


def store(adapter: Any, *pairs: tuple[ObjectKey, MemoryObject]) -> int:
    """Store objects; return LMCache's result."""
    task = adapter.submit_store_task([key for key, _ in pairs], [each for _, each in pairs])
    assert readable(adapter.get_store_event_fd())
    done = adapter.pop_completed_store_tasks()
    assert list(done) == [task]
    return int(done[task])


def look_up(adapter: Any, *keys: ObjectKey, size: int = len(HELD), **of: str) -> list[bool]:
    """Look objects up; return the bits."""
    task = adapter.submit_lookup_and_lock_task(keys, {0: layout(size, **of)})
    assert readable(adapter.get_lookup_and_lock_event_fd())
    result = adapter.query_lookup_and_lock_result(task)
    assert adapter.query_lookup_and_lock_result(task) is None
    return result.bits


def load(adapter: Any, *pairs: tuple[ObjectKey, MemoryObject]) -> list[bool]:
    """Load objects; return the bits."""
    task = adapter.submit_load_task([key for key, _ in pairs], [each for _, each in pairs])
    assert readable(adapter.get_load_event_fd())
    result = adapter.query_load_result(task)
    assert adapter.query_load_result(task) is None
    return result.bits


def test_what_was_stored_is_found_and_loaded_in_place(adapter: Any) -> None:
    """The bytes come back into LMCache's own memory, and LMCache's listeners hear it."""
    assert store(adapter, (KEY, MemoryObject(HELD))) == len(HELD)
    other = ObjectKey(b"o" * 32)
    assert look_up(adapter, KEY, other) == [True, False]
    into = MemoryObject(bytes(len(HELD)))
    assert load(adapter, (KEY, into), (other, MemoryObject(HELD))) == [True, False]
    assert into.data == HELD
    assert adapter.stored == [(KEY, len(HELD))]
    assert adapter.accessed == [KEY]


@pytest.mark.parametrize(
    "other",
    [
        {"model_name": "another/model"},
        {"kv_rank": 0x02010201},
        {"object_group_id": 1},
        {"cache_salt": "tenant"},
        {"chunk_hash": b"k" * 31 + b"l"},
    ],
)
def test_each_part_of_a_key_is_part_of_the_address(adapter: Any, other: dict[str, Any]) -> None:
    """An object of another model, rank, group or tenant is never served."""
    store(adapter, (KEY, MemoryObject(HELD)))
    into = MemoryObject(bytes(len(HELD)))
    assert load(adapter, (attrs.evolve(KEY, **other), into)) == [False]
    assert into.data == bytes(len(HELD))


def test_another_size_or_type_is_a_miss(adapter: Any) -> None:
    """LMCache's key names no layout, so the address does."""
    store(adapter, (KEY, MemoryObject(HELD)))
    assert look_up(adapter, KEY, size=len(HELD) + 4) == [False]
    assert look_up(adapter, KEY, dtype="float16") == [False]
    assert load(adapter, (KEY, MemoryObject(bytes(len(HELD) + 4)))) == [False]
    assert load(adapter, (KEY, MemoryObject(HELD, "float16"))) == [False]


def test_a_question_without_a_layout_takes_the_one_that_was_met(adapter: Any) -> None:
    """LMCache's own benchmark asks so."""
    store(adapter, (KEY, MemoryObject(HELD)))
    task = adapter.submit_lookup_and_lock_task([KEY], {})
    assert readable(adapter.get_lookup_and_lock_event_fd())
    assert adapter.query_lookup_and_lock_result(task).bits == [True]


def test_locks_are_counted(adapter: Any) -> None:
    """Each lookup locks once, and an unlock too many does no harm."""
    store(adapter, (KEY, MemoryObject(HELD)))
    look_up(adapter, KEY)
    look_up(adapter, KEY)
    adapter.submit_unlock([KEY])
    assert adapter.report_status()["locked"] == 1
    adapter.submit_unlock([KEY, KEY, ObjectKey(b"never")])
    status = adapter.report_status()
    assert status.pop("last_success_s") >= 0
    assert status == {
        "is_healthy": True,
        "home": "ipc:///home",
        "namespace": "lmcache",
        "reason": "",
        "why": "",
        "type": "PeerCacheL2Adapter",
        "locked": 0,
        "objects_known": 1,
        "stores_waiting": 0,
        "lookups_waiting": 0,
        "loads_waiting": 0,
    }


def test_a_client_that_raises_is_a_miss_with_a_result(adapter: Any, fake: FakeClient) -> None:
    """LMCache waits for a result without a deadline: there is always one."""
    fake.problem = RuntimeError("a bug")
    assert store(adapter, (KEY, MemoryObject(HELD))) == -1
    assert look_up(adapter, KEY) == [False]
    assert load(adapter, (KEY, MemoryObject(HELD))) == [False]


def test_objects_that_cannot_be_read_are_a_miss(adapter: Any) -> None:
    """A foreign object in a batch ends nothing but its own task."""
    assert store(adapter, (KEY, object())) == -1  # type: ignore[arg-type]
    assert load(adapter, (KEY, object())) == [False]  # type: ignore[arg-type]
    adapter.submit_unlock(None)
    assert adapter.query_load_result([]) is None


def test_results_that_are_never_asked_for_do_not_grow(
    adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefetch that LMCache has given up leaves its result behind."""
    monkeypatch.setattr(sys.modules["peercache.lmcache.adapter"], "RESULTS_MAX", 3)
    tasks = []
    for _ in range(5):
        tasks.append(adapter.submit_load_task([KEY], [MemoryObject(HELD)]))
        # Several threads load: one after the other, so that the oldest results are known.
        assert readable(adapter.get_load_event_fd())
    assert len(set(tasks)) == 5
    kept = [adapter.query_load_result(task) is not None for task in tasks]
    assert kept == [False] * 2 + [True] * 3


def test_a_removed_object_is_gone(adapter: Any, fake: FakeClient) -> None:
    """A deletion names no layout; those that this server has met are removed."""
    store(adapter, (KEY, MemoryObject(HELD)))
    adapter.delete([KEY, ObjectKey(b"k" * 32, model_name="unknown")])
    wait_until(lambda: adapter.deleted == [KEY])
    assert look_up(adapter, KEY) == [False]
    adapter.get_usage()
    wait_until(lambda: adapter.get_usage().total_bytes_used == 0)


def test_usage_is_that_of_the_home_node(adapter: Any) -> None:
    """The first question asks for it; no caller waits."""
    store(adapter, (KEY, MemoryObject(HELD)))
    adapter.get_usage()
    wait_until(lambda: adapter.get_usage().total_bytes_used == len(HELD))


def test_a_large_store_goes_in_parts(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of the client has a deadline of its own."""
    monkeypatch.setattr(sys.modules["peercache.lmcache.adapter"], "STORE_BYTES", 40)
    pairs = [(ObjectKey(bytes([i]) * 32), MemoryObject(HELD)) for i in range(7)]
    assert store(adapter, *pairs) == 7 * len(HELD)
    assert look_up(adapter, *(key for key, _ in pairs)) == [True] * 7


def test_a_close_is_bounded_and_later_tasks_are_misses(
    adapter: Any, fake: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that does not come back keeps no server from stopping; nothing raises after it."""
    monkeypatch.setattr("peercache.engines.lanes.CLOSE_S", 0.01)
    fake.may_answer.clear()
    adapter.submit_load_task([KEY], [MemoryObject(HELD)])
    adapter.close()
    assert fake.is_closed
    # The number of a closed descriptor may be another's by now.
    signals: list[int] = []
    monkeypatch.setattr(fake_lmcache.Notifier, "notify", signals.append)
    assert adapter.submit_load_task([KEY], [MemoryObject(HELD)]) > 0
    assert signals == []
    adapter.close()


def test_memory_is_registered_once_and_never_what_may_move(fake: FakeClient, adapter: Any) -> None:
    """A lazy arena has a first part that stays; LMCache reports how large it is."""
    arena = type("Arena", (), {"ptr": 4096, "size": 1 << 20, "stable_registration_size": 1 << 16})
    second = type(adapter)({}, l1_memory_desc=arena, client_factory=fake.open)
    assert fake.registered == [(4096, 1 << 16)]
    second.close()


def test_a_wrong_setting_is_named(adapter: Any, fake: FakeClient) -> None:
    """A person reads it as the server starts."""
    with pytest.raises(ConfigError, match="hom"):
        type(adapter)({"hom": "x"}, client_factory=fake.open)


def test_without_lmcache_the_import_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """One clear error in place of a stack of theirs."""
    monkeypatch.setitem(sys.modules, "lmcache", None)
    monkeypatch.setitem(sys.modules, "lmcache.lmcache_native", None)
    fake_lmcache.forget()
    with pytest.raises(ImportError, match=r"install lmcache 0\.5\.6 or later"):
        importlib.import_module("peercache.lmcache")


def test_the_status_shows_that_the_home_node_is_lost(adapter: Any, fake: FakeClient) -> None:
    """Which one, of which namespace, since when, and why."""
    lost = HomeState(
        is_lost=True, answered_s=time.monotonic() - 60, reason="no_answer", why="no answer"
    )
    fake.home_state = lost
    status = adapter.report_status()
    assert not status["is_healthy"]
    assert (status["reason"], status["why"]) == ("no_answer", "no answer")
    assert status["last_success_s"] >= 60
    fake.home_state = attrs.evolve(lost, is_lost=False, reason="", why="")
    assert adapter.report_status()["is_healthy"]
