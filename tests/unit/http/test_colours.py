"""The colours of the dashboard, light and dark: texts are readable, and lines are told apart."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

CSS = files("peercache.http").joinpath("files").joinpath("dashboard.css").read_text()

TEXTS = [
    *((text, back) for text in ("text", "faint", "accent", "warn") for back in ("back", "card")),
    ("bad", "back"),
    *((kind, f"{kind}-back") for kind in ("good", "bad", "warn", "note")),
]
LINES = [f"c{place}" for place in range(6)]


def _palettes() -> dict[str, dict[str, str]]:
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6})\b", block))
        for block in re.findall(r":root \{([^}]+)\}", CSS)
    )
    return {"light": light, "dark": light | dark}


def _luminance(colour: str) -> float:
    digits = colour.lstrip("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("name", ["light", "dark"])
def test_colours_have_the_contrast_of_wcag_aa(name: str) -> None:
    """4.5 to 1 for texts, 3 to 1 for lines and marks."""
    palette = _palettes()[name]
    for text, back in TEXTS:
        assert _contrast(palette[text], palette[back]) >= 4.5, (text, back)
    for line in LINES:
        assert _contrast(palette[line], palette["card"]) >= 3.0, line


def test_contrast_is_computed_as_wcag_does() -> None:
    """Black on white is 21, and a grey that designers like too much is not enough."""
    assert _contrast("#000", "#fff") == pytest.approx(21.0)
    assert _contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def test_every_colour_is_of_the_palette() -> None:
    """A colour beside the palette is the same in the dark."""
    rest = re.sub(r":root \{[^}]+\}", "", CSS)
    assert re.findall(r"#[0-9a-fA-F]{3,8}\b", rest) == []
