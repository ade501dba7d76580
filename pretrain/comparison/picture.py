# SPDX-License-Identifier: Apache-2.0
"""A comparison as pictures: a PNG, and one self-contained HTML page with the same curves."""

import cmath
import math
from collections.abc import Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from pretrain.comparison.gaps import mean_curve, paired_gaps, training_gaps
from pretrain.comparison.runs import FORWARDS, Row
from pretrain.comparison.summary import HEAD, Line, cells
from pretrain.report.charts import Chart, Series, render, swatch
from pretrain.report.page import page_of

COLOURS = (
    *("#2f6fde", "#d9541e", "#16876b", "#8a4bc4", "#b4232f", "#5b7fa8", "#b9a44c", "#d2527f"),
    *("#4a5160", "#5a9e2f", "#c07f3a", "#3aa6b9"),
)
Point = tuple[int, float, float, float]
"""Tokens; mean, lowest and highest gap over seeds."""
_TITLES = {
    "own": "Validation gap, own forward, %",
    "bf16": "Validation gap, BF16 forward, %",
    "training": "Training gap, %",
}


def _dashes(number: int) -> tuple[float, ...]:
    """Lengths on and off, in widths of the line, of a row's curve: none while colours are new; then
    a dash, a dash and a dot, a dash and two dots, and so on."""
    turn = number // len(COLOURS)
    return (4.0, 2.5, *(0.5, 2.5) * (turn - 1)) if turn else ()


def _corners(number: int) -> list[tuple[float, float]]:
    """Corners of a row's dot, around it and back to the first, in radii of a round one: none while
    colours are new; then a triangle, a star of four points, a square, a star of five, and so on."""
    turn = number // len(COLOURS)
    if not turn:
        return []
    radii = (1.4,) if turn % 2 else (1.4, 0.5)
    sides = len(radii) * (turn // 2 + 3)
    ring = [cmath.rect(radii[k % len(radii)], math.tau * k / sides) for k in range(sides + 1)]
    return [(corner.imag, corner.real) for corner in ring]


def curves(row: Row, base: Row) -> dict[str, list[Point]]:
    """By kind: own, bf16, training."""
    found = {name: mean_curve(paired_gaps(row, base, name)) for name in FORWARDS}
    found["training"] = mean_curve(training_gaps(row, base))
    tokens = next(iter(row.runs.values())).tokens
    return {
        name: [(tokens.get(step, step), *rest) for step, *rest in points]  # type: ignore[misc]
        for name, points in found.items()
    }


def write_png(rows: Sequence[Row], base: Row, path: Path, dpi: int = 130) -> bool:
    """Gaps over training, one panel a kind; the band is from the lowest to the highest seed.

    Returns False, and writes nothing, where no row has a gap to the base.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = {row.label: curves(row, base) for row in rows if row is not base}
    kinds = [kind for kind in _TITLES if any(found[kind] for found in drawn.values())]
    if not kinds:
        return False
    # Beside few rows there is room for their legend; many have theirs below the panels.
    columns, few = 2 * len(kinds), len(drawn) < 10
    size = 6.2 * len(kinds), 4.6 + (0 if few else 0.15 * math.ceil(len(drawn) / columns))
    figure, axes = pyplot.subplots(1, len(kinds), figsize=size, squeeze=False, layout="constrained")
    for axis, kind in zip(axes[0], kinds):
        for number, (label, found) in enumerate(drawn.items()):
            if found[kind]:
                _plot(axis, number, label, found[kind])
        axis.axhline(0.0, color="#888888", linewidth=0.8)
        axis.set_title(f"{_TITLES[kind]} (base: {base.label})", fontsize=10)
        axis.set_xlabel("tokens")
        axis.grid(alpha=0.25)
    # A row may be in some panels only: one that has not validated where the base has.
    named = {
        label: handle
        for axis in axes[0]
        for handle, label in zip(*axis.get_legend_handles_labels())
    }
    if few:
        axes[0][0].legend(list(named.values()), list(named), fontsize=8)
    else:
        figure.legend(
            list(named.values()),
            list(named),
            loc="outside lower center",
            fontsize=7,
            ncols=columns,
            handlelength=5.0,  # whole dashes and dots
        )
    figure.savefig(path, dpi=dpi)
    pyplot.close(figure)
    return True


def _plot(axis: Any, number: int, label: str, points: Sequence[Point]) -> None:
    """A row's curve and its band."""
    x, mean, low, high = zip(*points)
    colour = COLOURS[number % len(COLOURS)]
    axis.plot(
        x,
        mean,
        linestyle=(0, _dashes(number)) if _dashes(number) else "-",
        dash_capstyle="round",
        color=colour,
        label=label,
        linewidth=1.6,
        marker=_corners(number) or "o",  # a single evaluation has no line
        markevery=None if len(x) < 30 else [],  # none; the legend has one
        ms=3.5,
    )
    axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)


def write_html(
    rows: Sequence[Row], base: Row, lines: Sequence[Line], said: Sequence[str], path: Path
) -> None:
    """One page: the table, what may be said, and the curves."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in HEAD)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells(line)) + "</tr>"
        for line in lines
    )
    notes = [f"{line.label}: {note}" for line in lines for note in line.notes]
    texts = "".join(f"<p>{escape(text)}</p>" for text in [*said, *notes])
    parts = [
        f"<header><h1>Runs compared</h1><p class='lead'>base: {escape(base.label)}</p></header>",
        f'<div class="card scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>",
        '<p class="hint">+- is the 95 % t interval of the mean over seeds, each paired with the '
        "base of its seed; one seed has none. Gaps are (loss - base) / base.</p>",
        f'<div class="card said">{texts}</div>' if texts else "",
        *(_chart(rows, base, kind) for kind in _TITLES),
        f"<footer>nibble, {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}</footer>",
    ]
    styles = "\n".join(map(_style, range(len(rows))))
    page = page_of("Runs compared", "\n".join(filter(None, parts)), styles)
    path.write_text(page, encoding="utf-8")


def _style(number: int) -> str:
    """CSS of a row: its colour, and dashes where that is not new."""
    rules = [f".row{number} {{ --c: {COLOURS[number % len(COLOURS)]}; }}"]
    if dashes := _dashes(number):
        pattern = " ".join(f"{2 * length:g}" for length in dashes)
        rules.append(f".curve.row{number} {{ stroke-dasharray: {pattern}; }}")
    return "\n".join(rules)


def _chart(rows: Sequence[Row], base: Row, kind: str) -> str:
    series, keys = [], []
    for number, row in enumerate(row for row in rows if row is not base):
        points = [(float(x), mean) for x, mean, _, _ in curves(row, base)[kind]]
        if points:
            own = Series(row.label, f"row{number}", points, corners=_corners(number))
            series.append(own)
            dashes = _dashes(number)
            # A whole turn of dashes, and the first again.
            shown = swatch(own, round(2 * sum(dashes + dashes[:1])) or 16)
            last = f"{points[-1][1]:+.2f}"
            keys.append(f'<span class="key">{shown}{escape(row.label)} <b>{last}</b></span>')
    if not series:
        return ""
    chart = render(Chart(series, _TITLES[kind], levels=[(0.0, "base")]), 1086, 360)
    return (
        f'<h2>{_TITLES[kind]}</h2><figure class="card"><figcaption>{"".join(keys)}</figcaption>'
        f"{chart}</figure>"
    )
