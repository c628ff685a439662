"""Engines without a host tier that die in the middle of their work: forks of this process.

In:  {"home": address, "kind": of the model, "at": a key of POINTS, "tokens": […], "seed": n}
     A fork computes and stores the prompt, or loads it, through memory that stands in for pinned
     memory, and kills itself at this point.
Out: {"ready": true}; then {"died": bool} a line: whether it came to that point.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from typing import Any

warnings.simplefilter("ignore")

import host_copies  # noqa: E402 - the warnings of what is imported here are of no interest

host_copies.prepare()

import pytest  # noqa: E402 - likewise

from peercache.client import bridge  # noqa: E402 - likewise
from peercache.client.client import Client  # noqa: E402 - likewise
from peercache.sglang.device import StagedPool  # noqa: E402 - likewise
from tests.integration.sglang_linked import Linked  # noqa: E402 - SGLang must find the stand-ins in place
from tests.pace import TIMEOUT_S, no_peer_is_taken_for_hung  # noqa: E402 - likewise

PATCH = pytest.MonkeyPatch()

DIES_AT = 2
"""The layer of the model in whose copy an engine dies."""


def die(*_: Any) -> None:
    """End at once, as a crash does."""
    os.kill(os.getpid(), signal.SIGKILL)


def in_a_load() -> None:
    """Die after some layers are on the device."""
    copy = StagedPool.to_device

    def to_device(pool: Any, layer: int, *more: Any) -> None:
        if layer == DIES_AT:
            die()
        copy(pool, layer, *more)

    PATCH.setattr(StagedPool, "to_device", to_device)


def in_a_gather() -> None:
    """Die after some layers of a page are in pinned memory."""
    pairs = StagedPool._pairs

    def some(pool: Any, place: int, *more: Any) -> Any:
        if place == 1:
            die()
        return pairs(pool, place, *more)

    PATCH.setattr(StagedPool, "_pairs", some)


def before_the_commit() -> None:
    """Die after the bytes are in the home node's memory, in slots that are only reserved."""
    place = bridge._place
    PATCH.setattr(bridge, "_place", lambda *arguments: die(place(*arguments)))


POINTS = {"load": in_a_load, "gather": in_a_gather, "commit": before_the_commit}


def run(request: dict[str, Any]) -> None:
    """Do what a request asks, in a fork."""
    POINTS[request["at"]]()
    settings = {"home": request["home"], "op_timeout_s": TIMEOUT_S, "exists_timeout_s": TIMEOUT_S}
    linked = Linked(Client.open, request["kind"], settings, is_staged=True)
    if request["at"] == "load":
        linked.restore(request["tokens"], request["seed"])
    else:
        linked.compute(request["tokens"], request["seed"])


def main(replies: Any) -> None:
    """Do what each line requests."""
    no_peer_is_taken_for_hung(PATCH)
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        fork = os.fork()
        if not fork:
            try:
                run(json.loads(line))
            finally:
                os._exit(1)
        died = os.WTERMSIG(os.waitpid(fork, 0)[1]) == signal.SIGKILL
        print(json.dumps({"died": died}), file=replies, flush=True)


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(channel)
