# SPDX-License-Identifier: Apache-2.0
"""A linear layer as a step runs it: `python -m tools.bench_ops --op linear`.

Forward and backward of [rows, in] . [out, in]^T, the weight quantized within, its gradient written
to the FP32 sum as the first micro-batch of a step does. Beside it torch's three BF16 products,
whose weight gradient is BF16 and new. All replayed in a CUDA graph: what the device needs alone.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fused_ops.keys import StreamKey
from fused_ops.linear import LinearCall, linear
from fused_ops.main_grad import mark_zeroed
from fused_ops.recipe import GemmRecipe, get_recipe, split_label
from fused_ops.testing import assert_close
from fused_ops.weight_codes import WeightCodes
from tools.bench_ops.quantizers import median_us

LABELS = (
    "bf16", "nvfp4", "nvfp4_fast", "nvfp4_fast:fp8", "nvfp4_pow2", "fp8_tensorwise", "mxfp8",
)  # fmt: skip
CHECKED = (256, 512, 384)
"""Tokens, outputs and inputs of the check before anything is timed."""


def recipe_of(label: str) -> GemmRecipe:
    """A recipe by name, or by NAME:DECODE."""
    name, decode = split_label(label)
    return replace(get_recipe(name), decode=decode or "exact")


def layer(
    label: str, x: Tensor, weight: Tensor, dy: Tensor, implementation: str | None = None
) -> Callable[[], tuple[Tensor, Tensor]]:
    """A call that gives Y and dX and writes dW to a new `weight.main_grad`.

    Args:
        x: [tokens, in], bf16.
        weight: [out, in], bf16.
        dy: [tokens, out], bf16.
        implementation: of all its ops, or the best there is.
    """
    x = x.detach().requires_grad_()
    weight = torch.nn.Parameter(weight.detach())
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    recipe, key = recipe_of(label), StreamKey(seed=1, step=2, micro_batch=0, layer=3)

    def run() -> tuple[Tensor, Tensor]:
        mark_zeroed([weight])
        codes = WeightCodes() if implementation is None else None
        call = LinearCall(
            recipe=recipe,
            key=key,
            main_grad=True,
            weight_codes=codes,
            implementation=implementation,
        )
        y = linear(x, weight, call=call)
        dx, _ = torch.autograd.grad(y, [x, weight], dy, allow_unused=True)
        return y.detach(), dx

    run.weight = weight  # type: ignore[attr-defined]
    return run


def check(label: str) -> None:
    """Y, dX and dW of the kernels against those of the reference, of the same device."""
    tokens, out, inner = CHECKED
    x, w, dy = (
        torch.randn(shape, device="cuda").bfloat16()
        for shape in ((tokens, inner), (out, inner), (tokens, out))
    )
    runs = [layer(label, x, w, dy, name) for name in (None, "reference")]
    results = [(*run(), run.weight.main_grad) for run in runs]  # type: ignore[attr-defined]
    for number, (got, want) in enumerate(zip(*results)):
        assert_close(got, want, "bf16_output", f"{label}, {('Y', 'dX', 'dW')[number]}")


def saved_bytes(label: str, rows: int, out: int, inner: int, device: str = "cuda") -> int:
    """Bytes that the forward pass keeps for the backward pass beside the weight."""
    x, w = (torch.randn(n, inner, device=device).bfloat16() for n in (rows, out))
    weight, total = torch.nn.Parameter(w), []
    call = LinearCall(recipe=recipe_of(label), key=StreamKey(1, 2, 0, 3))

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() != weight.data_ptr():
            total.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        linear(x.requires_grad_(), weight, call=call)
    return sum(total)


def bench_linear(rows: int, out: int, inner: int) -> None:
    """One line a recipe: the time, over torch's BF16, and what is kept over its X."""
    x, w, dy = (
        torch.randn(shape, device="cuda").bfloat16()
        for shape in ((rows, inner), (out, inner), (rows, out))
    )
    base = median_us(lambda: (x @ w.t(), dy @ w, dy.t() @ x))
    flops = 6 * rows * out * inner
    print(f"\n{rows} tokens, {inner} -> {out}: torch BF16 {flops / base / 1e6:.0f} TFLOP/s")
    for label in LABELS:
        check(label)
        spent = median_us(layer(label, x, w, dy))
        kept = saved_bytes(label, rows, out, inner) / (2 * rows * inner)
        print(
            f"{label:24} {spent:8.1f} us {flops / spent / 1e6:6.0f} TFLOP/s "
            f"{base / spent:6.3f} x torch BF16, {kept:.3f} of BF16's bytes kept for backward",
            flush=True,
        )
