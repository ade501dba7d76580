# SPDX-License-Identifier: Apache-2.0
"""Time the fused ops on a GPU, each only after it has passed its check.

    python -m tools.bench_ops --op quantize|matmul [--rows 8192] [--cols 5120 20480]

Quantizers: microseconds, TB/s of bytes that must move (input read once, codes and scales written
once), and that over the bandwidth of a device copy in the same run. Products: TFLOP/s, and over
torch's own BF16 product in the same run.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fused_ops.formats import OperandSpec
from fused_ops.quantize import operand_amax, quantize, triton_backend
from fused_ops.scaled_matmul import scaled_matmul
from fused_ops.testing import assert_bitwise_equal, assert_close

KEY = (0x12345678, 0x9ABCDEF0)
CHECK = (256, 512)


def _nvfp4(**options: object) -> OperandSpec:
    return OperandSpec(format="nvfp4", **options)  # type: ignore[arg-type]


SPECS = [
    _nvfp4(),
    _nvfp4(rounding="stochastic"),
    _nvfp4(hadamard=16),
    _nvfp4(hadamard=16, rounding="stochastic"),
    _nvfp4(choice="4over6_mse"),
    _nvfp4(block=(16, 16)),
    _nvfp4(scale="pow2"),
    _nvfp4(scale="pow2", rounding="stochastic"),
    _nvfp4(scale="pow2", hadamard=16, rounding="stochastic"),
    _nvfp4(scale="pow2", choice="better_of_two"),
    _nvfp4(scale="pow2", hadamard=16, choice="better_of_two"),
]


def median_us(run: Callable[[], object]) -> float:
    """Median microseconds of a call replayed in a CUDA graph: what the device needs alone."""
    from triton.testing import do_bench_cudagraph

    run()
    with torch.cuda.stream(torch.cuda.Stream()):
        return 1e3 * float(do_bench_cudagraph(run, rep=40, return_mode="median"))


def check_quantizer(spec: OperandSpec, columns: bool) -> None:
    """The bytes of the kernel are those of the reference on a CPU."""
    x, key = torch.randn(CHECK).bfloat16(), torch.tensor(KEY)
    want = quantize(x, spec, columns=columns, key=key, implementation="reference")
    got = quantize(x.cuda(), spec, columns=columns, key=key.cuda(), implementation="triton")
    assert_bitwise_equal(got.codes.cpu(), want.codes, f"{spec.label} codes")
    assert_bitwise_equal(got.scales.cpu(), want.scales, f"{spec.label} scales")


def copy_bandwidth(x: Tensor) -> float:
    """TB/s of a device copy of x, bytes read and written."""
    y = torch.empty_like(x)
    return 2 * x.numel() * x.element_size() / median_us(lambda: y.copy_(x)) / 1e6


def row(name: str, moved: float, microseconds: float, copy: float) -> None:
    rate = moved / microseconds / 1e6
    print(f"{name:52} {microseconds:8.1f} us {rate:6.2f} TB/s {rate / copy:6.3f} of copy")


def bench_quantize(rows: int, cols: int) -> None:
    """All quantizers and amaxes on one [rows, cols] bf16 matrix."""
    x = torch.randn(rows, cols, device="cuda").bfloat16()
    copy = copy_bandwidth(x)
    print(f"\n{rows} x {cols}: copy {copy:.2f} TB/s")
    amax = operand_amax(x, _nvfp4())
    assert_bitwise_equal(amax, x.abs().amax().float(), "amax")
    row("amax", 2 * x.numel(), median_us(lambda: operand_amax(x, _nvfp4())), copy)
    rotated = _nvfp4(hadamard=16)
    row(
        "amax columns hadamard16", 2 * x.numel(),
        median_us(lambda: operand_amax(x, rotated, columns=True)), copy,
    )  # fmt: skip
    moved = x.numel() * (2 + 0.5 + 1 / 16)
    key = torch.tensor(KEY, device="cuda")
    for spec in SPECS:
        for columns in (False, True):
            check_quantizer(spec, columns)
            run = partial(
                quantize, x, spec, columns=columns, amax=amax, key=key, implementation="triton"
            )
            time = median_us(run)
            row(f"{'columns' if columns else 'rows'} {spec.label}", moved, time, copy)
    packed = quantize(x, _nvfp4(), amax=amax)
    time = median_us(lambda: triton_backend.decode(packed))
    row("decode to bf16", x.numel() * (2.5 + 1 / 16), time, copy)
    time = median_us(lambda: triton_backend.decode(packed, e4m3=True, shift=3))
    row("decode to e4m3", x.numel() * (1.5 + 1 / 16), time, copy)


PRODUCTS = [
    ("nvfp4, exact", _nvfp4(), "exact", "bf16_core_sum"),
    ("nvfp4 4over6, decode fp8", _nvfp4(choice="4over6_mse"), "fp8", "fp8_core_full"),
    ("nvfp4 pow2", _nvfp4(scale="pow2"), "exact", "fp8_core_sum"),
    ("fp8_tensorwise", OperandSpec(format="fp8_tensorwise"), "exact", "fp8_core_full"),
]


def check_product(spec: OperandSpec, decode: str, tolerance: str) -> None:
    """Within the stated bound of the reference."""
    x, y = (quantize(torch.randn(CHECK, device="cuda").bfloat16(), spec) for _ in range(2))
    want = scaled_matmul(x, y, out_dtype=torch.float32, decode=decode, implementation="reference")
    got = scaled_matmul(x, y, out_dtype=torch.float32, decode=decode, implementation="hopper")
    assert_close(got, want, tolerance, spec.label)


def bench_matmul(rows: int, cols: int, inner: int) -> None:
    """[rows, inner] . [cols, inner]^T from codes; operands are decoded within the time."""
    a, b = (torch.randn(n, inner, device="cuda").bfloat16() for n in (rows, cols))
    flops = 2 * rows * cols * inner
    base = median_us(lambda: a @ b.t())
    print(f"\n{rows} x {cols} x {inner}: torch BF16 {flops / base / 1e6:.0f} TFLOP/s")
    grad = torch.zeros(rows, cols, device="cuda")
    for name, spec, decode, tolerance in PRODUCTS:
        check_product(spec, decode, tolerance)
        x, y = quantize(a, spec), quantize(b, spec)
        for kind, accumulate in (("bf16 out", None), ("into fp32", grad)):
            options: dict[str, Any] = {
                "out_dtype": torch.bfloat16,
                "decode": decode,
                "accumulate": accumulate,
            }
            time = median_us(partial(scaled_matmul, x, y, **options))
            print(
                f"{name + ', ' + kind:52} {time:8.1f} us {flops / time / 1e6:6.0f} TFLOP/s "
                f"{base / time:6.3f} x torch BF16"
            )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--op", choices=("quantize", "matmul"), required=True)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--cols", type=int, nargs="+", default=[5120, 20480])
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed, and none was found: run it on a GPU machine")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for cols in options.cols:
        if options.op == "quantize":
            bench_quantize(options.rows, cols)
        else:
            bench_matmul(options.rows, cols, 25600 - cols if cols < 25600 else cols)
    return 0


if __name__ == "__main__":
    sys.exit(main())
