"""The prefill role in a process of its own: one Rig that stays open.

    role_process.py EXTRA_CONFIG_JSON

In:  {"back_up": tokens, "seed": n} or {"prefetch": tokens, "seed": n}
Out: {"ready": true}, then {"stored": pages} or {"loaded": pages, "right": bool} a line
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
from tests.integration.sglang_rig import Rig, Shape  # noqa: E402 - likewise
from tests.pace import no_peer_is_taken_for_hung  # noqa: E402 - likewise


def main(extra: dict[str, Any], replies: Any) -> None:
    """Do what each line says."""
    no_peer_is_taken_for_hung(pytest.MonkeyPatch())
    rig = Rig(Shape(), extra, PeerCacheStore)
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "back_up" in request:
            answer: dict[str, Any] = {"stored": rig.back_up(request["back_up"], request["seed"])}
        else:
            loaded, right = rig.prefetch(request["prefetch"], request["seed"])
            answer = {"loaded": loaded, "right": right}
        print(json.dumps(answer), file=replies, flush=True)
    rig.close()


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(json.loads(sys.argv[1]), channel)
