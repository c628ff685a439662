"""A client that answers questions on stdin, a JSON object a line; any build can run it.

It uses what every build has: the public client, and nothing of the tests.
"""

from __future__ import annotations

import hashlib
import json
import sys

import numpy as np

from peercache import Client
from peercache.client import home

try:
    from peercache.net import breaker
except ImportError:
    # The build before this one has it there.
    from peercache.paths import breaker  # type: ignore[attr-defined, no-redef]

PAGE_BYTES = 64 * 1024
CALL_S = 20.0
# A node that is slow because the machine is, is not taken for hung.
breaker.STALL_S = 60.0
home.ATTACH_S = 30.0


def page_of(key: str) -> np.ndarray:
    """Return the only right bytes of a key."""
    seed = np.frombuffer(hashlib.sha256(key.encode()).digest(), np.uint8)
    return np.resize(seed, PAGE_BYTES)


def main() -> None:
    """Answer until stdin ends."""
    cluster, address = sys.argv[1:]
    with Client.open(
        cluster=cluster, home=address, op_timeout_s=CALL_S, exists_timeout_s=CALL_S
    ) as cache:
        for line in sys.stdin:
            asked = json.loads(line)
            keys = asked.get("keys", [])
            if asked["do"] == "set":
                answer = cache.batch_set(keys, [page_of(key) for key in keys])
            elif asked["do"] == "get":
                buffers = [np.full(PAGE_BYTES, 0xA5, np.uint8) for _ in keys]
                hits = cache.batch_get(keys, buffers)
                right = [np.array_equal(b, page_of(k)) for k, b in zip(keys, buffers)]  # noqa: B905
                answer = ["wrong" if h and not r else h for h, r in zip(hits, right)]  # noqa: B905
            elif asked["do"] == "exists":
                answer = cache.contains(keys)
            elif asked["do"] == "remove":
                answer = cache.remove(keys)
            else:
                answer = cache.stats()
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


main()
