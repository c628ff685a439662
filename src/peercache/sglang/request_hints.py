"""The hints of SGLang's requests, for the stores of this process.

Takes   requests with hints, as they begin and as they end: SGLang carries `kv_hints` to its
        scheduler and no further, so hooks of the plug-in take them there. Pages, from the stores.
Keeps   nothing raises into SGLang. A request without hints costs a look at an attribute.
Limits  those of `engines.hints`. The pages of a request with hints are hashed twice, as SGLang
        hashes them: a prompt of 100,000 tokens takes some milliseconds.

A hint of a request concerns the whole pages of its prompt, and at its end those of its output too.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Final, final

from peercache.engines.hints import Naming, RequestHints
from peercache.engines.lanes import CLOSE_S, harmless
from peercache.model.keys import PageKeys

HASH_DIGITS: Final = 64
BLOCK_DIGITS: Final = 16
"""Of a page's hash, as many digits as SGLang's KV events name it by."""


@final
class StoreHints:
    """The hints of requests for one store."""

    def __init__(
        self, client: Callable[[], Any | None], keys: Callable[[Sequence[str]], PageKeys], log: Any
    ) -> None:
        """Take the hints of this process's requests from now on. keys: those of page hashes."""
        naming = Naming(number=block_of, named=page_of_hash, keys=keys)
        self.page_tokens = 0
        """Of the pages of the store; 0 while it has none."""
        self._requests = RequestHints("sglang", naming, client, log)
        self.saw, self.stored = self._requests.saw, self._requests.stored
        _stores.add(self)

    def begin(self, request: Any) -> None:
        """Take the hints of a request."""
        if self.page_tokens:
            self._requests.begin(request.rid, request.kv_hints)
            self.saw(pages_of(request, self.page_tokens, request.origin_input_ids), request.rid)

    def end(self, request: Any) -> None:
        """Obey what was to wait for the end of a request."""
        if self.page_tokens:
            tokens = [*request.origin_input_ids, *request.output_ids]
            pages = pages_of(request, self.page_tokens, tokens)
            self.saw(pages, request.rid)
            ends = {page: (at + 1) * self.page_tokens for at, page in enumerate(pages)}
            self._requests.end(request.rid, ends.get)

    def close(self) -> None:
        """End."""
        _stores.discard(self)
        self._requests.close(CLOSE_S)


_stores: weakref.WeakSet[StoreHints] = weakref.WeakSet()


@harmless(lambda: None)
def begun(_: Any, request: Any, *__: Any, **___: Any) -> None:
    """Take a request after it was made: a hook of `Req.__init__`."""
    if getattr(request, "kv_hints", None) is not None:
        for store in list(_stores):
            store.begin(request)


@harmless(lambda: None)
def ended(_: Any, request: Any, *__: Any, **___: Any) -> None:
    """Take a request whose memory is released: a hook of `release_kv_cache`."""
    if getattr(request, "kv_hints", None) is not None and request.finished():
        for store in list(_stores):
            store.end(request)


def block_of(page: str) -> int:
    """Return the number by which SGLang's events name a page; -1 for a key of another kind."""
    try:
        return int(page[:BLOCK_DIGITS], 16)
    except ValueError:
        return -1


def page_of_hash(text: str | bytes) -> str | None:
    """Return the page of a whole hash in hexadecimal digits."""
    digits = text.decode("latin-1") if isinstance(text, bytes) else text
    digits = digits.removeprefix("hex:").lower()
    is_hash = len(digits) == HASH_DIGITS and not set(digits) - set("0123456789abcdef")
    return digits if is_hash else None


def pages_of(request: Any, page_tokens: int, tokens: Sequence[int]) -> list[str]:
    """Return the hashes of the whole pages of a request's tokens, as SGLang stores them."""
    whole = len(tokens) // page_tokens * page_tokens
    if not whole:
        return []
    utils = import_module("sglang.srt.mem_cache.utils")
    key = import_module("sglang.srt.mem_cache.radix_cache").RadixKey(
        array("q", tokens[:whole]), request.extra_key, cache_salt=request.cache_salt
    )
    return list(utils.get_storage_hash_str(key, None, page_size=page_tokens))
