"""The client of an adapter: opened at once if the home node answers, else as soon as it does.

An engine starts even if its cache does not serve: until the client is open every call is a miss.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, final

from peercache.client.client import Client
from peercache.client.home import NO_ANSWER, REFUSED
from peercache.config.settings import Config
from peercache.config.table import environment_name
from peercache.model.keys import Namespace
from peercache.observability.log import WarnOnce, log_into

OP_TIMEOUT_S = 0.8
"""Default deadline of a get: an engine waits for a load at most a second, and a quarter of this
time may pass in a queue."""

TIMEOUT_FRACTION = 0.25
"""The fraction of a call's deadline that work may wait for its thread."""

NOT_OPEN = "not_open"
"""Reason: there is no home node, because its client could not be opened yet, or is closed."""

REASONS = (NOT_OPEN, NO_ANSWER, REFUSED)

LOG_LEVEL = environment_name("log_level")

REOPEN_RETRY_S = 5.0
"""Pause until the next attempt to open a client. The attempt waits as long for a node, so a node is
found within this time."""

WARN_S = 3600.0
"""How often it is logged that no client can be opened, for an engine that runs without a node."""


def engine_config(
    settings: Mapping[str, Any], environment: Mapping[str, str], *, engine: str = ""
) -> Config:
    """Return the settings of an engine's JSON line, which override those of the environment.

    engine: the package to whose logging the log is written from now on; "" leaves the log
            unchanged.
    Raises a ConfigError that names the problem: an operator reads it when the engine starts.
    """
    config = Config.load(
        settings, environment={"PEERCACHE_OP_TIMEOUT_S": str(OP_TIMEOUT_S)} | dict(environment)
    )
    if engine:
        log_into(engine, level=level_named(config, settings, environment))
    return config


def level_named(config: Config, settings: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """Return the log level that a setting names; "" if none does: the default is a command's."""
    is_named = settings.get("log_level") is not None or LOG_LEVEL in environment
    return config.log_level if is_named else ""


@final
class LateClient:
    """A client that is open, or will be opened. Thread-safe."""

    def __init__(
        self,
        config: Config,
        namespace: Namespace,
        log: Any,
        *,
        on_open: Callable[[Any], None] = lambda _: None,
        client_factory: Callable[..., Any] = Client.open,
        retry_s: float = REOPEN_RETRY_S,
    ) -> None:
        """Try to open a client; if that fails, continue to try in a thread. Never raises.

        on_open: called with the client, before any other call is made with it.
        """
        self._config = config
        self._namespace = namespace
        self._log = log
        self._on_open = on_open
        self._client_factory = client_factory
        self._retry_s = retry_s
        self._warn_once = WarnOnce(log, repeat_s=WARN_S)
        self._change = threading.Lock()
        self._closing = threading.Event()
        self._client: Any = None
        self._why = ""
        self._thread: threading.Thread | None = None
        if not self._try():
            self._thread = threading.Thread(target=self._main, name="peercache-attach", daemon=True)
            self._thread.start()

    @property
    def client(self) -> Any | None:
        """The client that serves calls; None while it is not open."""
        return self._client

    def status(self) -> dict[str, Any]:
        """Return the state of the home node, for the status that the engine shows.

        home, namespace: names. last_success_s: seconds since its last answer; None: it never
                         answered.
        reason: why it is not healthy, one of REASONS; why: the same as a sentence. Both are ""
                while it is healthy.
        """
        named = {"home": self._config.home, "namespace": self._namespace.name}
        client = self._client
        if client is None:
            return named | {
                "is_healthy": False,
                "last_success_s": None,
                "reason": NOT_OPEN,
                "why": self._why,
            }
        state = client.home_state
        return {
            "home": client.home_address,
            "namespace": self._namespace.name,
            "is_healthy": not state.is_lost,
            "last_success_s": round(time.monotonic() - state.answered_s, 1),
            "reason": state.reason,
            "why": state.why,
        }

    def close(self) -> None:
        """Close the client; bounded, may be repeated."""
        self._closing.set()
        with self._change:
            client, self._client = self._client, None
            self._why = "it is closed"
        if client is not None:
            client.close()

    def _main(self) -> None:
        while not self._closing.wait(self._retry_s):
            if self._try():
                return

    def _try(self) -> bool:
        try:
            client = self._client_factory(self._config, namespace=self._namespace)
        except Exception as error:
            self._why = str(error)
            self._warn_once(
                "engines.open_failed", str(error), namespace=self._namespace.name, why=str(error)
            )
            return False
        try:
            self._on_open(client)
        except Exception:
            # Without it reads may need a copy, but are as correct.
            self._log.exception("engines.work_failed", thread=threading.current_thread().name)
        with self._change:
            if not self._closing.is_set():
                self._client = client
                self._log.info("engines.opened", namespace=self._namespace.name)
                return True
        client.close()
        return True
