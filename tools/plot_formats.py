# SPDX-License-Identifier: Apache-2.0
"""Error and bias of every format over kinds of data: `python -m tools.plot_formats`.

Writes fused_ops/formats.png (or --output): above the relative error (root of the summed squared
error over the summed squares), below the bias in percent (regression slope of the quantized on the
exact value, less 1), over all values and at the largest value of each block of 16. Rotated formats
are judged against the rotated values. Prints the numbers too.
"""

import argparse
import sys
from dataclasses import dataclass
from typing import Any

import torch

from fused_ops.cases import make_input
from fused_ops.formats import OperandSpec
from fused_ops.quantize import quantize
from fused_ops.quantize.hadamard import rotate
from fused_ops.testing import relative_mse, slope, slope_at_block_maxima

DATA = {"Gaussian": "gaussian", "Laplace": "laplace", "t(3)": "student_t3", "outliers": "outliers"}
SHAPE = (768, 1024)
DRAWS = 4

NVFP4: dict[str, Any] = {"format": "nvfp4"}
POW2: dict[str, Any] = {"format": "nvfp4", "scale": "pow2"}
FORMATS = {
    "fp8 tensor": OperandSpec(format="fp8_tensorwise"),
    "fp8 1x128": OperandSpec(format="fp8_blockwise"),
    "mxfp8": OperandSpec(format="mxfp8"),
    "nvfp4 1x16": OperandSpec(**NVFP4),
    "nvfp4 16x16": OperandSpec(**NVFP4, block=(16, 16)),
    "nvfp4 4/6": OperandSpec(**NVFP4, choice="4over6_mse"),
    "pow2": OperandSpec(**POW2),
    "pow2 better": OperandSpec(**POW2, choice="better_of_two"),
    "mxfp4": OperandSpec(format="mxfp4"),
    "nvfp4 SR": OperandSpec(**NVFP4, rounding="stochastic", hadamard=16),
    "ms-eden": OperandSpec(**NVFP4, rounding="ms_eden", hadamard=128),
    "pow2 SR": OperandSpec(**POW2, rounding="stochastic", hadamard=16),
    "mxfp4 SR": OperandSpec(format="mxfp4", rounding="stochastic", hadamard=32),
}
COLOURS = ["#1b6ca8", "#e08a1e", "#3a923a", "#b03a48"]


@dataclass(frozen=True)
class Measured:
    """Error and biases of one format on one kind of data."""

    error: float
    bias: float
    bias_at_maxima: float


def measure(spec: OperandSpec, kind: str) -> Measured:
    """Over a fixed tensor, and several draws if the rounding is random."""
    x = make_input(kind, SHAPE, seed=1)
    exact = (rotate(x, spec.hadamard) if spec.hadamard else x).float()
    draws = DRAWS if spec.is_random else 1
    decoded = [quantize(x, spec, key=(draw, 0)).dequantize() for draw in range(draws)]
    mean = torch.stack(decoded).mean(dim=0)
    return Measured(
        error=(sum(relative_mse(d, exact) for d in decoded) / draws) ** 0.5,
        bias=100 * (slope(mean, exact) - 1),
        bias_at_maxima=100 * (slope_at_block_maxima(mean, exact) - 1),
    )


def draw(table: dict[str, dict[str, Measured]], path: str) -> None:
    """The figure: grouped bars, one group a format, one colour a kind of data."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(12, 7), sharex=True)
    width = 0.8 / len(DATA)
    for index, kind in enumerate(DATA):
        places = [i + (index - (len(DATA) - 1) / 2) * width for i in range(len(table))]
        rows = [row[kind] for row in table.values()]
        colour = COLOURS[index]
        above.bar(places, [100 * r.error for r in rows], width, color=colour, label=kind)
        below.bar(places, [r.bias for r in rows], width, color=colour)
        below.plot(places, [r.bias_at_maxima for r in rows], "_", color="black", markersize=7)
    above.set_ylabel("relative error, %")
    below.set_ylabel("bias (slope - 1), %")
    above.legend(ncols=len(DATA), frameon=False)
    below.plot([], [], "_", color="black", label="at block maxima")
    below.legend(frameon=False, loc="lower left")
    below.axhline(0, color="black", linewidth=0.8)
    below.set_xticks(range(len(table)), list(table), rotation=30, ha="right")
    for axes in (above, below):
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    above.set_title("Quantization error and bias; SR and ms-eden after a Hadamard rotation")
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.plot_formats", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--output", default="fused_ops/formats.png", metavar="FILE.png")
    options = parser.parse_args(arguments)
    table: dict[str, dict[str, Measured]] = {}
    print("error %, bias %, bias at block maxima %".rjust(60))
    for name, spec in FORMATS.items():
        table[name] = {label: measure(spec, kind) for label, kind in DATA.items()}
        cells = [f"{100 * m.error:6.2f} {m.bias:+6.2f} {m.bias_at_maxima:+6.2f}"
                 for m in table[name].values()]  # fmt: skip
        print(f"{name:12s} " + " | ".join(cells), flush=True)
    draw(table, options.output)
    print(f"wrote {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
