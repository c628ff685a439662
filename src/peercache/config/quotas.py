"""How quotas are written: NAME=SHARE[/DISK_SHARE][,priority=N], one rule a namespace or pattern."""

from __future__ import annotations

import math
import re
from typing import Any

from peercache.config.quantities import exact_size, parse_size
from peercache.model.quotas import PRIORITY_MAX, RULES_MAX, Amount, QuotaRule

_WANTED = "NAME=20%, NAME=4GiB or NAME=20%/40%,priority=1, with ';' between them"


def parse_quotas(value: Any) -> tuple[QuotaRule, ...]:
    """Return rules from a list of texts, or from one text with semicolons."""
    if isinstance(value, str):
        items = value.split(";")
    elif isinstance(value, (list, tuple)):
        items = [str(item) for item in value]
    else:
        raise TypeError(f"wants {_WANTED}")
    rules = tuple([_rule(item.strip()) for item in items if item.strip()])
    patterns = [rule.pattern for rule in rules]
    if len(rules) > RULES_MAX:
        raise ValueError(f"wants at most {RULES_MAX} rules")
    for pattern in patterns:
        if patterns.count(pattern) > 1:
            raise ValueError(f"{pattern!r} has two rules")
    for tier in ("pool", "disk"):
        parts = [getattr(rule, tier).part for rule in rules if rule.is_exact]
        if math.fsum(parts) > 1 + 1e-9:
            raise ValueError(f"the shares of the {tier} come to {math.fsum(parts):.0%} in all")
    return rules


def written_quotas(rules: tuple[QuotaRule, ...]) -> str:
    """Return rules as `parse_quotas` reads them."""
    return ";".join(map(_written, rules))


def _rule(text: str) -> QuotaRule:
    match = re.fullmatch(r"([^=;,]+)=([^/,=]+)(?:/([^/,=]+))?(?:,\s*priority=(\d{1,9}))?", text)
    if match is None:
        raise ValueError(f"{text!r}: wants {_WANTED}")
    pool = _amount(match[2])
    priority = int(match[4] or 0)
    if priority > PRIORITY_MAX:
        raise ValueError(f"{text!r}: a priority is at most {PRIORITY_MAX}")
    return QuotaRule(match[1].strip(), pool, _amount(match[3]) if match[3] else pool, priority)


def _amount(text: str) -> Amount:
    match = re.fullmatch(r"\s*(\d{1,3}(?:\.\d+)?)\s*%\s*", text, re.ASCII)
    if match is None:
        return Amount(size_bytes=parse_size(text))
    if float(match[1]) > 100:
        raise ValueError(f"{text!r} is more than all of it")
    return Amount(part=float(match[1]) / 100)


def _written(rule: QuotaRule) -> str:
    amounts = "/".join(map(_written_amount, dict.fromkeys((rule.pool, rule.disk))))
    return f"{rule.pattern}={amounts}" + (f",priority={rule.priority}" if rule.priority else "")


def _written_amount(amount: Amount) -> str:
    return exact_size(amount.size_bytes) if amount.size_bytes else f"{amount.part * 100:.15g}%"
