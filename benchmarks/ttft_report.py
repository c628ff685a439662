"""Shows the figures of `benchmarks.ttft_sglang`: a text, and the table and picture of the docs.

`make ttft` measures and writes FIGURES; `make docs` makes table and picture of them.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).with_name("ttft_sglang.json")

Figures = dict[str, Any]

COLD = "cold_s"

CASES = (
    (COLD, "computed (cold)"),
    ("warm_tcp_s", "PeerCache over tcp"),
    ("warm_shm_s", "PeerCache over shared memory"),
    ("linked_tcp_s", "PeerCache's linker over tcp, without a host tier"),
    ("linked_shm_s", "PeerCache's linker over shared memory, without a host tier"),
    ("host_memory_s", "the engine's own host memory"),
)

STEPS = (
    ("until_exists_s", "SGLang, until it asks the store", False),
    ("exists_s", "PeerCache: `batch_exists`, or the linker's `lookup`", True),
    ("until_get_s", "SGLang, until it reads", False),
    ("get_s", "PeerCache: `batch_get_v1`, or `load`", True),
    ("rest_s", "SGLang: load to the device, compute the rest", False),
)
"""Steps of a warm prompt, in their order, and whether they are PeerCache's."""

COLUMNS = {
    "tcp": "tcp",
    "first_tcp": "tcp, first prompt",
    "shm": "shm",
    "first_shm": "shm, first prompt",
    "linked_tcp": "linker, tcp",
    "linked_shm": "linker, shm",
}


MEMORY = {"engine": "engine, MiB", "nodes": "nodes, MiB"}
"""Columns of memory: that of the engine's processes, and that of both nodes."""

MEMORY_NOTE = (
    "The memory is that of the engine's processes, with its device pool, which is ordinary memory "
    "here, and that of both nodes; pages that several of them have mapped are divided among them, "
    "and files are not counted."
)


def measured() -> Figures:
    """Return the figures that the documentation shows."""
    figures: Figures = json.loads(FIGURES.read_text())
    return figures


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"


def cases(figures: Figures) -> list[tuple[str, str]]:
    """Return the cases that were measured."""
    return [(name, label) for name, label in CASES if name in figures]


def columns(figures: Figures) -> list[str]:
    """Return the columns of the steps that were measured."""
    return [column for column in COLUMNS if column in figures["steps"]]


def heads(figures: Figures) -> list[str]:
    """Return the heads of these columns."""
    return [COLUMNS[column] for column in columns(figures)]


def times(figures: Figures) -> list[list[str]]:
    """Return rows: the source of the tokens, milliseconds, two ratios, and MEMORY if measured."""
    rows = []
    for name, label in cases(figures):
        lines = [(label, figures[name])]
        if name in figures["first"]:
            lines.append((f"{label}, first prompt of a store", figures["first"][name]))
        for line, seconds in lines:
            to_host = seconds / figures["host_memory_s"]
            to_cold = figures["cold_s"] / seconds
            row = [line, _ms(seconds), f"{to_host:.2f}", f"{to_cold:.1f}"]
            rows.append([*row, *memory(figures, name)])
    return rows


def memory(figures: Figures, case: str) -> list[str]:
    """Return MiB of the engine and of the nodes in a case; nothing if they were not measured."""
    if "memory_bytes" not in figures:
        return []
    if case == COLD:
        return [""] * len(MEMORY)
    tier = "linker" if case.startswith("linked") else "host_tier"
    return [f"{figures['memory_bytes'][tier][of] / 2**20:,.0f}" for of in MEMORY]


def steps(figures: Figures) -> list[list[str]]:
    """Return rows: a step, and its milliseconds in each of COLUMNS."""
    return [
        [label, *(_ms(figures["steps"][column][step]) for column in columns(figures))]
        for step, label, _ in STEPS
    ]


def setting(figures: Figures) -> str:
    """Return a sentence about what was measured."""
    shape = figures["shape"]
    return (
        f"Prompts of {figures['prompt_tokens']:,} tokens, of which {figures['cached_tokens']:,} "
        f"can be cached, in pages of {figures['page_tokens']} tokens and "
        f"{figures['page_bytes'] / 2**20:g} MiB; a random Llama with "
        f"{shape['num_hidden_layers']} layers, hidden size {shape['hidden_size']}, "
        f"{shape['num_attention_heads']} heads, {shape['num_key_value_heads']} KV heads of "
        f"{shape['head_dim']}, {shape['torch_dtype']}; SGLang 0.5.23 on "
        f"{figures['processors']} processors, load average {figures['load_average']:g}; "
        f"medians of {figures['rounds']}."
    )


