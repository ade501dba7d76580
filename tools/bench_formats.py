# SPDX-License-Identifier: Apache-2.0
"""Time MX, FP8 blocks, MS-EDEN and long rotations on a GPU, each only after its check.

    python -m tools.bench_formats [--rows 65536] [--cols 640 1792]

Quantizers and decoders: microseconds, TB/s of bytes that must move, and that over the bandwidth of
a device copy in the same run. Products: TFLOP/s, and over torch's own BF16 product, operands
decoded within the time.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial

import torch

from fused_ops.formats import OperandSpec
from fused_ops.quantize import operand_amax, quantize, triton_decode
from fused_ops.scaled_matmul import scaled_matmul
from fused_ops.testing import assert_bitwise_equal, assert_close

KEY = (0x12345678, 0x9ABCDEF0)
TURNED = OperandSpec(format="nvfp4", hadamard=128)
SPECS = [
    TURNED,
    OperandSpec(format="nvfp4", hadamard=128, rounding="ms_eden"),
    OperandSpec(format="mxfp8"),
    OperandSpec(format="mxfp4"),
    OperandSpec(format="mxfp4", block=(32, 32)),
    OperandSpec(format="mxfp4", hadamard=32, rounding="stochastic"),
    OperandSpec(format="fp8_blockwise"),
    OperandSpec(format="fp8_blockwise", block=(128, 128)),
]
DECODED = [OperandSpec(format=name) for name in ("mxfp8", "mxfp4", "fp8_blockwise")]


def median_us(run: Callable[[], object]) -> float:
    """Median microseconds of a call replayed in a CUDA graph: what the device needs alone."""
    from triton.testing import do_bench_cudagraph

    run()
    with torch.cuda.stream(torch.cuda.Stream()):
        return 1e3 * float(do_bench_cudagraph(run, rep=40, return_mode="median"))


def row(name: str, moved: float, microseconds: float, copy: float) -> None:
    rate = moved / microseconds / 1e6
    print(f"{name:52} {microseconds:8.1f} us {rate:6.2f} TB/s {rate / copy:6.3f} of copy")


def check(spec: OperandSpec, columns: bool) -> None:
    """The bytes of the kernel are those of the reference on a CPU."""
    x, key = torch.randn(256, 640).bfloat16(), torch.tensor(KEY)
    want = quantize(x, spec, columns=columns, key=key, implementation="reference")
    got = quantize(x.cuda(), spec, columns=columns, key=key.cuda(), implementation="triton_wide")
    assert_bitwise_equal(got.codes.cpu(), want.codes, f"{spec.label} codes")
    assert_bitwise_equal(got.scales.cpu(), want.scales, f"{spec.label} scales")


def bench_quantizers(rows: int, cols: int) -> None:
    """Quantizers along both axes, amaxes and decoders of one [rows, cols] bf16 matrix."""
    x, key = torch.randn(rows, cols, device="cuda").bfloat16(), torch.tensor(KEY, device="cuda")
    size, y = 2 * x.numel(), torch.empty_like(x)
    copy = 2 * size / median_us(lambda: y.copy_(x)) / 1e6
    print(f"\n{rows} x {cols}: copy {copy:.2f} TB/s")
    for columns in (False, True):
        side = "columns" if columns else "rows"
        run = partial(operand_amax, x, TURNED, columns=columns)
        row(f"amax {side} hadamard128", size, median_us(run), copy)
        amax = run()
        for spec in SPECS:
            check(spec, columns)
            made = partial(
                quantize, x, spec, columns=columns, amax=amax, key=key, implementation="triton_wide"
            )
            row(f"{side} {spec.label}", size + made().nbytes, median_us(made), copy)
    for spec in DECODED:
        packed = quantize(x, spec)
        time = median_us(partial(triton_decode.unscaled, packed))
        row(f"decode {spec.label} to bf16", packed.nbytes + size, time, copy)


def bench_products(rows: int, cols: int, inner: int) -> None:
    """[rows, inner] . [cols, inner]^T from codes."""
    a, b = (torch.randn(n, inner, device="cuda").bfloat16() for n in (rows, cols))
    flops = 2 * rows * cols * inner
    base = median_us(lambda: a @ b.t())
    print(f"\n{rows} x {cols} x {inner}: torch BF16 {flops / base / 1e6:.0f} TFLOP/s")
    for spec, decode in [(spec, "exact") for spec in DECODED] + [(DECODED[-1], "fp8")]:
        small = [quantize(t[:256], spec) for t in (a, b)]
        want = scaled_matmul(*small, out_dtype=torch.float32, implementation="reference")
        got = scaled_matmul(*small, out_dtype=torch.float32, decode=decode)
        tolerance = "bf16_core_sum" if decode == "exact" else "fp8_core_full"
        assert_close(got, want, tolerance, spec.label)
        x, y = quantize(a, spec), quantize(b, spec)
        time = median_us(partial(scaled_matmul, x, y, out_dtype=torch.bfloat16, decode=decode))
        print(
            f"{spec.label + ', ' + decode:52} {time:8.1f} us {flops / time / 1e6:6.0f} TFLOP/s "
            f"{base / time:6.3f} x torch BF16"
        )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=65536)
    parser.add_argument("--cols", type=int, nargs="+", default=[640, 1792])
    options = parser.parse_args(arguments)
    if min(options.rows, *options.cols) < 1:
        parser.error(f"--rows and --cols must be at least 1, got {options.rows}, {options.cols}")
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed, and none was found: run it on a GPU machine")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for cols in options.cols:
        bench_quantizers(options.rows, cols)
        bench_products(options.rows, cols, options.cols[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
