# SPDX-License-Identifier: Apache-2.0
"""Line charts as SVG text: no library, no script, colours from the page's style sheet.

A chart is data (`Chart`, `Series`, `Mark`), `render` draws it. Tooltips are the browser's own
(`<title>`), so that a saved page keeps them.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import escape

MAX_POINTS = 700
MAX_COLUMNS = 120
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 14, 34


@dataclass(frozen=True)
class Series:
    """One curve. `style`: line, faint (a background of raw values), points (line with dots)."""

    name: str
    color: str
    points: Sequence[tuple[float, float]]
    style: str = "line"
    corners: Sequence[tuple[float, float]] = ()
    """Of a dot around its middle, in its radius, y upward; none: a circle. A curve of one point is
    a dot."""


@dataclass(frozen=True)
class Mark:
    """A vertical line at a step: `label` is its tooltip, `name` stands beside it, `kind` is CSS."""

    x: float
    label: str
    kind: str = "event"
    name: str = ""


@dataclass(frozen=True)
class Chart:
    """What to draw. `log` None chooses a logarithmic axis where values span a factor of 20."""

    series: Sequence[Series]
    label: str
    log: bool | None = False
    from_zero: bool = False
    marks: Sequence[Mark] = ()
    levels: Sequence[tuple[float, str]] = ()
    x_range: tuple[float, float] | None = None


@dataclass
class _Axis:
    """Maps values to pixels; `ticks` are the labelled values."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    ticks: list[float] = field(default_factory=list)

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, 1e-300))
        share = min(1.05, max(-0.05, (value - low) / ((high - low) or 1.0)))
        return self.start + share * (self.end - self.start)


def render(chart: Chart, width: int, height: int) -> str:
    """The chart as one `<svg>` of the given size in user units; empty data says so."""
    drawn = [s for s in chart.series if s.points]
    if not drawn:
        return (
            f'<svg viewBox="0 0 {width} {height}" role="img" class="empty">'
            f'<text x="{width / 2}" y="{height / 2}" text-anchor="middle">no data yet</text></svg>'
        )
    x = _x_axis(chart, drawn, width)
    y = _y_axis(chart, drawn, height)
    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(chart.label)}">',
        *_grid(x, y, width, height),
        *_levels(chart, x, y),
        *_marks(chart, x, y),
    ]
    for series in drawn:
        parts += _curve(series, x, y)
    parts += _columns(drawn, x, y)
    parts.append("</svg>")
    return "".join(parts)


def swatch(series: Series, width: int) -> str:
    """What a key shows of a curve, as an `<svg>` of `width` times 10 user units."""
    points = [(0.0, 0.0), (1.0, 0.0)] if len(series.points) > 1 else [(0.5, 0.0)]
    shown = _curve(replace(series, points=points), _Axis(0, 1, 0, width), _Axis(-1, 1, 10, 0))
    return f'<svg class="swatch" viewBox="0 0 {width} 10">{"".join(shown)}</svg>'


def smooth(points: Sequence[tuple[float, float]], window: int) -> list[tuple[float, float]]:
    """Centred running mean over `window` points, narrower at both ends."""
    sums = [0.0]
    for _, value in points:
        sums.append(sums[-1] + value)
    half = window // 2
    result = []
    for i, (x, _) in enumerate(points):
        reach = min(half, i, len(points) - 1 - i)
        low, high = i - reach, i + reach + 1
        result.append((x, (sums[high] - sums[low]) / (high - low)))
    return result


def thin(points: Sequence[tuple[float, float]], limit: int) -> list[tuple[float, float]]:
    """At most about `limit` points: each bucket keeps its lowest and its highest, in order."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(2 * len(points) / limit)
    kept = [points[0]]
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        ends = {min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])}
        kept += sorted(ends)
    return [*kept, points[-1]]


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values (1, 2, 2.5, 5 times a power of ten) inside [low, high], about `count`."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= span / count * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten inside [low, high], with 2 and 5 between them where there are few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    powers = [10.0**d for d in decades if low <= 10.0**d <= high]
    if len(powers) >= 4:
        return powers[:: math.ceil(len(powers) / 6)]
    inner = [m * 10.0**d for d in decades for m in (1, 2, 5) if low <= m * 10.0**d <= high]
    return inner if len(inner) >= 2 else nice_ticks(low, high, 4)


def number(value: float, digits: int = 4) -> str:
    """A value for a reader: 0.00012 -> 1.2e-4, 2310 -> 2 310, 123456 -> 123 k."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    if abs(value) < 1e-3:
        mantissa, exponent = f"{value:.{max(0, digits - 2)}e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{mantissa}e{int(exponent)}"
    for limit, divisor, unit in (
        (1e12, 1e12, "T"),
        (1e9, 1e9, "G"),
        (1e6, 1e6, "M"),
        (1e5, 1e3, "k"),
    ):
        if abs(value) >= limit:
            return f"{value / divisor:.3g}\u202f{unit}"
    return grouped(value) if abs(value) >= 1000 else f"{value:.{digits}g}"


def grouped(value: float) -> str:
    """A whole number with thin spaces between thousands."""
    return f"{round(value):,}".replace(",", "\u202f")


