"""Says which groups of attention heads a rank holds, where servers of several TP sizes share pages.

SGLang's `tp_lcm_size` is a multiple of every tensor-parallel size that shall share pages. The heads
of the model are cut into so many groups, and a page is one object for each group that its rank
holds: with 4 groups, two objects at TP 2, one at TP 4. So a rank of any of these sizes finds its
heads whatever the size of the writer was.

SGLang cuts in the layout `page_head` only, where the heads of a group are contiguous. Where it does
not cut, a page stays one object of its rank, which ranks of other sizes do not find.
"""

from __future__ import annotations

from typing import Any

import attrs

PAGE_HEAD = "page_head"


@attrs.define(eq=False)
class UncutPool(Exception):
    """A `tp_lcm_size` that has no effect on a pool; the message says why."""

    why: str

    def __str__(self) -> str:
        """Return the sentence a person reads."""
        return self.why


@attrs.frozen
class HeadGroups:
    """The groups of one rank: `count` of `total`, beginning with group `first`."""

    total: int
    first: int
    count: int

    @classmethod
    def of(cls, storage_config: Any, pool: Any) -> HeadGroups | None:
        """Return the groups that a rank holds of a pool; None where no sharing was asked for.

        Raises UncutPool where it was, and the pool's pages cannot be cut. At a TP size of
        `tp_lcm_size` SGLang's `should_split_heads` is false: the whole page is one group.
        """
        total = int(getattr(storage_config, "tp_lcm_size", None) or 0)
        if not total or getattr(storage_config, "is_mla_model", False):
            # Ranks of a replicated model share their pages anyway.
            return None
        size, rank = int(storage_config.tp_size), int(storage_config.tp_rank)
        layout, heads = getattr(pool, "layout", None), getattr(pool, "head_num", None)
        if heads is None:
            raise UncutPool("its pages hold no attention heads")
        if layout != PAGE_HEAD:
            raise UncutPool(f"its layout is {layout}, and {PAGE_HEAD} alone keeps heads together")
        if total % size:
            raise UncutPool(f"tp_lcm_size {total} is no multiple of the TP size {size}")
        count = total // size
        if int(heads) % count:
            raise UncutPool(f"{heads} heads of a rank are not {count} equal groups")
        if count > 1 and not getattr(storage_config, "should_split_heads", False):
            raise UncutPool("SGLang does not split its heads")
        if count > 1 and not hasattr(pool, "get_split_heads_page_buffer_meta"):
            raise UncutPool("it does not say where its heads lie")
        return cls(total, rank * count, count)
