"""The figures of a pool, for Stats and metrics."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from peercache.actors.pool.page_table import PageTable
from peercache.actors.pool.reservations import Reservations
from peercache.actors.pool.slots import SlotAllocator
from peercache.observability.metrics import Metrics

_BYTE_STATES: Final = ("used", "reserved", "free")


def pool_figures(
    slots: SlotAllocator,
    pages: PageTable,
    reservations: Reservations,
    granule: int,
    page_bytes: int,
) -> dict[str, int]:
    """Return named figures; used + reserved + free is what is usable, to the byte."""
    taken = slots.held_granules + slots.reserved_granules
    return {
        "pool_bytes": page_bytes,
        "pool_bytes_usable": slots.usable * granule,
        "pool_bytes_used": slots.held_granules * granule,
        "pool_bytes_reserved": slots.reserved_granules * granule,
        "pool_bytes_free": (slots.usable - taken) * granule,
        "pool_bytes_stored": pages.stored_bytes,
        "pool_bytes_mirrored": slots.mirror_granules * granule,
        "pool_bytes_retained": sum(one.retained for one in slots.tenants.all()) * granule,
        "pool_pages": len(pages),
        "pool_size_classes": slots.class_count,
        "pool_extents_reclaimed": slots.reclaims,
        "pool_reservations": reservations.open_count,
        "pool_clients": reservations.client_count,
    }


def show_pool(metrics: Metrics, read: Callable[[], dict[str, int]]) -> None:
    """Compute the gauges of a pool when they are read: messages cost nothing for them."""
    shown = {f"pool_bytes_{state}": metrics.pool_bytes.labels(state) for state in _BYTE_STATES}
    shown |= {
        "pool_pages": metrics.pool_pages,
        "pool_bytes_mirrored": metrics.pool_bytes_mirrored,
        "pool_bytes_retained": metrics.pool_bytes_retained,
        "pool_reservations": metrics.reservations,
    }
    for figure, gauge in shown.items():
        gauge.set_function(partial(_figure, read, figure))


def _figure(read: Callable[[], dict[str, int]], name: str) -> float:
    return read()[name]
