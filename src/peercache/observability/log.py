"""The log: events as `component.what_happened`, with facts as fields.

A call runs in its caller's thread from begin to end, and has a number, which costs one attribute:
log lines of the client read it when they are written, and questions to nodes carry it in the number
that they have anyway. So a line of a node at debug and a line of the engine have it in common.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, final

import structlog

REQUEST_BITS = 24
"""Low bits of a question's number that distinguish the questions of one client."""


class _Current(threading.local):
    number: int = 0
    series: int = 0


current = _Current()
"""number: of the client's call that this thread is in, 0 outside of one.
series: what the call is counted as (`observability.latency`)."""


def request_of(count: int) -> int:
    """Return the number of a question: the `count`-th of its client, asked by the current call."""
    number = current.number
    return number << REQUEST_BITS | count & (1 << REQUEST_BITS) - 1 if number else count


def call_of(request: int) -> int:
    """Return the number of the call that asked a question, 0 for a question of no call."""
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
    """Write the log where an engine writes its own, in its form: with its time and its levels.

    engine: the name of its package, whose loggers are looked at. Engines give handlers to their own
            loggers and none to the root; without any, Python shows warnings alone, without a time.
    level:  the least level; "" is the engine's own.
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
            # Not theirs itself: it may drop a level that was asked for here.
            handler = logging.StreamHandler(theirs.stream)
            handler.setFormatter(theirs.formatter)
            logger.addHandler(handler)
        else:
            logger.addHandler(theirs)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
    # A handler that the root gets later would write each line a second time.
    logger.propagate = False


def _logger_of(engine: str) -> logging.Logger | None:
    """Return a logger of this package that writes somewhere: not one that is silenced."""
    for name, logger in list(logging.root.manager.loggerDict.items()):
        is_of_engine = name == engine or name.startswith(engine + ".")
        if is_of_engine and isinstance(logger, logging.Logger) and _writes(logger):
            return logger
    return None


def _writes(logger: logging.Logger) -> bool:
    return any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers)


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
    # An engine's logging prints its own time.
    return event if _rendering["renderer"] is _PLAIN else _stamp(logger, name, event)


def _render(logger: Any, name: str, event: Any) -> Any:
    # What a client writes while it is in a batch call says which one.
    if current.number:
        event.setdefault("call", current.number)
    if _rendering["renderer"] is _PLAIN:
        event.pop("level", None)
    return _rendering["renderer"](logger, name, event)


@final
class WarnOnce:
    """Writes a warning the first time that its event meets a key, or once in a while. Thread-safe.

    A fault that lasts is met by every call, and its log line says nothing new. The memory of keys
    is bounded, and so is the log: a peer may invent a new key with each message.
    """

    def __init__(
        self,
        log: Any,
        *,
        clock: Callable[[], float] = time.monotonic,
        repeat_s: float = math.inf,
    ) -> None:
        """Write to `log`. repeat_s: after which a warning is written again."""
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
