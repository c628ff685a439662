"""`peercache bench`, from its flags to its report."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from peercache.cli.bench import report
from peercache.cli.bench.disk import DiskPlan, run_disk
from peercache.cli.bench.hosts import WorkingSet, drive, serve
from peercache.cli.bench.local import Plan, run_local
from peercache.cli.bench.tax import run_tax
from peercache.cli.bench.workloads import DISK_SET_BYTES, TAX_PAGES, WORKING_SET_BYTES
from peercache.errors import ConfigError

PLOT_PAGE_BYTES = (64 * 2**10, 256 * 2**10, 2**20, 4 * 2**20)
"""Page sizes of a plot: from a small model's page to a large one's."""


def run_local_bench(args: argparse.Namespace) -> int:
    """Measure, print, draw; return 1 if one byte was wrong."""
    if args.plot:
        if not args.plot.endswith(".png"):
            raise ConfigError("plot", f"{args.plot}: wants a name that ends in .png")
        report.require_plotting()
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
            floor = figures[f"tax_{shape}_floor"]
            print(f"  {shape:11} {lost:6.1%} of a Python thread, at {served:.2f} GB/s over tcp")
            print(f"  {'':11} {floor:6.1%} is lost to a raw stream of that rate elsewhere")
    return 0


def run_disk_bench(args: argparse.Namespace) -> int:
    """Measure the page store in a folder, and print it beside the device."""
    _check(args)
    if args.threads < 1 or args.entries < 1:
        raise ConfigError("threads", "threads and entries want at least 1")
    if not Path(args.folder).is_dir():
        raise ConfigError("folder", f"{args.folder} is no folder")
    pages = int(args.pages or max(args.batch, DISK_SET_BYTES // args.page_bytes))
    plan = DiskPlan(
        args.folder, args.page_bytes, args.batch, pages, args.threads, entries=args.entries
    )
    figures = run_disk(plan, _progress)
    if args.json:
        print(report.as_json({"page_bytes": args.page_bytes, **figures}))
    else:
        report.print_disk(f"{args.folder}, {args.batch} × {args.page_bytes // 1024} KiB", figures)
    return 1 if figures["wrong_bytes"] else 0


def run_serve(args: argparse.Namespace) -> int:
    """Hold pages for `bench drive` until Ctrl-C."""
    _check(args)
    settings = {
        "listen": args.listen,
        "advertise": args.advertise,
        "fabric": args.fabric,
        "rdma_device_names": args.rdma_device_names,
    }
    serve(_working_set(args), settings, lambda text: print(text, flush=True))
    return 0


def run_drive(args: argparse.Namespace) -> int:
    """Read what `bench serve` holds on the other host, and print how fast."""
    _check(args)
    settings = {
        "discovery_addr": args.discovery,
        "advertise": args.advertise,
        "fabric": args.fabric,
        "rdma_device_names": args.rdma_device_names,
    }
    figures = drive(_working_set(args), settings, args.seconds)
    if args.json:
        print(report.as_json(figures))
    else:
        title = f"from {args.discovery}, {args.batch} × {args.page_bytes // 1024} KiB"
        report.print_table(title, figures)
    return 1 if figures["wrong_bytes"] or figures["misses"] else 0


def run_rdma_bench(args: argparse.Namespace) -> int:
    """Measure READs beside the bare loop; return 1 for a wrong byte, or where there are none."""
    # Imported here: numbers of RDMA are nobody's business who measures tcp.
    from peercache.cli.bench.rdma import GRANULE, PAGE_BYTES, RdmaPlan, run_rdma  # noqa: PLC0415

    sizes = tuple(args.page_bytes or PAGE_BYTES)
    for page_bytes in sizes:
        if page_bytes < GRANULE or page_bytes % GRANULE or page_bytes > args.total_bytes:
            raise ConfigError("page-bytes", f"wants multiples of {GRANULE}, up to total-bytes")
    near = (args.near,) if args.near else ()
    plan = RdmaPlan(
        near=near,
        far=(args.far,) if args.far else near,
        gid_index=args.gid_index,
        page_bytes=sizes,
        total_bytes=args.total_bytes,
        seconds=args.seconds,
        shm_dir=args.shm_dir,
    )
    figures, problems = run_rdma(plan, _progress)
    if args.json:
        print(report.as_json(figures))
    else:
        print(report.rdma_table(figures, sizes), end="")
    for problem in problems:
        print(f"  {problem}", file=sys.stderr)
    was_read = f"get_gb_s_{sizes[0] >> 10}k" in figures
    wrong = any(value for name, value in figures.items() if name.startswith("wrong_pages"))
    return 0 if was_read and not wrong else 1


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
