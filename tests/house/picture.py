"""The picture of docs/explanation/architecture.md and README.md: `make docs` draws it."""

from __future__ import annotations

from html import escape

WIDTH, HEIGHT = 900, 430

Box = tuple[int, int, int, int]

# Left, top, width and height of what each host has.
OTHER = 480
"""How far the second host is to the right of the first one."""
HOST: Box = (20, 16, 380, 356)
ENGINE: Box = (40, 52, 340, 76)
NODE: Box = (40, 164, 340, 192)
INNER, OUTER = 60, 220
"""Left of the two columns in a node; the second host has them the other way round."""

CONTROL, DATA, LINE = "#1971c2", "#d9480f", "#495057"


def picture() -> str:
    """Return the picture of a set on one host and a get on another, as SVG."""
    drawn = [
        "<title>A set on one host and a get on another</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        *(_arrow_head(name, color) for name, color in (("c", CONTROL), ("d", DATA))),
        *_host(0, "host A, runs prefill", INNER, OUTER),
        *_host(OTHER, "host B, runs decode", OUTER, INNER),
        # The numbers are those of the two lines below.
        *_arrow("d", [(100, 128), (100, 200)], (100, 146), "1"),
        *_arrow("c", [(130, 260), (130, 272), (610, 272), (610, 260)], (450, 272), "2"),
        *_arrow("c", [(610, 128), (610, 200)], (610, 146), "3"),
        *_arrow("d", [(160, 200), (160, 146), (450, 146), (450, 90), (520, 90)], (450, 118), "4"),
        *_text(450, 396, "middle", "1 set: the page is copied once, into the memory of its host."
               " 2 A record of 56 bytes goes to its owner."),
        *_text(450, 416, "middle", "3 exists and get: the owner knows where the page is."
               " 4 get: its bytes are read there, by RDMA READ, shared memory or TCP."),
    ]  # fmt: skip
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="13" role="img">\n' + "\n".join(drawn) + "\n</svg>\n"
    )


def _host(x: int, name: str, pool: int, shard: int) -> list[str]:
    """Return a host with its engine and its node; pool, shard: the columns that begin with them."""
    grey = "#f1f3f5"

    def inner(left: int, top: int) -> Box:
        return (x + left, top, 140, 60)

    def moved(box: Box) -> Box:
        return (x + box[0], *box[1:])

    return [
        *_box(moved(HOST), grey, name),
        *_box(moved(ENGINE), "#ffffff", "engine process", "SGLang, vLLM or LMCache",
              "PeerCache client"),
        *_box(moved(NODE), "#ffffff", "node"),
        *_box(inner(pool, 200), "#ffe8cc", "", "pool", "published memory"),
        *_box(inner(pool, 284), grey, "", "disk tier", "optional"),
        *_box(inner(shard, 200), "#d0ebff", "", "directory shard", "who has which page"),
        *_box(inner(shard, 284), grey, "", "membership, ring", "who owns which record"),
    ]  # fmt: skip


def _box(box: Box, fill: str, title: str, *lines: str) -> list[str]:
    """Return a box with a title at its top, and lines in its middle: the first one is bold."""
    x, y, width, height = box
    drawn = [
        (
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}" '
            f'stroke="{LINE}"/>'
        )
    ]
    if title:
        drawn += _text(x + 12, y + 21, "start", title, weight="bold")
    top = y + (44 if title else height / 2 - 4)
    for number, line in enumerate(lines):
        weight = "normal" if number or title else "bold"
        drawn += _text(x + width / 2, top + 18 * number, "middle", line, weight=weight)
    return drawn


def _text(x: float, y: float, anchor: str, text: str, *, weight: str = "normal") -> list[str]:
    return [
        (
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-weight="{weight}">'
            f"{escape(text)}</text>"
        )
    ]


def _arrow_head(name: str, color: str) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" '
        f'markerHeight="6" orient="auto"><path d="M0 0L8 4L0 8z" fill="{color}"/></marker>'
    )


def _arrow(kind: str, points: list[tuple[int, int]], at: tuple[int, int], label: str) -> list[str]:
    """Return an arrow along points, and its number in a circle."""
    color, width = (DATA, 4) if kind == "d" else (CONTROL, 2)
    way = " ".join(f"{x},{y}" for x, y in points)
    drawn = [
        (
            f'<polyline points="{way}" fill="none" stroke="{color}" stroke-width="{width}" '
            f'marker-end="url(#{kind})"/>'
        )
    ]
    if label:
        drawn.append(f'<circle cx="{at[0]}" cy="{at[1]}" r="10" fill="{color}"/>')
        drawn.append(
            f'<text x="{at[0]}" y="{at[1] + 5}" text-anchor="middle" fill="#ffffff" '
            f'font-weight="bold">{label}</text>'
        )
    return drawn
