"""The client of an adapter: there at once, or as soon as the home node is."""

from __future__ import annotations

import logging
from concurrent.futures import Future

import pytest

from peercache.engines.lanes import harmless
from peercache.engines.late_client import OP_TIMEOUT_S, LateClient, engine_config, level_named
from peercache.errors import ConfigError, PeerUnreachable
from peercache.model.keys import Namespace
from peercache.observability.log import LOGGER, get_logger
from tests.pace import TIMEOUT_S, wait_until
from tests.unit.engines.fake_client import FakeClient

SPACE = Namespace("test")


def late_client(fake: FakeClient) -> LateClient:
    """Return an attachment that tries often."""
    return LateClient(
        engine_config({}, {}), SPACE, get_logger(), client_factory=fake.open, retry_s=0.01
    )


def test_a_client_is_there_at_once() -> None:
    """The first call of an engine is served."""
    fake = FakeClient()
    attached = late_client(fake)
    assert attached.client is fake
    assert fake.namespace == SPACE
    attached.close()
    attached.close()
    assert fake.is_closed
    assert attached.client is None


def test_a_home_node_that_comes_later_is_found() -> None:
    """An engine starts without its cache, and has it when the node is there."""
    fake = FakeClient()
    fake.problem = PeerUnreachable("the home node")
    attached = late_client(fake)
    assert attached.client is None
    status = attached.status()
    assert not status["is_healthy"]
    assert (status["reason"], status["why"]) == ("not_open", str(fake.problem))
    fake.problem = None
    wait_until(lambda: attached.client is fake)
    assert attached.status()["is_healthy"]
    attached.close()


def test_a_client_that_comes_after_the_close_is_closed() -> None:
    """A node that is found while the engine stops keeps no client of it."""
    fake = FakeClient()
    made: Future[LateClient] = Future()
    attached = LateClient(
        engine_config({}, {}),
        SPACE,
        get_logger(),
        on_open=lambda _: made.result(TIMEOUT_S).close(),
        client_factory=_second_try(fake),
        retry_s=0.01,
    )
    # Its thread may have opened the client before this line.
    made.set_result(attached)
    wait_until(lambda: fake.is_closed)
    assert attached.client is None


def _second_try(fake: FakeClient):  # noqa: ANN202 - a stand-in of Client.open
    tries: list[int] = []

    def open_client(*given: object, **named: object) -> FakeClient:
        tries.append(1)
        if len(tries) == 1:
            raise PeerUnreachable("the home node")
        return fake

    return open_client


def test_an_engine_waits_a_second_unless_a_setting_says_more() -> None:
    """The JSON line and the environment come before the default of adapters."""
    assert engine_config({}, {}).op_timeout_s == OP_TIMEOUT_S
    assert engine_config({}, {"PEERCACHE_OP_TIMEOUT_S": "3"}).op_timeout_s == 3
    assert engine_config({"op_timeout_s": 2}, {"PEERCACHE_OP_TIMEOUT_S": "3"}).op_timeout_s == 2
    with pytest.raises(ConfigError, match="pool_sise"):
        engine_config({"pool_sise": "1GiB"}, {})


def test_what_would_raise_answers() -> None:
    """The engine gets the harmless answer, and other answers as they are."""

    @harmless(lambda: -1)
    def half(number: int) -> int:
        if number % 2:
            raise ValueError(number)
        return number // 2

    assert [half(4), half(3)] == [2, -1]


def test_the_log_level_of_an_engines_settings_counts() -> None:
    """That of the JSON line, then that of the environment; the default is the engine's own."""
    for settings, environment, level in (
        ({"log_level": "debug"}, {"PEERCACHE_LOG_LEVEL": "error"}, "debug"),
        ({}, {"PEERCACHE_LOG_LEVEL": "error"}, "error"),
        ({}, {}, ""),
    ):
        assert level_named(engine_config(settings, environment), settings, environment) == level
    logger = logging.getLogger(LOGGER)
    before = logger.level
    try:
        engine_config({"log_level": "debug"}, {}, engine="an engine")
        assert logger.level == logging.DEBUG
    finally:
        logger.setLevel(before)
