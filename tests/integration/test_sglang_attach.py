"""SGLang's controllers attach and detach the store again and again, with operations in flight.

The same on a live engine is in test_sglang_faults.py.
"""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.utils import get_storage_hash_str

from peercache.client import home
from peercache.client.client import Client
from peercache.errors import PeerUnreachable
from tests.integration.processes import StandaloneNode
from tests.integration.recorded_store import RecordedStore, calls
from tests.integration.sglang_fakes import FakeClient, FakeCluster
from tests.integration.sglang_rig import PAGE_TOKENS, Rig, Shape, prompt, ranks
from tests.pace import PROMPT_S, TIMEOUT_S, assert_within, wait_until

PAGES = 9
PROMPTS = 6
ROUNDS = 20

PATIENT = {"exists_timeout_s": TIMEOUT_S, "op_timeout_s": TIMEOUT_S}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneNode]:
    """Return a node."""
    with StandaloneNode(tmp_path_factory.mktemp("node"), pool_size="64MiB") as node:
        yield node


class Attaching:
    """A rig whose storage comes and goes."""

    def __init__(self, rig: Rig, extra: dict[str, Any]) -> None:
        """Keep what is left behind by each store that was detached."""
        self.rig = rig
        self._extra = extra
        self.left: list[weakref.ref[Any]] = []

    def attach(self, **extra: Any) -> None:
        """Attach as the server does."""
        controller, pools = self.rig.controller, self.rig.pools
        more = {} if self.rig.shape.controller == "plain" else {"host_pools": pools.entries}
        with ranks(self.rig.shape):
            controller.attach_storage_backend(
                "dynamic",
                prefetch_threshold=PAGE_TOKENS,
                model_name=self.rig.shape.model,
                storage_backend_extra_config={
                    "backend_name": "peercache",
                    "module_path": RecordedStore.__module__,
                    "class_name": RecordedStore.__name__,
                    "interface_v1": 1,
                    **self._extra,
                    **extra,
                },
                **more,
            )

    def detach(self) -> None:
        """Detach as the server does."""
        self.left.append(weakref.ref(self.rig.store))
        self.rig.controller.detach_storage_backend()

    def start_backups(self, slots: torch.Tensor, seeds: range) -> None:
        """Queue the pages of many prompts: the storage threads work on them from now on."""
        for seed in seeds:
            tokens = prompt(PAGES, seed)
            keys = get_storage_hash_str(tokens, None, page_size=PAGE_TOKENS)
            self.rig.controller.write_storage(slots, tokens, hash_value=keys)

    def start_prefetch(self, seed: int) -> torch.Tensor:
        """Start to read a prompt that is stored; return the slots that are being filled."""
        controller = self.rig.controller
        controller.prefetch(CacheRequestHandle("rid", 0), prompt(PAGES, seed))
        operation = controller.prefetch_hit_queue.get(timeout=TIMEOUT_S)
        slots = self.rig.pools.alloc(operation.storage_hit_count)
        operation.host_indices = slots
        controller.prefetch_buffer.put(operation)
        return slots


def left_over(node: StandaloneNode) -> dict[str, Any]:
    """Return what detached stores have left in this process and in the node."""
    gc.collect()
    threads = [thread.name for thread in threading.enumerate()]
    clients = Path(node.home.removeprefix("ipc://") + ".clients")
    mapped = [Path(each.path).name for each in psutil.Process().memory_maps()]
    return {
        "threads": [t for t in threads if "peercache" in t or "prefetch" in t or "backup" in t],
        "segments": [name for name in mapped if name.startswith("peercache-")],
        "clients": list(clients.glob("*.lock")),
    }


