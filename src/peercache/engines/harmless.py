"""Never raise into an engine: what a method answers where it would."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from peercache.observability.log import get_logger

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


def harmless(
    answer: Callable[[], Answer],
) -> Callable[[Callable[Arguments, Answer]], Callable[Arguments, Answer]]:
    """Have a method log what it would raise, and return what `answer` makes: a miss, or nothing."""

    def guard(method: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
        @functools.wraps(method)
        def guarded(*positional: Arguments.args, **named: Arguments.kwargs) -> Answer:
            try:
                return method(*positional, **named)
            except Exception:
                get_logger(component="engines").exception(
                    "engines.call_failed", method=method.__qualname__
                )
                return answer()

        return guarded

    return guard
