"""`peercache get`, `set`, `exists`, `retain` and `rm`: single pages, through a node of this host.

Only a process on a node's own host can write, so these commands accept only a home address.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from peercache.cli.operate.connecting import target_of, target_options
from peercache.cli.options import Callback, DurationType, json_option
from peercache.client.client import Client
from peercache.config.home import nearest_home
from peercache.errors import ConfigError, PeerUnreachable
from peercache.model.keys import DEFAULT_NAME, Namespace
from peercache.observability import reasons
from peercache.observability.metrics import totals_of

EXIT_NOT_FOUND = 1

STDIO = "-"


def _page_options(command: Callback) -> Callback:
    """Add the target, --namespace and --geometry."""
    for option in (
        click.option(
            "--geometry",
            default="",
            help="Geometry of the namespace (the format of its pages), if it has one.",
        ),
        click.option(
            "--namespace", default=DEFAULT_NAME, show_default=True, metavar="NAME",
            help="The namespace of the pages.",
        ),
        target_options,
    ):  # fmt: skip
        command = option(command)
    return command


@click.command("get")
@_page_options
@click.option(
    "-o", "--output", default=STDIO, metavar="FILE", help="Write it there; - is stdout.",
)  # fmt: skip
@click.argument("key")
@json_option
def get_command(*, key: str, output: str, as_json: bool, **where: Any) -> int:
    """Read the page of a key, whichever node holds it, and verify it.

    Exit status: 0, 1 if no node holds it, 2 if there is no node.
    """
    if output == STDIO and (as_json or sys.stdout.isatty()):
        raise click.UsageError("a page is bytes: name a file with -o, or send stdout into a pipe.")
    with _client(**where) as client:
        length = client.lengths([key])[0]
        page = bytearray(length)
        is_hit = bool(length) and client.batch_get([key], [page])[0]
        why = _reasons(client, "pages_missed") if length else f": {_SENTENCES[reasons.ABSENT]}"
    if is_hit and output == STDIO:
        sys.stdout.buffer.write(page)
        sys.stdout.buffer.flush()
    elif is_hit:
        try:
            Path(output).write_bytes(page)
        except OSError as error:
            raise ConfigError("output", f"cannot write {output}: {error.strerror}") from error
    if as_json:
        print(json.dumps({"key": key, "found": is_hit, "bytes": length if is_hit else 0}))
    elif not is_hit:
        print(f"peercache: no page of {key!r}{why}", file=sys.stderr)
    return 0 if is_hit else EXIT_NOT_FOUND


@click.command("set")
@_page_options
@click.argument("key")
@click.argument("file", default=STDIO)
@json_option
def set_command(*, key: str, file: str, as_json: bool, **where: Any) -> int:
    """Store the bytes of FILE (or -: stdin) under a key, at a node of this host.

    Exit status: 0, 1 if the node did not take them, 2 if there is no node.
    """
    try:
        page = sys.stdin.buffer.read() if file == STDIO else Path(file).read_bytes()
    except OSError as error:
        raise ConfigError("file", f"cannot read {file}: {error.strerror}") from error
    if not page:
        raise ConfigError("file", f"{file} is empty, and a page has a byte at least")
    with _client(**where) as client:
        is_stored = client.batch_set([key], [page])[0]
        why = _reasons(client, "sets_refused", {reasons.WRONG_SIZE: _OTHER_LENGTH})
    if as_json:
        print(json.dumps({"key": key, "stored": is_stored, "bytes": len(page)}))
    elif not is_stored:
        print(f"peercache: {key!r} was not stored{why}", file=sys.stderr)
    return 0 if is_stored else EXIT_NOT_FOUND


@click.command("exists")
@_page_options
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@json_option
def exists_command(*, keys: tuple[str, ...], as_json: bool, **where: Any) -> int:
    """Say of each key whether a node holds its page.

    Exit status: 0 if all are there, 1 if one is not, 2 if there is no node.
    """
    with _client(**where) as client:
        found = client.contains(keys)
    if as_json:
        print(json.dumps({"exists": dict(zip(keys, found, strict=True))}))
    else:
        for key, is_there in zip(keys, found, strict=True):
            print(f"{'yes' if is_there else 'no '} {key}")
    return 0 if all(found) else EXIT_NOT_FOUND


@click.command("retain")
@_page_options
@click.option(
    "--for", "seconds", type=DurationType(), required=True, metavar="DURATION",
    help="How long; 0 ends the protection.",
)  # fmt: skip
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@json_option
def retain_command(*, keys: tuple[str, ...], seconds: float, as_json: bool, **where: Any) -> int:
    """Keep the pages of keys in the memory of their holders, within the namespace's quota.

    Exit status: 0 if all are kept, 1 if one is not, 2 if there is no node.
    """
    with _client(**where) as client:
        count = client.retain(keys, seconds)
    if as_json:
        print(json.dumps({"asked": len(keys), "retained": count}))
    elif seconds:
        print(f"{count} of {len(keys)} retained for {seconds:g} s")
    else:
        print(f"{count} of {len(keys)} let go")
    return 0 if count == len(keys) else EXIT_NOT_FOUND


@click.command("rm")
@_page_options
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@json_option
def remove_command(*, keys: tuple[str, ...], as_json: bool, **where: Any) -> int:
    """Remove the pages of keys from memory and disk of every member.

    Exit status: 0, 1 if none was there, 2 if there is no node.
    """
    with _client(**where) as client:
        count = client.remove(keys)
    if as_json:
        print(json.dumps({"removed": count}))
    else:
        print(f"removed {count} {'copy' if count == 1 else 'copies'}")
    return 0 if count else EXIT_NOT_FOUND


@contextlib.contextmanager
def _client(namespace: str, geometry: str, **given: Any) -> Iterator[Client]:
    """Attach to a node of this host; raise an error that explains how to reach one."""
    target = target_of(**given)
    if not target.is_home and not target.is_named:
        raise PeerUnreachable(
            f"a node of this host: nothing listens at {nearest_home()}, the default home; start "
            "one (peercache node), or name one with --home ipc://PATH"
        )
    if not target.is_home:
        raise ConfigError(
            "at",
            f"{target.at} is no home address, and pages are read and written through a node of "
            "this host: name it with --home ipc://PATH (its ready line has it), or start one",
        )
    config = target.attached()
    with Client.open(config, namespace=Namespace(namespace, geometry)) as client:
        yield client


_SENTENCES = {
    reasons.ABSENT: "no node holds it under this namespace and geometry",
    reasons.EVICTED: "its holder has just evicted it",
    reasons.DEADLINE: "it took longer than --timeout",
    reasons.WRONG_SIZE: "it has just been replaced by one of another length: try again; engines "
    "with pages of several lengths in one namespace need a --geometry each",
    reasons.PEER_UNREACHABLE: "the node that holds it does not answer: see `peercache status`",
    reasons.POOL_FULL: "the pool of this host's node has no room for it",
    reasons.TOO_LARGE: "it is larger than the pool of this host's node",
    reasons.DRAINING: "an operator drains this host's node",
    reasons.NOT_PROMOTED: "it is on its holder's disk, and was not loaded within --timeout",
    reasons.NO_HOME: "this host's node has stopped, or restarts",
}
"""Reasons that a person at the command line can act on; others are named as in the metrics."""


_OTHER_LENGTH = (
    "a page of another length is stored under this key, and a stored page is not replaced: remove "
    "it first (peercache rm), or name another key or --geometry"
)


def _reasons(client: Client, counter: str, more: Mapping[str, str] | None = None) -> str:
    """Return why pages were missed or refused, for the end of a sentence.

    more: sentences that differ for this counter.
    """
    sentences = {**_SENTENCES, **(more or {})}
    found = totals_of(getattr(client.metrics, counter))
    named = [sentences.get(each, each) for each, count in sorted(found.items()) if count]
    return f": {'; '.join(named)}" if named else ""
