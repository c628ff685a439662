"""The log: events as `component.what_happened`, with facts as fields.

A call runs in its caller's thread from start to end, and has a number, which costs one attribute:
log lines of the client contain it, and requests to nodes carry it in the number that they have
anyway. So a debug line of a node and a line of the engine have the same call number.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, final

import structlog

REQUEST_BITS = 24
"""Low bits of a request's number that distinguish the requests of one client."""


class _Current(threading.local):
    number: int = 0
    series: int = 0
    missed: Mapping[str, int] | Iterable[str] = ()


current = _Current()
"""number: that of the client's call that this thread is in, 0 outside of one. series: the series of
the call (`observability.latency`). missed: pages that it did not serve, by reason, or the reason of
each."""


def request_of(count: int) -> int:
    """Return the number of a request: the `count`-th of its client, sent by the current call."""
    number = current.number
    return number << REQUEST_BITS | count & (1 << REQUEST_BITS) - 1 if number else count


def call_of(request: int) -> int:
    """Return the number of the call that sent a request, 0 if it was not sent by a call."""
    return request >> REQUEST_BITS


LOGGER = "peercache"
"""The standard library's logger that every line goes through. An engine's own logging settings
apply to it; a command sets it up with `configure_logging`."""

WARNED_KEYS_MAX = 1024
"""Keys that one `WarnOnce` remembers; while it is full, it writes no new warning."""

WARNED_FORGET_S = 3600.0
"""A full `WarnOnce` forgets all keys this long after the first of them, and starts again."""

_PLAIN = structlog.processors.LogfmtRenderer(key_order=["event"], bool_as_flag=False)
_rendering: dict[str, Any] = {"renderer": _PLAIN}


def configure_logging(*, log_format: str, level: str) -> None:
    """Write the log to stderr, as JSON or for a console; only commands call this."""
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


def log_into(engine: str, *, level: str = "") -> None:
    """Write the log where an engine writes its own, in its format: with its time and its levels.

    engine: the name of its package, which has the loggers. Engines add handlers to their own
            loggers and none to the root; without any, Python shows only warnings, without a time.
    level:  the least level; "" means the engine's own.
    """
    logger, own = logging.getLogger(LOGGER), _logger_of(engine)
    if level:
        logger.setLevel(level.upper())
    elif logger.level == logging.NOTSET and (own is not None or not logger.hasHandlers()):
        logger.setLevel(logging.INFO if own is None else own.getEffectiveLevel())
    if logger.hasHandlers():
        return
    for theirs in [] if own is None else own.handlers:
        if type(theirs) is logging.StreamHandler:
            # Not the engine's logger itself: it may drop a level that was requested here.
            handler = logging.StreamHandler(theirs.stream)
            handler.setFormatter(theirs.formatter)
            logger.addHandler(handler)
        else:
            logger.addHandler(theirs)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
    # A handler that is added to the root later would write each line a second time.
    logger.propagate = False


def _logger_of(engine: str) -> logging.Logger | None:
    """Return a logger of this package with a handler that writes."""
    for name, logger in list(logging.root.manager.loggerDict.items()):
        is_of_engine = name == engine or name.startswith(engine + ".")
        if is_of_engine and isinstance(logger, logging.Logger) and _writes(logger):
            return logger
    return None


def _writes(logger: logging.Logger) -> bool:
    return any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers)


def get_logger(**bound: Any) -> Any:
    """Return a logger with bound fields."""
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
    # An engine's logging prints its own time.
    return event if _rendering["renderer"] is _PLAIN else _stamp(logger, name, event)


def _render(logger: Any, name: str, event: Any) -> Any:
    # Lines that a client writes during a batch call contain its number.
    if current.number:
        event.setdefault("call", current.number)
    if _rendering["renderer"] is _PLAIN:
        event.pop("level", None)
    return _rendering["renderer"](logger, name, event)


@final
class WarnOnce:
    """Writes a warning once per event and key, or again after a time. Thread-safe.

    A lasting fault affects every call, and repeated log lines contain nothing new. The memory of
    keys is bounded, and so is the log: a peer may invent a new key with each message.
    """

    def __init__(
        self,
        log: Any,
        *,
        clock: Callable[[], float] = time.monotonic,
        repeat_s: float = math.inf,
    ) -> None:
        """Write to `log`. repeat_s: the time after which a warning is written again."""
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._repeat_s = repeat_s
        self._written: dict[tuple[str, Hashable], float] = {}
        self._since_s = 0.0

    def __call__(self, event: str, key: Hashable, **facts: object) -> None:
        """Write the warning, unless this event and key were written before."""
        with self._lock:
            written_s = self._written.get((event, key))
            if written_s is not None and self._repeat_s == math.inf:
                return
            now = self._clock()
            if written_s is not None:
                if now - written_s < self._repeat_s:
                    return
            elif not self._written:
                self._since_s = now
            elif len(self._written) >= WARNED_KEYS_MAX:
                if now - self._since_s < WARNED_FORGET_S:
                    return
                self._written.clear()
                self._since_s = now
            self._written[event, key] = now
        self._log.warning(event, **facts)
