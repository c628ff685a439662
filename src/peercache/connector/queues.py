"""The two queues of a scheduler: prefetches of waiting requests, and stores of computed pages.

A scheduler adds requests to them, and polls each queue once per step. A poll does not wait for its
own rank. With several tensor-parallel ranks it calls `all_reduce_min` once, so every rank must poll
in the same steps, and add and end the same requests in the same order, as tensor-parallel
schedulers do anyway.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar, final

import attrs

from peercache.connector.connector import Core, PageMapping, RemoteKVConnector, checked, span_of
from peercache.connector.metadata import whole_number
from peercache.content.chain import Chain, TokenIds, Tokens
from peercache.errors import InvalidRequest

PENDING = -1
AGREED_MAX = 32
"""Requests that ranks agree on in one poll: the first of the queue."""


@attrs.frozen
class Prefetched:
    """The end of a request's prefetch.

    tokens: the number now in the engine's pages, after the local ones; 0: compute the request.
    pages: the indices that hold them; they belong to the scheduler from now on.
    """

    req_id: str
    tokens: int
    pages: list[int]


@attrs.frozen
class Stored:
    """The end of a request's store. tokens: of the leading run; pages: indices to use again."""

    req_id: str
    tokens: int
    pages: list[int]


@attrs.define(eq=False)
class _Prefetch:
    req_id: str
    ids: TokenIds
    chain: Chain
    first: int
    step: Future[int]
    pages: list[int] | None = None
    is_stopped: bool = False
    is_dropped: bool = False


@attrs.define(eq=False)
class _Store:
    req_id: str
    pages: list[int]
    step: Future[int]


def _outcome(step: Future[int]) -> int:
    """Return the result of a step on this rank, PENDING while it runs."""
    if not step.done():
        return PENDING
    return 0 if step.cancelled() else step.result()


class _Entry(Protocol):
    """A request in a queue. step: its running operation."""

    step: Future[int]


Entry = TypeVar("Entry", bound=_Entry)


class _Queue(Generic[Entry]):
    """The common part of both queues: a connector, entries in the order of arrival, agreement."""

    def __init__(self, connector: RemoteKVConnector, requests_max: int) -> None:
        self._requests_max = whole_number("requests_max", requests_max, 1)
        self._connector = connector
        self._core: Core = connector.core
        self._entries: deque[Entry] = deque()

    def __len__(self) -> int:
        """Return the number of requests that are not reported yet."""
        return len(self._entries)

    def _outcomes(self) -> list[tuple[Entry, int]]:
        """Return the results of the first entries on all ranks, PENDING if one rank is not done.

        In the order of their arrival.
        """
        entries = list(self._entries)[:AGREED_MAX]
        own = [_outcome(entry.step) for entry in entries]
        if self._core.metadata.all_reduce_min is None:
            return list(zip(entries, own, strict=True))
        # The same count of numbers on every rank; a rank without entries agrees to everything.
        filled = own + [2**31 - 1] * (AGREED_MAX - len(own))
        agreed = self._core.agree(filled)
        # The results of other ranks are unknown: the next poll tries again.
        agreed = [PENDING] * len(own) if agreed is None else agreed[: len(own)]
        return list(zip(entries, agreed, strict=True))


