"""A node's published memory: created, and populated step by step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio

from peercache.config.quantities import written_size
from peercache.config.settings import Config
from peercache.errors import ConfigError, PeerCacheError, PoolTooLarge
from peercache.memory import kernel
from peercache.memory.kernel import (
    IN_MEMORY,
    filesystem_of,
    host_memory,
    own_cgroup_memory,
    text_of,
)
from peercache.memory.layout import Layout
from peercache.memory.published import PublishedSegment, TableFile, remove_leftovers
from peercache.model.ids import Incarnation
from peercache.observability.log import get_logger
from peercache.trust.sharing import Sharing

POPULATE_STEP_BYTES = 256 * 2**20
"""Memory populated between two checks for cancellation: about a tenth of a second."""


def publish(
    config: Config, incarnation: Incarnation, sharing: Sharing | None = None
) -> PublishedSegment:
    """Create the segment, after removing the segments of dead nodes."""
    folder, huge_page_bytes = config.shm_dir, 0
    if config.hugepages != "off":
        folder = kernel.folder_for(config.hugepages, config.hugepages_dir)
        huge_page_bytes = kernel.SIZES[config.hugepages]
        if config.pool_size < huge_page_bytes:
            raise ConfigError("pool_size", f"must be at least one page of {config.hugepages}")
    try:
        # Segments of dead nodes would use up the room.
        remove_leftovers(folder, sharing)
        if not huge_page_bytes:
            # Before anything is created: for an absurd pool size the seals alone would fill this
            # host.
            _expect_memory(config)
        else:
            layout = Layout.of(config.pool_size, config.granule, huge_page_bytes)
            kernel.expect_enough(config.hugepages, layout)
        segment = PublishedSegment.create(
            folder,
            incarnation=incarnation,
            page_bytes=config.pool_size // config.granule * config.granule,
            granule=config.granule,
            huge_page_bytes=huge_page_bytes,
            sharing=sharing,
        )
    except OSError as error:
        name = "hugepages" if huge_page_bytes else "shm_dir"
        remedy = "mount a tmpfs there that the node may write to, or name another folder"
        raise ConfigError(name, f"cannot use {folder}: {error.strerror}: {remedy}") from error
    if not huge_page_bytes and (kind := _file_system(config)) not in IN_MEMORY:
        get_logger().warning(
            "pool.on_a_disk", shm_dir=config.shm_dir, file_system=kind, remedy="shm_dir = /dev/shm"
        )
    return segment


def _file_system(config: Config) -> str:
    return filesystem_of(config.shm_dir, text_of(Path("/proc/mounts")))


def _expect_memory(config: Config) -> None:
    """Refuse a pool that is larger than this process can ever use."""
    if _file_system(config) not in IN_MEMORY:
        return
    limit, _ = own_cgroup_memory()
    host = host_memory("MemTotal") + host_memory("SwapTotal")
    # Without this check, the kernel kills the process while it populates the pool, without a
    # message.
    for bound, of in ((limit, "this cgroup may use"), (host, "this host has")):
        if 0 < bound < config.pool_size:
            raise ConfigError(
                "pool_size",
                f"{written_size(config.pool_size)} are more than the {written_size(bound)} of "
                f"memory that {of}: lower pool_size",
            )


def table_file(
    config: Config, incarnation: Incarnation, sharing: Sharing | None, log: Any
) -> TableFile | None:
    """Create the file of the directory's table; None if that fails: then the table is private.

    Always in shm_dir: a hugetlbfs would give it whole huge pages.
    """
    remove_leftovers(config.shm_dir, sharing)
    try:
        return TableFile.create(config.shm_dir, incarnation, sharing)
    except (OSError, PeerCacheError) as error:
        log.warning("node.table_not_made", shm_dir=config.shm_dir, problem=str(error))
        return None


async def populate(
    segment: PublishedSegment,
    on_grown: Callable[[int], None],
    log: Any,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Make the page memory usable, in steps. Started when the first step is done; `on_grown` is
    called after each.
    """
    total = segment.layout.page_bytes
    done = 0
    is_started = False
    while done < total:
        step = min(total, done + POPULATE_STEP_BYTES)
        before = done
        try:
            done = await trio.to_thread.run_sync(segment.populate, step)
        except PoolTooLarge as error:
            if not done:
                raise
            # Another process has taken the memory; the populated part still serves.
            log.warning("pool.growth_stopped", usable_bytes=done, problem=str(error))
            return
        if done <= before:
            return  # The segment was closed in the meantime.
        on_grown(done)
        log.debug("pool.grew", usable_bytes=done, of_bytes=total)
        if not is_started:
            task_status.started()
            is_started = True
    log.info("pool.populated", usable_bytes=done)
