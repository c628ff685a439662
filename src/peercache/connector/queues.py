"""The two queues of a scheduler: prefetches of waiting requests, and stores of computed pages.

A scheduler adds to them, and polls each once a step. A poll waits for nothing of its own rank; with
several tensor-parallel ranks it makes one `all_reduce_min`, so every rank polls in the same steps
and adds and ends the same requests in the same order, as tensor-parallel schedulers do anyway.
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

    tokens: that are in the engine's pages now, behind the local ones; 0: the request is computed.
    pages:  the indices that hold them, the scheduler's from now on.
    """

    req_id: str
    tokens: int
    pages: list[int]


@attrs.frozen
class Stored:
    """The end of a request's store. tokens: of the leading run; pages: indices now free to use."""

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
    """Return what a step has come to on this rank, PENDING while it is under way."""
    if not step.done():
        return PENDING
    return 0 if step.cancelled() else step.result()


class _Entry(Protocol):
    """What waits in a queue. step: what is under way for it."""

    step: Future[int]


Entry = TypeVar("Entry", bound=_Entry)


class _Queue(Generic[Entry]):
    """What both queues have: a connector, entries in the order of their arrival, agreement."""

    def __init__(self, connector: RemoteKVConnector, requests_max: int) -> None:
        self._requests_max = whole_number("requests_max", requests_max, 1)
        self._connector = connector
        self._core: Core = connector.core
        self._entries: deque[Entry] = deque()

    def __len__(self) -> int:
        """Return the number of requests that are not reported yet."""
        return len(self._entries)

    def _outcomes(self) -> list[tuple[Entry, int]]:
        """Return what the first entries have come to on every rank, PENDING where one is not done.

        In the order of their arrival.
        """
        entries = list(self._entries)[:AGREED_MAX]
        own = [_outcome(entry.step) for entry in entries]
        if self._core.metadata.all_reduce_min is None:
            return list(zip(entries, own, strict=True))
        # As many numbers on every rank, whatever it has; a rank without entries agrees to all.
        filled = own + [2**31 - 1] * (AGREED_MAX - len(own))
        agreed = self._core.agree(filled)
        # What another rank has is not known: the next poll asks again.
        agreed = [PENDING] * len(own) if agreed is None else agreed[: len(own)]
        return list(zip(entries, agreed, strict=True))


@final
class AsyncKVPrefetchQueue(_Queue[_Prefetch]):
    """Prefetches: a lookup, then, if it is worth it, pages and a retrieve in chunks.

    allocate: takes a number of pages, and returns as many indices of the engine's buffers, or None
              where there is no room: then the request is computed. Called by `poll`.
    release:  takes the indices back that hold nothing. Called by `poll`.
              What either raises, and indices that no call can take, are in the log as
              `connector.allocation_failed`; such a request is computed.
    retrieve_remote_cache_threshold: tokens that a lookup must find for a retrieve to begin.
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
        """Begin empty."""
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
        """Begin a request's prefetch; return False if the queue is full.

        What the engine has itself is whole pages: the rest of a last one is retrieved again.
        InvalidRequest: what is no request, or one that is in the queue.
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
        """Go on with what is done; return the requests whose prefetch has ended.

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
        """Have a request that is wanted now take what has arrived: the next polls report it."""
        for entry in self._entries:
            if entry.req_id == req_id:
                entry.is_stopped = True
        self._core.end_retrieve(req_id)

    def cancel(self, req_id: str) -> None:
        """End a request that has gone; its pages are released by a poll, and it is not reported."""
        for entry in self._entries:
            if entry.req_id == req_id:
                entry.is_stopped = entry.is_dropped = True
        self._core.end_retrieve(req_id)

    def _is_worth(self, pages: int) -> bool:
        return pages > 0 and pages * self._core.page_tokens >= self._threshold

    def _begin(self, entry: _Prefetch, count: int) -> bool:
        """Begin the retrieve of `count` pages; return whether there is room for them."""
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
            # The engine's own bug costs this request its prefetch, and no other one its report.
            self._core.warn_once("connector.allocation_failed", "allocate", problem=repr(error))
            self._give_back(pages)
            return False
        entry.pages = pages
        timeout_s = self._core.metadata.timeout_s
        entry.step = self._core.retrieve(entry.req_id, span, entry.ids, entry.chain, timeout_s)
        return True

    def _end(self, entry: _Prefetch, tokens: int, ended: list[Prefetched]) -> None:
        pages = entry.pages or []
        # Without pages the outcome is a lookup's.
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
    """Stores: pages stay locked in the engine from `add` until a poll reports them."""

    def __init__(self, connector: RemoteKVConnector, *, requests_max: int = 1024) -> None:
        """Begin empty."""
        super().__init__(connector, requests_max)

    def add(self, req_id: str, mapping: PageMapping, tokens: Tokens, **kw: Any) -> bool:
        """Begin a store, as `store_kv_async` does; return False if there is no room for it.

        Then nothing is stored, and the pages are free.
        """
        if len(self._entries) >= self._requests_max:
            return False
        if isinstance(mapping, Iterator):
            mapping = list(mapping)  # Such as a zip: it is read twice here.
        step, _ = self._connector.store_kv_async(req_id, mapping, tokens, **kw)
        self._entries.append(_Store(req_id, [int(page) for page, _ in mapping], step))
        return True

    def poll(self) -> list[Stored]:
        """Return the stores that have ended on every rank."""
        done = [(entry, tokens) for entry, tokens in self._outcomes() if tokens != PENDING]
        for entry, _ in done:
            self._entries.remove(entry)
        return [Stored(entry.req_id, tokens, entry.pages) for entry, tokens in done]
