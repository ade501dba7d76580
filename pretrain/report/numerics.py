# SPDX-License-Identifier: Apache-2.0
"""Numerics in report.html: layers by steps, one map an operand, a product or a router."""

import math
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from fused_ops.keys import GEMMS, OPERANDS
from pretrain.history import Row
from pretrain.report.charts import number
from pretrain.report.heat_map import HeatMap, colour_range, legend, render

# Figure, title, the value without error (None: the higher the brighter), which end is the bad one.
_OPERAND_FIGURES = (
    ("amax", "Largest magnitude, log2", None, max),
    ("snr_db", "Signal to noise, dB", None, min),
    ("slope", "Slope of the quantized on the exact value", 1.0, None),
    ("slope_max", "The same at the largest value of each block", 1.0, None),
    ("slope_small", "The same below half the smallest code: 0 is always flushed", 1.0, None),
    ("flushed", "Share flushed to zero", None, max),
    ("saturated", "Share beyond the largest code", None, max),
    ("underflow", "Share of blocks whose scale is zero", None, max),
    ("above", "Share above the range of the shift", None, max),
    ("below", "Share below the range of the shift", None, max),
)
_PRODUCT_FIGURES = (
    ("cosine", "Cosine with the exact product", None, min),
    ("signed", "Signed error along the exact product", 0.0, None),
    ("zeros", "Exact zeros of the product as multiplied", None, max),
)
_ROUTER_FIGURES = (
    ("entropy", "Entropy of the router, over that of equal shares", None, min),
    ("max_load", "Load of the busiest expert, over the mean", None, max),
    ("idle", "Share of experts without a token", None, max),
)
Cells = dict[str, dict[int, float]]


def section(rows: Sequence[Row], training: Sequence[Row] = ()) -> str:
    """The whole section, or nothing where the run was not monitored; `training`: for its cost."""
    layers = [row for row in rows if isinstance(row.get("module"), str)]
    if not layers:
        return ""
    names = list(dict.fromkeys(row["module"] for row in layers))
    groups = [
        (figure, {op: _cells(layers, op, figure[0]) for op in OPERANDS})
        for figure in _OPERAND_FIGURES
    ]
    groups += [
        (figure, {gemm: _cells(layers, gemm, figure[0]) for gemm in GEMMS})
        for figure in _PRODUCT_FIGURES
    ]
    zeros = ("zero_gradients", "Exact zeros of the weight's gradient", None, max)
    groups.append((zeros, {"whole step": _cells(layers, None, "zero_gradients")}))
    parts = [_figure(figure, cells, names) for figure, cells in groups]
    routed = [row for row in rows if isinstance(row.get("router"), str)]
    routers = list(dict.fromkeys(row["router"] for row in routed))
    parts += [
        _figure(figure, {"router": _cells(routed, None, figure[0], "router")}, routers)
        for figure in _ROUTER_FIGURES
    ]
    return (
        "<h2>Numerics</h2>"
        '<p class="hint">Layers downwards, steps to the right; a row names itself under the '
        "pointer. Colours of one figure have one scale; grey is not quantized. The figures are "
        "of samples of one micro-batch a rank, the next one at each monitored step, defined in "
        "fused_ops/operand_error.py. " + escape(cost(rows, training)) + "</p>" + "".join(parts)
    )


def cost(rows: Sequence[Row], training: Sequence[Row]) -> str:
    """How much longer monitored steps took than the others; empty where that cannot be said."""
    watched = {row["step"] for row in rows}
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for row in training[len(training) // 10 :]:  # the first steps warm up
        if math.isfinite(row.get("seconds", math.nan)):
            seconds[row["step"] in watched].append(row["seconds"])
    if not seconds[True] or not seconds[False]:
        return ""
    plain = statistics.median(seconds[False])
    own = statistics.median(seconds[True])
    more = max(0.0, own - plain) * len(seconds[True])
    share = more / (sum(seconds[True]) + sum(seconds[False]))
    return (
        f"A monitored step took {own / plain:.2f} times another one: monitoring was "
        f"{100 * share:.2g} % of the time in steps."
    )


def _cells(rows: Sequence[Row], part: str | None, figure: str, name: str = "module") -> Cells:
    """{layer: {step: value}} of a figure."""
    cells: Cells = {}
    for row in rows:
        holder: Any = row if part is None else row.get(part)
        value = holder.get(figure) if isinstance(holder, Mapping) else None
        if isinstance(value, int | float) and math.isfinite(value):
            if figure == "amax":  # operands differ by powers of ten
                if value <= 0:
                    continue
                value = math.log2(value)
            cells.setdefault(row[name], {})[row["step"]] = float(value)
    return cells


def _figure(
    figure: tuple[str, str, float | None, Any], parts: Mapping[str, Cells], names: Sequence[str]
) -> str:
    name, title, middle, worst = figure
    parts = {label: cells for label, cells in parts.items() if cells}
    if not parts:
        return ""
    steps = sorted({step for cells in parts.values() for row in cells.values() for step in row})
    maps = {}
    for label, cells in parts.items():
        rows = [(one, [cells[one].get(s) for s in steps]) for one in names if one in cells]
        maps[label] = HeatMap(f"{title}: {label}", steps, rows, middle)
    limits = colour_range(list(maps.values()))
    drawn = "".join(
        f"<div><h4>{escape(label)}</h4>{render(each, limits)}</div>" for label, each in maps.items()
    )
    said = "largest" if name == "amax" else "farthest off"
    note = f"{said}: {_extreme(parts, middle, worst)}"
    return (
        f'<figure class="card heat"><figcaption><h3>{escape(title)}</h3>'
        f'{legend(limits, middle is not None)}<span class="key">{escape(note)}</span>'
        f'</figcaption><div class="maps">{drawn}</div></figure>'
    )


def _extreme(parts: Mapping[str, Cells], middle: float | None, worst: Any) -> str:
    """The one cell that is farthest off."""
    cells = [
        (value, label, name, step)
        for label, found in parts.items()
        for name, row in found.items()
        for step, value in row.items()
    ]

    def key(cell: tuple[float, str, str, int]) -> float:
        return abs(cell[0] - middle) if middle is not None else cell[0]

    value, label, name, step = (worst or max)(cells, key=key)
    return f"{number(value)}, {name} {label}, step {step}"
