"""`peercache doctor`, from its flags to its exit status."""

from __future__ import annotations

import argparse
import os
import sys

from peercache.cli.doctor.host import gather
from peercache.cli.doctor.report import as_json, as_text
from peercache.cli.doctor.verdicts import PROBLEM, judge
from peercache.config.flags import config_from_flags
from peercache.observability.log import configure_logging


def run_doctor(args: argparse.Namespace) -> int:
    """Look, judge, print; return 1 if there is a problem."""
    # What a part logs while it is tried stands in the report already.
    configure_logging(log_format="auto", level="error")
    facts = gather(config_from_flags(args, os.environ), is_quick=args.quick)
    findings = judge(facts)
    sys.stdout.write(as_json(facts, findings) + "\n" if args.json else as_text(facts, findings))
    return int(any(finding.level == PROBLEM for finding in findings))
