"""The picture of `peercache bench replay`: charts of the hit rate, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

import attrs

from peercache.cli.bench.replay import Outcome

WIDTH, HEIGHT = 720, 300
"""Of one chart; charts are below each other."""

LEFT, RIGHT, TOP, BOTTOM = 50, 190, 40, 45
"""The margins of a chart; the right one has the legend."""

COLOURS: Final = ("#2563eb", "#d97706", "#059669", "#7c3aed", "#dc2626", "#0891b2")

STEPS: Final = (1, 2, 5)


@attrs.frozen
class Curve:
    """A curve of a chart. points: (x, share), in the order of x."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: str
    is_dashed: bool = False


def of_replays(trace: str, outcomes: Sequence[Outcome]) -> str:
    """Return an SVG: the hit rate over time, and by the number of blocks if there are several."""
    over_time: list[Curve] = []
    for number, outcome in enumerate(outcomes):
        colour, blocks = COLOURS[number % len(COLOURS)], f"{outcome.blocks:,} blocks"
        over_time += [
            Curve(blocks, outcome.over_time(outcome.hits), colour),
            Curve(f"{blocks}, one LRU", outcome.over_time(outcome.ideal), colour, is_dashed=True),
        ]
    charts = [chart(f"{trace}: blocks hit, over time", "minutes of the trace", over_time)]
    if len(outcomes) > 1:
        ordered = sorted(outcomes, key=lambda outcome: outcome.blocks)
        replayed = [(float(one.blocks), one.rate(one.hits)) for one in ordered]
        ideal = [(float(one.blocks), one.rate(one.ideal)) for one in ordered]
        lines = [
            Curve("replayed", replayed, COLOURS[0]),
            Curve("one LRU", ideal, COLOURS[0], is_dashed=True),
        ]
        charts.append(chart(f"{trace}: blocks hit, by room", "blocks in all nodes", lines))
    height = HEIGHT * len(charts)
    placed = [
        f'<g transform="translate(0 {HEIGHT * number})">\n{one}\n</g>'
        for number, one in enumerate(charts)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif" font-size="12" role="img">\n'
        f"<title>{escape(trace)}: share of blocks hit</title>\n"
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n'
        + "\n".join(placed)
        + "\n</svg>\n"
    )


def chart(title: str, below: str, lines: Sequence[Curve]) -> str:
    """Return the elements of one chart: shares from 0 to 1 over a horizontal axis from 0."""
    longest = max((x for line in lines for x, _ in line.points), default=0.0) or 1.0
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, share: float) -> tuple[float, float]:
        return LEFT + width * x / longest, TOP + height * (1 - share)

    parts = [_text(LEFT, TOP - 16, title, more='font-size="14"')]
    for quarter in range(5):
        left, y = place(0, quarter / 4)
        parts += [
            f'<path d="M{left:.1f} {y:.1f}h{width}" stroke="#e5e7eb"/>',
            _text(left - 6, y + 4, f"{quarter / 4:g}", more='text-anchor="end"'),
        ]
    step = tick_step(longest)
    for number in range(int(longest / step) + 1):
        x, y = place(number * step, 0)
        parts.append(_text(x, y + 16, f"{number * step:,g}", more='text-anchor="middle"'))
    parts.append(_text(LEFT + width / 2, HEIGHT - 10, below, more='text-anchor="middle"'))
    for number, line in enumerate(lines):
        style = f'stroke="{line.colour}" stroke-width="2" fill="none"'
        style += ' stroke-dasharray="5 4"' if line.is_dashed else ""
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line.points))
        x, y = LEFT + width + 12, TOP + 10 + 18 * number
        parts += [
            f'<polyline points="{points}" {style}/>',
            f'<path d="M{x} {y}h24" {style}/>',
            _text(x + 30, y + 4, line.label),
        ]
    return "\n".join(parts)


def tick_step(longest: float) -> float:
    """Return the distance of the marks of an axis: 1, 2 or 5 times a power of ten, 10 at most."""
    power = 1.0
    while 10 * power > longest:
        power /= 10
    while True:
        for step in STEPS:
            if longest <= 10 * step * power:
                return step * power
        power *= 10


def _text(x: float, y: float, words: str, *, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="#374151" {more}>{escape(words)}</text>'
