"""The storage backend and the linker that the schedulers of `benchmarks.ttft_sglang` load.

TimedStore and TimedLinker are ours with a file of their calls, one JSON line each: {"call",
"pages", "hits", "begun_s", "ended_s"}, in seconds of the monotonic clock, which all processes of a
host share.

Its import also makes SGLang's `torch_native` attention compute only the new rows. Without that, the
backend computes the rows of all cached tokens again and drops them, which no GPU backend does: that
takes half of a cold prompt's time, even if pages were cached.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from benchmarks.ttft_engine import CALLS_FILE, COMPUTE_SLEEP, ZERO_SUFFIX
from peercache.sglang import PeerCacheLinker, PeerCacheStore

Answer = TypeVar("Answer")


class Calls:
    """The file of the calls, and the switch that makes all pages zero."""

    def __init__(self) -> None:
        """Open the file."""
        name = os.environ[CALLS_FILE]
        self._file = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._zero = Path(name + ZERO_SUFFIX)

    @property
    def are_zeroed(self) -> bool:
        """Whether pages that are read become zero."""
        return self._zero.exists()

    def timed(
        self,
        call: str,
        pages: int,
        answer: Callable[[], Answer],
        hits: Callable[[Answer], int],
    ) -> Answer:
        """Call, and write a line about it."""
        begun_s = time.monotonic()
        answered = answer()
        ended_s = time.monotonic()
        line = {
            "call": call, "pages": pages, "hits": hits(answered),
            "begun_s": begun_s, "ended_s": ended_s,
        }  # fmt: skip
        os.write(self._file, json.dumps(line).encode() + b"\n")
        return answered


class TimedStore(PeerCacheStore):
    """A PeerCacheStore that records the begin and end of its calls."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Open the file of the calls, in addition to what PeerCacheStore does."""
        super().__init__(*arguments, **options)
        self._calls = Calls()

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Register the pool, after touching all its memory.

        On a GPU host this memory is pinned and never faults. The stand-in for a CPU only allocates
        it, and would fault once for each 4 KiB within the time to first token.
        """
        mem_pool_host.kv_buffer.zero_()
        super().register_mem_pool_host(mem_pool_host)

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Time the call."""
        ask = super().batch_exists
        return self._calls.timed("exists", len(keys), lambda: ask(keys, extra_info), int)

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Time the call."""
        ask = super().batch_get_v1
        flags = self._calls.timed(
            "get", len(keys), lambda: ask(keys, host_indices, extra_info), sum
        )
        if self._calls.are_zeroed:
            self.mem_pool_host.kv_buffer[:, host_indices] = 0  # page_first: K and V, then tokens
        return flags

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Time the call."""
        ask = super().batch_set_v1
        return self._calls.timed("set", len(keys), lambda: ask(keys, host_indices, extra_info), sum)


class TimedLinker(PeerCacheLinker):
    """A PeerCacheLinker that records the begin and end of its lookups and loads."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Open the file of the calls, in addition to what PeerCacheLinker does."""
        super().__init__(*arguments, **options)
        self._calls = Calls()

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Time the call."""
        ask = super().lookup
        return self._calls.timed("exists", len(transfers[0].keys), lambda: ask(rid, transfers), len)

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Time the call."""
        ask, pages = super().load, len(transfers[0].keys)
        is_loaded = self._calls.timed(
            "get", pages, lambda: ask(rid, transfers), lambda answer: pages * answer
        )
        if self._calls.are_zeroed:
            for buffer in next(iter(self.pools.values())).kv_buffer:
                buffer[transfers[0].device_indices] = 0
        return is_loaded


_token_s = float(os.environ.get(COMPUTE_SLEEP, "0"))
_extend = TorchNativeAttnBackend._run_sdpa_forward_extend  # noqa: SLF001 - SGLang has no other way


def extend_new_rows(
    self: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    *more: Any,
    **options: Any,
) -> torch.Tensor:
    """Attend like SGLang's own method; for one request with cached tokens only in the new rows.

    query, output: (new tokens, heads, head size). The caches: (tokens, KV heads, head size).

    With COMPUTE_SLEEP it takes that long for each new token, however busy the processors are.
    """
    time.sleep(_token_s * len(query))
    if len(seq_lens) != 1 or not extend_prefix_lens[0]:
        answer: torch.Tensor = _extend(
            self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
            extend_prefix_lens, *more, **options,
        )  # fmt: skip
        return answer
    prefix, whole = int(extend_prefix_lens[0]), int(seq_lens[0])
    tokens = req_to_token[req_pool_indices[0], :whole]
    # Row i comes after `prefix + i` others.
    mask = torch.ones(whole - prefix, whole, dtype=torch.bool).tril(prefix)
    attended = torch.nn.functional.scaled_dot_product_attention(
        query.movedim(0, 1).unsqueeze(0),
        k_cache[tokens].movedim(0, 1).unsqueeze(0),
        v_cache[tokens].movedim(0, 1).unsqueeze(0),
        attn_mask=mask,
        enable_gqa=options["enable_gqa"],
        scale=options["scaling"],
    )
    output[:] = attended.squeeze(0).movedim(1, 0)
    return output


TorchNativeAttnBackend._run_sdpa_forward_extend = extend_new_rows  # noqa: SLF001
