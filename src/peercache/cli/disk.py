"""`peercache disk check` and `peercache disk stats`: inspection of a page store."""

from __future__ import annotations

import attrs
import click

from peercache.cli.options import json_option
from peercache.cli.terminal import print_json, show_progress
from peercache.observability.log import get_logger
from peercache.storage.check import StoreCheck, StoreFigures, check, folders_in, stats_of

EXIT_DAMAGED = 1


@click.group(no_args_is_help=False)
def disk() -> None:
    """Look at a disk_path, or at the folder of one node in it."""


@disk.command("check")
@click.argument("path")
@json_option
def check_command(path: str, *, as_json: bool) -> int:
    """Verify every page of a stopped node, and repair its index."""
    is_whole = True
    for folder in folders_in(path):
        found = check(folder, show_progress, get_logger())
        is_whole = is_whole and found.is_whole
        if as_json:
            print_json({**attrs.asdict(found), "whole": found.is_whole})
        else:
            _print_check(found)
    return 0 if is_whole else EXIT_DAMAGED


@disk.command("stats")
@click.argument("path")
@json_option
def stats_command(path: str, *, as_json: bool) -> None:
    """Show what a page store contains; a running node may have it open."""
    for folder in folders_in(path):
        found = stats_of(folder)
        if as_json:
            print_json(attrs.asdict(found))
        else:
            _print_stats(found)


def _print_check(found: StoreCheck) -> None:
    print(f"{found.folder}: {found.pages} pages, {_gib(found.page_bytes)}, all of them right")
    if found.index != "ok":
        print(f"  the index was {found.index}: made again from the slots")
    for name in found.damaged:
        print(f"  damaged, dropped: {name}")
    for name in found.unreadable:
        print(f"  cannot be read: {name}")
    if found.rows_without_page:
        print(f"  {found.rows_without_page} index rows without their page, dropped")
    if found.index == "ok" and found.pages_without_row:
        print(f"  {found.pages_without_row} slots of evicted pages wait for new ones")


def _print_stats(found: StoreFigures) -> None:
    state = "a running node has it" if found.in_use else "no node has it"
    print(f"{found.folder}: {state}")
    print(f"  pages       {found.pages}, {_gib(found.page_bytes)}")
    print(f"  namespaces  {found.namespaces}")
    print(f"  files       {found.slabs} slabs, {_gib(found.file_bytes)} on disk")
    print(f"  last used   {found.newest_use_s} to {found.oldest_use_s} s ago")
    print(f"  index       {found.index}")


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
