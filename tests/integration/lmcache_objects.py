"""The L2 adapter in LMCache's own Python: lists, quotas by salt and pins, by LMCache's own classes.

In:  the JSON of `--l2-adapter` with a coordinator that has pins, at a node with a small pool.
Out: one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import select
import sys
import time
import urllib.request
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from lmcache.v1.distributed.api import EncodedObjectKey, MemoryLayoutDesc, ObjectKey, Tier
from lmcache.v1.distributed.config import EvictionConfig
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.distributed.quota_manager import QuotaManager
from lmcache.v1.distributed.storage_controllers.eviction_controller import (
    L2AdapterEvictionState,
    L2EvictionController,
)
from lmcache.v1.multiprocess.cache_control.errors import InvalidRequest
from lmcache.v1.multiprocess.cache_control.object_service import ObjectService

from peercache.lmcache import pins

pins.PAUSE_S = 0.2  # type: ignore[misc]
SIZE = 256 << 10
ANSWER_S = 60.0
MODEL = "a/model"


def key(number: int, salt: str) -> ObjectKey:
    """Return the key of an object."""
    return ObjectKey(number.to_bytes(32, "big"), MODEL, 0x01000100, 0, salt)


def memory() -> Any:
    """Return an object as LMCache's allocator gives it."""
    tensor = torch.full((SIZE // 2,), 1, dtype=torch.bfloat16)
    meta = SimpleNamespace(shapes=[tensor.shape], dtypes=[tensor.dtype])
    return SimpleNamespace(
        tensor=tensor, data_ptr=tensor.data_ptr(), get_size=lambda: SIZE, meta=meta
    )


def wait_until(comes: Callable[[], bool]) -> None:
    """Wait for something."""
    until = time.monotonic() + ANSWER_S
    while not comes():
        assert time.monotonic() < until, "it does not come"
        time.sleep(0.05)


def made(line: str) -> tuple[Any, Any]:
    """Return what LMCache makes of a `--l2-adapter`: its description, and the adapter."""
    parsed = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[line]))
    (config,) = parsed.adapters
    adapter = create_l2_adapter_from_registry(config)
    adapter.set_backend_identity("plugin", shared=True)
    return SimpleNamespace(type_name="plugin", config=config), adapter


def store(adapter: Any, *keys: ObjectKey) -> bool:
    """Store an object under each key."""
    task = adapter.submit_store_task(list(keys), [memory() for _ in keys])
    select.select([adapter.get_store_event_fd()], [], [], ANSWER_S)
    os.eventfd_read(adapter.get_store_event_fd())
    return bool(adapter.pop_completed_store_tasks()[task].is_successful())


def look_up(adapter: Any, *keys: ObjectKey) -> int:
    """Return how many are held."""
    layout = MemoryLayoutDesc(shapes=[torch.Size([SIZE // 2])], dtypes=[torch.bfloat16])
    task = adapter.submit_lookup_and_lock_task(list(keys), {0: layout})
    select.select([adapter.get_lookup_and_lock_event_fd()], [], [], ANSWER_S)
    os.eventfd_read(adapter.get_lookup_and_lock_event_fd())
    adapter.submit_unlock(list(keys))
    found: int = adapter.query_lookup_and_lock_result(task).popcount()
    return found


def listed(service: ObjectService, **of: Any) -> list[ObjectKey]:
    """Return the keys that LMCache's HTTP API would list, over all pages."""
    token, found = None, []
    while True:
        page = asyncio.run(
            service.list_objects(Tier.L2, None, of.get("model"), of.get("page_size", 3), token)
        )
        found += [entry.key.to_object_key() for entry in page["entries"]]
        token = page["next_page_token"]
        if token is None:
            return found


def main() -> None:
    """Print what happened."""
    line = json.loads(sys.argv[1])
    said: dict[str, Any] = {}
    try:
        made(json.dumps({**line, "adapter_params": {"hom": "x"}}))
    except ValueError as error:
        said["wrong"] = str(error)
    desc, adapter = made(sys.argv[1])
    manager = SimpleNamespace(l2_adapters=lambda: [(desc, adapter)])
    service = ObjectService(SimpleNamespace(storage_manager=manager))
    quotas = QuotaManager()
    state = L2AdapterEvictionState(0, adapter, EvictionConfig("IsolatedLRU", 0.8, 0.5))
    # It is the object that LMCache's server has; only its loop is not started.
    controller = L2EvictionController([state], quotas)

    both = [*(key(i, "a") for i in range(4)), *(key(i, "b") for i in range(3))]
    said["stored"] = store(adapter, *both)
    said["listed"] = listed(service) == both
    said["of_no_model"] = len(listed(service, model="another/model"))
    try:
        listed(service, page_size=0)
    except InvalidRequest as error:
        said["refused"] = str(error)
    said["by_salt"] = dict(adapter.get_usage().bytes_by_cache_salt)
    quotas.set_quota("a", 4 * SIZE)
    quotas.set_quota("b", 100 * SIZE)
    controller._check_and_evict(state)
    wait_until(lambda: len(listed(service)) == 5)
    said["left"] = [each.cache_salt for each in listed(service)]
    said["by_salt_then"] = dict(adapter.get_usage().bytes_by_cache_salt)

    # What the coordinator has pinned outlives what fills the pool.
    url = line["adapter_params"]["coordinator_url"]
    wait_until(lambda: adapter.report_status()["pinned"] == 4)
    with urllib.request.urlopen(f"{url}/cache/pins", timeout=ANSWER_S) as answer:
        pinned = [
            EncodedObjectKey(**each["key"]).to_object_key() for each in json.load(answer)["pins"]
        ]
    said["pinned_stored"] = store(adapter, *pinned)
    wait_until(lambda: adapter.report_status()["pins_retained"] == 4)
    # Of what is used within five seconds, what was stored last is evicted first (ADR 0036).
    time.sleep(5.5)
    for number in range(100, 200, 5):
        store(adapter, *(key(number + i, "c") for i in range(5)))
    said["pinned_held"] = look_up(adapter, *pinned)
    said["first_held"] = look_up(adapter, *both)
    adapter._usage_asked_s = 0.0
    adapter.get_usage()
    wait_until(lambda: "a" not in adapter.get_usage().bytes_by_cache_salt)
    left = listed(service, page_size=500)
    said["pinned_listed"] = len(set(pinned) & set(left))
    said["fits"] = len(left) * SIZE <= 16 << 20
    adapter.close()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
