"""`peercache slo`: whether calls are as fast as the objectives require.

The times come from the status of each member, or from /metrics of nodes that are named by their
HTTP ports.
"""

from __future__ import annotations

import http.client
import math
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import click

from peercache.cli.operate.connecting import target_of, target_options
from peercache.cli.options import DurationType, json_option
from peercache.cli.terminal import console, duration, print_json, show_progress, table
from peercache.client.operator import Operator, Target
from peercache.errors import PeerCacheError, PeerUnreachable, Rejected
from peercache.observability.latency import (
    Counts,
    ObjectiveResult,
    added,
    counts_in,
    counts_of,
    judged,
    limits_of,
    since,
)

EXIT_MISSED = 1
READ_S = 5.0
READ_BYTES_MAX = 2**24


@click.command("slo")
@click.argument("nodes", nargs=-1, metavar="[HTTP-HOST:PORT|URL]...")
@target_options
@click.option(
    "--over",
    type=DurationType(),
    default=0.0,
    metavar="DURATION",
    help="Read twice, so long apart, and check the calls in between; 0 checks all since the start.",
)
@click.option("--token-file", metavar="FILE", help="Bearer token of the nodes' http_token_file.")
@click.option("--ca", metavar="FILE", help="Certificate of the authority of https nodes.")
@click.option("--cert", metavar="FILE", help="Certificate to show to https nodes, with --key.")
@click.option("--key", metavar="FILE", help="Key of --cert.")
@json_option
def slo(
    nodes: Sequence[str],
    over: float,
    *,
    token_file: str | None,
    ca: str | None,
    cert: str | None,
    key: str | None,
    as_json: bool,
    **target: Any,
) -> int:
    """Judge the calls of the engines of a cluster by the objectives; all nodes together.

    It asks one node for all members, as `peercache status` does. If HTTP ports are named, it reads
    /metrics of those nodes instead.
    """
    if key and not cert:
        raise click.UsageError("--key requires --cert.")
    try:
        context = _context(ca, cert, key)
        token = Path(token_file).read_text().strip() if token_file else ""
    except (OSError, ssl.SSLError) as error:
        name = getattr(error, "filename", "") or cert or ca
        raise click.UsageError(f"{name} cannot be used: {error.strerror or error}.") from error
    if nodes and target["at"]:
        raise click.UsageError("Name HTTP ports, or a node with --at, and not both.")
    urls = [_url_of(node) for node in nodes]
    if urls:
        read = partial(_of_pages, urls, token, context)
    else:
        read = partial(_of_members, target_of(**target))

    counts, limits = read()
    if over:
        show_progress(f"reading again in {over:g} s")
        time.sleep(over)
        after, limits = read()
        counts = {name: since(counts.get(name, {}), each) for name, each in after.items()}
    results = judged(added(counts.values()), limits)
    is_met = all(each.is_met for each in results)
    if as_json:
        print_json(
            {"ok": is_met, "nodes": len(counts), "objectives": [_shown(each) for each in results]}
        )
    else:
        _print(results)
    return 0 if is_met else EXIT_MISSED


Read: TypeAlias = tuple[dict[str, Counts], dict[str, float]]
"""The counts of each node, and the limit of each objective."""


def _of_pages(urls: Sequence[str], token: str, context: ssl.SSLContext | None) -> Read:
    found = {url: _scraped(url, token, context) for url in urls}
    return (
        {url: counts_of(text) for url, text in found.items()},
        _longest(limits_of(text) for text in found.values()),
    )


def _of_members(target: Target) -> Read:
    with Operator(target) as operator:
        found = [each.status for each in operator.statuses() if each.answers]
    return (
        {each.incarnation: counts_in(each.objectives) for each in found},
        _longest(each.limits_s for each in found),
    )


def _longest(limits: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the limits: nodes with different ones are judged by the longest."""
    longest: dict[str, float] = {}
    for name, limit_s in [item for each in limits for item in each.items()]:
        longest[name] = max(limit_s, longest.get(name, 0.0))
    return longest


def _context(ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext | None:
    if not ca:
        return None
    context = ssl.create_default_context(cafile=ca)
    if cert:
        context.load_cert_chain(cert, key)
    return context


def _url_of(node: str) -> str:
    whole = node if "://" in node else f"http://{node}"
    if not whole.startswith(("http://", "https://")):
        raise click.BadParameter(f"{node!r} is no HOST:PORT, and no http or https address.")
    return whole if whole.endswith("/metrics") else whole.rstrip("/") + "/metrics"


def _scraped(url: str, token: str, context: ssl.SSLContext | None) -> str:
    """Return a node's answer; raise PeerUnreachable or Rejected with what to do."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - checked above
    # Ignore proxies of the environment: they cannot reach a node's loopback.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    problem: PeerCacheError
    try:
        with opener.open(request, timeout=READ_S) as page:
            return str(page.read(READ_BYTES_MAX).decode())
    except urllib.error.HTTPError as error:
        detail = "give --token-file, or --ca, --cert and --key of an operator"
        problem = Rejected(str(error.code), f"{url} answers {error.code} {error.reason}: {detail}")
    except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
        reason = getattr(error, "reason", error)
        hint = "name the HTTP port of a node (`http` in its ready line)"
        if isinstance(reason, ssl.SSLCertVerificationError):
            reason = reason.verify_message
            hint = "name the certificate of the cluster's authority with --ca"
        problem = PeerUnreachable(f"{url} ({reason}): {hint}")
    raise problem


def _shown(result: ObjectiveResult) -> dict[str, Any]:
    quantiles = {name: _number(value) for name, value in result.quantiles.items()}
    return {
        "name": result.objective.name,
        "meaning": result.objective.meaning,
        "within_s": result.objective.within_s,
        "share_wanted": result.objective.share,
        "share": _number(result.within),
        "budget_left": _number(result.budget_left),
        "calls": result.calls,
        "met": result.is_met,
        **quantiles,
    }


def _number(value: float) -> float | None:
    """Return a number that JSON can represent, or None."""
    return None if math.isnan(value) else round(value, 7)


def _print(results: Sequence[ObjectiveResult]) -> None:
    shown = table("objective", "calls", "within", "wanted", "budget left", "p50", "p90", "p99", "")
    for each in results:
        objective = each.objective
        if not each.calls:
            shown.add_row(objective.name, "0", "", f"{objective.share:.1%}", "", "", "", "", "–")
            continue
        shown.add_row(
            objective.name,
            f"{each.calls:,}",
            f"{each.within:.2%}",
            f"{objective.share:.1%} in {duration(objective.within_s)}",
            f"{each.budget_left:.0%}",
            *(duration(value) for value in each.quantiles.values()),
            "met" if each.is_met else "MISSED",
        )
    console().print(shown)
