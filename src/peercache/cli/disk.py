"""`peercache disk check` and `peercache disk stats`: a page store, looked at by a person."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import attrs

EXIT_DAMAGED = 1


def add_disk_flags(parser: argparse.ArgumentParser) -> None:
    """Add `disk`'s subcommands."""
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    check = kinds.add_parser(
        "check", help="verify every page of a stopped node, and repair its index"
    )
    stats = kinds.add_parser("stats", help="what a page store holds; also of a running node")
    for kind, run in ((check, _check), (stats, _stats)):
        kind.add_argument("path", metavar="PATH", help="disk_path, or the folder of one node in it")
        kind.add_argument("--json", action="store_true", help="print one JSON object a folder")
        kind.set_defaults(run=run)


def _check(args: argparse.Namespace) -> int:
    from peercache.observability.log import get_logger  # noqa: PLC0415 - see cli's charter
    from peercache.storage.check import check, folders_in  # noqa: PLC0415 - see cli's charter

    whole = True
    for folder in folders_in(args.path):
        found = check(folder, _progress, get_logger())
        whole = whole and found.is_whole
        if args.json:
            _print_json({**attrs.asdict(found), "whole": found.is_whole})
            continue
        print(f"{found.folder}: {found.pages} pages, {_gib(found.page_bytes)}, all of them right")
        if found.index != "ok":
            print(f"  the index was {found.index}: made anew from the slots")
        for name in found.damaged:
            print(f"  damaged, dropped: {name}")
        for name in found.unreadable:
            print(f"  cannot be read: {name}")
        if found.rows_without_page:
            print(f"  {found.rows_without_page} index rows without their page, dropped")
        if found.index == "ok" and found.pages_without_row:
            print(f"  {found.pages_without_row} slots of evicted pages wait for new ones")
    return 0 if whole else EXIT_DAMAGED


def _stats(args: argparse.Namespace) -> int:
    from peercache.storage.check import folders_in, stats_of  # noqa: PLC0415 - see cli's charter

    for folder in folders_in(args.path):
        found = stats_of(folder)
        if args.json:
            _print_json(attrs.asdict(found))
            continue
        state = "a running node has it" if found.in_use else "no node has it"
        print(f"{found.folder}: {state}")
        print(f"  pages       {found.pages}, {_gib(found.page_bytes)}")
        print(f"  namespaces  {found.namespaces}")
        print(f"  files       {found.slabs} slabs, {_gib(found.file_bytes)} on disk")
        print(f"  last used   {found.newest_use_s} to {found.oldest_use_s} s ago")
        print(f"  index       {found.index}")
    return 0


def _print_json(found: dict[str, Any]) -> None:
    print(json.dumps(found))


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"  {text}", file=sys.stderr)
