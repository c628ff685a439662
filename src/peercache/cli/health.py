"""`peercache health`: asks the node of this host whether it serves; for probes of containers."""

from __future__ import annotations

import http.client
import json
import os
from typing import Any

import click

from peercache.cli.options import SettingsCommand, json_option, settings_options
from peercache.config.quantities import format_address
from peercache.config.settings import DEFAULT_METRICS_PORT, Config
from peercache.errors import ConfigError

TIMEOUT_S = 3.0
"""Probes have a few seconds, and this process needs half of one to start."""

EXIT_UNWELL = 1


@click.command(cls=SettingsCommand)
@json_option
@settings_options
def health(config: str | None, *, as_json: bool, **settings: str | None) -> int:
    """Say whether the node of this host serves.

    It takes the settings of the node, and reads /healthz over loopback.
    """
    loaded = Config.load(settings, file=config, environment=os.environ)
    address = loaded.http_address(in_process=False)
    if address is None:
        raise ConfigError("metrics_port", "0 turns HTTP off, so the node's health cannot be read")
    host, port = address
    # A wildcard address is reached over loopback, where a node requires no certificate of its own
    # user.
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    reply, is_well = _ask(host, DEFAULT_METRICS_PORT if port == -1 else port)
    if as_json:
        print(json.dumps(reply))
    else:
        status, reason = reply.get("status", "unavailable"), reply.get("reason", "")
        print(f"{status}: {reason}" if reason else status)
    return 0 if is_well else EXIT_UNWELL


def _ask(host: str, port: int) -> tuple[dict[str, Any], bool]:
    """Return what the node reports about itself, and whether it serves."""
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        reply = json.loads(answer.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        reason = f"no answer from {format_address(host, port)}: {why}"
        return {"status": "unavailable", "reason": reason}, False
    finally:
        connection.close()
    if not isinstance(reply, dict):
        return {
            "status": "unavailable",
            "reason": f"{format_address(host, port)} is no node",
        }, False
    if "error" in reply:
        # Such as 403: a node of another user, or an address that requires a certificate.
        return {"status": "unavailable", "reason": str(reply["error"])}, False
    return reply, answer.status == http.client.OK