def _x_axis(chart: Chart, drawn: Sequence[Series], width: int) -> _Axis:
    xs = [p[0] for s in drawn for p in s.points]
    low, high = chart.x_range or (min(xs), max(xs))
    if low == high:
        low, high = low - 1, high + 1
    axis = _Axis(low, high, _LEFT, width - _RIGHT)
    axis.ticks = [t for t in nice_ticks(low, high, max(3, width // 130)) if t == int(t)]
    return axis


def _y_axis(chart: Chart, drawn: Sequence[Series], height: int) -> _Axis:
    ys = sorted(p[1] for s in drawn for p in s.points)
    low, high = ys[0], ys[-1]
    log = chart.log if chart.log is not None else low > 0 and high / low > 20
    log = log and low > 0
    if len(ys) > 50 and not chart.from_zero and not log:
        # A single spike must not flatten the curve; what is beyond leaves the plot visibly.
        middle = ys[int(0.99 * (len(ys) - 1))]
        if high - low > 3 * (middle - low) > 0:
            high = middle + 0.25 * (middle - low)
    levels = [level for level, _ in chart.levels]
    low, high = min([low, *levels]), max([high, *levels])
    if chart.from_zero:
        low = 0.0
    if log:
        pad = (high / low) ** 0.06 if high > low else 2.0
        axis = _Axis(low / pad, high * pad, height - _BOTTOM, _TOP, log=True)
        axis.ticks = log_ticks(axis.low, axis.high)
        return axis
    pad = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    axis = _Axis(low if low == 0 else low - pad, high + pad, height - _BOTTOM, _TOP)
    axis.ticks = nice_ticks(axis.low, axis.high)
    return axis


def _grid(x: _Axis, y: _Axis, width: int, height: int) -> list[str]:
    base = height - _BOTTOM
    parts = []
    for tick in y.ticks:
        at = f"{y(tick):.1f}"
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text class="tick y" x="{_LEFT - 8}" y="{at}">{number(tick, 3)}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{base}" y2="{base}"/>')
    for tick in x.ticks:
        at = f"{x(tick):.1f}"
        parts.append(f'<line class="axis" x1="{at}" x2="{at}" y1="{base}" y2="{base + 4}"/>')
        parts.append(f'<text class="tick x" x="{at}" y="{base + 18}">{grouped(tick)}</text>')
    return parts


def _levels(chart: Chart, x: _Axis, y: _Axis) -> list[str]:
    parts = []
    for value, label in chart.levels:
        at = y(value)
        parts.append(
            f'<line class="level" x1="{x.start}" x2="{x.end}" y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<text class="note" x="{x.end - 4}" y="{at - 6:.1f}" text-anchor="end">'
            f"{escape(label)}</text>"
        )
    return parts


def _marks(chart: Chart, x: _Axis, y: _Axis) -> list[str]:
    parts = []
    free = x.start
    for mark in sorted(chart.marks, key=lambda m: m.x):
        if not x.low <= mark.x <= x.high:
            continue
        at = x(mark.x)
        parts.append(
            f'<g class="mark {escape(mark.kind)}"><line x1="{at:.1f}" x2="{at:.1f}" '
            f'y1="{y.end}" y2="{y.start}"/><title>{escape(mark.label)}</title></g>'
        )
        # A short name at the top, where the one before leaves room.
        width = 6.5 * len(mark.name) + 10
        if mark.name and at >= free and at + width <= x.end:
            name = escape(mark.name)
            parts.append(f'<text class="note" x="{at + 5:.1f}" y="{y.end + 11}">{name}</text>')
            free = at + width
    return parts


def _curve(series: Series, x: _Axis, y: _Axis) -> list[str]:
    points = thin(series.points, MAX_POINTS)
    path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
    color = escape(series.color)
    parts = []
    if len(points) > 1:
        parts.append(f'<polyline class="curve {series.style} {color}" points="{path}"/>')
    if series.style == "points" or len(points) == 1:
        radius = 3.2 if len(points) < 60 else 2
        parts += [_dot(series, x(a), y(b), radius) for a, b in points]
    return parts


def _dot(series: Series, x: float, y: float, radius: float) -> str:
    look = f'class="dot {escape(series.color)}"'
    if not series.corners:
        return f'<circle {look} cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>'
    corners = " ".join(f"{x + radius * a:.1f},{y - radius * b:.1f}" for a, b in series.corners)
    return f'<polygon {look} points="{corners}"/>'


def _columns(drawn: Sequence[Series], x: _Axis, y: _Axis) -> list[str]:
    """Invisible columns that carry a tooltip with every curve's value at that step."""
    named: dict[float, list[tuple[str, float]]] = {}
    for series in drawn:
        if series.name:
            for a, b in series.points:
                named.setdefault(a, []).append((series.name, b))
    steps = sorted(named)
    if not steps:
        return []
    bare = [s for s in steps if len(named[s]) < 2]
    stride = math.ceil(len(bare) / MAX_COLUMNS) or 1
    shown = sorted({*bare[::stride], *(s for s in steps if len(named[s]) > 1), steps[-1]})
    edges = [(a + b) / 2 for a, b in itertools.pairwise(shown)]
    lefts, rights = [x.low, *edges], [*edges, x.high]
    parts = []
    for step, low, high in zip(shown, lefts, rights, strict=True):
        values = "".join(f"\n{name}: {number(value, 5)}" for name, value in named[step])
        wide = max(1.0, x(high) - x(low))
        parts.append(
            f'<rect class="hit" x="{x(low):.1f}" y="{y.end}" width="{wide:.1f}" '
            f'height="{y.start - y.end:.1f}">'
            f"<title>step {grouped(step)}{escape(values)}</title></rect>"
        )
    return parts
