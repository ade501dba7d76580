# SPDX-License-Identifier: Apache-2.0
"""Heat maps as SVG text around a small PNG of one pixel a cell: rows by steps, no library.

A run of a hundred layers and many steps stays a few kilobytes. Each row has a tooltip.
"""

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from pretrain.report.charts import grouped, number

MAX_COLUMNS = 200
_TOP, _BOTTOM, _LEFT = 6, 22, 34
_WIDTH = 330

# Dark to bright (a cut of viridis), and blue over grey to red around a middle.
_RISING = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
_DIVERGING = ((33, 102, 172), (146, 197, 222), (236, 236, 234), (244, 165, 130), (178, 24, 43))
_EMPTY = (128, 128, 128)


@dataclass(frozen=True)
class HeatMap:
    """What to draw.

    steps: of the columns. rows: (name, one value a step, None where there is none).
    middle: the value without error, where colours diverge; None: from the lowest to the highest.
    """

    label: str
    steps: Sequence[int]
    rows: Sequence[tuple[str, Sequence[float | None]]]
    middle: float | None = None


def colour_range(maps: Sequence[HeatMap]) -> tuple[float, float]:
    """The range of colours that maps beside each other share."""
    values = [v for each in maps for _, row in each.rows for v in row if v is not None]
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    middle = maps[0].middle
    if middle is not None:
        reach = max(abs(low - middle), abs(high - middle)) or 1e-3
        return middle - reach, middle + reach
    return (low, high) if high > low else (low, low + (abs(low) or 1.0) * 1e-3)


def render(heat_map: HeatMap, limits: tuple[float, float]) -> str:
    """The map as one `<svg>`."""
    stride = math.ceil(len(heat_map.steps) / MAX_COLUMNS) or 1
    steps = heat_map.steps[::stride]
    rows = [(name, values[::stride]) for name, values in heat_map.rows]
    tall = max(2.0, min(9.0, 260 / max(len(rows), 1)))
    height = tall * len(rows)
    colours = _DIVERGING if heat_map.middle is not None else _RISING
    pixels = [[_colour(v, limits, colours) for v in values] for _, values in rows]
    wide = _WIDTH - _LEFT
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {height + _TOP + _BOTTOM:.0f}" role="img" '
        f'aria-label="{escape(heat_map.label)}">',
        f'<image class="cells" x="{_LEFT}" y="{_TOP}" width="{wide}" height="{height:.1f}" '
        f'preserveAspectRatio="none" href="{_png(pixels)}"/>',
    ]
    seen = ""
    free = -math.inf
    for index, (name, values) in enumerate(heat_map.rows):
        top = _TOP + tall * index
        layer = ".".join(name.split(".")[:2])
        if layer != seen and top >= free:
            short = escape(layer.removeprefix("layers."))
            parts.append(
                f'<text class="tick y" x="{_LEFT - 6}" y="{top + tall / 2:.1f}">{short}</text>'
            )
            free = top + 11
        seen = layer
        parts.append(
            f'<rect class="hit" x="{_LEFT}" y="{top:.1f}" width="{wide}" height="{tall:.1f}">'
            f"<title>{escape(_row_text(name, heat_map.steps, values))}</title></rect>"
        )
    base = _TOP + height + 15
    ends = [(_LEFT, "start", steps[0]), (_WIDTH, "end", steps[-1])]
    for x, anchor, step in ends[: 1 if len(steps) == 1 else 2]:
        parts.append(f'<text x="{x}" y="{base:.1f}" text-anchor="{anchor}">{grouped(step)}</text>')
    return "".join([*parts, "</svg>"])


def _row_text(name: str, steps: Sequence[int], values: Sequence[float | None]) -> str:
    known = [(v, step) for v, step in zip(values, steps) if v is not None]
    if not known:
        return name
    low, high = min(known), max(known)
    return (
        f"{name}\nlast {number(known[-1][0])}\nlowest {number(low[0])} at step {low[1]}"
        f"\nhighest {number(high[0])} at step {high[1]}"
    )


def legend(limits: tuple[float, float], diverging: bool) -> str:
    """A strip of the colours between its two ends."""
    colours = _DIVERGING if diverging else _RISING
    strip = [[_colour(i / 63, (0.0, 1.0), colours) for i in range(64)]]
    return (
        f'<span class="key">{number(limits[0], 3)} <img class="cells" alt="to" '
        f'src="{_png(strip)}" width="80" height="9"> {number(limits[1], 3)}</span>'
    )


def _colour(
    value: float | None, limits: tuple[float, float], colours: Sequence[tuple[int, int, int]]
) -> tuple[int, int, int]:
    if value is None or not math.isfinite(value):
        return _EMPTY
    share = (value - limits[0]) / ((limits[1] - limits[0]) or 1.0)
    place = min(max(share, 0.0), 1.0) * (len(colours) - 1)
    low = min(int(place), len(colours) - 2)
    part = place - low
    first, second = colours[low], colours[low + 1]
    red, green, blue = (round(a + part * (b - a)) for a, b in zip(first, second))
    return red, green, blue


def _png(pixels: Sequence[Sequence[tuple[int, int, int]]]) -> str:
    """A data URL of an RGB image."""
    raw = b"".join(b"\0" + bytes(c for pixel in row for c in pixel) for row in pixels)

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", len(pixels[0]), len(pixels), 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    data += chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(data).decode()
