"""The flags of every command that takes the configuration: one `--kebab-case` flag a setting.

A flag hands its text on as it was written; only `Config` judges, so that a wrong value gets the
same sentence whether it came from a flag, a file or the environment.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from peercache.config.settings import ENVIRONMENT_PREFIX, FIELDS, Config

_SPELLINGS = {"discovery_addr": ("--discovery",)}
"""Other spellings of a flag, after the one made from the name."""

_METAVARS = {
    "int": "N",
    "bool": "true|false",
    "float": "SECONDS",
    "str": "TEXT",
    "tuple[str, ...]": "HOST:PORT[,HOST:PORT...]",
}
_SIZES = frozenset(
    {
        "pool_size",
        "granule",
        "client_uncommitted_max",
        "disk_size",
        "disk_queue",
        "disk_promote_rate",
    }
)
_NAMED = {
    "listen": "HOST:PORT",
    "advertise": "HOST",
    "home": "ipc://PATH",
    "shm_dir": "FOLDER",
    "disk_path": "FOLDER",
    "disk_free_floor": "SHARE",
    "rdma_device_names": "DEVICE[,DEVICE...]",
}


def flag_of(name: str) -> str:
    """Return the flag of a setting: `pool_size` is `--pool-size`."""
    return "--" + name.replace("_", "-")


def environment_name_of(name: str) -> str:
    """Return the environment variable of a setting: `pool_size` is `PEERCACHE_POOL_SIZE`."""
    return ENVIRONMENT_PREFIX + name.upper()


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--config FILE` and one flag for every field of `Config`."""
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file with settings under the names of these flags."
    )
    group = parser.add_argument_group(
        "settings",
        "also read from --config and from the environment (PEERCACHE_POOL_SIZE); a flag wins",
    )
    for name, field in FIELDS.items():
        help_text = str(field.metadata["help"]).replace("%", "%%")
        group.add_argument(
            flag_of(name),
            *_SPELLINGS.get(name, ()),
            dest=name,
            metavar=_metavar(name, str(field.type), field.metadata["choices"]),
            help=help_text,
        )


def config_from_flags(args: argparse.Namespace, environ: Mapping[str, str]) -> Config:
    """Merge --config, the environment and the flags; raise ConfigError for what is wrong."""
    settings = {name: getattr(args, name) for name in FIELDS}
    return Config.load(settings, file=args.config, environment=environ)


def _metavar(name: str, annotation: str, choices: tuple[str, ...]) -> str:
    if choices:
        return "|".join(choices)
    if name in _SIZES:
        return "SIZE"
    return _NAMED.get(name, _METAVARS[annotation])
