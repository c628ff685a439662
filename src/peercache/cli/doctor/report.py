"""Writes facts and verdicts, as text for a person or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

import attrs

from peercache.cli.doctor.facts import Facts, PortFact, packet_bytes
from peercache.cli.doctor.verdicts import ADVICE, GOOD, PROBLEM, Finding

_SIGNS = {GOOD: "ok  ", ADVICE: "note", PROBLEM: "FAIL"}
TOPIC_WIDTH = 14


def as_text(facts: Facts, findings: Sequence[Finding]) -> str:
    """Return what `peercache doctor` prints."""
    lines = [f"peercache {facts.peercache}, Python {facts.python}, Linux {facts.kernel}", ""]
    for finding in findings:
        lines.append(f"{_SIGNS[finding.level]}  {finding.topic:{TOPIC_WIDTH}} {finding.text}")
        if finding.fix:
            lines.append(f"      {'':{TOPIC_WIDTH}} fix: {finding.fix}")
    if facts.ports:
        lines += ["", "RDMA ports"]
        for port in facts.ports:
            lines += _port_lines(port, dict(facts.chosen))
    problems = sum(finding.level == PROBLEM for finding in findings)
    notes = sum(finding.level == ADVICE for finding in findings)
    told = f"{problems} problem{'s' * (problems != 1)}" if problems else "no problems"
    lines += ["", f"{told}, {notes} note{'s' * (notes != 1)}" if notes else told]
    return "\n".join(lines) + "\n"


def as_json(facts: Facts, findings: Sequence[Finding]) -> str:
    """Return one JSON object with both."""
    return json.dumps(
        {
            "problems": sum(finding.level == PROBLEM for finding in findings),
            "findings": [attrs.asdict(finding) for finding in findings],
            "facts": facts.as_dict(),
        }
    )


def _port_lines(port: PortFact, chosen: dict[str, int]) -> list[str]:
    address = f"LID {port.lid}" if port.lid else "interface MTU unknown"
    if port.mtu:
        address = f"interface MTU {port.mtu}, packets of {packet_bytes(port.mtu)}"
    head = f"  {port.name}  {port.state}  {port.link_layer}  {port.rate_gbps:g} Gb/s  {address}"
    marks = [
        f"    {'->' if chosen.get(port.name) == index else '  '} GID {index}  {text}  {kind}"
        for index, text, kind in port.gids
    ]
    return [head, *marks]
