"""`python -m sims`: run a seed, sweep seeds, hunt planted bugs, replay a trace, start a cluster."""

from __future__ import annotations

import argparse
import datetime as dt
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from peercache.cli.bench.replay import EVEN, Plan, speed_for
from peercache.cli.traces import requests_of
from peercache.paths.mirror import ALL, HOT, OFF
from sims import sweep, swept
from sims.canaries import CANARIES, hunt_all, planted_canary
from sims.churn import Churn, churn_table
from sims.crowd import Crowd, table
from sims.determinism import stream
from sims.placing import ALL as ALL_STORE
from sims.placing import HALF, Placing, cost_table
from sims.play import Outcome, play
from sims.replay import Replay, whole_blocks
from sims.spilling import SEEDS_OF_ALL, spilled
from sims.start import Start
from sims.swarm import GRANULE, draw, smaller, with_large_batches

LINES_SHOWN = 40
"""Lines of the trace that are shown for a failure."""

PLANT = "plant this bug first; docs/explanation/simulation.md lists them"

LARGE = "batches of up to 512 pages, as engines make them"


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m sims", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run one seed")
    run.add_argument("--seed", type=int, required=True)
    run.add_argument("--trace", action="store_true", help="show every line as it happens")
    names = [canary.name for canary in CANARIES]
    run.add_argument("--canary", default="", choices=names, metavar="NAME", help=PLANT)
    size = run.add_mutually_exclusive_group()
    size.add_argument("--small", action="store_true", help="at most five nodes, ten seconds")
    size.add_argument("--large-batches", action="store_true", help=LARGE)
    run.add_argument("--digest", action="store_true", help="print the digest of the trace only")
    _add_sweep(commands.add_parser("sweep", help="run many seeds on all cores"))
    canaries = commands.add_parser("canaries", help="plant each bug, and see that it is found")
    canaries.add_argument("--only", default="", choices=names, metavar="NAME", help="this one")
    canaries.add_argument("--jobs", type=int, help="processes; all cores if not given")
    starting = commands.add_parser(
        "start", help="start a large cluster and all its engines at once"
    )
    starting.add_argument("--nodes", type=int, default=1000)
    starting.add_argument("--ranks", type=int, default=8, help="clients a node")
    starting.add_argument("--seed", type=int, default=1)
    starting.add_argument("--within", type=float, default=10.0, help="virtual seconds it may take")
    crowding = commands.add_parser(
        "crowd", help="let many hosts read one prompt, with each of mirror_pulls"
    )
    crowding.add_argument("--readers", type=int, default=50)
    crowding.add_argument("--reads", type=int, default=4, help="of the prompt, by each of them")
    crowding.add_argument("--seed", type=int, default=1)
    spilling = commands.add_parser(
        "spills", help="kill, cut, remove or revoke at each step of a spill"
    )
    spilling.add_argument("--first", type=int, default=0, help="the first seed")
    spilling.add_argument("--seeds", type=int, default=SEEDS_OF_ALL, help="how many")
    spilling.add_argument("--trace", action="store_true", help="show every line as it happens")
    churning = commands.add_parser(
        "churn", help="let nodes of a large cluster die, restart, leave and join"
    )
    churning.add_argument("--nodes", type=int, nargs="+", default=(100, 300, 1000))
    churning.add_argument("--clients", type=int, default=20)
    churning.add_argument("--seconds", type=float, default=3600.0, help="virtual ones")
    churning.add_argument("--minutes", type=float, default=float("inf"),
                          help="of real time, at most, for each size")  # fmt: skip
    churning.add_argument("--seed", type=int, default=1)
    placing = commands.add_parser("placement", help="count what placement costs in large clusters")
    placing.add_argument("--nodes", type=int, nargs="+", default=(10, 100, 1000))
    placing.add_argument("--seed", type=int, default=1)
    _add_replay(commands.add_parser("replay", help="let a request trace drive a cluster"))
    args = parser.parse_args(arguments)
    does = {
        "run": _run,
        "sweep": _sweep,
        "canaries": _canaries,
        "start": _start,
        "crowd": _crowd,
        "churn": _churn,
        "spills": _spills,
        "placement": _placement,
        "replay": _replay,
    }
    return does[args.command](args)


def _add_sweep(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, help="how many")
    parser.add_argument("--minutes", type=float, help="for how long")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--first", type=int, help="the first seed; fresh ones if not given")
    which.add_argument(
        "--derived", action="store_true", help="seeds that follow from the code, as CI runs them"
    )
    parser.add_argument("--kept", action="store_true", help="the seeds that once failed, first")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--jobs", type=int, help="processes; all cores if not given")
    parser.add_argument("--large-batches", action="store_true", help=LARGE)
    parser.add_argument("--sum", type=Path, metavar="FILE", help="add the counts to this file")


def _placement(args: argparse.Namespace) -> int:
    sizes = [(nodes, storing) for nodes in args.nodes for storing in (HALF, ALL_STORE)]
    for line in cost_table(Placing(*size, seed=args.seed).play() for size in sizes):
        _print(line)
    return 0


def _start(args: argparse.Namespace) -> int:
    start = Start(nodes=args.nodes, ranks=args.ranks, seed=args.seed)
    try:
        report = start.play(at_most_s=args.within, deaths=True)
    except AssertionError as error:
        _print(f"seed {args.seed}: {error}")
        return 1
    for line in report.lines():
        _print(line)
    return 0


