"""The memory of each page of a host pool, in the byte order of its flat page.

SGLang's zero-copy interface (v1) names the buffers of a page through `get_page_buffer_meta`, its
older one (v0) passes the flattened page. Both must give the same object with the same bytes, so
runs have the order of the flat page: by address within the pool's buffer. (For layer-first MHA
`get_page_buffer_meta` names K and V of each layer in turn, but the flat page has all of K first.)

In every layout that we serve, run r of page p is at base[r] + p * stride[r]. Both are taken from
`get_page_buffer_meta` itself and compared with it on sample pages at registration; after that a
batch is one numpy expression, while the function would create Python objects for every run.

A page is one object, or one for each group of attention heads (namespace.py). Then its runs are
those of `get_split_heads_page_buffer_meta`, object by object.

A side pool without named buffers is served through its flat pages, at the cost of one more copy.

A hybrid model keeps state in addition to its KV pages: windows of attention, recurrent states, the
keys of an indexer, a draft model's cache. SGLang calls each of them a pool; a page of one has the
same hash as the KV page that it belongs to. In an `Attachment` every pool has a namespace of its
own under the name of the model, so equal hashes are different pages, one batch may hold pages of
several pools, and `clear` removes them together.

Objects are stored: a page is one object, or one for each group of attention heads. A page exists if
all its objects exist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from peercache.model.keys import PageKeys, page_keys_of
from peercache.model.runs import I64, U64, PageRuns
from peercache.observability import reasons
from peercache.sglang.namespace import PageSpaces

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")

BATCH_PAGES = 128
"""SGLang's largest batch: the sizes of this many pages are precomputed."""


class UnservedPool(Exception):
    """A host pool that we cannot serve; the store answers misses and logs this once."""


class UnusableBatch(Exception):
    """Arguments of one batch that cannot be served: a miss with a counted reason."""

    def __init__(self, reason: str, why: str) -> None:
        """Set the counted reason, and the sentence for operators."""
        super().__init__(why)
        self.reason = reason


