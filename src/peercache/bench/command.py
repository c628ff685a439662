"""`peercache bench`, from its flags to its report."""

from __future__ import annotations

import argparse
import sys

from peercache.bench import report
from peercache.bench.hosts import WorkingSet, drive, serve
from peercache.bench.local import Plan, run_local
from peercache.bench.tax import run_tax
from peercache.errors import ConfigError

PLOT_PAGE_BYTES = (64 * 2**10, 256 * 2**10, 2**20, 4 * 2**20)
"""Page sizes of a plot: from a small model's page to a large one's."""

TAX_PAGES = 64
"""What is served again and again while the tax is measured: it costs the same from any cache."""

WORKING_SET_BYTES = 512 * 2**20
"""Larger than any cache of the processor: hot buffers would flatter everything."""


def run_local_bench(args: argparse.Namespace) -> int:
    """Measure, print, draw; return 1 if one byte was wrong."""
    if args.plot and not args.plot.endswith(".png"):
        raise ConfigError("plot", f"{args.plot}: wants a name that ends in .png")
    _check(args)
    sizes = PLOT_PAGE_BYTES if args.plot else (args.page_bytes,)
    results = []
    for page_bytes in sizes:
        plan = Plan(
            fabric=args.fabric,
            page_bytes=page_bytes,
            batch=args.batch,
            pages=_pages(args, page_bytes),
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


def run_tax_bench(args: argparse.Namespace) -> int:
    """Measure what serving pages takes from the engine's thread."""
    _check(args)
    pages = args.pages or TAX_PAGES
    plan = Plan("tcp", args.page_bytes, args.batch, pages, args.seconds)
    figures = run_tax(plan, _progress)
    if args.json:
        print(report.as_json(figures))
    else:
        for shape in ("embedded", "standalone"):
            lost, served = figures[f"tax_{shape}"], figures[f"tax_{shape}_served_gb_s"]
            print(f"  {shape:11} {lost:6.1%} of a Python thread, at {served:.2f} GB/s over tcp")
    return 0


def run_serve(args: argparse.Namespace) -> int:
    """Hold pages for `bench drive` until Ctrl-C."""
    _check(args)
    settings = {"listen": args.listen, "advertise": args.advertise}
    serve(_working_set(args), settings, lambda text: print(text, flush=True))
    return 0


def run_drive(args: argparse.Namespace) -> int:
    """Read what `bench serve` holds on the other host, and print how fast."""
    _check(args)
    settings = {
        "discovery_addr": args.discovery,
        "advertise": args.advertise,
        "fabric": args.fabric,
    }
    figures = drive(_working_set(args), settings, args.seconds)
    if args.json:
        print(report.as_json(figures))
    else:
        title = f"from {args.discovery}, {args.batch} × {args.page_bytes // 1024} KiB"
        report.print_table(title, figures)
    return 1 if figures["wrong_bytes"] or figures["misses"] else 0


def _working_set(args: argparse.Namespace) -> WorkingSet:
    return WorkingSet(args.page_bytes, _pages(args, args.page_bytes), args.batch)


def _pages(args: argparse.Namespace, page_bytes: int) -> int:
    return int(args.pages or max(args.batch, WORKING_SET_BYTES // page_bytes))


def _check(args: argparse.Namespace) -> None:
    if args.page_bytes < 8 or args.page_bytes % 8:
        raise ConfigError("page-bytes", "wants a multiple of 8")
    if args.batch < 1 or (args.pages is not None and args.pages < 1):
        raise ConfigError("batch", "batch and pages want at least 1")


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"  {text}", file=sys.stderr)
