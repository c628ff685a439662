"""Names the namespaces that separate the pages of one model, layout and rank from all others.

SGLang's page hashes identify the tokens of a page, but not the format of its bytes or the shard of
the model: its controllers add no suffix. This module puts all of that into the namespace: from the
storage configuration (ranks, model name), from the host pool (dtype, layout, heads), and from the
server (the weights).

Head groups: SGLang's `tp_lcm_size` is a multiple of every tensor-parallel size that should share
pages. The heads of the model are cut into this many groups, and a page is one object for each group
that its rank holds: with 4 groups, two objects at TP 2, one at TP 4. So a rank of any of these
sizes finds its heads, independent of the writer's size. SGLang cuts only in the layout `page_head`,
in which the heads of a group are contiguous. If it does not cut, a page stays one object of its
rank, which ranks of other sizes do not find.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from peercache.model.keys import Namespace

PAGE_HEAD = "page_head"


class UncutPool(Exception):
    """A `tp_lcm_size` that has no effect on a pool; the message says why."""


@attrs.frozen
class HeadGroups:
    """The groups of one rank: `count` of `total`, beginning with group `first`."""

    total: int
    first: int
    count: int

    @classmethod
    def of(cls, storage_config: Any, pool: Any) -> HeadGroups | None:
        """Return the groups that a rank holds of a pool; None if no sharing is configured.

        Raises UncutPool if it is, and the pool's pages cannot be cut. At a TP size of `tp_lcm_size`
        SGLang's `should_split_heads` is false: the whole page is one group.
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
            raise UncutPool("it does not say where its heads are")
        return cls(total, rank * count, count)


MAMBA = "mamba"
"""The pool of recurrent states."""

_POOL_FACTS = (
    "dtype",
    "layout",
    "page_size",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "dsa_kv_cache_store_fp8",
    "storage_format_tag",
)
"""Facts that determine the bytes of a page. Nodes warn if a name has two sets."""

_SIDE_FACTS = (
    "pool_name",
    "conv_dtype",
    "conv_state_shapes",
    "temporal_dtype",
    "temporal_state_shape",
    "num_mamba_layers",
    "indexer_dtype",
    "indexer_page_stride_size",
    "item_bytes",
    "state_page_bytes",
    "ring_size",
    "size_per_token",
)
"""The same for side pools: states of Mamba, an indexer's keys, rows of DeepSeek V4."""

_RANK_FACTS = ("head_num", "size_per_token")
"""Facts that depend on a rank's part of the heads: servers of different TP sizes differ in them."""

_STAGE_FACTS = ("start_layer", "end_layer", "layer_num", "target_layer_num")
"""Facts about the layers of a page. Pipeline stages of one model differ in them."""


def model_name(storage_config: Any, pool: Any) -> str:
    """Return the served model's name, "" for none.

    SGLang appends the pool's format to the name, so that "a" in format "b" looks like the model
    "a-b". The format is a fact of the pool here, and is taken off.
    """
    name = str(getattr(storage_config, "model_name", None) or "")
    tag = getattr(pool, "storage_format_tag", None)
    if tag is None:
        return name
    return "" if name == str(tag) else name.removesuffix(f"-{tag}")


@attrs.frozen
class PageSpaces:
    """The namespaces of one pool's pages.

    shared:  the namespace of the client of a KV pool, which `clear` removes.
    objects: one for each object of a page, in order: one per group of heads, else only `shared`.
    """

    shared: Namespace
    objects: tuple[Namespace, ...]
    digests: tuple[bytes, ...] = attrs.field(init=False)
    """Digests of the objects' namespaces."""

    @digests.default
    def _digests(self) -> tuple[bytes, ...]:
        return tuple(each.digest() for each in self.objects)


def spaces_of(
    storage_config: Any,
    pool: Any,
    page_bytes: int,
    name: str,
    weights: Mapping[str, object],
    groups: HeadGroups | None = None,
    side: str = "",
) -> PageSpaces:
    """Return the namespaces of the pages of one host pool.

    storage_config: SGLang's HiCacheStorageConfig, of any version: a missing field has its default.
    pool:           the host pool that was registered.
    page_bytes:     bytes of one page, all its runs together.
    name:           name of the namespaces, unchanged: "a/b" and "a-b" are different.
    weights:        facts about the weights, {} if the name identifies them.
    groups:         groups of heads that its pages are cut into.
    side:           name of a side pool, "" for the KV pool; `name` is that of the KV pages in both
                    cases.
    """
    # Whether the pages are this rank's own, or equal on every rank.
    is_own = not _field(storage_config, "is_mla_model", default=False)
    geometry = _facts(pool, (*_POOL_FACTS, *_SIDE_FACTS) if side else _POOL_FACTS)
    if side:
        geometry |= {"pool": side, "pool_class": getattr(pool, "pool_class", type(pool).__name__)}
        # A replicated model's KV is the same on every rank. Its Mamba state is not, nor is a pool
        # with attention heads, such as that of a draft model: each rank has its own part.
        is_own = is_own or side == MAMBA or getattr(pool, "head_num", None) is not None
    coordinates: dict[str, object] = {}

    def part(axis: str, rank: str, size: str) -> None:
        rank_of = _field(storage_config, rank, default=0)
        coordinates[axis] = f"{rank_of}/{_field(storage_config, size, default=1)}"

    part("pp", "pp_rank", "pp_size")
    part("cp", "attn_cp_rank", "attn_cp_size")
    if _field(storage_config, "dcp_size", default=1) != 1:
        part("dcp", "dcp_rank", "dcp_size")

    # Stages of a pipeline and servers of several tensor-parallel sizes share the model's name, so
    # what differs among them is a coordinate.
    is_staged = _field(storage_config, "pp_size", default=1) != 1
    stage = coordinates if is_staged else geometry
    stage |= _facts(pool, _STAGE_FACTS)
    own = coordinates if is_own else geometry
    own |= {fact: geometry.pop(fact) for fact in _RANK_FACTS if fact in geometry}
    (coordinates if is_staged or is_own else geometry)["page_bytes"] = page_bytes
    if groups is None:
        if is_own:
            # Every rank of a replicated model holds the same bytes, and one of them writes them.
            part("tp", "tp_rank", "tp_size")
        shared = Namespace.of(name, geometry, coordinates, weights)
        return PageSpaces(shared, (shared,))

    # A group's object is the same on every rank that holds the group: use facts of a group, not of
    # a rank.
    own.pop("size_per_token", None)
    own["head_num"] = int(pool.head_num) // groups.count
    coordinates |= {"page_bytes": page_bytes // groups.count, "head_groups": groups.total}
    return PageSpaces(
        Namespace.of(name, geometry, coordinates, weights),
        tuple(
            Namespace.of(name, geometry, {**coordinates, "head_group": group}, weights)
            for group in range(groups.first, groups.first + groups.count)
        ),
    )


def _field(storage_config: Any, name: str, *, default: object) -> object:
    """Return a field of any version's configuration; a missing field has its default."""
    value = getattr(storage_config, name, default)
    return default if value is None else value


def _facts(pool: Any, names: Iterable[str]) -> dict[str, object]:
    """Return the attributes that a pool has."""
    found = {name: getattr(pool, name, None) for name in names}
    return {name: str(value) for name, value in found.items() if value is not None}
