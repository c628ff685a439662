"""The writing engine of the two-process tests: SGLang's controller in a process of its own.

In:  {"shape": {…}, "extra": {…}, "tokens": […], "seed": n}
Out: {"ready": true}, then {"stored": pages} a line. A rig that embeds its node stays open until
     stdin ends, because the node takes its pages along; others are closed at once.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

warnings.simplefilter("ignore")

import host_copies  # noqa: E402 - the warnings of what is imported here are of no interest

host_copies.prepare()

import pytest  # noqa: E402 - likewise

from peercache.sglang import PeerCacheStore  # noqa: E402 - likewise
from tests.integration.sglang_rig import Rig, Shape  # noqa: E402 - SGLang must find the stand-ins in place
from tests.pace import no_peer_is_taken_for_hung  # noqa: E402 - likewise


def main(replies: Any) -> None:
    """Back up one prompt a line."""
    embedding: list[Rig] = []
    no_peer_is_taken_for_hung(pytest.MonkeyPatch())
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        rig = Rig(Shape(**request["shape"]), request["extra"], PeerCacheStore)
        stored = rig.back_up(request["tokens"], request["seed"])
        if "home" in request["extra"]:
            rig.close()
        else:
            embedding.append(rig)
        print(json.dumps({"stored": stored}), file=replies, flush=True)
    for rig in embedding:
        rig.close()


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(channel)