def _churn(args: argparse.Namespace) -> int:
    reports = []
    for nodes in args.nodes:
        churn = Churn(nodes=nodes, clients=args.clients, seed=args.seed)
        try:
            reports.append(churn.churn(args.seconds, minutes=args.minutes, report=_print))
        except AssertionError as error:
            _print(f"{nodes} nodes, seed {args.seed}: {error}")
            return 1
    for line in churn_table(reports):
        _print(line)
    return 0


def _crowd(args: argparse.Namespace) -> int:
    reports = [
        Crowd(readers=args.readers, reads=args.reads, seed=args.seed, pulls=pulls).play()
        for pulls in (OFF, HOT, ALL)
    ]
    for line in table(reports):
        _print(line)
    return 1 if any(report.missed for report in reports) else 0


def _add_replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE")
    parser.add_argument("--requests", type=int, help="the first so many; default: all")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--prefill", type=int, help="nodes that get requests; default: half")
    parser.add_argument("--routing", default=EVEN, choices=(EVEN, "zipf"))
    parser.add_argument("--blocks", type=int, default=2000, help="room of all nodes")
    parser.add_argument("--speed", type=float, help="divides times; default: about a minute")
    parser.add_argument("--spill", action="store_true", help="pages move ahead of their eviction")
    parser.add_argument("--min-age", type=float, default=0.0, help="placement_min_age, seconds")
    for fault in ("kills", "pauses", "partitions"):
        parser.add_argument(f"--{fault}", type=float, default=0.0, help="a virtual second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--show", action="store_true", help="show every event as it happens")


def _replay(args: argparse.Namespace) -> int:
    requests = requests_of(args.trace, args.requests)
    speed, prefill = args.speed or speed_for(requests), args.prefill or max(1, args.nodes // 2)
    plan = Plan(requests, args.nodes, prefill, args.routing, GRANULE, speed, args.seed)
    replay = Replay(
        plan=plan,
        blocks=whole_blocks(args.blocks, args.nodes),
        spill=args.spill,
        min_age_s=args.min_age,
        kills=args.kills,
        pauses=args.pauses,
        partitions=args.partitions,
    )
    report = replay.play(_print if args.show else None)
    if args.json:
        _print(json.dumps(report.figures()))
    else:
        for line in report.lines():
            _print(line)
    if report.checker:
        _print(f"{report.checker}: {report.detail}")
    return 1 if report.checker else 0


def _spills(args: argparse.Namespace) -> int:
    failed = 0
    for seed in range(args.first, args.first + args.seeds):
        checker, detail = spilled(seed, show=_print if args.trace else None)
        failed += bool(checker)
        if checker:
            _print(f"seed {seed}: {checker} {detail}")
            _print(f"reproduce: python -m sims spills --first {seed} --seeds 1 --trace")
    _print(f"{args.seeds} seeds, {failed} of them failed")
    return 1 if failed else 0


def _run(args: argparse.Namespace) -> int:
    show = _print if args.trace else None
    change = smaller if args.small else with_large_batches if args.large_batches else None
    if not args.digest:
        _print(f"seed {args.seed}")
        drawn = draw(stream(args.seed, "swarm"), args.seed)
        for line in (change(drawn) if change else drawn).lines():
            _print(line)
    with planted_canary(args.canary):
        outcome = play(args.seed, show=show, change=change)
    if args.digest:
        _print(outcome.digest)
        return 0
    if not outcome.ok and not args.trace:
        for line in outcome.last_lines[-LINES_SHOWN:]:
            _print(line)
    _show(outcome, has_large_batches=args.large_batches)
    return 0 if outcome.ok else 1


def _sweep(args: argparse.Namespace) -> int:
    if args.seeds is None and args.minutes is None:
        args.seeds = 100
    seeds = sweep.derived_seeds() if args.derived else sweep.fresh_seeds()
    if args.first is not None:
        seeds = itertools.count(args.first)
    if args.kept:
        seeds = itertools.chain(sweep.kept_seeds(), seeds)
    chosen = seeds if args.seeds is None else itertools.islice(seeds, args.seeds)

    def show_outcome(outcome: Outcome) -> None:
        if not outcome.ok and not args.json:
            _show(outcome, has_large_batches=args.large_batches)

    tally = sweep.sweep(
        chosen,
        minutes=args.minutes,
        jobs=args.jobs,
        has_large_batches=args.large_batches,
        report=show_outcome,
    )
    if args.sum:
        day = dt.datetime.now(dt.timezone.utc).date().isoformat()
        swept.add(swept.row_of(tally, day), args.sum)
    _print(tally.as_json() if args.json else tally.summary())
    return 1 if tally.failures else 0


def _canaries(args: argparse.Namespace) -> int:
    return hunt_all(only=args.only, jobs=args.jobs, say=_print)


def _show(outcome: Outcome, *, has_large_batches: bool) -> None:
    _print(
        f"seed {outcome.seed}: {outcome.checker or 'nothing found'} {outcome.detail}\n"
        f"  {outcome.messages} messages, {outcome.virtual_s:.1f} s of virtual time in "
        f"{outcome.wall_s:.1f} s, healed after {outcome.healed_s:.1f} s, digest {outcome.digest}"
    )
    if not outcome.ok:
        _print(sweep.reproduce_line(outcome.seed, has_large_batches=has_large_batches))


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
