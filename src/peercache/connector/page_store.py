"""The port to what keeps the connector's pages, and PeerCache behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, final

from peercache.client.client import Client
from peercache.model.keys import Namespace, PageKeys
from peercache.model.runs import PageRuns


class PageStore(Protocol):
    """Keeps pages by key. Every method may be called from several threads at once, and none raises.

    What a get reports is exactly the page that was set under that key; everything else is a miss,
    after which the page's runs may hold anything. Nothing touches the runs after the return.
    """

    def exists(self, keys: PageKeys, page_bytes: int) -> int:
        """Return the length of the leading run of keys, (n,) V16, that are kept: a hint.

        page_bytes: only pages of this size count: a get of another one is a miss. 0: of any.
        """

    def get_into(self, keys: PageKeys, runs: PageRuns) -> list[bool]:
        """Read one page a key into its runs; return for each whether they hold it now."""

    def set_from(self, keys: PageKeys, runs: PageRuns) -> list[bool]:
        """Store one page a key from its runs; return for each whether it is kept now."""

    def register(self, address: int, length: int) -> Callable[[], None]:
        """Make memory that lives long ready for reads into it; return what ends that."""

    def close(self) -> None:
        """End calls and release everything; may be repeated."""


OpenStore: TypeAlias = Callable[[Namespace], PageStore]
"""Opens a store of one namespace. The keys that it is given are that namespace's already."""


@final
class ClientPages:
    """PeerCache as a page store: the batch calls of one client."""

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
        # Known from the question before: it costs none of its own.
        fits = [length == page_bytes for length in self._client.lengths(keys[:run])]
        return fits.index(False) if False in fits else run

    def register(self, address: int, length: int) -> Callable[[], None]:
        """Make memory ready for reads into it, in the background; return what ends that."""
        return self._client.register_memory(address, length)


def cluster_store(**settings: Any) -> OpenStore:
    """Return what opens PeerCache: a client with these settings, as `Client.open` takes them."""
    return lambda namespace: ClientPages(Client.open(namespace=namespace, **settings))
