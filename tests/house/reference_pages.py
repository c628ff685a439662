"""The parts of docs that are made from the code: `make docs` writes them.

Each page has parts of its own between two markers; what people wrote around them stays.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs

from benchmarks import peers_faults_report, peers_report, ttft_report
from peercache import errors
from peercache.cli.options import BASIC
from peercache.config.settings import SETTINGS
from peercache.http.prefix import openapi
from peercache.model.member import Member
from peercache.observability import reasons as miss_reasons
from peercache.observability.latency import Latency
from peercache.observability.metrics import Metrics
from peercache.observability.reasons import MISS_REASONS
from peercache.wire.envelope import MESSAGES
from peercache.wire.messages.declared import Receiver, Role
from sims import swept
from tests.house import alerts, board
from tests.system.endurance import picture as soak_report

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "reference"
BEGIN = "<!-- made by `make docs`: begin -->"
END = "<!-- made by `make docs`: end -->"

LEVELS = ("debug", "info", "warning", "error", "exception")


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


OF_CLIENTS = (
    "embedded", "namespace", "mirror_pulls", "verify", "op_timeout_s", "exists_timeout_s",
    "location_cache_entries", "object_events", "event_readers", "otel_traces", "decline",
    "page_compute_ms",
)  # fmt: skip
"""Settings that a node ignores."""

OF_BOTH = (
    "cluster", "home", "insecure", "tls_ca", "tls_cert", "tls_key", "tls_crl", "share_group",
    "share_uids", "shm_dir", "granule", "hugepages_dir", "fabric", "max_channels_per_peer",
    "directory_replicas", "rdma_device_names", "rdma_gid_index", "rdma_traffic_class",
    "rdma_service_level", "rdma_timeout_ms", "rdma_retry_count", "rdma_clear_text", "log_level",
)  # fmt: skip
"""Settings that nodes and clients read. All others are of nodes."""


def place_of(setting: str) -> str:
    """Return which processes read a setting."""
    return "client" if setting in OF_CLIENTS else "both" if setting in OF_BOTH else "node"


FOLLOWED = (
    "tls_ca", "tls_cert", "tls_key", "tls_crl", "etcd_ca", "etcd_cert", "etcd_key",
    "http_token_file",
)  # fmt: skip
"""Settings whose files are read again when they change."""

EQUAL = ("cluster", "insecure", "granule", "directory_replicas")
"""Settings that all nodes have alike."""


def change_of(setting: str) -> str:
    """Return how a setting of a running cluster is changed."""
    return "file" if setting in FOLLOWED else "cluster" if setting in EQUAL else "restart"


def groups_of_settings() -> dict[str, list[str]]:
    """Return the settings by group: the basic ones, then the others as the source groups them."""
    groups = {"Basic settings": [name for name in SETTINGS if name in BASIC]}
    source = (ROOT / "src" / "peercache" / "config" / "settings.py").read_text()
    group = ""
    for line in source.partition("class Config:")[2].splitlines():
        if heading := re.match(r"    # --- (.*)", line):
            group = f"Advanced: {heading[1]}"
        field = re.match(r"    (\w+): .* = (?:setting|switch)\(", line)
        if field and field[1] not in BASIC:
            groups.setdefault(group, []).append(field[1])
    assert {name for names in groups.values() for name in names} == set(SETTINGS)
    return groups


def configuration() -> str:
    """Return the tables of settings, a group each."""
    head = ["setting", "flag", "environment", "default", "read by", "change", "meaning"]
    parts = []
    for group, names in groups_of_settings().items():
        rows = [
            [
                f"`{name}`",
                f"`{row.flag}`",
                f"`{row.environment}`",
                f"`{row.written_default}`" if row.written_default else "",
                place_of(name),
                change_of(name),
                row.meaning,
            ]
            for name in names
            for row in [SETTINGS[name]]
        ]
        parts.append(f"## {group}\n\n{table(head, rows)}")
    return "\n\n".join(parts)


def metrics() -> str:
    """Return the table of metrics, as /metrics names them."""
    rows, labels_of = [], labels_of_metrics()
    for family in Metrics().registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in labels_of[family.name])
        rows.append([f"`{name}`", family.type, labels, family.documentation])
    reasons = [[f"`{reason}`", _comment_of(reason)] for reason in MISS_REASONS]
    return (
        table(["metric", "type", "labels", "meaning"], rows)
        + "\n\n"
        + table(["reason", "why a page was a miss, or was not stored"], reasons)
    )


def labels_of_metrics() -> dict[str, tuple[str, ...]]:
    """Return the labels of each metric, by the name of its family."""
    ours = [value for value in vars(Metrics()).values() if not hasattr(value, "register")]
    labels = {each.name: each.labels for each in ours if isinstance(each, Latency)}
    return labels | {each._name: each._labelnames for each in ours if hasattr(each, "_labelnames")}


def _comment_of(reason: str) -> str:
    """Return the comment next to a reason's constant, as a sentence."""
    for line in inspect.getsource(miss_reasons).splitlines():
        if f' = "{reason}"' in line:
            text = line.partition("#")[2].strip()
            return text[0].upper() + text[1:] + "."
    raise LookupError(reason)


