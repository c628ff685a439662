"""Another engine: SGLang's controllers in a process of its own.

In:  {"shape": {…}, "extra": {…}, "back_up": tokens, "seed": n}, or the same with "prefetch"
Out: {"ready": true}, then {"stored": pages} or {"loaded": pages, "right": bool} a line. Rigs stay
     open until stdin ends: one that embeds its node would take the pages along.
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
    """Do what each line requests."""
    rigs: dict[str, Rig] = {}
    no_peer_is_taken_for_hung(pytest.MonkeyPatch())
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        name = json.dumps([request["shape"], request["extra"]])
        if name not in rigs:
            rigs[name] = Rig(Shape(**request["shape"]), request["extra"], PeerCacheStore)
        if "back_up" in request:
            stored = rigs[name].back_up(request["back_up"], request["seed"])
            answer: dict[str, Any] = {"stored": stored}
        else:
            loaded, right = rigs[name].prefetch(request["prefetch"], request["seed"])
            answer = {"loaded": loaded, "right": right}
        print(json.dumps(answer), file=replies, flush=True)
    for rig in rigs.values():
        rig.close()


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(channel)
