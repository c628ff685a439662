"""The connector: the methods of SGLang's proposal for a remote KV connector.

`Core` combines the parts: the location of each page of each layer in the engine's KV buffers, the
prefixes of requests (of a growing prompt only the new part is hashed), lanes and the page store.
The connector's methods and the two queues are built from it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from operator import index
from typing import Any, TypeAlias, final

import attrs
import numpy as np

from peercache.connector.metadata import ConnectorMetadata, StoredPages, seconds
from peercache.content.chain import (
    Chain,
    Digests,
    TokenIds,
    Tokens,
    in_namespace,
    is_whole_number,
    page_keys_of,
    token_ids,
)
from peercache.engines.lanes import Lane, QueuedTransfer
from peercache.errors import InvalidRequest
from peercache.model.keys import PageKeys
from peercache.model.process import FORKED, ForkGuard
from peercache.model.runs import I64, U64, PageRuns
from peercache.observability import reasons
from peercache.observability.log import WarnOnce, get_logger

BUFFERS_MAX = 4096
"""Buffers of one engine: K and V of 2,048 layers."""


class KVBuffers:
    """Buffers with the same number of pages, one for each layer and part. Page i is at i * item
    length.

    pages: the number in every buffer. page_bytes: the size of one page over all buffers.
    """

    def __init__(self, kv_args: Any) -> None:
        """Take `kv_data_ptrs`, `kv_data_lens` and `kv_item_lens`: bytes, one number for each
        buffer.

        InvalidRequest: the values do not describe buffers.
        """
        pointers = _numbers(kv_args, "kv_data_ptrs")
        lengths = _numbers(kv_args, "kv_data_lens")
        items = _numbers(kv_args, "kv_item_lens")
        if not len(pointers) == len(lengths) == len(items):
            raise InvalidRequest(
                f"{len(pointers)} kv_data_ptrs, {len(lengths)} kv_data_lens and {len(items)} "
                "kv_item_lens: each buffer has one of each"
            )
        for place, (length, item) in enumerate(zip(lengths, items, strict=True)):
            if item > length or length % item:
                raise InvalidRequest(
                    f"buffer {place} has {length} bytes, which are no pages of {item} bytes"
                )
        self.regions = list(zip(pointers, lengths, strict=True))
        self.pages = min(length // item for length, item in zip(lengths, items, strict=True))
        self.page_bytes = sum(items)
        self._pointers: U64 = np.array(pointers, np.uint64)
        self._items: U64 = np.array(items, np.uint64)

    def check(self, pages: I64) -> None:
        """Raise InvalidRequest for page indices, (n,) int64, that are not in the buffers."""
        if len(pages) and not 0 <= (low := int(pages.min())) <= (high := int(pages.max())):
            raise InvalidRequest(f"page index {low} is no page of {self.pages}")
        if len(pages) and high >= self.pages:
            raise InvalidRequest(f"page index {high} is no page of {self.pages}")

    def runs(self, pages: I64) -> PageRuns:
        """Return where these pages are: each has a run in every buffer, in their order."""
        addresses = pages.astype(np.uint64)[:, None] * self._items
        addresses += self._pointers
        sizes = np.broadcast_to(self._items, addresses.shape)
        return PageRuns.regular(addresses, sizes, len(pages))


def _numbers(kv_args: Any, name: str) -> list[int]:
    values = getattr(kv_args, name, None)
    if not isinstance(values, (Sequence, np.ndarray)) or isinstance(values, (str, bytes)):
        raise InvalidRequest(f"{name} is a list of numbers, not {values!r:.60}")
    if not 1 <= len(values) <= BUFFERS_MAX:
        raise InvalidRequest(f"{name} has 1 to {BUFFERS_MAX} numbers, not {len(values)}")
    for place, value in enumerate(values):
        if not is_whole_number(value) or not 0 < value < 2**63:
            raise InvalidRequest(f"{name}[{place}] is {value!r:.40}: no address, no length")
    return [int(value) for value in values]


REQUESTS_MAX = 4096
TOKENS_MAX = 2**25
"""Tokens of all requests together: 128 MiB of ids, and 16 MiB of digests with pages of 64."""


@attrs.frozen(eq=False)
class _Known:
    """A prefix: the tokens of its whole pages, a copy of the caller's, and their digests."""

    seed: bytes
    tokens: TokenIds
    digests: Digests


