"""The flags of `peercache bench`. What they start is imported when it is chosen."""

from __future__ import annotations

import argparse

from peercache.config import parse_size


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """Add `bench`'s subcommands."""
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    local = kinds.add_parser("local", help="nodes and engine as processes on this machine")
    local.add_argument("--fabric", choices=("shm", "tcp"), default="shm")
    local.add_argument("--page-bytes", type=parse_size, default=2**20, metavar="N")
    local.add_argument("--batch", type=int, default=32, metavar="N", help="pages in one call")
    local.add_argument(
        "--pages",
        type=int,
        metavar="N",
        help="pages of the working set; default: as many as make 512 MiB",
    )
    local.add_argument(
        "--seconds", type=float, default=2.0, metavar="S", help="of each measurement, three times"
    )
    local.add_argument("--json", action="store_true", help="print one JSON object")
    local.add_argument("--plot", metavar="FILE.png", help="measure four page sizes and draw them")
    local.set_defaults(run=_local)


def _local(args: argparse.Namespace) -> int:
    from peercache.bench.command import run  # noqa: PLC0415 - see the charter

    return run(args)
