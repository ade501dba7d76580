# SPDX-License-Identifier: Apache-2.0
"""The figures of STUDY.md: gaps over training, final gaps by seed, errors of products by layer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fused_ops.keys import GEMMS
from pretrain.comparison.gaps import final_gaps, interval
from pretrain.comparison.picture import COLOURS, write_png
from pretrain.study.results import ModelResults, StudyRow

_FORWARDS = {"own": "own forward", "bf16": "BF16 forward"}


def draw(models: Sequence[ModelResults], base_row: str, folder: Path) -> list[Path]:
    """Draws what the models' rows allow into `folder`; returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for model in models:
        base = model.find(base_row)
        others = [one for one in model.rows if one is not base and one.row.runs]
        if base is None or not others:
            continue
        curves = folder / f"{model.name}-curves.png"
        if write_png([base.row, *(one.row for one in others)], base.row, curves, dpi=80):
            _lighten(curves)
            made.append(curves)
        final = folder / f"{model.name}-final.png"
        _final_gaps(model, base, others, final)
        made.append(final)
        seen = [one for one in others if one.numerics.get("errors")]
        if seen:
            made.append(folder / f"{model.name}-errors.png")
            _errors(model, seen, made[-1])
    return made


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.savefig(path, dpi=80)
    pyplot.close(figure)
    _lighten(path)


def _lighten(path: Path) -> None:
    """128 colours are enough for lines and maps, in a third of the bytes."""
    from PIL import Image

    with Image.open(path) as image:
        light = image.convert("RGB").quantize(128)
    light.save(path, optimize=True)


def _final_gaps(
    model: ModelResults, base: StudyRow, others: Sequence[StudyRow], path: Path
) -> None:
    """A dot a seed, the mean and its 95 % t interval; left the own forward, right the BF16 one."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1,
        2,
        figsize=(10.5, 1.4 + 0.34 * len(others)),
        sharey=True,
        sharex=True,
        layout="constrained",
    )
    low = high = 0.0
    for axis, (forward, title) in zip(axes, _FORWARDS.items()):
        for place, one in enumerate(others):
            values = final_gaps(one.row, base.row, forward)
            mean = interval(values)
            if mean is None:
                continue
            low, high = min(low, *values.values()), max(high, *values.values())
            colour = COLOURS[place % len(COLOURS)]
            axis.plot(
                list(values.values()), [place] * len(values), "o", color=colour, ms=3.5, alpha=0.55
            )
            axis.errorbar(
                mean.mean, place, xerr=mean.half or 0.0, fmt="|", color=colour, ms=13, capsize=3
            )
        axis.axvline(0.0, color="#888888", linewidth=0.8)
        axis.set_title(f"{model.name}: final gap, {title}, %", fontsize=10)
        axis.grid(alpha=0.25, axis="x")
    axes[0].set_yticks(range(len(others)), [one.row.label for one in others], fontsize=8)
    axes[0].set_ylim(len(others) - 0.5, -0.5)  # the first on top
    span = high - low or 1.0
    axes[0].set_xlim(low - 0.1 * span, high + 0.25 * span)  # a wide interval is cut, no seed
    _save(figure, path)


def _errors(model: ModelResults, rows: Sequence[StudyRow], path: Path) -> None:
    """Rows by linear layers, for each GEMM: the relative error of its product, colour and all."""
    import numpy as np
    from matplotlib import pyplot

    modules = [name.split(".") for name in rows[0].numerics["modules"]]
    names = [f"{parts[min(1, len(parts) - 1)]}.{parts[-1]}" for parts in modules]
    figure, axes = pyplot.subplots(
        3,
        1,
        figsize=(10.5, 2.6 + 0.6 * len(rows)),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, gemm in zip(axes[:, 0], GEMMS):
        table = np.array(
            [[np.nan if v is None else v for v in one.numerics["errors"][gemm]] for one in rows]
        )
        image = axis.imshow(table, aspect="auto", cmap="viridis", vmin=0.0)
        axis.set_yticks(range(len(rows)), [one.row.label for one in rows], fontsize=7)
        axis.set_title(f"{gemm}: relative error of the product", fontsize=9)
        figure.colorbar(image, ax=axis, pad=0.01)
    axes[-1, 0].set_xticks(range(len(names)), names, rotation=90, fontsize=6)
    _save(figure, path)
