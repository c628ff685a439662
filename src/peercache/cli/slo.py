"""`peercache slo`: whether calls are as fast as the objectives require, from nodes' /metrics."""

from __future__ import annotations

import http.client
import math
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from peercache.cli.options import DurationType, json_option
from peercache.cli.terminal import console, duration, print_json, show_progress, table
from peercache.errors import PeerCacheError, PeerUnreachable, Rejected
from peercache.observability.latency import (
    Counts,
    ObjectiveResult,
    added,
    counts_of,
    judged,
    limits_of,
    since,
)

EXIT_MISSED = 1
NODE = "127.0.0.1:31997"
READ_S = 5.0
READ_BYTES_MAX = 2**24


@click.command("slo")
@click.argument("nodes", nargs=-1, metavar="[HOST:PORT|URL]...")
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
) -> int:
    """Judge the calls of the engines of these nodes by the objectives; all nodes together.

    A node is named by its HTTP port, 127.0.0.1:31997 by default.
    """
    if key and not cert:
        raise click.UsageError("--key requires --cert.")
    try:
        context = _context(ca, cert, key)
        token = Path(token_file).read_text().strip() if token_file else ""
    except (OSError, ssl.SSLError) as error:
        name = getattr(error, "filename", "") or cert or ca
        raise click.UsageError(f"{name} cannot be used: {error.strerror or error}.") from error
    urls = [_url_of(node) for node in nodes or (NODE,)]

    limits: dict[str, float] = {}

    def read() -> list[Counts]:
        found = [_scraped(url, token, context) for url in urls]
        for name, limit_s in [item for text in found for item in limits_of(text).items()]:
            # Nodes with different limits are judged by the longest.
            limits[name] = max(limit_s, limits.get(name, 0.0))
        return [counts_of(text) for text in found]

    counted = read()
    if over:
        show_progress(f"reading again in {over:g} s")
        time.sleep(over)
        counted = [since(*both) for both in zip(counted, read(), strict=True)]
    results = judged(added(counted), limits)
    is_met = all(each.is_met for each in results)
    if as_json:
        print_json(
            {"ok": is_met, "nodes": len(urls), "objectives": [_shown(each) for each in results]}
        )
    else:
        _print(results)
    return 0 if is_met else EXIT_MISSED


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
