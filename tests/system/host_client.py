"""A client in a process of its own, on whichever host it is started; the test talks over its pipes.

Arguments: the settings as JSON. In: {"ask": "set" | "get" | "prefetch" | "clear" | "exists" |
"stats", "name": …, "count": n} a line. Out: {"ready": true}, then an answer a line.
"""

from __future__ import annotations

import json
import sys

import pytest

from peercache import Client
from peercache.errors import PeerCacheError
from tests.pace import no_peer_is_taken_for_hung
from tests.system.nodes import CALL_S, keys_of, pages_of, read


def main() -> None:
    """Serve the test until it closes the pipe."""
    no_peer_is_taken_for_hung(pytest.MonkeyPatch())
    timeout = {"op_timeout_s": CALL_S, "exists_timeout_s": CALL_S}
    try:
        client = Client.open(**{**timeout, **json.loads(sys.argv[1])})
    except PeerCacheError as error:
        report({"refused": f"{type(error).__name__}: {error}"})
        return
    with client:
        report({"ready": True})
        for line in sys.stdin:
            asked = json.loads(line)
            keys = keys_of(asked.get("name", ""), asked.get("count", 0))
            match asked["ask"]:
                case "set":
                    report({"done": sum(client.batch_set(keys, pages_of(keys)))})
                case "get":
                    report({"done": sum(read(client, keys))})
                case "prefetch":
                    report({"done": client.prefetch(keys)})
                case "exists":
                    report({"done": client.batch_exists(keys)})
                case "clear":
                    client.clear()
                    report({"done": 0})
                case "stats":
                    report({"done": client.stats()})


def report(answer: object) -> None:
    """Write an answer."""
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
