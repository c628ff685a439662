"""`peercache bench local`, from its flags to its report."""

from __future__ import annotations

import argparse
import sys

from peercache.bench import report
from peercache.bench.local import Plan, run_local
from peercache.errors import ConfigError

PLOT_PAGE_BYTES = (64 * 2**10, 256 * 2**10, 2**20, 4 * 2**20)
"""Page sizes of a plot: from a small model's page to a large one's."""

WORKING_SET_BYTES = 512 * 2**20
"""Larger than any cache of the processor: hot buffers would flatter everything."""


def run(args: argparse.Namespace) -> int:
    """Measure, print, draw; return 1 if one byte was wrong."""
    if args.plot and not args.plot.endswith(".png"):
        raise ConfigError("plot", f"{args.plot}: wants a name that ends in .png")
    if args.page_bytes < 8 or args.page_bytes % 8:
        raise ConfigError("page-bytes", "wants a multiple of 8")
    if args.batch < 1 or (args.pages is not None and args.pages < 1):
        raise ConfigError("batch", "batch and pages want at least 1")
    sizes = PLOT_PAGE_BYTES if args.plot else (args.page_bytes,)
    results = []
    for page_bytes in sizes:
        plan = Plan(
            fabric=args.fabric,
            page_bytes=page_bytes,
            batch=args.batch,
            pages=args.pages or max(args.batch, WORKING_SET_BYTES // page_bytes),
            seconds=args.seconds,
        )
        figures = run_local(plan, _progress)
        results.append((page_bytes, figures))
        if args.json:
            print(report.as_json({"page_bytes": page_bytes, **figures}))
        else:
            title = f"{args.fabric}, {args.batch} × {page_bytes // 1024} KiB"
            report.print_table(title, figures)
    if args.plot:
        report.plot(args.plot, args.fabric, results)
        print(f"  drawn: {args.plot}", file=sys.stderr)
    return 1 if any(figures["wrong_bytes"] for _, figures in results) else 0


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"  {text}", file=sys.stderr)