def open_descriptors() -> int:
    """Return how many descriptors this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def all_is_gone(node: StandaloneNode) -> None:
    """Return once detached stores have left nothing."""
    try:
        wait_until(lambda: not any(left_over(node).values()), "the store is gone", PROMPT_S)
    except AssertionError as late:
        raise AssertionError(left_over(node)) from late


@pytest.mark.slow
@pytest.mark.parametrize("controller", ["plain", "hybrid"])
def test_rounds_with_operations_in_flight_leave_nothing_behind(
    node: StandaloneNode, tmp_path: Path, controller: str
) -> None:
    """No thread, mapping, descriptor, client or reservation stays; every page found is right."""
    rng = random.Random(controller)
    extra = {"home": node.home, "record": str(tmp_path), **PATIENT}
    shape = Shape(model=f"attach-{controller}", controller=controller)
    rig = Rig(shape, extra, RecordedStore)
    attaching = Attaching(rig, extra)
    stored = rig.back_up(prompt(PAGES, seed=0), seed=0)
    source = rig.pools.alloc(PAGES * PAGE_TOKENS)
    detached_at: list[float] = []
    descriptors = 0

    for number in range(ROUNDS):
        first = 1 + number * PROMPTS
        attaching.start_backups(source, range(first, first + PROMPTS))
        target = attaching.start_prefetch(seed=0)
        threading.Event().wait(rng.uniform(0, 0.002))
        detached_at.append(time.monotonic())
        attaching.detach()
        rig.pools.free(target)
        descriptors = descriptors or open_descriptors()
        attaching.attach()
    again = rig.prefetch(prompt(PAGES, seed=0), seed=0)
    attaching.detach()

    met = {
        operation: sum(
            call.operation == operation and call.begun <= at <= call.ended
            for call in calls(tmp_path)
            for at in detached_at
        )
        for operation in ("get", "set")
    }
    assert (stored, again) == (PAGES, (PAGES, True))
    assert min(met.values()) > 0, met
    all_is_gone(node)
    # What is loaded at the first attach stays open; twenty times as much does not.
    wait_until(lambda: open_descriptors() <= descriptors, "descriptors are closed")
    assert [store for store in attaching.left if store() is not None] == []
    with Client.open(home=node.home, **PATIENT) as looking:
        figures = looking.stats()
    assert (figures["home_pool_reservations"], figures["home_pool_bytes_reserved"]) == (0, 0)


@pytest.mark.slow
def test_a_home_node_that_is_paused_does_not_hold_up_a_detach(tmp_path: Path) -> None:
    """The calls in flight end by their deadlines; the node forgets the client when it goes on."""
    (tmp_path / "node").mkdir()
    with StandaloneNode(tmp_path / "node", pool_size="64MiB") as node:
        extra = {"home": node.home, "record": str(tmp_path)}
        attaching = Attaching(Rig(Shape(model="still"), extra, RecordedStore), extra)
        source = attaching.rig.pools.alloc(PAGES * PAGE_TOKENS)
        attaching.start_backups(source, range(1))
        wait_until(lambda: len(calls(tmp_path)) == 1, "a prompt is stored")

        node.send_signal(signal.SIGSTOP)
        try:
            attaching.start_backups(source, range(1, PROMPTS))
            begun = time.monotonic()
            attaching.detach()
            took_s = time.monotonic() - begun
        finally:
            node.send_signal(signal.SIGCONT)

        all_is_gone(node)
    assert_within(took_s, PROMPT_S)
    assert calls(tmp_path)[0].good == PAGES
    assert calls(tmp_path)[-1].good == 0


@pytest.mark.slow
def test_a_store_that_cannot_attach_leaves_nothing_and_attaches_later(
    node: StandaloneNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang gets the error, and its controller is as before."""
    extra = {"home": node.home, "record": str(tmp_path), **PATIENT}
    attaching = Attaching(Rig(Shape(model="later"), extra, RecordedStore), extra)
    attaching.detach()
    with monkeypatch.context() as patch:
        patch.setattr(home, "ATTACH_S", 0.3)
        for _ in range(3):
            with pytest.raises(PeerUnreachable):
                attaching.attach(home=f"ipc://{tmp_path}/nowhere.ipc")

    assert not attaching.rig.controller.enable_storage
    all_is_gone(node)
    assert list((tmp_path / "nowhere.ipc.clients").glob("*")) == []
    attaching.attach()
    assert attaching.rig.back_up(prompt(PAGES, seed=1), seed=1) == PAGES
    attaching.detach()


def test_a_client_whose_memory_cannot_be_registered_is_closed(
    cluster: FakeCluster, open_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its thread and its tie to the home node would outlive the failed attach."""
    monkeypatch.setattr(FakeClient, "register_memory", lambda *_: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        open_rig()

    assert [client.closed for client in cluster.opened] == [True]
