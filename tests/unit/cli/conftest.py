"""Commands set the log of their process up; tests run some in a process that runs other tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from peercache.observability import log


@pytest.fixture(autouse=True)
def log_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what a command does to the log: tests of other parts read warnings there."""
    logger = logging.getLogger(log.LOGGER)
    monkeypatch.setattr(log, "_rendering", dict(log._rendering))
    monkeypatch.setattr(logger, "handlers", list(logger.handlers))
    monkeypatch.setattr(logger, "propagate", logger.propagate)
    level = logger.level
    yield
    logger.setLevel(level)  # Not its attribute: loggers remember which levels they write.