def messages() -> str:
    """Return the table of messages with their tags, senders and receivers."""
    rows = []
    for kind in MESSAGES:
        declared = kind.declared
        senders = ", ".join(role.value for role in Role if role in declared.senders)
        rows.append(
            [
                str(declared.tag),
                f"`{kind.__name__}`",
                _fields(kind),
                _first_sentence(kind),
                senders,
                "" if declared.to is Receiver.ASKER else declared.to.value,
            ]
        )
    return table(["tag", "message", "fields, in order", "meaning", "sent by", "to"], rows) + (
        f"\n\nA `Member` field holds: {_fields(Member)}."
    )


def _fields(kind: type[Any]) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in attrs.fields(kind))


def _first_sentence(kind: type[Any]) -> str:
    return " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())


def exceptions() -> str:
    """Return the tree of exceptions, and what each means."""
    tree = (errors.__doc__ or "").split("\n\n")[1]
    rows = []
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, errors.PeerCacheError):
            facts = [field.name for field in attrs.fields(kind)] if attrs.has(kind) else []
            rows.append(
                [f"`{name}`", ", ".join(f"`{fact}`" for fact in facts), _first_sentence(kind)]
            )
    lines = "\n".join(line[4:] for line in tree.splitlines())
    return f"```text\n{lines}\n```\n\n" + table(["exception", "facts", "meaning"], rows)


def log_events() -> str:
    """Return the table of log events, found in the sources."""
    rows = sorted({tuple(row) for row in _logged()})
    return table(["event", "level", "facts", "file"], [list(row) for row in rows])


