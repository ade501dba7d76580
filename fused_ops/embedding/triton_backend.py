# SPDX-License-Identifier: Apache-2.0
"""Embedding lookup on NVIDIA GPUs, its gradient through Triton: what it takes, how it launches."""

from typing import Any

from torch import Tensor

from fused_ops.embedding import reference
from fused_ops.linear import dummy_gradient
from fused_ops.triton_support import float_reason, launch, power_of_two

ROWS, BLOCK, WARPS = 8, 512, 4
"""Rows and columns that a program adds at once, and its warps."""


def supports(ids: Tensor, weight: Tensor, gaps: bool) -> str | None:
    """None, or why not."""
    if ids.numel() == 0:
        return "there are no ids"
    if not weight.main_grad.is_contiguous():  # type: ignore[attr-defined]
        return "main_grad is not contiguous"
    return float_reason(weight)


class _LookUp(reference.LookUp):
    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, None]:
        from fused_ops.embedding import triton_kernels as kernels

        (ids,) = ctx.saved_tensors
        names, order = ids.reshape(-1).long().sort(stable=True)
        dy = dy.contiguous()
        features, block = dy.shape[-1], min(BLOCK, power_of_two(dy.shape[-1]))
        launch(
            kernels.add_rows, (names.numel(), -(-features // block)),
            names, order, dy, ctx.weight.main_grad, names.numel(), features, ROWS, block,
            on=dy.device, warps=WARPS,
        )  # fmt: skip
        return None, dummy_gradient(ctx.weight), None


def embedding(ids: Tensor, weight: Tensor, gaps: bool) -> Tensor:
    """See `fused_ops.embedding.embedding`, which checks the arguments."""
    return _LookUp.apply(ids, weight, gaps)
