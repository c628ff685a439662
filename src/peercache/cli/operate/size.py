"""`peercache size`: which hit rate other amounts of memory would have, for a cluster or a trace."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import click
import numpy as np

from peercache.cli.operate.connecting import target_of, target_options
from peercache.cli.options import json_option
from peercache.cli.terminal import console, table
from peercache.cli.traces import Prompt, TraceError, requests_of
from peercache.client.operator import Operator
from peercache.config.quantities import written_size
from peercache.model.reuse import SHORT_USES, ReuseSample
from peercache.model.status import reuse_of

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}

SHAPE = ("layers", "kv_heads", "head_dim", "mla_dim")
"""The flags that describe a model."""

SIZES = 8
"""Sizes of memory of a trace, each twice the one before; the last one holds all blocks."""

BAR_COLUMNS = 25

EXIT_NOTHING = 1
"""No page was used yet."""


@attrs.frozen(kw_only=True)
class Size:
    """An amount of memory. times: of the memory of today, or of what holds the whole trace."""

    times: float
    hit_rate: float
    tokens: float = math.nan
    blocks: int | None = None
    bytes: float = math.nan


@attrs.frozen(kw_only=True)
class SizeCurve:
    """Sizes of memory with their hit rates. hosts: that share them."""

    source: str
    uses: float
    hosts: int
    sizes: Sequence[Size]


@click.command
@target_options
@click.option(
    "--trace", metavar="FILE", help="Estimate from this trace of requests, not a cluster."
)
@click.option(
    "--page-size",
    type=click.IntRange(1, 2**20),
    metavar="TOKENS",
    help="With --trace: tokens of each of its blocks. Default: 512.",
)
@click.option("--hosts", type=click.IntRange(1, 2**20), metavar="N", help="Hosts that share it.")
@click.option("--layers", type=click.IntRange(1, 2**16), metavar="N", help="Layers of the model.")
@click.option("--kv-heads", type=click.IntRange(1, 2**16), metavar="N", help="Heads of K and V.")
@click.option("--head-dim", type=click.IntRange(1, 2**16), metavar="N", help="Values of a head.")
@click.option(
    "--mla-dim",
    type=click.IntRange(1, 2**16),
    metavar="N",
    help="With MLA, in place of heads: values of a token in a layer, such as 576.",
)
@click.option(
    "--dtype",
    type=click.Choice(list(DTYPE_BYTES)),
    default="bfloat16",
    show_default=True,
    help="Type of the values.",
)
@click.option(
    "--tp",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    metavar="N",
    help="Tensor-parallel ranks.",
)
@json_option
def size(
    *,
    trace: str | None,
    page_size: int | None,
    hosts: int | None,
    dtype: str,
    tp: int,
    as_json: bool,
    **more: Any,
) -> int:
    """Estimate the hit rate with less and with more memory than today.

    Exit status: 0, 1 if no page was used yet, 2 if no node answers.
    """
    shape = {name: more.pop(name) for name in SHAPE}
    token_bytes = _token_bytes(**shape, value_bytes=DTYPE_BYTES[dtype], ranks=tp)
    if trace is None and page_size is not None:
        raise click.UsageError("--page-size requires --trace.")
    if trace is None:
        curve = _of_cluster(more, hosts, token_bytes)
    else:
        curve = _of_trace(Path(trace), page_size or 512, hosts or 1, token_bytes)
    if as_json:
        print(json.dumps(_plain(curve, token_bytes)))
    else:
        _print(curve, token_bytes)
    return 0 if curve.sizes else EXIT_NOTHING


def _token_bytes(
    *,
    layers: int | None,
    kv_heads: int | None,
    head_dim: int | None,
    mla_dim: int | None,
    value_bytes: int,
    ranks: int,
) -> int | None:
    """Return what a token's keys and values take, in all ranks of a server together.

    mla_dim: values of a token and layer where all heads share them, and all ranks.
    None where the flags describe no model.
    """
    if (layers, kv_heads, head_dim, mla_dim) == (None, None, None, None):
        return None
    has_heads = kv_heads is not None and head_dim is not None
    if layers is None or has_heads == (mla_dim is not None):
        raise click.UsageError(
            "A model requires --layers, and --kv-heads with --head-dim or --mla-dim."
        )
    if kv_heads and kv_heads % ranks and ranks % kv_heads:
        raise click.UsageError(f"--kv-heads {kv_heads} cannot be divided among --tp {ranks}.")
    # Each rank has one head at least.
    heads = 2 * max(kv_heads or 0, ranks) * (head_dim or 0)
    return layers * (mla_dim or heads) * value_bytes


def _of_cluster(target: dict[str, Any], hosts: int | None, token_bytes: int | None) -> SizeCurve:
    with Operator(target_of(**target)) as operator:
        statuses = [member.status for member in operator.statuses() if member.answers]
        cluster = operator.cluster
    reuse, memory = reuse_of(statuses), sum(status.pool.size for status in statuses)
    sizes = [
        Size(
            times=float(times),
            hit_rate=rate,
            bytes=float(times) * memory,
            tokens=float(times) * memory / token_bytes if token_bytes else math.nan,
        )
        for times, rate in reuse.hit_rates.items()
    ]
    return SizeCurve(
        source=f"cluster {cluster}",
        uses=reuse.uses,
        hosts=hosts or len({status.host for status in statuses}),
        sizes=sizes,
    )


def _of_trace(path: Path, page_size: int, hosts: int, token_bytes: int | None) -> SizeCurve:
    try:
        requests = requests_of(path)
    except TraceError as error:
        raise click.UsageError(f"{error}.") from error
    sample, held = reuse_of_trace(requests)
    if not held:
        return SizeCurve(source=f"trace {path}", uses=0.0, hosts=hosts, sizes=[])
    halves = [math.ceil(held / 2**step) for step in reversed(range(SIZES))]
    blocks = [size for size in halves if size >= SHORT_USES] or halves[-1:]
    # What holds all blocks serves as much as any greater memory.
    rates = sample.hit_rates([*blocks[:-1], math.inf])
    sizes = [
        Size(
            times=size / held,
            hit_rate=rate,
            blocks=size,
            tokens=size * page_size,
            bytes=size * page_size * token_bytes if token_bytes else math.nan,
        )
        for size, rate in zip(blocks, rates, strict=True)
    ]
    return SizeCurve(source=f"trace {path}", uses=sample.uses(), hosts=hosts, sizes=sizes)


def reuse_of_trace(requests: Sequence[Prompt]) -> tuple[ReuseSample, int]:
    """Return a sample of the blocks that requests ask for, each of size 1, and their number."""
    blocks = dict.fromkeys(block for request in requests for block in request.blocks)
    hashes = np.random.default_rng(0).integers(0, 2**64, len(blocks), np.uint64)
    hash_of = dict(zip(blocks, hashes.tolist(), strict=True))
    sample = ReuseSample()
    for number, request in enumerate(requests):
        hashes = np.array([hash_of[block] for block in request.blocks], np.uint64)
        sample.use(hashes, size=1, client=number)
    return sample, len(blocks)


def _plain(curve: SizeCurve, token_bytes: int | None) -> dict[str, Any]:
    """Return what --json prints; what is not known is null."""
    return {
        "source": curve.source,
        "uses": round(curve.uses),
        "hosts": curve.hosts,
        "bytes_a_token": token_bytes,
        "sizes": [
            {
                "times": round(size.times, 4),
                "hit_rate": round(size.hit_rate, 4),
                "blocks": size.blocks,
                "tokens": _whole(size.tokens),
                "bytes": _whole(size.bytes),
                "bytes_a_host": _whole(size.bytes / curve.hosts),
            }
            for size in curve.sizes
        ],
    }


def _whole(value: float) -> int | None:
    return None if math.isnan(value) else round(value)


def _print(curve: SizeCurve, token_bytes: int | None) -> None:
    if not curve.sizes:
        print(f"{curve.source}: no page was used yet")
        return
    word = "host" if curve.hosts == 1 else "hosts"
    print(f"{curve.source}, {curve.hosts} {word}, {curve.uses:,.0f} uses of pages")
    if token_bytes:
        print(f"a token takes {written_size(token_bytes)}")
    cells = [_cells(size, curve.hosts) for size in curve.sizes]
    names = [name for name in cells[0] if any(row[name] for row in cells)]
    shown = table(*names)
    for column in shown.columns[:-1]:
        column.justify = "right"
    for row in cells:
        shown.add_row(*(row[name] for name in names))
    console().print(shown)


def _cells(size: Size, hosts: int) -> dict[str, str]:
    """Return a row by the names of its columns; "" for what is not known."""
    has_bytes = not math.isnan(size.bytes)
    return {
        "times": f"{size.times:.3g} ×",
        "blocks": "" if size.blocks is None else f"{size.blocks:,}",
        "tokens": "" if math.isnan(size.tokens) else f"{size.tokens:,.0f}",
        "memory": written_size(size.bytes) if has_bytes else "",
        "a host": written_size(size.bytes / hosts) if has_bytes else "",
        "hit rate": f"{100 * size.hit_rate:.1f} %",
        "": "█" * round(BAR_COLUMNS * size.hit_rate),
    }
