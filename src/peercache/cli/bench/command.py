"""The flags of `peercache bench`; the measuring code is imported when a kind is chosen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from peercache.cli.options import Callback, SizeType, json_option

WORKING_SET_BYTES = 512 * 2**20
"""Larger than any cache of the processor: hot buffers would flatter every figure."""

DISK_SET_BYTES = 256 * 2**20
"""Written and read four times each: seconds on a fast disk, and a minute on a slow one."""

EXIT_WRONG = 1
"""A byte was wrong, a page was missed, or nothing could be read."""


def sizes(working_set_bytes: int) -> Callable[[Callback], Callback]:
    """Add the sizes of a working set, which is of so many bytes by default."""
    pages = f"as many as make {working_set_bytes >> 20} MiB, and a batch at least"

    def add(command: Callback) -> Callback:
        command = click.option(
            "--pages",
            type=click.IntRange(min=1),
            help=f"Pages of the working set; default: {pages}.",
        )(command)
        command = click.option(
            "--batch",
            type=click.IntRange(min=1),
            default=32,
            show_default=True,
            help="Pages in one call.",
        )(command)
        return click.option(
            "--page-bytes",
            type=SizeType(multiple_of=8),
            default="1MiB",
            show_default=True,
            help="Bytes of a page.",
        )(command)

    return add


def seconds(of: str) -> Callable[[Callback], Callback]:
    """Add how long something is measured."""
    return click.option(
        "--seconds", type=float, default=2.0, show_default=True, help=f"Length of {of}."
    )


def over_two_hosts(command: Callback) -> Callback:
    """Add what both hosts of `bench serve` and `bench drive` must be told."""
    command = sizes(WORKING_SET_BYTES)(command)
    command = click.option(
        "--rdma-device-names", metavar="NAME[,NAME...]", help="As in the settings."
    )(command)
    command = click.option(
        "--fabric",
        type=click.Choice(["auto", "shm", "tcp", "rdma"]),
        default="auto",
        show_default=True,
    )(command)
    return click.option(
        "--advertise", default="", metavar="HOST", help="Under which the other host reaches us."
    )(command)


@click.group(no_args_is_help=False)
def bench() -> None:
    """Measure how fast pages move, beside what the machine itself can do."""


@bench.command()
@click.option("--listen", default="", metavar="HOST:PORT", help="Control port.")
@over_two_hosts
def serve(page_bytes: int, batch: int, pages: int | None, **settings: str | None) -> None:
    """Hold the pages: the first of two hosts, until Ctrl-C."""
    from peercache.cli.bench import hosts  # noqa: PLC0415 - heavy

    hosts.serve(working_set(page_bytes, batch, pages, WORKING_SET_BYTES), settings)


@bench.command()
@click.option("--discovery", required=True, metavar="HOST:PORT", help="Of `bench serve`.")
@over_two_hosts
@seconds("the measurement")
@json_option
def drive(
    discovery: str,
    page_bytes: int,
    batch: int,
    pages: int | None,
    seconds: float,
    *,
    as_json: bool,
    **settings: str | None,
) -> int:
    """Read what `bench serve` holds on the other host, and measure."""
    from peercache.cli.bench import hosts, report  # noqa: PLC0415 - heavy
    from peercache.cli.terminal import print_json  # noqa: PLC0415 - heavy

    work = working_set(page_bytes, batch, pages, WORKING_SET_BYTES)
    figures = hosts.drive(work, {"discovery_addr": discovery, **settings}, seconds)
    if as_json:
        print_json(figures)
    else:
        report.print_drive(f"from {discovery}, {batch} × {page_bytes // 1024} KiB", figures)
    return EXIT_WRONG if figures["wrong_bytes"] or figures["misses"] else 0


@bench.command()
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False),
    default=".",
    show_default=True,
    help="On the device to measure.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Threads of the store.",
)
@sizes(DISK_SET_BYTES)
@json_option
def disk(
    folder: str,
    threads: int,
    page_bytes: int,
    batch: int,
    pages: int | None,
    *,
    as_json: bool,
) -> int:
    """Measure the page store beside the raw device of a folder."""
    from peercache.cli.bench import report  # noqa: PLC0415 - heavy
    from peercache.cli.bench.disk import DiskPlan, run_disk  # noqa: PLC0415 - heavy
    from peercache.cli.terminal import print_json, tell  # noqa: PLC0415 - heavy

    work = working_set(page_bytes, batch, pages, DISK_SET_BYTES)
    figures = run_disk(DiskPlan(Path(folder), work, threads), tell)
    if as_json:
        print_json({"page_bytes": page_bytes, **figures})
    else:
        report.print_disk(f"{folder}, {batch} × {page_bytes // 1024} KiB", figures)
    return EXIT_WRONG if figures["wrong_bytes"] else 0


def working_set(page_bytes: int, batch: int, pages: int | None, default_bytes: int) -> Any:
    """Return a working set: of so many pages, or of the default bytes and a batch at least."""
    from peercache.cli.bench.engine import WorkingSet  # noqa: PLC0415 - heavy

    return WorkingSet(page_bytes, pages or max(batch, default_bytes // page_bytes), batch)
