"""The connector's parts put together: prefixes, buffers, lanes and the page store.

The connector's methods and the two queues are built from what is here.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from operator import index as whole_number
from typing import Any, TypeAlias, final

import attrs
import numpy as np

from peercache.connector.buffers import KVBuffers
from peercache.connector.lane import Lane, QueuedTransfer
from peercache.connector.metadata import ConnectorMetadata, StoredPages
from peercache.connector.prefixes import Prefixes
from peercache.content.chain import Chain, Digests, in_namespace, page_keys_of
from peercache.content.tokens import TokenIds, Tokens, token_ids
from peercache.errors import InvalidRequest
from peercache.model.fork_guard import ForkGuard
from peercache.model.keys import PageKeys
from peercache.model.runs import I64, PageRuns
from peercache.observability.log import WarnOnce, get_logger

CLOSE_S = 10.0
"""How long `close` waits for calls of the store; a client's own deadline is usually shorter."""

WARN_S = 60.0
LOOKUPS_MAX = 1024
"""Lookups of queues that wait: each counts as one page of its lane."""

PageMapping: TypeAlias = Sequence[tuple[int, slice]]
"""(page index, slice of the prompt's tokens) of each page."""


@attrs.frozen(eq=False)
class Span:
    """The pages of one call: where they lie, and which of the prompt they are.

    indices: (n,) int64, of pages in the engine's buffers. first: the prompt's page of the first.
    """

    indices: I64
    first: int

    @property
    def end(self) -> int:
        """The prompt's page behind the last."""
        return self.first + len(self.indices)


