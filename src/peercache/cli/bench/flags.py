"""The flags of `peercache bench`. What they start is imported when it is chosen."""

from __future__ import annotations

import argparse

from peercache.cli.bench.workloads import (
    BATCH,
    DISK_SET_BYTES,
    PAGE_BYTES,
    RDMA_BYTES,
    SECONDS,
    TAX_PAGES,
    WORKING_SET_BYTES,
)
from peercache.config.quantities import size


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """Add `bench`'s subcommands."""
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    local = kinds.add_parser("local", help="nodes and engine as processes on this machine")
    local.add_argument("--fabric", choices=("shm", "tcp"), default="shm")
    _add_sizes(local, pages=_as_many_as_make(WORKING_SET_BYTES))
    _add_seconds(local)
    _add_json(local)
    local.add_argument(
        "--plot",
        metavar="FILE.png",
        help="measure four page sizes, from 64 KiB to 4 MiB, and draw them",
    )
    local.set_defaults(run=_local)

    tax = kinds.add_parser("tax", help="what a node takes from a Python-bound thread beside it")
    _add_sizes(tax, pages=str(TAX_PAGES))
    _add_seconds(tax)
    _add_json(tax)
    tax.set_defaults(run=_tax)

    serve = kinds.add_parser("serve", help="of two hosts: the one that holds the pages")
    serve.add_argument("--listen", default="", metavar="HOST:PORT", help="control port")
    serve.add_argument("--advertise", default="", metavar="HOST", help="as the other host sees us")
    serve.add_argument("--fabric", choices=("auto", "shm", "tcp", "rdma"), default="auto")
    _add_devices(serve)
    _add_sizes(serve, pages=_as_many_as_make(WORKING_SET_BYTES))
    serve.set_defaults(run=_serve)

    drive = kinds.add_parser("drive", help="of two hosts: the one that reads them, and measures")
    drive.add_argument("--discovery", required=True, metavar="HOST:PORT", help="of `bench serve`")
    drive.add_argument("--advertise", default="", metavar="HOST", help="as the other host sees us")
    drive.add_argument("--fabric", choices=("auto", "shm", "tcp", "rdma"), default="auto")
    _add_devices(drive)
    _add_sizes(drive, pages=_as_many_as_make(WORKING_SET_BYTES))
    _add_seconds(drive)
    _add_json(drive)
    drive.set_defaults(run=_drive)

    _add_disk(kinds.add_parser("disk", help="the page store beside the raw device of a folder"))
    _add_rdma(kinds.add_parser("rdma", help="READs beside a bare loop of pyverbs, on this host"))


def _add_disk(disk: argparse.ArgumentParser) -> None:
    disk.add_argument(
        "--folder", default=".", metavar="PATH", help="on the device to measure; default: here"
    )
    disk.add_argument(
        "--threads",
        type=int,
        default=4,
        metavar="N",
        help="threads of the store; default: %(default)s",
    )
    disk.add_argument(
        "--entries",
        type=int,
        default=1_000_000,
        metavar="N",
        help="pages of the index measured; default: a million",
    )
    _add_sizes(disk, pages=_as_many_as_make(DISK_SET_BYTES))
    _add_json(disk)
    disk.set_defaults(run=_disk)


def _add_rdma(rdma: argparse.ArgumentParser) -> None:
    rdma.add_argument("--near", default="", metavar="DEVICE", help="that reads; default: the best")
    rdma.add_argument("--far", default="", metavar="DEVICE", help="that is read; default: --near")
    rdma.add_argument("--gid-index", type=int, default=-1, metavar="N")
    rdma.add_argument(
        "--page-bytes", type=size, action="append", metavar="N", help="default: 1M and 128K"
    )
    rdma.add_argument(
        "--total-bytes",
        type=size,
        default=RDMA_BYTES,
        metavar="N",
        help=f"bytes of all pages of a turn; default: {RDMA_BYTES >> 20} MiB",
    )
    rdma.add_argument("--shm-dir", default="/dev/shm", metavar="FOLDER")  # noqa: S108 - the kernel's shared memory
    _add_seconds(rdma, "each page size")
    _add_json(rdma)
    rdma.set_defaults(run=_rdma)


def _add_devices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rdma-device-names", default=None, metavar="NAME[,NAME...]", help="as in the settings"
    )


def _add_sizes(parser: argparse.ArgumentParser, *, pages: str) -> None:
    """Add the sizes of a working set. pages: its default, in words."""
    parser.add_argument(
        "--page-bytes",
        type=size,
        default=PAGE_BYTES,
        metavar="N",
        help="bytes of a page; default: 1 MiB",
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=BATCH,
        metavar="N",
        help="pages in one call; default: %(default)s",
    )
    parser.add_argument(
        "--pages", type=int, metavar="N", help=f"pages of the working set; default: {pages}"
    )


def _as_many_as_make(working_set_bytes: int) -> str:
    return f"as many as make {working_set_bytes >> 20} MiB, and a batch at least"


def _add_seconds(parser: argparse.ArgumentParser, what: str = "each measurement") -> None:
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        metavar="S",
        help=f"of {what}; default: %(default)g",
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _local(args: argparse.Namespace) -> int:
    from peercache.cli.bench.command import run_local_bench  # noqa: PLC0415 - see the charter

    return run_local_bench(args)


def _tax(args: argparse.Namespace) -> int:
    from peercache.cli.bench.command import run_tax_bench  # noqa: PLC0415 - see the charter

    return run_tax_bench(args)


def _disk(args: argparse.Namespace) -> int:
    from peercache.cli.bench.command import run_disk_bench  # noqa: PLC0415 - see the charter

    return run_disk_bench(args)


def _serve(args: argparse.Namespace) -> int:
    from peercache.cli.bench.command import run_serve  # noqa: PLC0415 - see the charter

    return run_serve(args)


def _drive(args: argparse.Namespace) -> int:
    from peercache.cli.bench.command import run_drive  # noqa: PLC0415 - see the charter

    return run_drive(args)


def _rdma(args: argparse.Namespace) -> int:
    from peercache.cli.bench.command import run_rdma_bench  # noqa: PLC0415 - see the charter

    return run_rdma_bench(args)
