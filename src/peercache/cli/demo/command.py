"""`peercache demo`, from its flags to its exit status."""

from __future__ import annotations

import click

from peercache.cli.demo import story
from peercache.cli.demo.disk_part import tell_of_disks
from peercache.cli.options import json_option


@click.command
@json_option
@click.option("--keep-logs", metavar="FOLDER", help="Keep the logs of the nodes in this folder.")
def demo(keep_logs: str | None, *, as_json: bool) -> int:
    """Run a cluster on this machine, kill a node of it, and check every byte."""
    return story.run_demo(as_json=as_json, log_folder=keep_logs, more=tell_of_disks)
