"""What an LMCache server knows of its objects: lists, usage by salt, evictions, deletions, pins."""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from peercache.client.home import HomeState
from tests.pace import wait_until
from tests.unit.engines.fake_client import FakeClient
from tests.unit.lmcache.fake_lmcache import MemoryObject, ObjectKey
from tests.unit.lmcache.test_adapter import HELD, adapter, fake, load, look_up, store

__all__ = ["adapter", "fake"]

KEYS = [ObjectKey(bytes([number]) * 32, cache_salt="ab"[number % 2]) for number in range(5)]
SIZE = len(HELD)
LOST = HomeState(is_lost=True, answered_s=0.0, reason="no_answer", why="no answer")


@pytest.fixture(autouse=True)
def no_pause(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each call for the usage check the known objects."""
    monkeypatch.setattr("peercache.lmcache.adapter.USAGE_S", 0.0)


def all_listed(adapter: Any, **of: Any) -> list[Any]:
    """Return the keys of all pages of a list."""
    found, cursor = [], None
    while True:
        page = adapter.list_l2_keys(cursor=cursor, **of)
        assert all(entry.size_bytes == SIZE for entry in page.entries)
        found += [entry.key.to_object_key() for entry in page.entries]
        cursor = page.next_page_token
        if cursor is None:
            return found


def refreshed(adapter: Any, comes: Callable[[dict[str, int]], bool]) -> None:
    """Wait until the usage by salt is right."""
    wait_until(lambda: comes(dict(adapter.get_usage().bytes_by_cache_salt)))


def evict(fake: FakeClient, *places: int) -> None:
    """Have the nodes evict pages, by the order in which they were stored."""
    pages = list(fake.pages)
    for place in places:
        del fake.pages[pages[place]]


def test_a_list_has_what_was_stored_or_loaded_and_is_held(adapter: Any, fake: FakeClient) -> None:
    """Page by page, of one model or of all; what was evicted is left out."""
    other = ObjectKey(b"o" * 32, model_name="another/model")
    store(adapter, *((key, MemoryObject(HELD)) for key in [*KEYS[:4], other]))
    assert all_listed(adapter) == [*KEYS[:4], other]
    assert all_listed(adapter, page_size=2) == [*KEYS[:4], other]
    assert all_listed(adapter, model_name="a/model", page_size=1) == KEYS[:4]
    assert all_listed(adapter, model_name="unknown") == []
    evict(fake, 0, 2)
    assert all_listed(adapter, page_size=3) == [KEYS[1], KEYS[3], other]


def test_a_server_lists_what_it_loads_of_others(adapter: Any, fake: FakeClient) -> None:
    """After a restart a server knows nothing, and learns it from loads."""
    store(adapter, (KEYS[0], MemoryObject(HELD)))
    new = type(adapter)({}, client_factory=fake.open)
    assert all_listed(new) == []
    assert look_up(new, KEYS[0]) == [True]
    assert all_listed(new) == []
    assert load(new, (KEYS[0], MemoryObject(HELD))) == [True]
    assert all_listed(new) == [KEYS[0]]
    assert new.sizes == {KEYS[0]: SIZE}
    new.close()


@pytest.mark.parametrize("wrong", [{"page_size": 0}, {"page_size": -1}, {"cursor": "x"}])
def test_a_wrong_page_is_refused(adapter: Any, wrong: dict[str, Any]) -> None:
    """LMCache answers 400 for a ValueError."""
    with pytest.raises(ValueError, match=r"page_size|cursor"):
        adapter.list_l2_keys(**wrong)


def test_a_lost_home_node_is_no_empty_list(adapter: Any, fake: FakeClient) -> None:
    """LMCache answers 503 for a NotImplementedError, with its text; before and after a close."""
    store(adapter, (KEYS[0], MemoryObject(HELD)))
    fake.home_state = LOST
    with pytest.raises(NotImplementedError, match="the home node is lost: no answer"):
        adapter.list_l2_keys()
    fake.home_state = attrs.evolve(LOST, is_lost=False, reason="", why="")
    assert all_listed(adapter) == [KEYS[0]]
    adapter.close()
    with pytest.raises(NotImplementedError):
        adapter.list_l2_keys()


def test_usage_by_salt_follows_stores_evictions_and_deletions(
    adapter: Any, fake: FakeClient
) -> None:
    """Each object counts once; LMCache is notified of what PeerCache has evicted."""
    store(adapter, *((key, MemoryObject(HELD)) for key in KEYS))
    store(adapter, (KEYS[0], MemoryObject(HELD)))
    assert dict(adapter.get_usage().bytes_by_cache_salt) == {"a": 3 * SIZE, "b": 2 * SIZE}
    assert adapter.accessed == [KEYS[0]]
    evict(fake, 0, 1, 3)
    refreshed(adapter, lambda usage: usage == {"a": 2 * SIZE})
    assert adapter.sizes == dict.fromkeys([KEYS[2], KEYS[4]], SIZE)

    adapter.delete([KEYS[2]])
    wait_until(lambda: dict(adapter.get_usage().bytes_by_cache_salt) == {"a": SIZE})
    evict(fake, 0)
    adapter.delete([KEYS[4]])
    wait_until(lambda: adapter.sizes == {})


def test_a_node_that_is_lost_makes_no_object_gone(adapter: Any, fake: FakeClient) -> None:
    """Nothing is known of them meanwhile."""
    store(adapter, (KEYS[0], MemoryObject(HELD)))
    fake.home_state = LOST
    evict(fake, 0)
    adapter.get_usage()
    wait_until(lambda: adapter.report_status()["lookups_waiting"] == 0)
    assert dict(adapter.get_usage().bytes_by_cache_salt) == {"a": SIZE}
    assert adapter.deleted == []


def test_known_objects_do_not_grow(adapter: Any) -> None:
    """The first ones are forgotten; one that is added again is not dropped by an older check."""
    objects = importlib.import_module("peercache.lmcache.known_objects").KnownObjects(2)
    assert objects.add(KEYS[:2], ["l"] * 2, [1, 2]) == [True, True]
    before = objects.of(KEYS[:2])
    assert objects.add([KEYS[1], KEYS[2]], ["l"] * 2, [3, 4]) == [False, True]
    assert objects.bytes_by_salt() == {"b": 3, "a": 4}
    assert objects.drop(before) == []
    assert [each.key for each in objects.after(0, 9)] == [KEYS[1], KEYS[2]]
    assert len(objects) == 2


def test_each_object_is_checked_in_turn(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part at a time, from the first one again after the last."""
    module = importlib.import_module("peercache.lmcache.known_objects")
    monkeypatch.setattr(module, "CHECKED_MIN", 2)
    objects = module.KnownObjects()
    objects.add(KEYS, ["l"] * 5, [1] * 5)
    parts = [[KEYS.index(each.key) for each in objects.next_to_check()] for _ in range(4)]
    assert parts == [[0, 1], [2, 3], [4], [0, 1]]


def test_a_configuration_is_checked_and_explained(adapter: Any, fake: FakeClient) -> None:
    """LMCache finds the class by its name, expects a ValueError, and prints the help."""
    config = importlib.import_module("peercache.lmcache").PeerCacheL2AdapterConfig
    made = config.from_dict({"namespace": "n", "coordinator_url": "http://host:9300/"})
    assert made.checked.namespace == "n"
    assert made.coordinator_url == "http://host:9300"
    other = type(adapter)(config.from_dict({"namespace": "n"}), client_factory=fake.open)
    assert other.report_status()["namespace"] == "n"
    other.close()
    for wrong, names in [
        ({"hom": "x"}, "hom"),
        ({"coordinator_url": "host:9300"}, "coordinator_url"),
        ({"coordinator_url": 9300}, "coordinator_url"),
    ]:
        with pytest.raises(ValueError, match=names):
            config.from_dict(wrong)
    assert all(name in config.help() for name in ("home", "namespace", "coordinator_url"))


def test_a_serializer_is_named_in_the_log(
    adapter: Any, fake: FakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    """It stores rows of bytes, and looks them up with the layout of the model: never a hit."""
    row = MemoryObject(HELD)
    row.meta = SimpleNamespace(shapes=[(SIZE,)], dtypes=["torch.uint8"])
    store(adapter, (KEYS[0], row))
    assert look_up(adapter, KEYS[0]) == [False]
    assert look_up(adapter, KEYS[1]) == [False]
    assert caplog.text.count("lmcache.serializer_configured") == 1


class Coordinator:
    """LMCache's coordinator, as far as it lists pins."""

    def __init__(self) -> None:
        """Pin nothing."""
        self.pinned: list[ObjectKey] = []
        self.body: bytes | None = None
        self.url = ""

    def answer(self, offset: int) -> bytes:
        """Return two of the pins, or a wrong body."""
        if self.body is not None:
            return self.body
        part = self.pinned[offset : offset + 2]
        keys = [attrs.asdict(key.to_encoded_object_key()) for key in part]
        pins = [{"key": key, "pin_count": 1} for key in keys]
        return json.dumps({"total": len(self.pinned), "pins": pins}).encode()


@contextmanager
def serving(coordinator: Coordinator) -> Iterator[None]:
    """Answer requests for pins."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = coordinator.answer(int(self.path.partition("offset=")[2].partition("&")[0]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Write nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        coordinator.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield
        server.shutdown()
        thread.join()


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    """Return a coordinator that serves."""
    coordinator = Coordinator()
    with serving(coordinator):
        yield coordinator


def test_what_a_coordinator_pins_is_retained(
    adapter: Any,
    fake: FakeClient,
    coordinator: Coordinator,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In all object groups, until it is unpinned; a wrong or missing answer changes nothing."""
    pins = importlib.import_module("peercache.lmcache.pins")
    monkeypatch.setattr(pins, "PAUSE_S", 0.02)
    pinning = type(adapter)({"coordinator_url": coordinator.url}, client_factory=fake.open)
    second_group = attrs.evolve(KEYS[0], object_group_id=1)
    stored = [*KEYS[:3], second_group]
    store(pinning, *((key, MemoryObject(HELD)) for key in stored))
    assert pinning.report_status()["pinned"] == 0
    assert fake.retained == {}

    coordinator.pinned = KEYS[:3]
    wait_until(lambda: len(fake.retained) == 4)
    assert set(fake.retained.values()) == {pins.KEPT_S}
    wait_until(lambda: pinning.report_status()["pins_retained"] == 3)

    coordinator.body = b'{"pins": [{"key": 1}], "total": 1}'
    wait_until(lambda: "lmcache.pins_unknown" in caplog.text)
    assert pinning.report_status()["pinned"] == 3

    coordinator.body, coordinator.pinned = None, KEYS[1:2]
    wait_until(lambda: sorted(fake.retained.values()) == [0.0, 0.0, 0.0, pins.KEPT_S])
    assert "lmcache.pins_not_retained" not in caplog.text
    coordinator.pinned = [ObjectKey(b"n" * 32)]
    wait_until(lambda: "lmcache.pins_not_retained" in caplog.text)
    pinning.close()
