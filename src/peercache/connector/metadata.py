"""The parameters of a connector, and the port of its page store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Protocol, TypeAlias, cast, final

import attrs

from peercache.client.client import Client
from peercache.content.chain import Chain, Digests, TokenIds, is_whole_number
from peercache.errors import InvalidRequest
from peercache.model.keys import DEFAULT_NAME, Namespace, PageKeys
from peercache.model.runs import PageRuns
from peercache.observability import reasons


class PageStore(Protocol):
    """Keeps pages by key. Every method may be called from several threads at once, and none raises.

    A get that reports a hit has read exactly the page that was set under that key; everything else
    is a miss, after which the content of the page's runs is undefined. Nothing accesses the runs
    after the return. A store may also have `hint`, as `ClientPages` has it.
    """

    def exists(self, keys: PageKeys, page_bytes: int) -> int:
        """Return the length of the leading run of keys, (n,) V16, that are stored: a hint.

        page_bytes: only pages of this size count: a get of another size is a miss. 0: pages of any
                    size.
        """

    def get_into(self, keys: PageKeys, runs: PageRuns) -> list[bool]:
        """Read one page for each key into its runs; return for each whether they hold it now."""

    def set_from(self, keys: PageKeys, runs: PageRuns) -> list[bool]:
        """Store one page for each key from its runs; return for each whether it is stored now."""

    def register(self, address: int, length: int) -> Callable[[], None]:
        """Register long-lived memory for reads into it; return a function that ends that."""

    def close(self) -> None:
        """End calls and release everything; may be repeated."""


OpenStore: TypeAlias = Callable[[Namespace], PageStore]
"""Opens a store of one namespace. The keys passed to it belong to that namespace already."""


@final
class ClientPages:
    """PeerCache as a page store: the batch calls of one client, and its hints."""

    def __init__(self, client: Client) -> None:
        """Take over the client: `close` closes it."""
        self._client = client
        self.get_into = client.batch_get_into
        self.set_from = client.batch_set_from
        self.close = client.close

    def exists(self, keys: PageKeys, page_bytes: int) -> int:
        """Return the length of the leading run of keys that have a holder: a hint."""
        run = self._client.batch_exists(keys)
        if not run or not page_bytes:
            return run
        # Known from the lookup before: it needs no further request.
        fits = [length == page_bytes for length in self._client.lengths(keys[:run])]
        return fits.index(False) if False in fits else run

    def hint(self, hint: str, keys: PageKeys, seconds: float) -> int:
        """Obey a hint; return for how many of the pages it is done. Other stores may lack it."""
        if hint == reasons.RETAIN:
            return self._client.retain(keys, seconds)
        calls = {
            reasons.DEMOTE: self._client.demote,
            reasons.PREFETCH: self._client.prefetch,
            reasons.SHARE: self._client.share,
        }
        return calls[hint](keys)

    def register(self, address: int, length: int) -> Callable[[], None]:
        """Register memory for reads, in the background; return a function that ends that."""
        return self._client.register_memory(address, length)


def cluster_store(**settings: Any) -> OpenStore:
    """Return a function that opens a client: the `store` of a `ConnectorMetadata`.

    settings: those that `Client.open` takes. The function raises what `Client.open` raises.
    """
    return lambda namespace: ClientPages(Client.open(namespace=namespace, **settings))


SECONDS_MAX = 1e9
"""The longest timeout, thirty years: a thread cannot wait for `inf` seconds."""

AllReduceMin: TypeAlias = Callable[[Sequence[int]], Sequence[int]]
"""Returns, for each position, the smallest number that a tensor-parallel rank passed. Each rank
calls it with the same count of numbers, in the same order of calls: the scheduler's thread does."""


@attrs.frozen(eq=False)
class StoredPages:
    """Stored pages, for a publisher of KV events.

    digests: (pages, 32) uint8. parent: the digest before the first, None at the start of the
             prompt.
    tokens:  (pages * page_tokens,) uint32. salts: those of the request's chain.
    keys:    (pages,) V16, the page keys in the namespace of this rank.
    """

    digests: Digests
    parent: bytes | None
    tokens: TokenIds
    page_tokens: int
    salts: Mapping[str, str]
    keys: PageKeys


