"""Charts: lines and areas over time, as paths of SVG.

Pure geometry. Texts stand beside a chart in HTML, so that they are readable at every width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import attrs
import numpy as np
import numpy.typing as npt

WIDTH, HEIGHT = 600, 120
"""Units of the drawing; the page stretches it."""

LINES_MAX = 6
"""As many as there are colours that people tell apart."""

Values = npt.NDArray[np.float64]
Written = Callable[[float], str]


@attrs.frozen
class ChartLine:
    """One line or area. place: of its colour, 0 to LINES_MAX - 1; now: its last value, in words."""

    label: str
    path: str
    now: str
    place: int


@attrs.frozen
class Chart:
    """A chart of several lines over the same time.

    name:   of its place in the page.
    top, bottom: the values at the edges, in words; bottom is "" for zero.
    grid:   the path of the lines behind.
    areas:  whether the lines are stacked and filled.
    """

    name: str
    title: str
    lines: tuple[ChartLine, ...]
    top: str
    bottom: str = ""
    grid: str = "M0 .5H600M0 60H600M0 119.5H600"
    areas: bool = False

    @property
    def summary(self) -> str:
        """The chart in one sentence, for those who do not see it."""
        told = ", ".join(f"{line.label} {line.now}" for line in self.lines)
        return f"{self.title}: {told or 'nothing yet'}"


def line_chart(
    name: str,
    title: str,
    series: Sequence[tuple[str, Values]],
    written: Written,
    *,
    top: float = 0.0,
    unit: float = 10.0,
) -> Chart:
    """Return a chart of lines. top: the least value at the upper edge; unit: 1024 for bytes."""
    highest = _nice(max([top, *(_highest(values) for _, values in series)]), unit)
    lines = [
        ChartLine(label, _line(values / highest), _last(values, written), place % LINES_MAX)
        for place, (label, values) in enumerate(series)
    ]
    return Chart(name, title, tuple(lines), written(highest))


def decade_chart(
    name: str, title: str, series: Sequence[tuple[str, Values]], written: Written
) -> Chart:
    """Return a chart of lines on a logarithmic scale, with a line behind for each power of ten.

    Times of one call lie between microseconds and seconds: on a straight scale only the slowest
    are seen.
    """
    known = np.concatenate([values[np.isfinite(values) & (values > 0)] for _, values in series])
    low = math.floor(math.log10(known.min())) if len(known) else -4
    high = max(math.ceil(math.log10(known.max())) if len(known) else -1, low + 1)
    lines = [
        ChartLine(
            label,
            _line((np.log10(np.where(values > 0, values, np.nan)) - low) / (high - low)),
            _last(values, written),
            place % LINES_MAX,
        )
        for place, (label, values) in enumerate(series)
    ]
    steps = (HEIGHT - 1) / (high - low)
    grid = "".join(f"M0 {0.5 + step * steps:.1f}H{WIDTH}" for step in range(high - low + 1))
    return Chart(name, title, tuple(lines), written(10.0**high), written(10.0**low), grid)


def area_chart(
    name: str, title: str, series: Sequence[tuple[str, Values]], written: Written
) -> Chart:
    """Return a chart of stacked areas, the largest first; the smaller ones become one."""
    known = [(label, values) for label, values in series if _highest(values) > 0]
    known.sort(key=lambda each: -float(np.nansum(each[1])))
    if len(known) > LINES_MAX:
        rest = np.nansum([values for _, values in known[LINES_MAX - 1 :]], axis=0)
        known = [*known[: LINES_MAX - 1], ("others", rest)]
    bottoms: list[Values] = [np.zeros(len(values)) for _, values in known[:1]]
    for _, values in known:
        bottoms.append(bottoms[-1] + np.nan_to_num(values))
    highest = _nice(_highest(bottoms[-1]) if bottoms else 0.0, 10.0)
    lines = [
        ChartLine(
            label,
            _area(bottoms[place] / highest, bottoms[place + 1] / highest, np.isfinite(values)),
            _last(values, written),
            place,
        )
        for place, (label, values) in enumerate(known)
    ]
    return Chart(name, title, tuple(lines), written(highest), areas=True)


def _highest(values: Values) -> float:
    known = values[np.isfinite(values)]
    return float(known.max()) if len(known) else 0.0


def _nice(value: float, unit: float) -> float:
    """Return the next number that people like at an edge: 1, 2 or 5 with zeros, of bytes in KiB."""
    if value <= 0:
        return 1.0
    size = unit ** math.floor(math.log(value, unit)) if unit != 10.0 else 1.0
    power = size * 10.0 ** math.floor(math.log10(value / size))
    return next(step * power for step in (1, 2, 5, 10, 20) if step * power >= value * 0.999)


def _last(values: Values, written: Written) -> str:
    known = values[np.isfinite(values)]
    return written(float(known[-1])) if len(known) else "–"


def _runs(known: npt.NDArray[np.bool_]) -> list[npt.NDArray[np.intp]]:
    """Return the places of each run of known points: a line ends where nothing is known."""
    places = np.flatnonzero(known)
    if not len(places):
        return []
    return np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)


def _points(places: npt.NDArray[np.intp], parts: Values) -> list[str]:
    """Return points. parts: 0 at the lower edge, 1 at the upper one."""
    across = places * (WIDTH / max(1, len(parts) - 1))
    down = HEIGHT - np.clip(parts[places], 0.0, 1.0) * HEIGHT
    return [f"{x:.1f} {y:.1f}" for x, y in zip(across.tolist(), down.tolist(), strict=True)]


def _line(parts: Values) -> str:
    return "".join(
        f"M{'L'.join(points)}" if len(points) > 1 else f"M{points[0]}m-4 0h4"
        for run in _runs(np.isfinite(parts))
        if (points := _points(run, parts))
    )


def _area(bottom: Values, top: Values, known: npt.NDArray[np.bool_]) -> str:
    return "".join(
        f"M{'L'.join([*_points(run, top), *_points(run[::-1], bottom)])}Z" for run in _runs(known)
    )
