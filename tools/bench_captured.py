# SPDX-License-Identifier: Apache-2.0
"""Products of tensors of a real step: errors on FP8 cores, and speed by what operands hold.

    python -m tools.bench_captured OUT.pt [--rows 2048]

OUT.pt is of tools.capture. Errors are against the exact product of the same codes (BF16 outputs of
the first --rows rows of either operand, the contraction whole), on a CPU too. On a GPU also the
speed of torch's BF16 product of each layer's fprop on random operands, on those captured, and on
the NVFP4 values of both: one kernel, timed in turn, each so long that the card's power settles.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fused_ops.errors import ConfigError
from fused_ops.formats import OperandSpec
from fused_ops.quantize import quantize_decoded
from pretrain.command_line import prepare, refused, run_program


def main(arguments: list[str] | None = None) -> int:
    """The program; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench_captured",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("operands", type=Path, metavar="OUT.pt")
    parser.add_argument("--rows", type=int, default=2048, help="for errors (%(default)s)")
    options = parser.parse_args(arguments)
    if options.rows < 1:
        parser.error(f"--rows must be at least 1, got {options.rows}")
    prepare()
    try:
        _report(options.operands, options.rows)
    except ConfigError as error:
        return refused(error)
    return 0


def _report(path: Path, rows: int) -> None:
    from pretrain.captured import load_layers, product_errors, tail

    layers = load_layers(path)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU: FP32 sums of the reference"
    print(f"{where}, torch {torch.__version__}; {path}, {rows} rows of either operand")
    for name, layer in layers.items():
        print(f"{name}: " + ", ".join(f"{k} {tail(t)}" for k, t in layer.items()))
        for error in product_errors(name, layer, rows, device):
            print(
                f"  {error.gemm:6} {error.way:24} identical {error.identical:8.4%}  "
                f"largest {error.largest:.1e}  squared {error.squared:.1e}  "
                f"over the error of 4 bits {error.excess:+7.2%}",
                flush=True,
            )
    if device == "cpu":
        print("no GPU: the speed of BF16 GEMMs was not measured")
        return
    for name, layer in layers.items():
        _speed(name, layer)


def sustained_us(run: Callable[[], object], seconds: float = 0.5) -> float:
    """Mean microseconds of a call in a row of them that takes so long, after half as many."""

    def timed(times: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            run()
        end.record()
        torch.cuda.synchronize()
        return 1e3 * float(start.elapsed_time(end)) / times

    timed(3)
    times = max(3, int(seconds * 1e6 / timed(10)))
    timed(times // 2)
    return timed(times)


def _speed(name: str, layer: dict[str, Tensor], rounds: int = 5) -> None:
    x, w = (layer[k].cuda().bfloat16().flatten(0, -2).contiguous() for k in ("x", "w"))
    forms: dict[str, tuple[Tensor, Tensor]] = {}
    for kind, left, right in (
        ("random", torch.randn_like(x), torch.randn_like(w)),
        ("captured", x, w),
    ):
        spec = OperandSpec(format="nvfp4")
        codes = [quantize_decoded(t, spec, "bf16").data for t in (left, right)]
        forms[kind] = (left, right)
        forms[f"NVFP4 values of {kind}"] = (codes[0], codes[1])
    times: dict[str, list[float]] = {kind: [] for kind in forms}
    for _ in range(rounds):  # in turn: clocks drift
        for kind, (left, right) in forms.items():
            times[kind].append(sustained_us(lambda a=left, b=right: a @ b.t()))  # type: ignore[misc]
    flops = 2 * x.shape[0] * w.shape[0] * x.shape[1]
    print(f"{name}: BF16 GEMM {x.shape[0]} x {w.shape[0]} x {x.shape[1]}")
    for kind, found in times.items():
        time = statistics.median(found)
        ratios = sorted(r / t for r, t in zip(times["random"], found))
        print(
            f"  {kind:24} {time:8.1f} us {flops / time / 1e6:6.0f} TFLOP/s "
            f"{statistics.median(ratios):6.3f} x random ({ratios[0]:.3f} to {ratios[-1]:.3f})",
            flush=True,
        )


if __name__ == "__main__":
    run_program(main)