def whole_number(name: str, value: object, least: int) -> int:
    """Return a number of this field. InvalidRequest: not a number, or below `least`."""
    if not is_whole_number(value) or value < least:
        raise InvalidRequest(f"{name} is a whole number from {least} on, not {value!r:.40}")
    return int(value)


def seconds(value: object) -> float:
    """Return the seconds of a `timeout_s`. InvalidRequest: invalid."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not cast("float", value) > 0:
        raise InvalidRequest(f"timeout_s is more than 0 seconds, not {value!r:.40}")
    return float(min(cast("float", value), SECONDS_MAX))


def _is_text(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, str):
        raise InvalidRequest(f"{attribute.name} is a text, not {value!r:.40}")


def _is_count(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    whole_number(attribute.name, value, 1)


def _is_callable(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    is_left_out = value is None and attribute.default is None
    if not callable(value) and not is_left_out:
        raise InvalidRequest(f"{attribute.name} is called, and {value!r:.40} cannot be")


@attrs.frozen(kw_only=True, eq=False)
class ConnectorMetadata:
    """The parameters of a connector.

    model, dtype, page_tokens, salts: of the chain of content addresses (`Chain`).
    namespace:    the name to which rights and quotas apply.
    layout:       what else determines the bytes of a page: the order of layers, of K and V, of
                  heads. Engines with the same model and different layouts share no page.
    tp_rank, tp_size: the rank of this process; each rank stores a part of every page.
    is_replicated: each rank has the same bytes (MLA): the ranks share pages.
    store:        opens the page store: `cluster_store()`, `folder_store(path)`.
    all_reduce_min: agrees on results over ranks; None: each rank has its own.
    on_stored: called with the stored pages, in a thread of the connector; None: not called.
    timeout_s:    seconds, of a transfer without a timeout of its own; no part of a transfer begins
                  later.
    queued_pages: pages that wait or move, for gets and for sets each; further ones are refused.
    chunk_bytes:  bytes that one call of the store moves: cancellation and deadlines take effect in
                  between.
    get_threads, set_threads: calls of the store at a time.

    Raises InvalidRequest for a field that cannot be used.
    """

    model: str
    dtype: str
    page_tokens: int
    salts: Mapping[str, str] = attrs.field(factory=dict)
    namespace: str = attrs.field(default=DEFAULT_NAME, validator=_is_text)
    layout: str = attrs.field(default="", validator=_is_text)
    tp_rank: int = 0
    tp_size: int = attrs.field(default=1, validator=_is_count)
    is_replicated: bool = False
    store: OpenStore = attrs.field(factory=cluster_store, validator=_is_callable)
    all_reduce_min: AllReduceMin | None = attrs.field(default=None, validator=_is_callable)
    on_stored: Callable[[StoredPages], None] | None = attrs.field(
        default=None, validator=_is_callable
    )
    timeout_s: float = attrs.field(default=5.0, converter=seconds)
    queued_pages: int = attrs.field(default=65_536, validator=_is_count)
    chunk_bytes: int = attrs.field(default=64 * 2**20, validator=_is_count)
    get_threads: int = attrs.field(default=2, validator=_is_count)
    set_threads: int = attrs.field(default=1, validator=_is_count)

    @tp_size.validator
    def _check_rank(self, _: object, size: int) -> None:
        if whole_number("tp_rank", self.tp_rank, 0) >= size:
            raise InvalidRequest(f"rank {self.tp_rank} is not one of {size} tensor-parallel ranks")

    def chain(self) -> Chain:
        """Return the chain of content addresses. InvalidRequest: an invalid field."""
        return Chain(self.model, self.dtype, self.page_tokens, self.salts)

    def space(self) -> Namespace:
        """Return the namespace of this rank's pages: its part of each, in its layout."""
        ranks = {} if self.is_replicated else {"tp_rank": self.tp_rank, "tp_size": self.tp_size}
        geometry = {"dtype": self.chain().dtype, "page_tokens": self.page_tokens}
        return Namespace.of(
            self.namespace, {"connector": 1, **geometry, "layout": self.layout}, ranks
        )