@attrs.frozen(eq=False)
class HostPages:
    """The pages of one host pool.

    page_tokens: tokens per page. page_count: pages of the pool. page_bytes: bytes per page.
    objects: the number of objects of a page; all have the same number of runs and bytes.
    bases, strides, sizes: (runs,) each, of one page, object by object, each in flat order.
    flat_offsets: (runs,) their offsets in the flat page.
    order:       (runs,) the index of each run in `get_page_buffer_meta`.
    affine:      whether base + page * stride held on the sample pages.
    batch_sizes: (BATCH_PAGES * runs,) the sizes of a full batch.
    """

    pool: Any
    page_tokens: int
    page_count: int
    page_bytes: int
    objects: int
    bases: U64
    strides: U64
    sizes: U64
    flat_offsets: U64
    order: npt.NDArray[np.intp]
    affine: bool
    batch_sizes: U64

    @classmethod
    def of(cls, pool: Any, *, objects: int = 1, is_side: bool = False) -> HostPages:
        """Read a pool's geometry; raise UnservedPool if its pages cannot be served completely.

        objects: the number of groups of heads of a page.
        """
        _require_servable(pool)
        tokens, count = int(pool.page_size), int(pool.size) // int(pool.page_size)
        first, sizes = _buffers(pool, np.zeros(1, np.int64), objects)
        # One tensor holds the pool: C order is address order. Several tensors (K and V of different
        # width, the states of Mamba) are separate allocations with unrelated addresses: there the
        # pool's own order counts.
        single = len(_tensors(pool)) == 1
        order = np.arange(first.shape[1])
        if objects > 1 and not single:
            raise UnservedPool("its heads are in several tensors, which are not cut into groups")
        if single:
            within = np.argsort(first[0].reshape(objects, -1), axis=1, kind="stable")
            order = order.reshape(objects, -1)[np.arange(objects)[:, None], within].reshape(-1)
        page_bytes = int(sizes.sum())
        _require_complete(pool, first[0][order], sizes[order], page_bytes, is_side=is_side)
        second = _buffers(pool, np.ones(1, np.int64), objects)[0] if count > 1 else first
        strides = second[0] - first[0]
        samples = np.unique(np.array([0, count // 3, count // 2, count - 1], np.int64))
        expected, _ = _buffers(pool, samples, objects)
        affine = np.array_equal(expected, first + samples.astype(np.uint64)[:, None] * strides)
        return cls(
            pool=pool,
            page_tokens=tokens,
            page_count=count,
            page_bytes=page_bytes,
            objects=objects,
            bases=first[0][order],
            strides=strides[order],
            sizes=sizes[order],
            flat_offsets=_flat_offsets(first[0][order], sizes[order]),
            order=order,
            affine=affine,
            batch_sizes=np.tile(sizes[order], BATCH_PAGES),
        )

    def memory(self) -> list[tuple[int, int]]:
        """Return (address, bytes) of the memory that all pages are in, one for each tensor."""
        return [(tensor.data_ptr(), tensor.nbytes) for tensor in _tensors(self.pool)]

    def runs(self, host_indices: torch.Tensor, page_count: int) -> PageRuns:
        """Return the memory of the objects of a batch's pages, page by page.

        host_indices: (page_count * page_tokens,) int64, on the CPU; page i starts at entry
        i * page_tokens, aligned, and is contiguous. Raises UnusableBatch otherwise.
        """
        pages = _page_numbers(host_indices, page_count, self.page_tokens, self.page_count)
        if self.affine:
            addresses = self.bases + pages.astype(np.uint64)[:, None] * self.strides
        else:
            addresses, _ = _buffers(self.pool, pages, self.objects)
            addresses = addresses[:, self.order]
        return PageRuns.regular(addresses, self._sizes(page_count), page_count * self.objects)

    def flat_runs(self, tensors: list[torch.Tensor], page_count: int) -> PageRuns:
        """Return the memory of the objects of v0's flat pages; raise UnusableBatch."""
        runs = flat_runs(tensors, page_count, self.page_bytes)
        if self.objects == 1:
            return runs
        addresses = runs.addresses[:, None] + self.flat_offsets
        return PageRuns.regular(addresses, self._sizes(page_count), page_count * self.objects)

    def _sizes(self, page_count: int) -> U64:
        """Return the sizes of the runs of a batch."""
        if page_count > BATCH_PAGES:
            return np.tile(self.sizes, page_count)
        return self.batch_sizes[: page_count * len(self.sizes)]


@attrs.frozen(eq=False)
class FlatPages:
    """The pages of a side pool without named buffers, through copies that the pool makes.

    Used for an indexer's keys in layer_first, and for Mamba states with additional states. dtype:
    that of a flat page.
    """

    pool: Any
    page_tokens: int
    page_count: int
    page_bytes: int
    dtype: torch.dtype

    @classmethod
    def of(cls, pool: Any) -> FlatPages:
        """Read a pool's geometry; raise UnservedPool if its flat page is not the whole page."""
        _require_in_place(pool)
        try:
            page = pool.get_dummy_flat_data_page()
            held = pool.get_data_page(0, flat=True)
        except (NotImplementedError, ValueError, AttributeError, RuntimeError) as error:
            raise UnservedPool(str(error)) from error
        if not _in_place(page) or page.nbytes == 0 or page.nbytes != held.nbytes:
            raise UnservedPool("it gives no flat pages")
        tokens = int(getattr(pool, "page_size", 1) or 1)
        return cls(pool, tokens, int(pool.size) // tokens, page.nbytes, page.dtype)

    def memory(self) -> list[tuple[int, int]]:
        """Return nothing: reads fill a copy."""
        return []

    def slots(self, host_indices: torch.Tensor, page_count: int) -> list[int]:
        """Return the first slot of each page of a batch; raise UnusableBatch."""
        pages = _page_numbers(host_indices, page_count, self.page_tokens, self.page_count)
        slots: list[int] = (pages * self.page_tokens).tolist()
        return slots

    def staged(self, slots: list[int]) -> StagedPages:
        """Return room for copies of these pages, one contiguous tensor."""
        content = torch.empty((len(slots), self.page_bytes), dtype=torch.uint8)
        return StagedPages(self, slots, content)


@attrs.frozen(eq=False)
class StagedPages:
    """A batch of flat pages. slots: the first of each page. content: (pages, page_bytes) uint8."""

    pages: FlatPages
    slots: list[int]
    content: torch.Tensor

    def runs(self) -> PageRuns:
        """Return the memory of the copies."""
        return flat_runs(list(self.content), len(self.slots), self.pages.page_bytes)

    def gather(self) -> None:
        """Copy the pages from the pool."""
        for slot, copy in zip(self.slots, self.content, strict=True):
            page = self.pages.pool.get_data_page(slot, flat=True)
            copy.copy_(page.contiguous().view(torch.uint8))

    def scatter(self, hits: list[bool]) -> None:
        """Copy only the pages that were read into the pool."""
        for slot, copy, hit in zip(self.slots, self.content, hits, strict=True):
            if hit:
                self.pages.pool.set_from_flat_data_page(slot, copy.view(self.pages.dtype))


def side_pages_of(pool: Any, objects: int = 1) -> HostPages | FlatPages:
    """Return the pages of a side pool, in place if it names their buffers.

    Raises UnservedPool if its pages cannot be distinguished or copied; copies are never cut.
    """
    try:
        return HostPages.of(pool, objects=objects, is_side=True)
    except UnservedPool:
        if objects > 1:
            raise
        return FlatPages.of(pool)


def flat_runs(tensors: list[torch.Tensor], page_count: int, page_bytes: int) -> PageRuns:
    """Return the runs of v0's flat pages: one contiguous CPU tensor per page, used in place.

    Raises UnusableBatch for anything else: a copy would be read after the call has returned, and an
    object of another size would block the right one.
    """
    if len(tensors) != page_count:
        raise UnusableBatch(reasons.WRONG_SIZE, f"{page_count} keys and {len(tensors)} pages")
    if not all(_in_place(tensor) for tensor in tensors):
        raise UnusableBatch(reasons.REFUSED, "a page that is not a contiguous tensor on the CPU")
    sizes = np.array([t.nbytes for t in tensors], np.uint64)
    if (sizes != page_bytes).any():
        raise UnusableBatch(reasons.WRONG_SIZE, f"a page of another size than {page_bytes} bytes")
    return PageRuns.regular([t.data_ptr() for t in tensors], sizes, page_count)


def _in_place(page: Any) -> bool:
    return isinstance(page, torch.Tensor) and page.is_contiguous() and page.device.type == "cpu"


def _page_numbers(indices: Any, page_count: int, page_tokens: int, pages_max: int) -> I64:
    """Return the page numbers of a batch in a pool, (page_count,); raise UnusableBatch."""
    shape = None if indices is None else tuple(indices.shape)
    if shape != (page_count * page_tokens,):
        raise UnusableBatch(
            reasons.WRONG_SIZE,
            f"{page_count} keys require {page_count * page_tokens} host indices, there are {shape}",
        )
    slots = indices.numpy()
    starts, lasts = slots[::page_tokens], slots[page_tokens - 1 :: page_tokens]
    pages: I64 = starts // page_tokens
    if (
        (starts % page_tokens).any()
        or (lasts - starts != page_tokens - 1).any()
        or (page_count and (pages.min() < 0 or pages.max() >= pages_max))
    ):
        raise UnusableBatch(reasons.REFUSED, "host indices that are not whole pages of the pool")
    return pages


def is_logical(pool: Any) -> bool:
    """Return whether a pool only numbers pages, without bytes: the anchor of DeepSeek V4."""
    return getattr(pool, "kv_buffer", None) is None and getattr(pool, "size_per_token", None) == 0


def _tensors(pool: Any) -> list[torch.Tensor]:
    """Return the tensors that hold a pool's pages."""
    whole = getattr(pool, "kv_buffer", None)
    if whole is None and hasattr(pool, "get_hybrid_pool_buffer"):
        whole = pool.get_hybrid_pool_buffer()
    if whole is None:
        return []
    listed = [whole] if isinstance(whole, torch.Tensor) else list(whole)
    return [tensor for tensor in listed if tensor is not None and tensor.nbytes]


def _require_servable(pool: Any) -> None:
    if not _tensors(pool):
        raise UnservedPool("its pages are not in this pool (kv_buffer is None)")
    if pool.layout not in LAYOUTS:
        raise UnservedPool(f"its layout is {pool.layout}; served are {', '.join(LAYOUTS)}")
    _require_in_place(pool)


def _require_in_place(pool: Any) -> None:
    if getattr(pool, "logical_size", pool.size) != pool.size:
        raise UnservedPool("its pages are spread over several ranks")
    if getattr(pool, "shared_allocation_domain", None) is not None:
        raise UnservedPool("its pages move while it is in use (shared compacting memory)")


def _require_complete(
    pool: Any, addresses: U64, sizes: U64, page_bytes: int, *, is_side: bool
) -> None:
    """Refuse a pool if its runs are not the whole page, or not in the flat page's order."""
    wanted = (getattr(pool, "size_per_token", None) or pool.get_size_per_token()) * pool.page_size
    # For pools of DeepSeek V4 this is the size of a whole row; their flat page is right.
    if page_bytes != wanted and not (is_side and page_bytes == _flat_bytes(pool)):
        raise UnservedPool(f"its buffers name {page_bytes} bytes a page, of {wanted}")
    tensors = _tensors(pool)
    begins = np.array([tensor.data_ptr() for tensor in tensors], np.uint64)
    limits = begins + np.array([tensor.nbytes for tensor in tensors], np.uint64)
    ends = addresses + sizes
    inside = ((addresses[:, None] >= begins) & (ends[:, None] <= limits)).any(axis=1)
    by_address = np.argsort(addresses, kind="stable")
    apart = ends[by_address][:-1] <= addresses[by_address][1:]
    if not (all(t.is_contiguous() for t in tensors) and inside.all() and apart.all()):
        raise UnservedPool("its buffers overlap, or are outside its memory")


def _flat_offsets(addresses: U64, sizes: U64) -> U64:
    """Return the offset of each run in the flat page, which is in the order of addresses.

    That is true for pools of one tensor, the only ones with pages that are cut.
    """
    by_address = np.argsort(addresses, kind="stable")
    offsets = np.empty(len(sizes), np.uint64)
    offsets[by_address] = np.cumsum(sizes[by_address]) - sizes[by_address]
    return offsets


def _flat_bytes(pool: Any) -> int:
    """Return the bytes of a flat page, 0 if the pool has none."""
    try:
        return int(pool.get_dummy_flat_data_page().nbytes)
    except (NotImplementedError, ValueError, AttributeError, RuntimeError):
        return 0


def _buffers(pool: Any, pages: I64, objects: int) -> tuple[U64, U64]:
    """Return the pool's buffers: addresses, (pages, runs), and sizes of one page, (runs,)."""
    tokens = int(pool.page_size)
    slots = (pages[:, None] * tokens + np.arange(tokens)).reshape(-1)
    try:
        if objects == 1:
            addresses, sizes = pool.get_page_buffer_meta(torch.from_numpy(slots))
        else:
            addresses, sizes = pool.get_split_heads_page_buffer_meta(
                torch.from_numpy(slots), objects
            )
    except (NotImplementedError, ValueError) as error:
        raise UnservedPool(str(error)) from error
    if addresses is None:
        raise UnservedPool("it names no buffers of its pages")
    flat = np.array(addresses, np.uint64).reshape(len(pages), -1)
    if flat.size == 0:
        raise UnservedPool("it names no buffers of its pages")
    of_each = np.broadcast_to(np.array(sizes, np.uint64).reshape(-1), flat.size).reshape(flat.shape)
    if (of_each != of_each[0]).any():
        raise UnservedPool("its pages have several sizes")
    return flat, of_each[0].copy()


KV_POOL = "kv"


def pool_name(name: Any) -> str:
    """Return the text of a pool's name: a member of SGLang's PoolName, or any other."""
    return str(getattr(name, "value", name))


@attrs.frozen(eq=False)
class SidePool:
    """A served side pool.

    spaces: separate its objects' keys from those of other pools. end_registration: unregisters its
            memory.
    """

    pages: HostPages | FlatPages
    spaces: PageSpaces
    end_registration: Callable[[], None]


@attrs.frozen(eq=False)
class Attachment:
    """The state for batch methods, replaced as a whole: no method may see a partial
    re-registration.

    anchor: the pool that SGLang registered. pages: its pages; None for an anchor that only numbers
            pages, without bytes. sides: the served side pools, by name.
    """

    client: Any
    anchor: Any
    pages: HostPages | None
    spaces: PageSpaces
    version: str
    end_registration: Callable[[], None]
    sides: Mapping[str, SidePool]


def object_keys(keys: Sequence[str], digests: Sequence[bytes]) -> PageKeys:
    """Return the keys of the objects of pages, (pages * objects,) V16, page by page.

    digests: those of the objects' namespaces.
    """
    named: PageKeys = page_keys_of(keys, digests).T.reshape(-1)
    return named


def whole_pages(flags: list[bool], objects: I64) -> list[bool]:
    """Return for each page whether the flags of all its objects are set, (pages,).

    objects: (pages,) the number of objects of each page, at least one.
    """
    if len(flags) == len(objects):
        return flags
    begins = np.cumsum(objects) - objects
    whole: list[bool] = np.logical_and.reduceat(np.array(flags, np.bool_), begins).tolist()
    return whole
