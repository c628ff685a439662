"""`peercache doctor`, from its flags to its exit status."""

from __future__ import annotations

import os

import click

from peercache.cli.doctor.host import gather
from peercache.cli.doctor.report import as_json as written_as_json
from peercache.cli.doctor.report import as_text
from peercache.cli.doctor.verdicts import PROBLEM, judge
from peercache.cli.options import json_option, settings_options
from peercache.config.settings import Config
from peercache.observability.log import configure_logging


@click.command
@json_option
@click.option("--quick", is_flag=True, help="Measure nothing.")
@settings_options
def doctor(config: str | None, *, as_json: bool, quick: bool, **settings: str | None) -> int:
    """Tell what this host offers, what is wrong with it, and the line that fixes it."""
    # The report says what a part logs while it is tried.
    configure_logging(log_format="auto", level="error")
    facts = gather(Config.load(settings, file=config, environment=os.environ), is_quick=quick)
    findings = judge(facts)
    text = written_as_json(facts, findings) + "\n" if as_json else as_text(facts, findings)
    print(text, end="")
    return int(any(finding.level == PROBLEM for finding in findings))