@final
class Prefixes:
    """The last prefix of each request; the least recently used is forgotten first. Thread-safe.

    The lock is held during a dictionary access, never while tokens are hashed: a scheduler's thread
    does not wait for the hashing of another thread.
    """

    def __init__(self, requests_max: int = REQUESTS_MAX, tokens_max: int = TOKENS_MAX) -> None:
        """Start with no request."""
        self._lock = threading.Lock()
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._tokens = 0
        self._requests_max = requests_max
        self._tokens_max = tokens_max

    def digests(self, req_id: str, chain: Chain, tokens: TokenIds) -> Digests:
        """Return the digest of each whole page of a request's tokens, (pages, 32) uint8.

        Only the tokens that are new since a request's last call are hashed; if its tokens or its
        chain differ, it is hashed from the first difference.
        """
        tokens = tokens[: len(tokens) // chain.page_tokens * chain.page_tokens]
        with self._lock:
            known = self._known.get(req_id)
        pages = 0
        if known is not None and known.seed == chain.seed:
            pages = _common(known.tokens, tokens) // chain.page_tokens
            if pages * chain.page_tokens == len(tokens):
                return known.digests[:pages]
        begin = pages * chain.page_tokens
        had = known.digests[:pages] if known is not None and pages else None
        new = chain.digests(tokens[begin:], had[-1].tobytes() if had is not None else None)
        digests = new if had is None else np.concatenate([had, new])
        # A copy: the caller may later change its array.
        self._keep(req_id, _Known(chain.seed, tokens.copy(), digests))
        return digests

    def forget(self, req_id: str) -> None:
        """Drop a request's prefix."""
        with self._lock:
            self._drop(req_id)

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self._known)

    def _keep(self, req_id: str, known: _Known) -> None:
        with self._lock:
            self._drop(req_id)
            self._known[req_id] = known
            self._tokens += len(known.tokens)
            while self._known and (
                len(self._known) > self._requests_max or self._tokens > self._tokens_max
            ):
                self._drop(next(iter(self._known)))

    def _drop(self, req_id: str) -> None:
        if (known := self._known.pop(req_id, None)) is not None:
            self._tokens -= len(known.tokens)


def _common(one: TokenIds, other: TokenIds) -> int:
    """Return how many leading tokens are the same."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length


CLOSE_S = 10.0
"""How long `close` waits for calls of the store; a client's own deadline is usually shorter."""

WARN_S = 60.0
HINT_PAGES = 1024
"""Pages of one call for a hint."""

LOOKUPS_MAX = 1024
"""Waiting lookups of queues: each counts as one page of its lane."""

PageMapping: TypeAlias = Sequence[tuple[int, slice]]
"""(page index, slice of the prompt's tokens) of each page."""


@attrs.frozen(eq=False)
class Span:
    """The pages of one call: their buffer indices, and their position in the prompt.

    indices: (n,) int64, of pages in the engine's buffers. first: the number of the first page in
             the prompt.
    """

    indices: I64
    first: int

    @property
    def end(self) -> int:
        """The number, in the prompt, of the page after the last one."""
        return self.first + len(self.indices)


