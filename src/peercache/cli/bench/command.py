"""The flags of `peercache bench`; the measuring code is imported when a kind is chosen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from peercache.cli.options import SizeType, json_option
from peercache.errors import ConfigError

Callback = TypeVar("Callback", bound=Callable[..., Any])

WORKING_SET_BYTES = 512 * 2**20
"""Larger than any cache of the processor: hot buffers would flatter every figure."""

DISK_SET_BYTES = 256 * 2**20
"""Written and read four times each: seconds on a fast disk, and a minute on a slow one."""

RDMA_BYTES = 128 * 2**20

RDMA_GRANULE = 16 * 2**10

PLOT_PAGE_BYTES = (64 * 2**10, 256 * 2**10, 2**20, 4 * 2**20)
"""Page sizes of a plot: from a small model's page to a large one's."""

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
@click.option("--fabric", type=click.Choice(["shm", "tcp"]), default="shm", show_default=True)
@sizes(WORKING_SET_BYTES)
@seconds("each measurement")
@click.option("--tls", is_flag=True, help="Measure get over TLS too, beside bare OpenSSL.")
@json_option
@click.option(
    "--plot",
    metavar="FILE.png",
    help="Measure four page sizes, from 64 KiB to 4 MiB, and draw them.",
)
def local(
    fabric: str,
    page_bytes: int,
    batch: int,
    pages: int | None,
    seconds: float,
    plot: str | None,
    *,
    tls: bool,
    as_json: bool,
) -> int:
    """Measure nodes and an engine as processes on this machine."""
    from peercache.cli.bench import local as measuring  # noqa: PLC0415 - heavy
    from peercache.cli.bench import report  # noqa: PLC0415 - heavy
    from peercache.cli.terminal import print_json, tell  # noqa: PLC0415 - heavy

    if tls and fabric != "tcp":
        raise ConfigError("tls", "goes with --fabric tcp: shared memory is not encrypted")
    if plot:
        if not plot.endswith(".png"):
            raise ConfigError("plot", f"{plot}: wants a name that ends in .png")
        report.require_plotting()
    results = []
    for size in PLOT_PAGE_BYTES if plot else (page_bytes,):
        work = _working_set(size, batch, pages, WORKING_SET_BYTES)
        figures = measuring.run_local(measuring.Plan(fabric, work, seconds, tls), tell)
        results.append((size, figures))
        if as_json:
            print_json({"page_bytes": size, **figures})
        else:
            report.print_local(f"{fabric}, {batch} × {size // 1024} KiB", figures)
    if plot:
        report.plot(plot, fabric, results)
        click.echo(f"  drawn: {plot}", err=True)
    return EXIT_WRONG if any(figures["wrong_bytes"] for _, figures in results) else 0


@bench.command()
@click.option("--listen", default="", metavar="HOST:PORT", help="Control port.")
@over_two_hosts
def serve(page_bytes: int, batch: int, pages: int | None, **settings: str | None) -> None:
    """Hold the pages: the first of two hosts, until Ctrl-C."""
    from peercache.cli.bench import hosts  # noqa: PLC0415 - heavy

    hosts.serve(_working_set(page_bytes, batch, pages, WORKING_SET_BYTES), settings)


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

    work = _working_set(page_bytes, batch, pages, WORKING_SET_BYTES)
    figures = hosts.drive(work, {"discovery_addr": discovery, **settings}, seconds)
    if as_json:
        print_json(figures)
    else:
        report.print_local(f"from {discovery}, {batch} × {page_bytes // 1024} KiB", figures)
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
@click.option(
    "--entries",
    type=click.IntRange(min=1),
    default=1_000_000,
    show_default=True,
    help="Pages of the index measured.",
)
@sizes(DISK_SET_BYTES)
@json_option
def disk(
    folder: str,
    threads: int,
    entries: int,
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

    work = _working_set(page_bytes, batch, pages, DISK_SET_BYTES)
    figures = run_disk(DiskPlan(Path(folder), work, threads, entries), tell)
    if as_json:
        print_json({"page_bytes": page_bytes, **figures})
    else:
        report.print_disk(f"{folder}, {batch} × {page_bytes // 1024} KiB", figures)
    return EXIT_WRONG if figures["wrong_bytes"] else 0


@bench.command()
@click.option("--near", default="", metavar="DEVICE", help="Device that reads; default: the best.")
@click.option("--far", default="", metavar="DEVICE", help="Device that is read; default: --near.")
@click.option("--gid-index", type=int, default=-1, metavar="N", help="Of both devices.")
@click.option(
    "--page-bytes",
    type=SizeType(multiple_of=RDMA_GRANULE),
    multiple=True,
    default=("1MiB", "128KiB"),
    show_default=True,
    help="Bytes of a page; may be given several times.",
)
@click.option(
    "--total-bytes",
    type=SizeType(),
    default=RDMA_BYTES,
    help=f"Bytes of all pages of a turn; default: {RDMA_BYTES >> 20} MiB.",
)
@click.option("--shm-dir", default="/dev/shm", metavar="FOLDER", show_default=True)  # noqa: S108 - the kernel's shared memory
@seconds("each page size")
@json_option
def rdma(
    near: str,
    far: str,
    gid_index: int,
    page_bytes: tuple[int, ...],
    total_bytes: int,
    shm_dir: str,
    seconds: float,
    *,
    as_json: bool,
) -> int:
    """Measure READs beside a bare loop of pyverbs, on this host."""
    from peercache.cli.bench import report  # noqa: PLC0415 - heavy
    from peercache.cli.bench.rdma import RdmaPlan, run_rdma  # noqa: PLC0415 - heavy
    from peercache.cli.terminal import print_json, tell  # noqa: PLC0415 - heavy

    if max(page_bytes) > total_bytes:
        raise ConfigError("page-bytes", "wants sizes up to --total-bytes")
    devices = (near,) if near else ()
    plan = RdmaPlan(
        near=devices,
        far=(far,) if far else devices,
        gid_index=gid_index,
        granule=RDMA_GRANULE,
        page_bytes=page_bytes,
        total_bytes=total_bytes,
        seconds=seconds,
        shm_dir=shm_dir,
    )
    figures, problems = run_rdma(plan, tell)
    if as_json:
        print_json(figures)
    else:
        print(report.rdma_table(figures, page_bytes), end="")
    for problem in problems:
        click.echo(f"  {problem}", err=True)
    was_read = f"get_gb_s_{page_bytes[0] >> 10}k" in figures
    is_wrong = any(value for name, value in figures.items() if name.startswith("wrong_pages"))
    return 0 if was_read and not is_wrong else EXIT_WRONG


def _working_set(page_bytes: int, batch: int, pages: int | None, default_bytes: int) -> Any:
    from peercache.cli.bench.engine import WorkingSet  # noqa: PLC0415 - heavy

    return WorkingSet(page_bytes, pages or max(batch, default_bytes // page_bytes), batch)