def _logged() -> Iterator[list[str]]:
    for path in sorted((ROOT / "src" / "peercache").rglob("*.py")):
        tree = ast.parse(path.read_text())
        constants = {
            node.targets[0].id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        module = str(path.relative_to(ROOT / "src" / "peercache"))
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            teller = ast.unparse(node.func.value)
            is_log = node.func.attr in LEVELS and "log" in teller
            is_once = node.func.attr.endswith("warn_once")
            if not (is_log or is_once) or not node.args:
                continue
            for event in _events(node.args[0], constants):
                level = node.func.attr.replace("exception", "error")
                level = "warning" if is_once else level
                words = [word.arg for word in node.keywords if word.arg not in (None, "exc_info")]
                facts = ", ".join(f"`{word}`" for word in words)
                yield [f"`{event}`", level, facts, f"`{module}`"]


def _events(node: ast.expr, constants: dict[str, Any]) -> Iterator[str]:
    """Yield the events that an expression may name: a string, a constant, a choice of them."""
    for part in ast.walk(node):
        value = part.value if isinstance(part, ast.Constant) else None
        if isinstance(part, ast.Name):
            value = constants.get(part.id)
        if isinstance(value, str) and "." in value:
            yield value


def folders() -> str:
    """Return the tree of the package: each folder with the first line of its `__init__`."""
    source = ROOT / "src" / "peercache"
    lines = ["src/peercache/"]
    for path in sorted(source.rglob("__init__.py")):
        folder = path.parent.relative_to(source)
        if not folder.parts:
            continue
        first = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
        name = "  " * len(folder.parts) + folder.name + "/"
        lines.append(f"{name:<18}{first}")
    return "```text\n" + "\n".join(lines) + "\n```"


def compared_with_others() -> str:
    """Return the tables of the figures that `make peers` has measured."""
    return peers_report.markdown(peers_report.measured())


def compared_in_short() -> str:
    """Return the sentences that performance.md begins with, of the same figures."""
    return peers_report.summary(peers_report.measured())


def compared_with_mooncake() -> str:
    """Return the tables of comparison.md, of the same figures."""
    return peers_report.with_mooncake(peers_report.measured())


def compared_under_faults() -> str:
    """Return the tables of what `make peers-faults` has recorded."""
    return peers_faults_report.markdown(peers_faults_report.measured())


def time_to_first_token() -> str:
    """Return the tables of the figures that `make ttft` has measured."""
    return ttft_report.markdown(ttft_report.measured())


MADE: dict[str, tuple[Callable[[], str], ...]] = {
    "configuration.md": (configuration,),
    "metrics.md": (metrics,),
    "wire-protocol.md": (messages,),
    "errors.md": (exceptions,),
    "log-events.md": (log_events,),
    "../explanation/architecture.md": (folders,),
    "../explanation/comparison.md": (compared_with_mooncake, compared_under_faults),
    "../explanation/simulation.md": (swept.shown,),
    "../explanation/testing.md": (lambda: soak_report.shown(soak_report.measured()),),
    "../explanation/performance.md": (
        compared_in_short,
        compared_with_others,
        time_to_first_token,
    ),
    "../how-to/runbook.md": (alerts.runbook,),
}
"""The made parts of each page, in their order."""

FILES: dict[str, Callable[[], str]] = {
    "../../deploy/prometheus/rules.yml": alerts.rules,
    "../../deploy/prometheus/rules_test.yml": alerts.rules_test,
    "../../deploy/grafana/peercache.json": board.board,
    "prefix-index.openapi.json": lambda: json.dumps(openapi(), indent=1) + "\n",
    "../explanation/pages-compared.svg": lambda: peers_report.rates_picture(
        peers_report.measured()
    ),
    "../explanation/exists-compared.svg": lambda: peers_report.asking_picture(
        peers_report.measured()
    ),
    "../explanation/failures-compared.svg": lambda: peers_report.failures_picture(
        peers_report.measured()
    ),
    "../explanation/soak.svg": lambda: soak_report.picture(soak_report.measured()),
    "../explanation/time-to-first-token.svg": lambda: ttft_report.picture(ttft_report.measured()),
}
"""Whole files that are made: monitoring, and pictures."""


def with_made_part(page: str, text: str) -> str:
    """Return the text of a page with its made parts as the code has them now."""
    done, rest = "", text
    for make in MADE[page]:
        before, found, rest = rest.partition(BEGIN)
        _, closed, rest = rest.partition(END)
        if not found or not closed:
            raise ValueError(f"{page} has no place for its made part")
        done += f"{before}{BEGIN}\n\n{make()}\n\n{END}"
    return done + rest


if __name__ == "__main__":
    for name in MADE:
        path = PAGES / name
        path.write_text(with_made_part(name, path.read_text()))
    for name, draw in FILES.items():
        (PAGES / name).write_text(draw())
