# SPDX-License-Identifier: Apache-2.0
"""Launch every kernel once, on small and ragged cases: what a memory checker is run around.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m tools.run_kernels
    compute-sanitizer --tool racecheck python -m tools.run_kernels [--only NAME]

Without its allocator's blocks, torch gives every tensor an allocation of its own, and a byte past
the end of one is seen. Prints what was launched; results are not compared (the tests do that).
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fused_ops.activation import squared_relu, swiglu
from fused_ops.cross_entropy import cross_entropy
from fused_ops.embedding import embedding
from fused_ops.formats import OperandSpec
from fused_ops.gather import Places, sum_rows, take_rows
from fused_ops.grouped_linear import grouped_linear
from fused_ops.keys import OPERANDS
from fused_ops.linear_call import LinearCall
from fused_ops.quantize import (
    amax_pair,
    dequantize,
    operand_amax,
    plain_amax,
    quantize,
    quantize_decoded,
    quantize_pair,
    requantize_columns,
    triton_backend,
)
from fused_ops.quantize.implementations import PAIR
from fused_ops.recipe import RECIPES
from fused_ops.rmsnorm import rmsnorm_and_input
from fused_ops.rope import split_rope
from fused_ops.scaled_matmul import scaled_matmul
from fused_ops.weight_codes import WeightCodes

KEY = (0x12345678, 0x9ABCDEF0)
SHAPES = ((64, 128), (80, 48), (33, 50))
PAIRED = ("nvfp4", "nvfp4_4over6", "nvfp4_fast", "nvfp4_pow2", "fp8_tensorwise")
Case = tuple[str, Callable[[], object]]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed, and none was found: run it on a GPU machine")
    torch.manual_seed(0)
    count = 0
    for name, run in cases("cuda"):
        if options.only in name:
            run()
            torch.cuda.synchronize()
            print(name, flush=True)
            count += 1
    print(f"{count} cases")
    return 0 if count else 1


def cases(device: str) -> Iterator[Case]:
    """Every kernel by name, with what launches it; on a CPU the references run instead."""
    with torch.device(device):
        yield from _quantizers()
        yield from _pairs()
        yield from _products()
        yield from _experts()
        yield from _glue()


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).to(dtype)


def _operands() -> dict[str, OperandSpec]:
    """What the recipes make on these kernels, by name."""
    found: dict[str, OperandSpec] = {}
    for recipe in RECIPES.values():
        for name in OPERANDS:
            spec = recipe.spec(*name.split("."))
            if not spec.is_high_precision and spec.format != "fp8_delayed":
                found[f"{spec.label} {spec.element} {spec.numerator:g}"] = spec
    return found


def _quantizers() -> Iterator[Case]:
    for label, spec in _operands().items():
        for rows, cols in SHAPES:
            for dtype in (torch.bfloat16, torch.float32):
                x = _random(rows, cols, dtype=dtype)
                for columns in (False, True):
                    side = "columns" if columns else "rows"
                    run = partial(quantize, x, spec, columns=columns, key=KEY)
                    yield f"{side} {label} {rows}x{cols} {x.dtype}", run
                    yield (
                        f"amax {side} {label} {rows}x{cols} {x.dtype}",
                        partial(operand_amax, x, spec, columns=columns),
                    )
    for rows, cols in SHAPES:
        flag = torch.zeros((), dtype=torch.bool)
        yield f"plain amax {rows}x{cols}", partial(plain_amax, _random(rows, cols), flag)
    x = _random(64, 128)
    for form in ("fp8", "bf16"):
        yield f"decoded {form}", partial(quantize_decoded, x, OperandSpec(format="nvfp4"), form)
    for spec in (OperandSpec(format=name) for name in ("nvfp4", "mxfp4", "mxfp8", "fp8_blockwise")):
        yield f"dequantize {spec.label}", partial(dequantize, quantize(x, spec))
    packed = quantize(x, OperandSpec(format="nvfp4"))
    if packed.codes.is_cuda:
        yield "decode to bf16", partial(triton_backend.decode, packed)
        yield "decode to e4m3", partial(triton_backend.decode, packed, e4m3=True, shift=3)
    again = OperandSpec(format="nvfp4", scale="pow2", choice="better_of_two")
    for form in ("codes", "fp8"):
        requantize = partial(requantize_columns, packed, again, packed.amax, form=form)
        yield f"requantize columns, {form}", requantize


def _pairs() -> Iterator[Case]:
    """Both operands from one read, by each implementation that takes them."""
    table = torch.tensor(KEY)
    for name in PAIRED:
        recipe = RECIPES[name]
        for what, first, second in (
            ("x", recipe.spec("fprop", "x"), recipe.spec("wgrad", "x")),
            ("dy", recipe.spec("dgrad", "dy"), recipe.spec("wgrad", "dy")),
        ):
            x = _random(80, 144)
            amaxes = amax_pair(x, second)
            forms = ("codes", "codes") if first.format != "nvfp4" else ("fp8", "bf16")
            for implementation in PAIR.names:
                for key in (KEY, table):
                    keys = tuple(key if s.is_random else None for s in (first, second))
                    options: dict[str, Any] = {"amaxes": amaxes, "keys": keys, "forms": forms}
                    try:
                        PAIR.choose([implementation], x, first, second, **options)
                    except ValueError:
                        continue
                    run = partial(
                        quantize_pair, x, first, second, implementation=implementation, **options
                    )
                    where = "" if key is KEY else ", key on the device"
                    yield f"pair {implementation} {name} {what}{where}", run


def _products() -> Iterator[Case]:
    for name in ("nvfp4", "nvfp4_pow2", "fp8_tensorwise", "mxfp8", "mxfp4", "fp8_blockwise"):
        spec = RECIPES[name].spec("fprop", "x")
        left, right = (quantize(_random(rows, 128), spec) for rows in (64, 96))
        total = torch.zeros(64, 96)
        yield (
            f"product {name}",
            partial(scaled_matmul, left, right, out_dtype=torch.bfloat16),
        )
        yield (
            f"product {name} into a sum",
            partial(scaled_matmul, left, right, out_dtype=torch.bfloat16, accumulate=total),
        )


def _experts() -> Iterator[Case]:
    """Forward and backward of a layer of experts, some with a token or none, into FP32 sums."""
    counts = [0, 1, 17, 46]
    for name in ("bf16", "nvfp4", "nvfp4_fast", "nvfp4_pow2", "fp8_tensorwise"):
        weight = torch.nn.Parameter(_random(len(counts), 96, 48))
        weight.main_grad = torch.zeros(weight.shape)  # type: ignore[attr-defined]
        x = _random(sum(counts) + 3, 48).requires_grad_()
        call = LinearCall(recipe=RECIPES[name], main_grad=True, weight_codes=WeightCodes())

        def run(x: Tensor = x, weight: Any = weight, call: LinearCall = call) -> None:
            y = grouped_linear(x, weight, counts, call=call)
            y.backward(torch.ones_like(y))

        yield f"experts {name}", run
    places = Places(torch.randint(0, 33, (70,)), 33)
    rows = _random(33, 144).requires_grad_()
    yield "copies of tokens", lambda: sum_rows(take_rows(rows, places), places).sum().backward()


def _glue() -> Iterator[Case]:
    """Forward and backward of the ops around the products."""

    def both(*results: Tensor) -> None:
        torch.autograd.backward(results, [torch.ones_like(result) for result in results])

    x = _random(33, 192).requires_grad_()
    weight = _random(192).requires_grad_()
    yield "rmsnorm", lambda: both(*rmsnorm_and_input(x, weight))
    yield "swiglu", lambda: both(swiglu(x))
    yield "squared relu", lambda: both(squared_relu(x))
    logits = _random(33, 1000).requires_grad_()
    labels = torch.randint(0, 1000, (33,))
    yield "cross entropy", lambda: both(cross_entropy(logits, labels))
    table = torch.nn.Parameter(_random(100, 64))
    table.main_grad = torch.zeros(100, 64)  # type: ignore[attr-defined]
    ids = torch.randint(0, 100, (4, 9))
    yield "embedding", lambda: both(embedding(ids, table))
    mixed = _random(32, 1, 4 * 6 * 16).requires_grad_()
    angles = torch.randn(32, 1, 1, 8).repeat(1, 1, 1, 2)
    yield "rope", lambda: both(*split_rope(mixed, angles, queries=4, head_dim=16))


if __name__ == "__main__":
    sys.exit(main())