@final
class AsyncKVPrefetchQueue(_Queue[_Prefetch]):
    """Prefetches: a lookup, then, if it is worth it, an allocation and a retrieve in chunks.

    allocate: takes a number of pages, and returns as many indices of the engine's buffers, or None
              if there is no room: then the request is computed. Called by `poll`.
    release:  takes unused indices back. Called by `poll`. Exceptions of either, and invalid
              indices, are logged as `connector.allocation_failed`; such a request is computed.
    retrieve_remote_cache_threshold: the least number of tokens that a lookup must find for a
                                     retrieve.
    requests_max: requests in the queue; `add` refuses further ones.

    For the scheduler's thread alone.
    """

    def __init__(
        self,
        connector: RemoteKVConnector,
        allocate: Callable[[int], Sequence[int] | None],
        release: Callable[[list[int]], None],
        *,
        retrieve_remote_cache_threshold: int = 256,
        requests_max: int = 1024,
    ) -> None:
        """Start empty."""
        super().__init__(connector, requests_max)
        self._allocate = allocate
        self._release = release
        self._threshold = whole_number(
            "retrieve_remote_cache_threshold", retrieve_remote_cache_threshold, 0
        )

    def add(
        self,
        req_id: str,
        tokens: Tokens,
        num_local_computed_tokens: int = 0,
        salts: dict[str, str] | None = None,
    ) -> bool:
        """Start a request's prefetch; return False if the queue is full.

        Only whole local pages count: an incomplete last one is retrieved again.

        Raises InvalidRequest if the request is invalid, or is in the queue already.
        """
        core = self._core
        core.check_open()
        core.buffers()
        ids = checked(req_id, tokens, num_local_computed_tokens)
        if any(entry.req_id == req_id for entry in self._entries):
            raise InvalidRequest(f"request {req_id:.80} is being prefetched already")
        if len(self._entries) >= self._requests_max:
            return False
        first, chain = num_local_computed_tokens // core.page_tokens, core.chain_of(salts)
        ids = ids.copy()  # The caller may write into its array.
        step = core.look_up(req_id, ids, chain, first)
        self._entries.append(_Prefetch(req_id, ids, chain, first, step))
        return True

    def poll(self) -> list[Prefetched]:
        """Advance the prefetches; return the requests with a finished prefetch.

        At most one retrieve begins in a poll, so that none takes long.
        """
        ended: list[Prefetched] = []
        has_begun = False
        for entry, outcome in self._outcomes():
            if outcome == PENDING:
                continue
            if entry.pages is None and not entry.is_stopped and self._is_worth(outcome):
                if has_begun:
                    continue
                has_begun = True
                if self._begin(entry, outcome):
                    continue
            self._entries.remove(entry)
            self._end(entry, outcome, ended)
        return ended

    def stop(self, req_id: str) -> None:
        """Stop the prefetch of a request that is needed now: polls report what has arrived."""
        for entry in self._entries:
            if entry.req_id == req_id:
                entry.is_stopped = True
        self._core.end_retrieve(req_id)

    def cancel(self, req_id: str) -> None:
        """Cancel a request that is gone; a poll releases its pages, and it is not reported."""
        for entry in self._entries:
            if entry.req_id == req_id:
                entry.is_stopped = entry.is_dropped = True
        self._core.end_retrieve(req_id)

    def _is_worth(self, pages: int) -> bool:
        return pages > 0 and pages * self._core.page_tokens >= self._threshold

    def _begin(self, entry: _Prefetch, count: int) -> bool:
        """Start the retrieve of `count` pages; return whether there is room for them."""
        size = self._core.page_tokens
        begins = range(entry.first * size, (entry.first + count) * size, size)
        pages: list[int] = []
        try:
            given = self._allocate(count)
            if given is None:
                return False
            pages = list(given)
            mapping = [
                (page, slice(begin, begin + size))
                for page, begin in zip(pages, begins, strict=True)
            ]
            span = span_of(mapping, size, len(entry.ids))
            self._core.check_writable(span)
        except Exception as error:
            # A bug of the engine costs this request its prefetch, but does not affect the others.
            self._core.warn_once("connector.allocation_failed", "allocate", problem=repr(error))
            self._give_back(pages)
            return False
        entry.pages = pages
        timeout_s = self._core.metadata.timeout_s
        entry.step = self._core.retrieve(entry.req_id, span, entry.ids, entry.chain, timeout_s)
        return True

    def _end(self, entry: _Prefetch, tokens: int, ended: list[Prefetched]) -> None:
        pages = entry.pages or []
        # Without pages the result is that of the lookup.
        kept = 0 if entry.is_dropped else min(len(pages), tokens // self._core.page_tokens)
        self._give_back(pages[kept:])
        if not entry.is_dropped:
            ended.append(Prefetched(entry.req_id, kept * self._core.page_tokens, pages[:kept]))

    def _give_back(self, pages: list[int]) -> None:
        if not pages:
            return
        try:
            self._release(pages)
        except Exception as error:
            self._core.warn_once("connector.allocation_failed", "release", problem=repr(error))


@final
class AsyncKVStoreQueue(_Queue[_Store]):
    """Stores: pages stay locked in the engine from `add` until a poll reports them.

    requests_max: requests in the queue; `add` refuses further ones.

    For the scheduler's thread alone.
    """

    def __init__(self, connector: RemoteKVConnector, *, requests_max: int = 1024) -> None:
        """Start empty."""
        super().__init__(connector, requests_max)

    def add(self, req_id: str, mapping: PageMapping, tokens: Tokens, **kw: Any) -> bool:
        """Start a store, as `store_kv_async` does; return False if there is no room for it.

        Then nothing is stored, and the pages are free.
        """
        if len(self._entries) >= self._requests_max:
            return False
        if isinstance(mapping, Iterator):
            mapping = list(mapping)  # It may be an iterator, such as a zip, and is read twice here.
        step, _ = self._connector.store_kv_async(req_id, mapping, tokens, **kw)
        self._entries.append(_Store(req_id, [int(page) for page, _ in mapping], step))
        return True

    def poll(self) -> list[Stored]:
        """Return the stores that have finished on every rank."""
        done = [(entry, tokens) for entry, tokens in self._outcomes() if tokens != PENDING]
        for entry, _ in done:
            self._entries.remove(entry)
        return [Stored(entry.req_id, tokens, entry.pages) for entry, tokens in done]
