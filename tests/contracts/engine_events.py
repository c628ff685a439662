"""What the prefix index knows of an engine, in addition to what the engine reports."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from peercache.manager.engine_stream import EngineStream
from peercache.manager.gpu_blocks import GpuBlocks


def check(reported: dict[str, Any]) -> int:
    """Follow the events of each layout, ask what was asked; return how many answers were no 0.

    reported: as `tests/integration/vllm_cache.py` prints it.
    """
    hits = 0
    for layout, engine in reported.items():
        blocks = GpuBlocks(["engine"])
        stream = EngineStream("engine", blocks)
        stream.connected()
        taken = 0
        for count, tokens, adapter, expected in engine["asked"]:
            for at in range(taken, count):
                stream.take(at, base64.b64decode(engine["batches"][at]))
            taken = count
            (found,) = blocks.find(np.array(tokens, np.uint32), adapter)
            assert (found.why, found.prefix_tokens) == ("", expected), (layout, taken)
            hits += expected > 0
    return hits
