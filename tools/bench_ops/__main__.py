# SPDX-License-Identifier: Apache-2.0
"""Time the fused ops on a GPU, each only after it has passed its check.

    python -m tools.bench_ops --op quantize|amax|pair|matmul [--rows 8192] [--cols 5120 20480]
    python -m tools.bench_ops --op pair --tiles [--rows 8192] [--cols 5120 20480]
    python -m tools.bench_ops --op glue [--rows 8192]
    python -m tools.bench_ops --op rmsnorm|swiglu|squared_relu|cross_entropy|rope|embedding
    python -m tools.bench_ops --op attention
    python -m tools.bench_ops --op grouped [--rows 8192] [--tiles]
    python -m tools.bench_ops --op linear [--rows 8192] [--cols 5120 20480]

glue is all of the last two lines.

amax: of a matrix and its rotated columns in one read, with every tile that may be tried; pair: row
and column operands in one read, with `--tiles` by every tile of the CUDA source that may be tried;
quantize: all else, and both of these.

Quantizers, and the ops around products: microseconds, TB/s of bytes that must move (inputs read
once, outputs written once), and that over the bandwidth of a device copy in the same run.
Products: TFLOP/s, and over torch's own BF16 product in the same run. Attention: TFLOP/s of what
the causal rule leaves, of every way that takes the call. grouped: products of 64 experts, six a
token, over a loop of torch's products in the same run, with `--tiles` of every tile that may be
tried; and whole linear layers of experts, with the host's time. linear: forward and backward of a
layer, its weight quantized within, over torch's BF16 products in the same run.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_ops import grouped_cuda
from fused_ops.activation import squared_relu, swiglu
from fused_ops.attention import DocumentBounds, Visible, attention
from fused_ops.cross_entropy import cross_entropy
from fused_ops.embedding import embedding
from fused_ops.formats import OperandSpec
from fused_ops.grouped_linear import grouped_linear
from fused_ops.groups import Groups, groups_of
from fused_ops.linear import LinearCall
from fused_ops.quantize import quantize
from fused_ops.rmsnorm import rmsnorm, rmsnorm_and_input
from fused_ops.rope import split_rope
from fused_ops.scaled_matmul import grouped, scaled_matmul
from fused_ops.testing import assert_close
from fused_ops.weight_codes import WeightCodes
from tools.bench_ops.pair_tiles import bench_pair_tiles
from tools.bench_ops.quantizers import (
    CHECK,
    bench_amax,
    bench_pair,
    bench_quantize,
    copy_bandwidth,
    median_us,
    row,
)
from tools.bench_ops.whole_linear import bench_linear, recipe_of

PRODUCTS = [
    ("nvfp4, exact", OperandSpec(format="nvfp4"), "exact", "bf16_core_sum"),
    (
        "nvfp4 4over6, decode fp8",
        OperandSpec(format="nvfp4", choice="4over6_mse"),
        "fp8",
        "fp8_core_full",
    ),
    ("nvfp4 pow2", OperandSpec(format="nvfp4", scale="pow2"), "exact", "fp8_core_sum"),
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


def forward_backward(op: Callable[..., Any], inputs: list[Tensor]) -> Callable[[], tuple]:
    """A call of op and of its backward pass, for the same gradients every time."""
    leaves = [x.requires_grad_() for x in inputs if x.is_floating_point()]

    def outputs() -> tuple[Tensor, ...]:
        out = op(*inputs)
        return out if isinstance(out, tuple) else (out,)

    with torch.no_grad():
        torch.manual_seed(1)
        upstream = [torch.randn_like(y) for y in outputs()]

    def both() -> tuple[Tensor, ...]:
        out = outputs()
        gradients = torch.autograd.grad(out, leaves, upstream)
        return (*(y.detach() for y in out), *gradients)

    return both


def check_op(op: Callable[..., Any], inputs: list[Tensor]) -> None:
    """The kernels agree with the reference to the rounding of the output, backward too."""
    runs = [
        forward_backward(partial(op, implementation=name), [x.detach().clone() for x in inputs])
        for name in ("triton", "reference")
    ]
    for number, (got, want) in enumerate(zip(*(run() for run in runs))):
        assert_close(got, want, "bf16_output", f"result {number}")


def bench_op(name: str, op: Callable[..., Any], inputs: list[Tensor], moved: list[int]) -> None:
    """Times of the kernels of op, after their check; moved: see time_op."""
    check_op(op, [x.detach()[:256].clone() for x in inputs[:1]] + _rest(inputs))
    time_op(name, partial(op, implementation="triton"), inputs, moved)


def time_op(name: str, run: Callable[..., Any], inputs: list[Tensor], moved: list[int]) -> None:
    """Forward, and backward as the difference to both together.

    moved: bytes of the forward and of the backward pass.
    """
    copy = copy_bandwidth(torch.empty(1 << 28, dtype=torch.uint8, device="cuda"))
    with torch.no_grad():
        forward = median_us(lambda: run(*inputs))
    total = median_us(forward_backward(run, inputs))
    row(f"{name} forward", moved[0], forward, copy)
    row(f"{name} backward", moved[1], total - forward, copy)


def _rest(inputs: list[Tensor]) -> list[Tensor]:
    """Further inputs for the first 256 rows: what has one entry a row is cut, labels [rows] and
    factors [rows, 1]. A weight [features] has not, though there may be as many features as rows."""
    rows = inputs[0].shape[0]
    return [
        x.detach()[:256].clone()
        if x.shape[0] == rows and (x.dim() > 1 or not x.is_floating_point())
        else x
        for x in inputs[1:]
    ]


def bench_glue(op: str, rows: int) -> None:
    """The ops around the products, at the sizes of a layer of hidden 4096 and 14336."""

    def bf16(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").bfloat16()

    if op == "rmsnorm":
        size = rows * 4096 * 2
        inputs = [bf16(rows, 4096), bf16(4096)]
        bench_op("rmsnorm", rmsnorm, inputs, [2 * size, 3 * size])
        torch_norm = partial(F.rms_norm, eps=1e-5)
        time_op(
            "torch's rms_norm", lambda x, w: torch_norm(x, (4096,), w), inputs, [2 * size, 3 * size]
        )
        bench_op("rmsnorm and input", rmsnorm_and_input, inputs, [2 * size, 4 * size])
        bench_op(
            "rmsnorm of heads", rmsnorm, [bf16(rows, 32, 128), bf16(128)], [2 * size, 3 * size]
        )
    elif op in ("swiglu", "squared_relu"):
        gated = 2 if op == "swiglu" else 1
        run = swiglu if gated == 2 else squared_relu
        size, x = rows * 14336 * 2, bf16(rows, gated * 14336)
        moved = [(1 + gated) * size, (1 + 2 * gated) * size]
        bench_op(op, run, [x], moved)
        bench_op(f"{op} scaled", run, [x, torch.rand(rows, 1, device="cuda")], moved)
    elif op == "rope":
        half = torch.outer(torch.arange(rows), 1e4 ** -torch.linspace(0, 1, 64))
        angles = torch.cat([half, half], -1)[:, None, None].cuda()
        cut = {rows: angles, 256: angles[:256].clone()}  # objects that stay: cos and sin are kept

        def split(mixed: Tensor, implementation: str) -> tuple[Tensor, ...]:
            turns = cut[mixed.shape[0]]
            return split_rope(mixed, turns, 4, 128, implementation=implementation)

        size = rows * 6144 * 2
        bench_op("split and rope", split, [bf16(rows, 1, 6144)], [2 * size, 2 * size])
    else:
        labels = torch.randint(0, 32768, (rows,), device="cuda")
        size = rows * 32768 * 2
        for overwrite in (False, True):
            run = partial(cross_entropy, overwrite=overwrite)
            name = "cross entropy" + (", gradient over logits" if overwrite else "")
            bench_op(name, run, [bf16(rows, 32768), labels], [size, 2 * size])


def bench_embedding(rows: int) -> None:
    """The embedding's gradient added to its FP32 sum, and torch's way to the same."""
    weight = torch.randn(32768, 4096, device="cuda").bfloat16().requires_grad_()
    weight.main_grad = torch.zeros(32768, 4096, device="cuda")  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    ids = torch.randint(0, 32768, (1, rows), device="cuda")
    for name in ("triton", "reference"):
        before = weight.main_grad.clone()  # type: ignore[attr-defined]
        forward_backward(partial(embedding, ids, implementation=name), [weight])()
        added = weight.main_grad - before  # type: ignore[attr-defined]
        if name == "triton":
            want = added
    assert_close(added, want, "fp32_sum", "embedding")
    size = rows * 4096 * 2
    run = partial(embedding, ids, implementation="triton")
    time_op("embedding", run, [weight], [2 * size, 5 * size])
    both = forward_backward(lambda w: F.embedding(ids, w), [weight])
    time = median_us(lambda: weight.main_grad.add_(both()[1]))  # type: ignore[attr-defined]
    print(f"{'torch: embedding, gradient, sum':52} {time:8.1f} us")


def bench_attention(rows: int) -> None:
    """32 heads, 8 groups, 128 features: one document of all tokens, and four equal ones."""
    inputs = [torch.randn(rows, 1, n, 128, device="cuda").bfloat16() for n in (32, 8, 8)]
    bounds = torch.arange(5, dtype=torch.int32, device="cuda") * (rows // 4)
    ids = torch.arange(4, device="cuda").repeat_interleave(rows // 4)[None]
    for label, documents, share in (
        ("one document", None, 1),
        ("four documents", DocumentBounds(ids, bounds, rows // 4), 4),
    ):
        visible = Visible(documents=documents)
        flops = 2 * rows * (rows // share) * 32 * 128
        with torch.no_grad():
            query, key, value = (t.float() for t in inputs)
            want = attention(query, key, value, visible, implementation="reference")
        for way in ("sdpa", "varlen"):
            if way == "varlen" and documents is None:
                continue
            op = partial(attention, visible=visible, implementation=way)
            with torch.no_grad():
                error = float((op(*inputs) - want).norm() / want.norm())
                assert error < 2**-7, f"{way}: relative error {error}"
                forward = median_us(lambda: op(*inputs))  # noqa: B023 (called at once)
            both = median_us(forward_backward(op, inputs))
            print(
                f"{label + ', ' + way:52} forward {forward:8.1f} us "
                f"{flops / forward / 1e6:6.0f} TFLOP/s, with backward {both:8.1f} us "
                f"{3.5 * flops / both / 1e6:6.0f} TFLOP/s"
            )


EXPERTS, TOP_K = 64, 6
EXPERT_SHAPES = ((3072, 4096), (4096, 1536))
"""[out, in] of the two projections of experts of 1536 with SwiGLU, hidden 4096."""


def expert_tiles(kind: str, cores: str) -> list[grouped.Tile]:
    """Launch configurations of a grouped product, the one in use first."""
    k = 128 if cores == "fp8" else 64
    sides = [(128, 256, 8, 3), (128, 256, 8, 4), (256, 128, 8, 3), (128, 128, 8, 3)]
    sides += [(128, 128, 8, 4), (128, 128, 4, 3), (64, 256, 4, 3), (64, 128, 4, 4)]
    tiles = [
        grouped.Tile(m, n, k, warps, stages, described)
        for m, n, warps, stages in sides
        for described in (True, False)
    ]
    used = grouped.TILES[kind, cores]
    return [used, *(tile for tile in tiles if tile != used)]


def expert_product(
    gemm: str, cores: str, groups: Groups, out: int, inner: int
) -> Callable[..., Tensor]:
    """One of the three products of all experts, as they lie in training; takes an implementation
    and its options. "wgrad" adds to FP32 sums, "wgrad, first" writes them."""
    device, dtype = torch.device("cuda"), torch.float8_e4m3fn if cores == "fp8" else torch.bfloat16

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    scale = torch.ones(len(groups), device=device)
    alpha = grouped.Alpha(scale, scale, 1.0) if cores == "fp8" else None
    if not gemm.startswith("wgrad"):
        n, k = (out, inner) if gemm == "fprop" else (inner, out)
        a, b = random(groups.rows, k), random(len(groups), n, k)
        if gemm == "dgrad" and cores == "bf16":
            b = b.transpose(1, 2).contiguous().transpose(1, 2)
        return partial(
            grouped.rows_matmul, a, b, groups, rows=groups.rows, dtype=torch.bfloat16, alpha=alpha
        )
    grad, padded = torch.zeros(len(groups), out, inner, device=device), cores == "fp8"
    if padded:
        a, b = random(out, 16 * groups.blocks), random(inner, 16 * groups.blocks)
    else:
        a, b = random(groups.rows, out).t(), random(groups.rows, inner).t()
    how: dict[str, Any] = {"padded": padded, "accumulate": gemm == "wgrad", "alpha": alpha}
    return partial(grouped.inner_matmul, a, b, groups, out=grad, **how)


def bench_grouped(rows: int, all_tiles: bool) -> None:
    """Products and layers of experts, tokens spread over them at random."""
    chosen = torch.randint(0, EXPERTS, (TOP_K * rows,))
    counts = torch.bincount(chosen, minlength=EXPERTS).tolist()
    groups = groups_of(counts, torch.device("cuda"))
    for out, inner in EXPERT_SHAPES:
        flops = 2 * groups.rows * out * inner
        x, w = (torch.randn(n, inner, device="cuda").bfloat16() for n in (groups.rows, out))
        base = median_us(lambda: [part @ w.t() for part in x.split(counts)])  # noqa: B023
        print(
            f"\n{EXPERTS} experts, {groups.rows} rows, {out} x {inner}: "
            f"loop of torch.matmul {flops / base / 1e6:.0f} TFLOP/s"
        )
        for gemm in ("fprop", "dgrad", "wgrad", "wgrad, first"):
            for cores in ("bf16", "fp8"):
                product = expert_product(gemm, cores, groups, out, inner)
                kind = "inner" if gemm.startswith("wgrad") else "rows"
                names: list[tuple[str, dict]] = [("triton", {"tile": t}) for t in expert_tiles(
                    kind, cores
                )[: None if all_tiles else 2]]  # fmt: skip
                if kind == "inner":
                    names.append(("cublaslt", {}))
                elif cores == "bf16":
                    names.insert(0, ("torch", {}))
                for name, options in names:
                    report_product(f"{gemm} {cores}", product, name, options, flops, base)
        bench_expert_layers(counts, out, inner)


def report_product(
    what: str, product: Callable[..., Tensor], name: str, options: dict, flops: int, base: float
) -> None:
    """One line: checked against the reference, then timed."""
    tile = options.get("tile")
    how = name if tile is None else (
        f"{tile.m}x{tile.n}x{tile.k} {tile.warps} warps {tile.stages} stages "
        f"{'descriptors' if tile.described else 'pointers'}"
    )  # fmt: skip
    sums = product.keywords.get("out")  # type: ignore[attr-defined]
    results: list[Tensor] = []
    try:
        for choice in ({"implementation": name} | options, {"implementation": "reference"}):
            if sums is not None:
                sums.zero_()
            results.append(product(**choice).clone())
        assert_close(results[0], results[1], "bf16_output", what)
        spent = median_us(partial(product, implementation=name, **options))
    except Exception as error:  # a tile may not fit the device
        print(f"{what + ', ' + how:60} {type(error).__name__}: {str(error)[:80]}")
        return
    print(
        f"{what + ', ' + how:60} {spent:8.1f} us {flops / spent / 1e6:6.0f} TFLOP/s "
        f"{base / spent:6.3f} x the loop",
        flush=True,
    )


def bench_expert_layers(counts: list[int], out: int, inner: int) -> None:
    """Forward and backward of a linear layer of experts, its weights quantized within."""
    rows = sum(counts)
    weight = torch.nn.Parameter(torch.randn(EXPERTS, out, inner, device="cuda").bfloat16())
    weight.main_grad = torch.zeros(weight.shape, device="cuda")  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    x = torch.randn(rows, inner, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn(rows, out, device="cuda").bfloat16()
    for label in ("bf16", "nvfp4", "nvfp4_fast", "nvfp4_fast:fp8", "nvfp4_pow2", "fp8_tensorwise"):
        recipe, times = recipe_of(label), []
        for together in (True, False):
            grouped_cuda.ENABLED = together
            host, device = [], []
            for _ in range(6):
                call = LinearCall(recipe=recipe, main_grad=True, weight_codes=WeightCodes())
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.synchronize()
                begun = time.perf_counter()
                start.record()
                grouped_linear(x, weight, counts, call=call).backward(dy)
                end.record()
                host.append(1e3 * (time.perf_counter() - begun))
                end.synchronize()
                device.append(start.elapsed_time(end))
            times.append((statistics.median(device), statistics.median(host)))
        grouped_cuda.ENABLED = True
        print(
            f"{'layer, ' + label:60} {times[0][0]:8.2f} ms (host {times[0][1]:6.2f}); "
            f"one by one {times[1][0]:8.2f} ms",
            flush=True,
        )


GLUE = ("rmsnorm", "swiglu", "squared_relu", "cross_entropy", "rope")
AROUND = (*GLUE, "embedding", "attention")
QUANTIZERS = {"quantize": bench_quantize, "amax": bench_amax, "pair": bench_pair}
MULTIPLES = {
    "quantize": (16, 16), "pair": (16, 16), "amax": (1, 1), "matmul": (1, 16), "linear": (1, 16),
    "attention": (4, 1), "glue": (4, 1),
}  # fmt: skip
"""Of which --rows and --cols must be multiples: operands of one read have whole blocks along both
axes, products along the contraction, and attention has four documents of one length."""
CHOICES = (*QUANTIZERS, "matmul", "linear", "grouped", "glue", *AROUND)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("bench_ops", description=__doc__.split("\n\n")[0])
    parser.add_argument("--op", choices=CHOICES, required=True)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--cols", type=int, nargs="+", default=[5120, 20480])
    parser.add_argument("--tiles", action="store_true", help="try every tile: grouped, pair")
    options = parser.parse_args(arguments)
    for name, sizes in (("--rows", [options.rows]), ("--cols", options.cols)):
        of = MULTIPLES.get(options.op, (1, 1))[name == "--cols"]
        if any(size < 1 or size % of for size in sizes):
            parser.error(
                f"{name} of --op {options.op} must be multiples of {of} above 0, got {sizes}"
            )
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed, and none was found: run it on a GPU machine")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for op in AROUND if options.op == "glue" else (options.op,):
        if op in GLUE:
            bench_glue(op, options.rows)
        elif op == "embedding":
            bench_embedding(options.rows)
        elif op == "attention":
            bench_attention(options.rows)
    if options.op == "grouped":
        bench_grouped(options.rows, options.tiles)
    if options.op in (*AROUND, "glue", "grouped"):
        return 0
    if options.op == "pair" and options.tiles:
        bench_pair_tiles(options.rows, options.cols)
        return 0
    for cols in options.cols:
        if options.op in QUANTIZERS:
            QUANTIZERS[options.op](options.rows, cols)
        else:
            timed = bench_linear if options.op == "linear" else bench_matmul
            timed(options.rows, cols, 25600 - cols if cols < 25600 else cols)
    return 0


if __name__ == "__main__":
    sys.exit(main())
