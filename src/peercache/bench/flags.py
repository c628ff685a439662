"""The flags of `peercache bench`. What they start is imported when it is chosen."""

from __future__ import annotations

import argparse

from peercache.config import parse_size


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """Add `bench`'s subcommands."""
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    local = kinds.add_parser("local", help="nodes and engine as processes on this machine")
    local.add_argument("--fabric", choices=("shm", "tcp"), default="shm")
    _add_sizes(local)
    local.add_argument("--plot", metavar="FILE.png", help="measure four page sizes and draw them")
    local.set_defaults(run=_local)

    tax = kinds.add_parser("tax", help="what a node takes from a Python-bound thread beside it")
    _add_sizes(tax)
    tax.set_defaults(run=_tax)

    serve = kinds.add_parser("serve", help="of two hosts: the one that holds the pages")
    serve.add_argument("--listen", default="", metavar="HOST:PORT", help="control port")
    serve.add_argument("--advertise", default="", metavar="HOST", help="as the other host sees us")
    serve.add_argument("--fabric", choices=("auto", "shm", "tcp", "rdma"), default="auto")
    _add_devices(serve)
    _add_sizes(serve)
    serve.set_defaults(run=_serve)

    drive = kinds.add_parser("drive", help="of two hosts: the one that reads them, and measures")
    drive.add_argument("--discovery", required=True, metavar="HOST:PORT", help="of `bench serve`")
    drive.add_argument("--advertise", default="", metavar="HOST", help="as the other host sees us")
    drive.add_argument("--fabric", choices=("auto", "shm", "tcp", "rdma"), default="auto")
    _add_devices(drive)
    _add_sizes(drive)
    drive.set_defaults(run=_drive)

    disk = kinds.add_parser("disk", help="the page store beside the raw device of a folder")
    disk.add_argument(
        "--folder", default=".", metavar="PATH", help="on the device to measure; default: here"
    )
    disk.add_argument("--threads", type=int, default=4, metavar="N", help="threads of the store")
    disk.add_argument(
        "--entries", type=int, default=1_000_000, metavar="N", help="pages of the index measured"
    )
    _add_sizes(disk)
    disk.set_defaults(run=_disk)

    rdma = kinds.add_parser("rdma", help="READs beside a bare loop of pyverbs, on this host")
    rdma.add_argument("--near", default="", metavar="DEVICE", help="that reads; default: the best")
    rdma.add_argument("--far", default="", metavar="DEVICE", help="that is read; default: --near")
    rdma.add_argument("--gid-index", type=int, default=-1, metavar="N")
    rdma.add_argument(
        "--page-bytes", type=parse_size, action="append", metavar="N", help="default: 1M and 128K"
    )
    rdma.add_argument("--total-bytes", type=parse_size, default=2**27, metavar="N")
    rdma.add_argument("--shm-dir", default="/dev/shm", metavar="FOLDER")  # noqa: S108 - the kernel's shared memory
    rdma.add_argument("--seconds", type=float, default=2.0, metavar="S", help="of each page size")
    rdma.add_argument("--json", action="store_true", help="print one JSON object")
    rdma.set_defaults(run=_rdma)


def _add_devices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rdma-device-names", default=None, metavar="NAME[,NAME...]", help="as in the settings"
    )


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--page-bytes", type=parse_size, default=2**20, metavar="N")
    parser.add_argument("--batch", type=int, default=32, metavar="N", help="pages in one call")
    parser.add_argument(
        "--pages",
        type=int,
        metavar="N",
        help="pages of the working set; default: as many as make 512 MiB",
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, metavar="S", help="of each measurement"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _local(args: argparse.Namespace) -> int:
    from peercache.bench.command import run_local_bench  # noqa: PLC0415 - see the charter

    return run_local_bench(args)


def _tax(args: argparse.Namespace) -> int:
    from peercache.bench.command import run_tax_bench  # noqa: PLC0415 - see the charter

    return run_tax_bench(args)


def _disk(args: argparse.Namespace) -> int:
    from peercache.bench.command import run_disk_bench  # noqa: PLC0415 - see the charter

    return run_disk_bench(args)


def _serve(args: argparse.Namespace) -> int:
    from peercache.bench.command import run_serve  # noqa: PLC0415 - see the charter

    return run_serve(args)


def _drive(args: argparse.Namespace) -> int:
    from peercache.bench.command import run_drive  # noqa: PLC0415 - see the charter

    return run_drive(args)


def _rdma(args: argparse.Namespace) -> int:
    from peercache.bench.command import run_rdma_bench  # noqa: PLC0415 - see the charter

    return run_rdma_bench(args)
