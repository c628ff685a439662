"""The copies between device and host, for SGLang 0.5.12, which imports them on every machine."""

from host_copies import *  # noqa: F403 - all that are there