def span_of(mapping: PageMapping, page_tokens: int, tokens: int) -> Span:
    """Return the pages that a mapping names; an incomplete last page is left out.

    mapping: (page index, slice of the prompt's tokens) for each page, in the prompt's order.
    tokens: the number in the prompt.
    InvalidRequest: slices that are not pages of the prompt, or that leave one out.
    """
    try:
        pairs = list(mapping)
        indices = np.array([index(place) for place, _ in pairs], np.int64)
        begins = [index(part.start or 0) for _, part in pairs]
        ends = [index(part.stop) for _, part in pairs]
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
    # As lists: for so few numbers arrays are slower.
    wanted = list(range(first, first + len(begins) * page_tokens, page_tokens))
    is_run = begins == wanted and ends[:-1] == wanted[1:] and 0 < last <= page_tokens
    if not is_run or first < 0 or first % page_tokens:
        raise _wrong_slice(begins, ends, page_tokens)
    if ends[-1] > tokens:
        raise InvalidRequest(f"the mapping names {ends[-1]} tokens, the list has {tokens}")
    whole = len(begins) - (last < page_tokens)
    return Span(indices[:whole], first // page_tokens)


def _wrong_slice(begins: list[int], ends: list[int], size: int) -> InvalidRequest:
    """Return the error about the first slice that is not the page after the one before."""
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
    """The state of one connector: a store, three lanes, the engine's buffers, the requests'
    prefixes.

    counts: how many were refused, late, cancelled or failed, by lane.
    """

    def __init__(
        self, metadata: ConnectorMetadata, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Open the store, and start the threads. Raises what opening the store raises."""
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

    # --- checks and arguments of a call -----------------------------------------------------------

    def check_open(self) -> None:
        """Raise InvalidRequest if the connector cannot be used any more."""
        if self._is_closed:
            raise InvalidRequest("the connector is closed")
        if self._fork.is_child:
            raise InvalidRequest(FORKED)

    def register(self, kv_args: Any) -> None:
        """Set the engine's buffers. InvalidRequest: they are set already, or are not buffers."""
        self.check_open()
        buffers = KVBuffers(kv_args)
        if self._buffers is not None:
            raise InvalidRequest("the KV buffers are registered already: once for a connector")
        self._buffers = buffers
        self._deregister = [self.store.register(*region) for region in buffers.regions]

    def buffers(self) -> KVBuffers:
        """Return the engine's buffers. InvalidRequest: they are not set yet."""
        if self._buffers is None:
            raise InvalidRequest("there are no KV buffers: register_kv_buffers comes first")
        return self._buffers

    def check_writable(self, span: Span) -> None:
        """Raise InvalidRequest for pages that are not in the buffers, and for one named twice."""
        self.buffers().check(span.indices)
        if len(set(span.indices.tolist())) < len(span.indices):
            raise InvalidRequest("the mapping names a page index twice: one page would be lost")

    def chain_of(self, salts: Mapping[str, str] | None) -> Chain:
        """Return the chain with a request's salts in addition to the connector's own."""
        return self.chain.salted(salts) if salts else self.chain

    def keys(self, digests: Digests) -> PageKeys:
        """Return the keys of pages in this rank's namespace."""
        return in_namespace(page_keys_of(digests), self._space_digest)

    def agree(self, numbers: Sequence[int]) -> list[int] | None:
        """Return the minimum of each number over all ranks; None if the ranks did not agree."""
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
        # Never more than this rank has: it must not report what it has not done yet.
        return list(map(min, reduced, numbers))

    # --- lookups ----------------------------------------------------------------------------------

    def matched_pages(self, req_id: str, ids: TokenIds, chain: Chain, local_pages: int) -> int:
        """Return how many pages after the local ones this rank's store has: a hint."""
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
        """Run `matched_pages` in another thread; return its result as a future."""
        found = 0

        def move(_begin: int, _end: int) -> int:
            nonlocal found
            found = self.matched_pages(req_id, ids, chain, local_pages)
            return 1

        until = self.clock() + self.metadata.timeout_s
        asked = QueuedTransfer(req_id, move, 1, 1, until, 1)
        answer: Future[int] = Future()
        asked.future.add_done_callback(
            # Cancelled or late: no page is known to exist.
            lambda done: answer.set_result(found if not done.cancelled() and done.result() else 0)
        )
        self.lookups.add(asked)
        return answer

    # --- transfers --------------------------------------------------------------------------------

    def retrieve(
        self, req_id: str, span: Span, ids: TokenIds, chain: Chain, timeout_s: float
    ) -> Future[int]:
        """Read a span's pages; return the tokens of the leading run that will have arrived."""
        digests = self.prefixes.digests(req_id, chain, ids)
        keys, buffers = self.keys(digests[span.first : span.end]), self.buffers()

        def move(begin: int, end: int) -> int:
            runs = buffers.runs(span.indices[begin:end])
            return _leading(self.store.get_into(keys[begin:end], runs))

        transfer = self._queued(req_id, move, span, timeout_s)
        self.gets.add(transfer)
        return transfer.future

    def keep(
        self, req_id: str, span: Span, ids: TokenIds, chain: Chain, timeout_s: float
    ) -> tuple[Future[int], int]:
        """Store a span's pages; return the tokens of the leading run, and its latest end."""
        digests = self.prefixes.digests(req_id, chain, ids)
        keys, buffers = self.keys(digests[span.first : span.end]), self.buffers()

        def move(begin: int, end: int) -> int:
            runs: PageRuns = buffers.runs(span.indices[begin:end])
            stored = _leading(self.store.set_from(keys[begin:end], runs))
            self._report_stored(digests, span.first + begin, stored, ids, chain)
            return stored

        transfer = self._queued(req_id, move, span, timeout_s)
        is_taken = self.sets.add(transfer)
        return transfer.future, (span.end if is_taken else span.first) * self.page_tokens

    def hint(
        self, req_id: str, hint: str, time_s: float, ids: TokenIds, chain: Chain, timeout_s: float
    ) -> Future[int]:
        """Have the store obey a hint for a prompt; return the tokens for which it has."""
        keys = self.keys(self.prefixes.digests(req_id, chain, ids))
        obey = getattr(self.store, "hint", None)

        def move(begin: int, end: int) -> int:
            return obey(hint, keys[begin:end], time_s) if obey is not None else 0

        until, size = self.clock() + timeout_s, self.page_tokens
        transfer = QueuedTransfer(req_id, move, len(keys), HINT_PAGES, until, size)
        (self.gets if hint == reasons.PREFETCH else self.sets).add(transfer)
        return transfer.future

    def end(self, req_id: str) -> None:
        """End the running operations of a request, and forget it. InvalidRequest: no such id."""
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
            # A call of the store hangs and may access memory: the memory that it uses is left as it
            # is.
            self._log.warning("connector.close_timed_out", waited_s=CLOSE_S)
            return
        for deregister in self._deregister:
            deregister()
        self.store.close()

    def _queued(
        self, req_id: str, move: Callable[[int, int], int], span: Span, timeout_s: float
    ) -> QueuedTransfer:
        chunk = max(1, self.metadata.chunk_bytes // self.buffers().page_bytes)
        until = self.clock() + timeout_s
        return QueuedTransfer(req_id, move, len(span.indices), chunk, until, self.page_tokens)

    def _report_stored(
        self, digests: Digests, first: int, pages: int, ids: TokenIds, chain: Chain
    ) -> None:
        report = self.metadata.on_stored
        if report is None or not pages:
            return
        end, size = first + pages, self.page_tokens
        parent = digests[first - 1].tobytes() if first else None
        stored_pages = StoredPages(
            digests[first:end], parent, ids[first * size : end * size].copy(), size, chain.salts,
            self.keys(digests[first:end]),
        )  # fmt: skip
        try:
            report(stored_pages)
        except Exception as error:  # A failure of the publisher must not fail the transfer.
            self.warn_once("connector.publisher_failed", type(error).__name__, problem=repr(error))


def check_id(req_id: object) -> None:
    """Raise InvalidRequest for an invalid request id."""
    if not isinstance(req_id, str):
        raise InvalidRequest(f"a request's id is a text, not {req_id!r:.40}")


def checked(req_id: object, tokens: Tokens, local_tokens: object = 0) -> TokenIds:
    """Return a request's token ids. InvalidRequest: the request is invalid."""
    check_id(req_id)
    ids = token_ids(tokens)
    if not is_whole_number(local_tokens) or not 0 <= local_tokens <= len(ids):
        raise InvalidRequest(
            f"{local_tokens!r:.40} of {len(ids)} tokens cannot be computed locally"
        )
    return ids


@final
class RemoteKVConnector:
    """Stores and retrieves the KV pages of requests, named by their tokens.

        connector = RemoteKVConnector(ConnectorMetadata(model=…, dtype=…, page_tokens=64))
        connector.register_kv_buffers(kv_args)

    No method waits for pages to move: the two `_async` ones queue a transfer and return a Future.
    Its result is the number of tokens, from the mapping's first on, whose pages have moved: a
    leading run, 0 if there is none. It never has an exception. Until it is done, the engine must
    keep the pages unchanged; once it is done, or cancelled, nothing accesses them. Invalid
    arguments, and calls after `close`, raise InvalidRequest; every other failure is a shorter run.

    Keywords of all calls with tokens:

    salts: texts by name (LoRA, tenant) that separate requests, in addition to the metadata's.
    timeout_s: the transfer's deadline in seconds; by default that of the metadata.
    """

    def __init__(self, metadata: ConnectorMetadata) -> None:
        """Open the store. Raises the same exceptions as `Client.open`."""
        self.core = Core(metadata)

    def register_kv_buffers(self, kv_args: Any) -> None:
        """Register the engine's buffers, once: pages are read and written in place.

        kv_args: has `kv_data_ptrs`, `kv_data_lens` and `kv_item_lens`, lists with one number for
                 each buffer (K or V of a layer): its address, its bytes, and the bytes of a page in
                 it. Page i is at i times these bytes.

        Raises InvalidRequest if these are no buffers, or for a second call.
        """
        self.core.register(kv_args)

    def store_kv_async(
        self, req_id: str, page_to_tokens_mapping: PageMapping, tokens_list: Tokens, **kw: Any
    ) -> tuple[Future[int], int]:
        """Store pages; return a Future of the stored tokens, and the end of the accepted tokens.

        req_id: the request, a text.
        page_to_tokens_mapping: (page index, slice of `tokens_list`) for each page, in order; a last
                                slice that is shorter than a page is left out.
        tokens_list: all tokens from the prompt's first on: a list of int, or a one-dimensional
                     array of integers.

        A full queue accepts nothing: the Future is done, and the end is the start of the mapping.

        Raises InvalidRequest for malformed arguments, before `register_kv_buffers`, and after
        `close`.
        """
        ids, chain, timeout_s = self._asked(kw, req_id, tokens_list)
        span = span_of(page_to_tokens_mapping, self.core.page_tokens, len(ids))
        self.core.buffers().check(span.indices)
        return self.core.keep(req_id, span, ids, chain, timeout_s)

    def retrieve_kv_async(
        self, req_id: str, page_to_tokens_mapping: PageMapping, tokens_list: Tokens, **kw: Any
    ) -> Future[int]:
        """Read pages into the buffers; return a Future of the tokens that have arrived.

        The arguments are those of a store; a page index may be named only once. The content of
        pages after the leading run is undefined.

        Raises InvalidRequest as a store.
        """
        ids, chain, timeout_s = self._asked(kw, req_id, tokens_list)
        span = span_of(page_to_tokens_mapping, self.core.page_tokens, len(ids))
        self.core.check_writable(span)
        return self.core.retrieve(req_id, span, ids, chain, timeout_s)

    def num_external_matched_tokens(
        self, req_id: str, tokens: Tokens, num_local_computed_tokens: int, **kw: Any
    ) -> int:
        """Return how many tokens after the local ones every rank can retrieve: a hint.

        num_local_computed_tokens: how many of the first tokens the engine has already.

        Asks the store, which blocks until the store's own deadline; `AsyncKVPrefetchQueue` asks in
        another thread. With `all_reduce_min`, each rank must call this in the same order; 0 if that
        fails.
        """
        core = self.core
        ids, chain, _ = self._asked(kw, req_id, tokens, num_local_computed_tokens)
        local_pages = num_local_computed_tokens // core.page_tokens
        pages = core.matched_pages(req_id, ids, chain, local_pages)
        (pages,) = core.agree([pages]) or [0]
        reached = (local_pages + pages) * core.page_tokens
        return max(0, reached - num_local_computed_tokens)

    def hint_kv_async(
        self, req_id: str, hint: str, tokens_list: Tokens, seconds: float = 0.0, **kw: Any
    ) -> Future[int]:
        """Retain, demote, prefetch or share the pages of a prompt; return a Future.

        hint:    "retain", for `seconds` from now on; "demote", to be evicted first; "prefetch",
                 into the memory of this host; "share", which only counts what other hosts read.
        The result is the number of tokens in pages for which it is done. A store without hints, as
        a folder, does nothing.
        """
        ids, chain, timeout_s = self._asked(kw, req_id, tokens_list)
        if hint not in reasons.HINT_OUTCOMES:
            raise InvalidRequest(f"{hint!r:.40} is no hint: {', '.join(reasons.HINT_OUTCOMES)} are")
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise InvalidRequest(f"seconds are a number, not {seconds!r:.40}")
        return self.core.hint(req_id, hint, seconds, ids, chain, timeout_s)

    def finish_req(self, req_id: str) -> None:
        """End the running operations of this request, and forget its tokens; may be repeated.

        Waiting transfers are cancelled; a running one ends after its current chunk. The call
        returns at once: the Futures show when the pages are free.
        """
        self.core.end(req_id)

    def close(self) -> None:
        """End everything, within seconds; may be repeated.

        Every Future is then done or cancelled, except those of hanging calls of the store.
        """
        self.core.close()

    def _asked(
        self, kw: Mapping[str, Any], req_id: object, tokens: Tokens, local_tokens: object = 0
    ) -> tuple[TokenIds, Chain, float]:
        """Return the token ids of a call, its chain and its timeout, if it is valid."""
        self.core.check_open()
        unknown = sorted(kw.keys() - {"salts", "timeout_s"})
        if unknown:
            raise InvalidRequest(f"{unknown[0]!r} is no option: salts and timeout_s are")
        salts, timeout_s = kw.get("salts"), kw.get("timeout_s", self.core.metadata.timeout_s)
        if salts is not None and not isinstance(salts, Mapping):
            raise InvalidRequest(f"salts are texts by name, not {salts!r:.60}")
        chain, timeout_s = self.core.chain_of(salts), seconds(timeout_s)
        return checked(req_id, tokens, local_tokens), chain, timeout_s