def memory_heads(figures: Figures) -> list[str]:
    """Return the heads of the columns of memory, if it was measured."""
    return list(MEMORY.values()) if "memory_bytes" in figures else []


def memory_note(figures: Figures) -> list[str]:
    """Return what the columns of memory count, if it was measured."""
    return [MEMORY_NOTE] if "memory_bytes" in figures else []


def text(figures: Figures) -> str:
    """Return the text for a terminal."""
    lines = [setting(figures), ""]
    head = ["tokens come from", "ms", "/ host", "cold /", *memory_heads(figures)]
    lines += [
        f"{row[0]:<56}" + "".join(f"{cell:>13}" for cell in row[1:])
        for row in (head, *times(figures))
    ]
    lines += [
        "",
        f"{'ms of a warm prompt':<48}" + "".join(f"{head:>18}" for head in heads(figures)),
    ]
    lines += [
        f"{row[0]:<48}" + "".join(f"{cell:>18}" for cell in row[1:]) for row in steps(figures)
    ]
    lines += ["", f"warm at most {figures['ratio']:.2f} times the time from host memory"]
    return "\n".join([*lines, *memory_note(figures)])


def markdown(figures: Figures) -> str:
    """Return the part of docs/explanation/performance.md."""
    ratios = ("ratio to host memory", "ratio of cold to it")
    first = [["tokens come from", "ms", *ratios, *memory_heads(figures)]]
    second = [["step of a warm prompt, ms", *heads(figures)]]
    return "\n\n".join(
        [
            setting(figures),
            _table(first + times(figures)),
            _table(second + steps(figures)),
            *memory_note(figures),
        ]
    )


def _table(rows: list[list[str]]) -> str:
    ruled = [rows[0], ["---", *["---:"] * (len(rows[0]) - 1)], *rows[1:]]
    return "\n".join("| " + " | ".join(row) + " |" for row in ruled)


WIDTH, LEFT, ROW, BAR = 860, 250, 44, 24
OURS, THEIRS = "#d9480f", "#9aa5b1"


def picture(figures: Figures) -> str:
    """Return an SVG: one bar per case, with PeerCache's share of the time in another colour."""
    scale = (WIDTH - LEFT - 90) / figures["cold_s"]
    parts = []
    for number, (name, label) in enumerate(cases(figures)):
        y = 20 + number * ROW
        middle = y + BAR / 2 + 5
        shown = escape(label, quote=False)
        parts.append(f'<text x="{LEFT - 10}" y="{middle}" text-anchor="end">{shown}</text>')
        x = float(LEFT)
        for seconds, is_ours in _pieces(figures, name):
            width = seconds * scale
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" '
                f'fill="{OURS if is_ours else THEIRS}"/>'
            )
            x += width
        parts.append(f'<text x="{x + 8:.1f}" y="{middle}">{_ms(figures[name])} ms</text>')
    y = 20 + len(cases(figures)) * ROW
    for x, colour, label in ((LEFT, THEIRS, "SGLang"), (LEFT + 100, OURS, "PeerCache")):
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{colour}"/>')
        parts.append(f'<text x="{x + 20}" y="{y + 12}">{label}</text>')
    height = y + 30
    title = f"Time to first token of a prompt of {figures['prompt_tokens']:,} tokens"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif" font-size="14" role="img">\n<title>{title}</title>\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _pieces(figures: Figures, name: str) -> list[tuple[float, bool]]:
    """Return the pieces of a bar, which add up to its time: seconds, and whether they are ours."""
    fabric = name.removeprefix("warm_").removesuffix("_s")
    taken = figures["steps"].get(fabric)
    if taken is None:
        return [(figures[name], False)]
    whole = sum(taken[step] for step, _, _ in STEPS)
    # Medians of steps do not add up to the median of their sum.
    return [(taken[step] / whole * figures[name], ours) for step, _, ours in STEPS]
