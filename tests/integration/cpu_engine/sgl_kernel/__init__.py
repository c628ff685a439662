"""In place of the CPU build of sgl_kernel, which is not on PyPI: every name is there, none works.

What runs instead are SGLang's own fallbacks in plain torch; one that is really needed reports it.
"""

from collections.abc import Callable
from typing import Any

__version__ = "0.0.0"


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in on this machine")

    kernel.__name__ = name
    return kernel
