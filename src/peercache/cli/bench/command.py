"""The flags of `peercache bench`; the measuring code is imported when a kind is chosen."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from peercache.cli.options import Callback, DurationType, SizeType, json_option
from peercache.cli.traces import TraceError, requests_of

if TYPE_CHECKING:
    from peercache.cli.bench.replay import Plan

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
        "--seconds",
        type=DurationType(),
        default=2.0,
        metavar="DURATION",
        show_default="2s",
        help=f"Length of {of}.",
    )


def over_two_hosts(command: Callback) -> Callback:
    """Add the options that `bench serve` and `bench drive` have in common."""
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
        "--advertise",
        default="",
        metavar="HOST",
        help="Address at which the other host reaches this one.",
    )(command)


@click.group(no_args_is_help=False)
def bench() -> None:
    """Measure how fast pages move, compared with what the machine can do."""


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
    """Measure the page store, compared with the raw device of a folder."""
    from peercache.cli.bench import report  # noqa: PLC0415 - heavy
    from peercache.cli.bench.disk import DiskPlan, run_disk  # noqa: PLC0415 - heavy
    from peercache.cli.terminal import print_json, show_progress  # noqa: PLC0415 - heavy

    work = working_set(page_bytes, batch, pages, DISK_SET_BYTES)
    figures = run_disk(DiskPlan(Path(folder), work, threads), show_progress)
    if as_json:
        print_json({"page_bytes": page_bytes, **figures})
    else:
        report.print_disk(f"{folder}, {batch} × {page_bytes // 1024} KiB", figures)
    return EXIT_WRONG if figures["wrong_bytes"] else 0


@bench.command()
@click.option(
    "--trace",
    required=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="One request a line, as JSON: timestamp (ms) and hash_ids, as in Mooncake's traces.",
)
@click.option("--nodes", type=click.IntRange(1, 64), default=4, show_default=True)
@click.option(
    "--prefill",
    type=click.IntRange(min=1),
    help="Nodes that get requests; the others lend their memory. Default: all.",
)
@click.option(
    "--routing",
    type=click.Choice(["even", "zipf"]),
    default="even",
    show_default=True,
    help="even: a request goes to any node; zipf: a session stays at one, and some get more.",
)
@click.option(
    "--blocks",
    type=click.IntRange(min=1),
    multiple=True,
    default=(4000,),
    show_default="4000",
    help="Blocks that all nodes have room for. Given several times: one replay each.",
)
@click.option(
    "--block-size",
    "block_bytes",
    type=SizeType(multiple_of=4096),
    default="64KiB",
    show_default=True,
    help="Bytes of a block; a power of two.",
)
@click.option("--requests", type=click.IntRange(min=1), help="The first so many. Default: all.")
@click.option(
    "--speed",
    type=click.FloatRange(min=0, min_open=True),
    help="Factor by which the trace's times, and placement_min_age, are divided. "
    "Default: about a minute, at most 60.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Of the routing.")
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="NAME=VALUE",
    help="A setting of the nodes and their clients; may be repeated.",
)
@click.option(
    "--picture",
    metavar="FILE.svg",
    type=click.Path(path_type=Path),
    help="Draw the hit rate over time, and by --blocks if there are several.",
)
@json_option
def replay(
    trace: Path, blocks: tuple[int, ...], picture: Path | None, *, as_json: bool, **given: Any
) -> int:
    """Replay a request trace through nodes of this host, compared with an ideal cache."""
    from peercache.cli.bench import picture as pictures  # noqa: PLC0415 - heavy
    from peercache.cli.bench import report  # noqa: PLC0415
    from peercache.cli.bench.replay import WrongBytes, run_replay  # noqa: PLC0415
    from peercache.cli.terminal import print_json, progress_bar  # noqa: PLC0415

    plan = plan_of(trace, blocks, **given)
    if picture and (picture.suffix != ".svg" or not picture.parent.is_dir()):
        raise _refusal("picture", f"{picture}: must be a name that ends in .svg, in a folder")
    outcomes = []
    try:
        for one in blocks:
            title = f"{one} blocks"
            with progress_bar(title, len(plan.requests), is_shown=not as_json) as advance:
                outcomes.append(run_replay(plan, one, advance))
    except WrongBytes as error:
        print(f"peercache: {error}", file=sys.stderr)
        return EXIT_WRONG
    if picture:
        picture.write_text(pictures.of_replays(trace.name, outcomes))
    if as_json:
        figures = [outcome.figures() for outcome in outcomes]
        print_json({"trace": trace.name, **plan.figures(), "replays": figures})
    else:
        report.print_replays(trace.name, plan, outcomes)
    return 0


def plan_of(
    trace: Path,
    blocks: Sequence[int],
    *,
    requests: int | None,
    nodes: int,
    prefill: int | None,
    block_bytes: int,
    speed: float | None,
    assignments: Sequence[str],
    **more: Any,
) -> Plan:
    """Return what is replayed; raise click.BadParameter or ConfigError for what cannot be."""
    from peercache.cli.bench.replay import OWN_SETTINGS, Plan, expect_room, speed_for  # noqa: PLC0415 - heavy
    from peercache.config.settings import Config  # noqa: PLC0415

    try:
        asked = requests_of(trace, requests)
    except TraceError as error:
        raise _refusal("trace", str(error)) from error
    if not any(request.blocks for request in asked):
        raise _refusal("trace", f"{trace} has no request with blocks")
    if (prefill or nodes) > nodes:
        raise _refusal("prefill", f"{prefill} are more than all {nodes} nodes")
    if block_bytes & (block_bytes - 1):
        raise _refusal("block-size", f"{block_bytes} must be a power of two")
    speed = speed or speed_for(asked)
    settings = dict(_assignment(one, OWN_SETTINGS) for one in assignments)
    config = Config.load(settings)
    # A time of the trace too: what is in use there must be in use here.
    settings.setdefault("placement_min_age", f"{config.placement_min_age / speed:g}")
    plan = Plan(
        requests=asked,
        nodes=nodes,
        prefill=prefill or nodes,
        block_bytes=block_bytes,
        speed=speed,
        settings=settings,
        **more,
    )
    for one in blocks:
        if not plan.batch(one):
            raise _refusal("blocks", f"{one} are too few: every node requires room for 4 at least")
        expect_room(plan, one)
    return plan


def _assignment(text: str, own: Sequence[str]) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    name = name.replace("-", "_")
    if not separator:
        raise _refusal("set", f"{text!r} must be NAME=VALUE")
    if name in own:
        raise _refusal("set", f"{name} is given by the replay itself")
    return name, value


def _refusal(flag: str, problem: str) -> click.BadParameter:
    return click.BadParameter(problem, param_hint=f"'--{flag}'")


def working_set(page_bytes: int, batch: int, pages: int | None, default_bytes: int) -> Any:
    """Return a working set: of so many pages, or of the default bytes and a batch at least."""
    from peercache.cli.bench.engine import WorkingSet  # noqa: PLC0415 - heavy

    return WorkingSet(page_bytes, pages or max(batch, default_bytes // page_bytes), batch)
