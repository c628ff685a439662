"""The `peercache` command: demo, bench, doctor, node, disk, config, version.

Each subcommand imports what it needs when it is chosen, so that `peercache version` works where a
node would not.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import textwrap
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import attrs

from peercache.cli.bench.flags import add_bench_flags
from peercache.cli.disk import add_disk_flags
from peercache.config.flags import add_config_flags, environment_name_of, flag_of
from peercache.config.settings import FIELDS
from peercache.errors import PeerCacheError
from peercache.wire.envelope import WIRE_VERSION, WIRE_VERSION_OLDEST

EXIT_WRONG_USAGE = 2  # What argparse exits with, too.
EXIT_INTERRUPTED = 130  # What a shell reports of a process that Ctrl-C ended.
EXIT_BROKEN_PIPE = 141  # The same of one that wrote to a pipe without a reader.


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["node"]:
        # The node has its own parser: the same flags under both of its names.
        from peercache.node.__main__ import main as run_node  # noqa: PLC0415 - see the charter

        return run_node(given[1:])
    args = _parser().parse_args(given)
    try:
        status = int(args.run(args))
        sys.stdout.flush()
    except PeerCacheError as error:
        print(f"peercache: {error}", file=sys.stderr)
        return EXIT_WRONG_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        return EXIT_BROKEN_PIPE
    return status


def _nobody_reads() -> bool:
    """Return whether our reader has gone, as that of `peercache config | head` does."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    gone = any(event & select.POLLERR for _, event in output.poll(0))
    if gone:
        # Python flushes once more when it ends, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return gone


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="peercache", description="Peer-to-peer L3 storage for SGLang's HiCache."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="three nodes on this machine, every byte checked")
    demo.add_argument("--json", action="store_true", help="print one JSON object, and no progress")
    demo.add_argument(
        "--keep-logs", metavar="FOLDER", help="keep the logs of the nodes in this folder"
    )
    demo.set_defaults(run=_demo)

    bench = commands.add_parser("bench", help="how fast pages move, beside the machine's limits")
    add_bench_flags(bench)

    doctor = commands.add_parser("doctor", help="what this host offers, what is wrong, and the fix")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.add_argument("--quick", action="store_true", help="measure nothing")
    add_config_flags(doctor)
    doctor.set_defaults(run=_doctor)

    # Listed for --help only: `main` hands everything after `node` to the node's own parser.
    commands.add_parser("node", help="run a standalone node; see `peercache node --help`")

    disk = commands.add_parser("disk", help="what lies in a disk_path, and whether it is right")
    add_disk_flags(disk)

    config = commands.add_parser("config", help="list every setting, its default and meaning")
    config.add_argument("--toml", action="store_true", help="print an example file instead")
    config.set_defaults(run=_config)

    commands.add_parser("version", help="print the versions").set_defaults(run=_version)
    return parser


def _demo(args: argparse.Namespace) -> int:
    from peercache.cli.demo.disk_part import tell_of_disks  # noqa: PLC0415 - see the charter
    from peercache.cli.demo.story import run_demo  # noqa: PLC0415 - see the charter

    return run_demo(as_json=args.json, log_folder=args.keep_logs, more=tell_of_disks)


def _doctor(args: argparse.Namespace) -> int:
    from peercache.cli.doctor.command import run_doctor  # noqa: PLC0415 - see the charter

    return run_doctor(args)


def _version(_: argparse.Namespace) -> int:
    wire = f"{WIRE_VERSION_OLDEST} to {WIRE_VERSION}" if WIRE_VERSION > 1 else f"{WIRE_VERSION}"
    print(f"peercache {version('peercache')} (wire version {wire})")
    return 0


def _config(args: argparse.Namespace) -> int:
    if args.toml:
        print(example_toml(), end="")
        return 0
    from rich import box  # noqa: PLC0415 - see the charter
    from rich.console import Console  # noqa: PLC0415 - see the charter
    from rich.table import Table  # noqa: PLC0415 - see the charter
    from rich.text import Text  # noqa: PLC0415 - see the charter

    table = Table("setting", "default", "meaning", box=box.SIMPLE, pad_edge=False)
    for name, field in FIELDS.items():
        choices = field.metadata["choices"]
        meaning = field.metadata["help"] + (f" One of: {', '.join(choices)}." if choices else "")
        table.add_row(Text(name, "bold"), Text(written(field)), Text(meaning))
    # A pipe has no width; a hundred columns keep each setting on few lines.
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    print(
        f"\nA setting is a flag ({flag_of('pool_size')}), an environment variable "
        f"({environment_name_of('pool_size')}), a line of the TOML file,\n"
        "a keyword of Client.open, and a key of SGLang's extra-config JSON."
    )
    return 0


_SIZES = ("pool_size", "granule", "disk_size", "disk_queue", "disk_promote_rate")
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("GB", 10**9), ("KiB", 2**10))


def written(field: attrs.Attribute[Any]) -> str:
    """Return the default of a setting as a person would write it; "" for none."""
    value = field.default
    if isinstance(value, tuple):
        return ",".join(value)
    if isinstance(value, bool):
        return str(value).lower()
    if field.name in _SIZES and isinstance(value, int):
        for unit, size in _UNITS:
            if value % size == 0:
                return f"{value // size}{unit}"
    return str(value)


def example_toml() -> str:
    """Return a TOML file with every setting at its default, commented out."""
    lines = [
        "# Settings of PeerCache: uncomment what you change.",
        "# A flag (--pool-size) or the environment (PEERCACHE_POOL_SIZE) wins over this file.",
    ]
    for name, field in FIELDS.items():
        choices = field.metadata["choices"]
        meaning = field.metadata["help"] + (f" One of: {', '.join(choices)}." if choices else "")
        lines += ["", *(f"# {line}" for line in textwrap.wrap(meaning, 97))]
        lines.append(f"# {name} = {_toml(field)}")
    return "\n".join(lines) + "\n"


def _toml(field: attrs.Attribute[Any]) -> str:
    if isinstance(field.default, tuple):
        return json.dumps(list(field.default))
    if isinstance(field.default, str) or field.name in _SIZES:
        return json.dumps(written(field))
    return json.dumps(field.default)
