"""The log: events as `component.what_happened`, with facts as fields."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

LOGGER = "peercache"
"""The standard library's logger that every line goes through: an engine's own logging settings
decide what becomes of it, and a command sets it up with `configure_logging`."""

_PLAIN = structlog.processors.LogfmtRenderer(key_order=["event"], bool_as_flag=False)
_rendering: dict[str, Any] = {"renderer": _PLAIN}


def configure_logging(*, log_format: str, level: str) -> None:
    """Write our log to stderr, as JSON or for a console: a command's business, not a library's."""
    as_json = log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())
    _rendering["renderer"] = (
        structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger(LOGGER)
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())


def get_logger(**bound: Any) -> Any:
    """Return a logger with facts bound to it."""
    return structlog.wrap_logger(
        logging.getLogger(LOGGER),
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.add_log_level,
            _time_of_own_log,
            structlog.processors.format_exc_info,
            _render,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
    ).bind(**bound)


_stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)


def _time_of_own_log(logger: Any, name: str, event: Any) -> Any:
    # An engine's logging puts its own time in front.
    return event if _rendering["renderer"] is _PLAIN else _stamp(logger, name, event)


def _render(logger: Any, name: str, event: Any) -> Any:
    if _rendering["renderer"] is _PLAIN:
        event.pop("level", None)
    return _rendering["renderer"](logger, name, event)
