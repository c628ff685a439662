"""Details of a node's process for a person: its threads, its environment and its settings."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from peercache.config.settings import SETTINGS, Config
from peercache.config.table import FILE, FOLDER
from peercache.model.status import Detail, Thread

SHOWN = ("PEERCACHE_", "SGLANG_", "PYTHON", "UCX_", "NCCL_", "RDMAV_", "IBV_", "OMP_", "MALLOC_")
"""Beginnings of the names of environment variables that change how a node works. Others are not
shown: they are no business of the cluster."""

MASKED = "(masked)"

_SECRET = re.compile(r"SECRET|TOKEN|PASSW|CREDENTIAL|PRIVATE|_KEY\b|APIKEY", re.IGNORECASE)
_USER = re.compile(r"//[^/\s]+@")
"""Up to the last @ before the path: a password may hold one."""

THREADS_MAX = 128


def details(config: Config) -> Detail:
    """Return what this process is, now."""
    settings = {name: row.kind.written(getattr(config, name)) for name, row in SETTINGS.items()}
    # The path of a file with a secret in it is none.
    paths = {
        name: settings.pop(name) for name, row in SETTINGS.items() if row.kind in (FILE, FOLDER)
    }
    return Detail(
        threads=threads(),
        environment=masked(shown(os.environ)),
        settings=dict(sorted((masked(settings) | paths).items())),
    )


def shown(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change how a node works, by name."""
    return {name: environment[name] for name in sorted(environment) if name.startswith(SHOWN)}


def masked(values: Mapping[str, str]) -> dict[str, str]:
    """Return values without what is secret: by the name, and what stands before @ in an address."""
    return {
        name: MASKED if value and _SECRET.search(name) else _USER.sub(f"//{MASKED}@", value)
        for name, value in values.items()
    }


def threads() -> tuple[Thread, ...]:
    """Return the threads of this process, the busiest first; the compiled ones too."""
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            text = (task / "stat").read_text(errors="replace")
        except OSError:
            continue  # It has ended meanwhile.
        name, _, rest = text.partition("(")[2].rpartition(")")
        fields = rest.split()
        cpu_s = (int(fields[11]) + int(fields[12])) * tick_s
        found.append(Thread(name=name, cpu_s=cpu_s, state=fields[0]))
    return tuple(sorted(found, key=lambda thread: -thread.cpu_s)[:THREADS_MAX])
