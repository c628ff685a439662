"""The connector: the methods of SGLang's proposal for a remote KV connector."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, final

from peercache.connector.core import Core, PageMapping, checked, span_of
from peercache.connector.metadata import ConnectorMetadata, seconds
from peercache.content.chain import Chain
from peercache.content.tokens import Tokens
from peercache.errors import InvalidRequest


@final
class RemoteKVConnector:
    """Stores and retrieves the KV pages of requests, named by their tokens.

        connector = RemoteKVConnector(ConnectorMetadata(model=…, dtype=…, page_tokens=64))
        connector.register_kv_buffers(kv_args)

    No method waits for pages to move: the two `_async` ones queue a transfer and return a Future.
    Its result is the number of tokens, from the mapping's first on, whose pages have moved: a
    leading run, 0 if there is none. It never has an exception. While it is not done the engine
    must keep the pages as they are; once it is done, or cancelled, nothing touches them.
    What no call can take raises `InvalidRequest`; every other trouble is a shorter run.

    Keywords of all calls with tokens: `salts` (texts by name: LoRA, tenant) separates requests
    beyond the metadata's; `timeout_s` is the transfer's deadline.
    """

    def __init__(self, metadata: ConnectorMetadata) -> None:
        """Open the store. Raises what opening it raises, as `Client.open` does."""
        self.core = Core(metadata)

    def register_kv_buffers(self, kv_args: Any) -> None:
        """Take the engine's buffers, once: they are read from and written into in place.

        kv_args: has `kv_data_ptrs`, `kv_data_lens` and `kv_item_lens`, a number for each buffer
                 (K or V of a layer): its address, its bytes, and the bytes of a page in it.
        """
        self.core.register(kv_args)

    def store_kv_async(
        self, req_id: str, page_to_tokens_mapping: PageMapping, tokens_list: Tokens, **kw: Any
    ) -> tuple[Future[int], int]:
        """Store pages; return a Future, and the token up to which the pages were taken.

        page_to_tokens_mapping: (page index, slice of `tokens_list`) for each page, one after the
                     other; what a last slice has short of a page is left out.
        tokens_list: all tokens from the prompt's first on, a list or an array.
        A full queue takes nothing: the Future is done, and the end is where the mapping begins.
        """
        core = self.core
        core.check_open()
        chain, timeout_s = self._options(kw)
        ids = checked(req_id, tokens_list)
        span = span_of(page_to_tokens_mapping, core.page_tokens, len(ids))
        core.buffers().check(span.indices)
        return core.keep(req_id, span, ids, chain, timeout_s)

    def retrieve_kv_async(
        self, req_id: str, page_to_tokens_mapping: PageMapping, tokens_list: Tokens, **kw: Any
    ) -> Future[int]:
        """Read pages into the buffers; return a Future. The arguments are those of a store.

        What pages behind the leading run hold is undefined.
        """
        core = self.core
        core.check_open()
        chain, timeout_s = self._options(kw)
        ids = checked(req_id, tokens_list)
        span = span_of(page_to_tokens_mapping, core.page_tokens, len(ids))
        core.check_writable(span)
        return core.retrieve(req_id, span, ids, chain, timeout_s)

    def num_external_matched_tokens(
        self, req_id: str, tokens: Tokens, num_local_computed_tokens: int, **kw: Any
    ) -> int:
        """Return how many tokens behind the local ones every rank can retrieve: a hint.

        Asks the store, for as long as its own deadline allows; `AsyncKVPrefetchQueue` asks in
        another thread. With `all_reduce_min`, each rank calls this in the same order; 0 where that
        fails.
        """
        core = self.core
        core.check_open()
        chain, _ = self._options(kw)
        ids = checked(req_id, tokens, num_local_computed_tokens)
        local_pages = num_local_computed_tokens // core.page_tokens
        pages = core.matched_pages(req_id, ids, chain, local_pages)
        (pages,) = core.agree([pages]) or [0]
        reached = (local_pages + pages) * core.page_tokens
        return max(0, reached - num_local_computed_tokens)

    def finish_req(self, req_id: str) -> None:
        """End what this request has under way, and forget its tokens; may be repeated.

        Transfers that wait are cancelled; one that moves ends after its chunk. It returns at once:
        the Futures say when the pages are free.
        """
        self.core.end(req_id)

    def close(self) -> None:
        """End everything, within seconds; may be repeated.

        Every Future is done or cancelled then, but those of a store's calls that hang.
        """
        self.core.close()

    def _options(self, kw: Mapping[str, Any]) -> tuple[Chain, float]:
        unknown = sorted(kw.keys() - {"salts", "timeout_s"})
        if unknown:
            raise InvalidRequest(f"{unknown[0]!r} is no option: salts and timeout_s are")
        salts, timeout_s = kw.get("salts"), kw.get("timeout_s", self.core.metadata.timeout_s)
        if salts is not None and not isinstance(salts, Mapping):
            raise InvalidRequest(f"salts are texts by name, not {salts!r:.60}")
        return self.core.chain_of(salts), seconds(timeout_s)