def span_of(mapping: PageMapping, page_tokens: int, tokens: int) -> Span:
    """Return the pages that a mapping names; a last slice that is no whole page is left out.

    mapping: (page index, slice of the prompt's tokens) for each page, in the prompt's order.
    tokens:  of the prompt.
    InvalidRequest: slices that are no pages of it, or that leave one out.
    """
    try:
        pairs = list(mapping)
        indices = np.array([whole_number(place) for place, _ in pairs], np.int64)
        begins = [whole_number(part.start or 0) for _, part in pairs]
        ends = [whole_number(part.stop) for _, part in pairs]
        are_slices = {part.step for _, part in pairs} <= {None, 1}
    except (TypeError, ValueError, AttributeError, OverflowError):
        are_slices = False
    if not are_slices:
        raise InvalidRequest(
            "page_to_tokens_mapping is a list of (page index, slice of tokens), "
            f"not {str(mapping)[:60]}"
        )
    if not begins:
        return Span(indices, 0)
    first, last = begins[0], ends[-1] - begins[-1]
    # As lists: so few numbers cost more in arrays.
    wanted = list(range(first, first + len(begins) * page_tokens, page_tokens))
    is_run = begins == wanted and ends[:-1] == wanted[1:] and 0 < last <= page_tokens
    if not is_run or first < 0 or first % page_tokens:
        raise _wrong_slice(begins, ends, page_tokens)
    if ends[-1] > tokens:
        raise InvalidRequest(f"the mapping names {ends[-1]} tokens, the list has {tokens}")
    whole = len(begins) - (last < page_tokens)
    return Span(indices[:whole], first // page_tokens)


def _wrong_slice(begins: list[int], ends: list[int], size: int) -> InvalidRequest:
    """Return what is wrong with the first slice that is no page behind the one before."""
    for place, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        is_next = begin == begins[0] + place * size and begin >= 0 and begin % size == 0
        is_last = place + 1 == len(begins)
        if not is_next or not 0 < end - begin <= size or (end - begin < size and not is_last):
            break
    return InvalidRequest(
        f"slice {place} is {begin}:{end}: slices are the prompt's pages of {size} tokens, one "
        "after the other"
    )


def _leading(hits: list[bool]) -> int:
    return hits.index(False) if False in hits else len(hits)


@final
class Core:
    """What one connector owns: a store, three lanes, the engine's buffers, the requests' prefixes.

    counts: of what was refused, late, cancelled or failed, by lane.
    """

    def __init__(
        self, metadata: ConnectorMetadata, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Open the store, and start the threads. Raises what the store's opening raises."""
        self.metadata = metadata
        self.chain = metadata.chain()
        self.page_tokens = self.chain.page_tokens
        self.counts: Counter[str] = Counter()
        self.prefixes = Prefixes()
        self.clock = clock
        self._log = get_logger(rank=metadata.tp_rank)
        self.warn_once = WarnOnce(self._log, repeat_s=WARN_S)
        self._fork = ForkGuard()
        self._buffers: KVBuffers | None = None
        self._deregister: list[Callable[[], None]] = []
        self._is_closed = False
        self._closing = threading.Lock()
        space = metadata.space()
        self._space_digest = space.digest()
        self.store = metadata.store(space)

        def lane(name: str, threads: int, pages: int) -> Lane:
            return Lane(name, threads, pages, self.counts, self.warn_once, clock)

        self.gets = lane("get", metadata.get_threads, metadata.queued_pages)
        self.sets = lane("set", metadata.set_threads, metadata.queued_pages)
        self.lookups = lane("lookup", 1, LOOKUPS_MAX)

    # --- what a call needs ------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise InvalidRequest where nothing can be done any more."""
        if self._is_closed:
            raise InvalidRequest("the connector is closed")
        if self._fork.is_child:
            raise InvalidRequest("the connector is another process's: a forked child opens its own")

    def register(self, kv_args: Any) -> None:
        """Take the engine's buffers. InvalidRequest: there are some, or these are none."""
        self.check_open()
        buffers = KVBuffers(kv_args)
        if self._buffers is not None:
            raise InvalidRequest("the KV buffers are registered already: once for a connector")
        self._buffers = buffers
        self._deregister = [self.store.register(*region) for region in buffers.regions]

    def buffers(self) -> KVBuffers:
        """Return the engine's buffers. InvalidRequest: there are none yet."""
        if self._buffers is None:
            raise InvalidRequest("there are no KV buffers: register_kv_buffers comes first")
        return self._buffers

    def check_writable(self, span: Span) -> None:
        """Raise InvalidRequest for pages that no buffer has, and for one that is named twice."""
        self.buffers().check(span.indices)
        if len(set(span.indices.tolist())) < len(span.indices):
            raise InvalidRequest("the mapping names a page index twice: one page would be lost")

    def chain_of(self, salts: Mapping[str, str] | None) -> Chain:
        """Return the chain of a request's salts, beside the connector's own."""
        return self.chain.salted(salts) if salts else self.chain

    def keys(self, digests: Digests) -> PageKeys:
        """Return the keys of pages in this rank's namespace."""
        return in_namespace(page_keys_of(digests), self._space_digest)

    def agree(self, numbers: Sequence[int]) -> list[int] | None:
        """Return the smallest of each number over all ranks; None where they did not agree."""
        reduce = self.metadata.all_reduce_min
        if reduce is None:
            return list(numbers)
        try:
            reduced = list(map(int, reduce(numbers)))
            if len(reduced) != len(numbers):
                raise ValueError(f"{len(reduced)} numbers for {len(numbers)}")
        except Exception as error:  # The engine's collective has failed: on some rank, or on all.
            self.warn_once("connector.agreement_failed", type(error).__name__, problem=repr(error))
            return None
        # Never more than this rank has: what it has not done yet is not done.
        return list(map(min, reduced, numbers))

    # --- lookups ----------------------------------------------------------------------------------

    def matched_pages(self, req_id: str, ids: TokenIds, chain: Chain, local_pages: int) -> int:
        """Return how many pages behind the local ones this rank's store has: a hint."""
        digests = self.prefixes.digests(req_id, chain, ids)[local_pages:]
        if not len(digests):
            return 0
        try:
            page_bytes = 0 if self._buffers is None else self._buffers.page_bytes
            return self.store.exists(self.keys(digests), page_bytes)
        except Exception as error:  # As in a transfer: a bug of a store is a miss.
            self.warn_once("connector.lookup_failed", type(error).__name__, problem=repr(error))
            return 0

    def look_up(self, req_id: str, ids: TokenIds, chain: Chain, local_pages: int) -> Future[int]:
        """Return what `matched_pages` will say, found in a thread of its own."""
        found = 0

        def move(_begin: int, _end: int) -> int:
            nonlocal found
            found = self.matched_pages(req_id, ids, chain, local_pages)
            return 1

        until = self.clock() + self.metadata.timeout_s
        asked = QueuedTransfer(req_id, move, 1, 1, until, 1)
        answer: Future[int] = Future()
        asked.future.add_done_callback(
            # Cancelled or late: nothing is known to be there.
            lambda done: answer.set_result(found if not done.cancelled() and done.result() else 0)
        )
        self.lookups.add(asked)
        return answer

    # --- transfers --------------------------------------------------------------------------------

    def retrieve(
        self, req_id: str, span: Span, ids: TokenIds, chain: Chain, timeout_s: float
    ) -> Future[int]:
        """Read a span's pages; return the tokens of the leading run that will have arrived."""
        keys, buffers = self._keys_of(req_id, span, ids, chain), self.buffers()

        def move(begin: int, end: int) -> int:
            runs = buffers.runs(span.indices[begin:end])
            return _leading(self.store.get_into(keys[begin:end], runs))

        transfer = self._queued(req_id, move, span, timeout_s)
        self.gets.add(transfer)
        return transfer.future

    def keep(
        self, req_id: str, span: Span, ids: TokenIds, chain: Chain, timeout_s: float
    ) -> tuple[Future[int], int]:
        """Store a span's pages; return the tokens of the leading run, and where it ends at most."""
        digests = self.prefixes.digests(req_id, chain, ids)
        keys, buffers = self.keys(digests[span.first : span.end]), self.buffers()

        def move(begin: int, end: int) -> int:
            runs: PageRuns = buffers.runs(span.indices[begin:end])
            stored = _leading(self.store.set_from(keys[begin:end], runs))
            self._tell_stored(digests, span.first + begin, stored, ids, chain)
            return stored

        transfer = self._queued(req_id, move, span, timeout_s)
        is_taken = self.sets.add(transfer)
        return transfer.future, (span.end if is_taken else span.first) * self.page_tokens

    def end(self, req_id: str) -> None:
        """End what a request still has under way, and forget it. InvalidRequest: no such id."""
        if self._fork.is_child:
            return
        self.end_retrieve(req_id)
        self.sets.end(req_id)
        self.prefixes.forget(req_id)

    def end_retrieve(self, req_id: str) -> None:
        """End the lookups and retrieves of a request. InvalidRequest: no such id."""
        check_id(req_id)
        self.lookups.end(req_id)
        self.gets.end(req_id)

    def close(self) -> None:
        """End everything; bounded, may be repeated."""
        with self._closing:
            if self._is_closed or self._fork.is_child:
                return
            self._is_closed = True
        is_quiet = True
        for lane in (self.lookups, self.sets, self.gets):
            is_quiet &= lane.close(CLOSE_S)
        if not is_quiet:
            # A call of the store hangs and may touch memory: what it uses is left as it is.
            self._log.warning("connector.close_timed_out", waited_s=CLOSE_S)
            return
        for deregister in self._deregister:
            deregister()
        self.store.close()

    def _keys_of(self, req_id: str, span: Span, ids: TokenIds, chain: Chain) -> PageKeys:
        return self.keys(self.prefixes.digests(req_id, chain, ids)[span.first : span.end])

    def _queued(
        self, req_id: str, move: Callable[[int, int], int], span: Span, timeout_s: float
    ) -> QueuedTransfer:
        chunk = max(1, self.metadata.chunk_bytes // self.buffers().page_bytes)
        until = self.clock() + timeout_s
        return QueuedTransfer(req_id, move, len(span.indices), chunk, until, self.page_tokens)

    def _tell_stored(
        self, digests: Digests, first: int, pages: int, ids: TokenIds, chain: Chain
    ) -> None:
        tell = self.metadata.on_stored
        if tell is None or not pages:
            return
        end, size = first + pages, self.page_tokens
        parent = digests[first - 1].tobytes() if first else None
        told = StoredPages(
            digests[first:end], parent, ids[first * size : end * size].copy(), size, chain.salts,
            self.keys(digests[first:end]),
        )  # fmt: skip
        try:
            tell(told)
        except Exception as error:  # The publisher's trouble is none of the transfer's.
            self.warn_once("connector.publisher_failed", type(error).__name__, problem=repr(error))


def check_id(req_id: object) -> None:
    """Raise InvalidRequest for what is no request's id."""
    if not isinstance(req_id, str):
        raise InvalidRequest(f"a request's id is a text, not {req_id!r:.40}")


def checked(req_id: object, tokens: Tokens, local_tokens: object = 0) -> TokenIds:
    """Return a request's token ids. InvalidRequest: what is no request."""
    check_id(req_id)
    ids = token_ids(tokens)
    is_number = isinstance(local_tokens, (int, np.integer)) and not isinstance(local_tokens, bool)
    if not is_number or not 0 <= local_tokens <= len(ids):  # type: ignore[operator]
        raise InvalidRequest(
            f"{local_tokens!r:.40} of {len(ids)} tokens cannot be computed locally"
        )
    return ids
