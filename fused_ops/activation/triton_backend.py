# SPDX-License-Identifier: Apache-2.0
"""SwiGLU and squared ReLU on NVIDIA GPUs through Triton: which calls it takes, how it launches."""

from typing import Any

import torch
from torch import Tensor

from fused_ops.triton_support import float_reason, launch, power_of_two

BLOCK, WARPS = 2048, 8
"""Columns and warps of a program: 8 elements a thread, so that loads are of 16 bytes."""


def supports(x: Tensor, scale: Tensor | None) -> str | None:
    """None, or why not."""
    return float_reason(x)


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor | None, gated: bool) -> Tensor:
        from fused_ops.activation import triton_kernels as kernels

        x = x.contiguous()
        ctx.gated = gated
        ctx.save_for_backward(x, scale)
        features = x.shape[-1] // (2 if gated else 1)
        y = torch.empty((*x.shape[:-1], features), dtype=x.dtype, device=x.device)
        block = min(BLOCK, power_of_two(features))
        launch(
            kernels.activation_forward, (y.numel() // features, -(-features // block)),
            x, x if scale is None else scale.contiguous(), y, features,
            gated, scale is not None, block, on=x.device, warps=WARPS,
        )  # fmt: skip
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        from fused_ops.activation import triton_kernels as kernels

        x, scale = ctx.saved_tensors
        features = dy.shape[-1]
        rows = dy.numel() // features
        dx = torch.empty_like(x)
        d_scale = None if scale is None else torch.empty_like(scale).contiguous()
        block = min(BLOCK, power_of_two(features))
        pieces = -(-features // block) if scale is None else 1
        span = block if scale is None else -(-features // block) * block
        launch(
            kernels.activation_backward, (rows, pieces),
            x, x if scale is None else scale.contiguous(), dy.contiguous(), dx,
            x if d_scale is None else d_scale, features, span,
            ctx.gated, scale is not None, block, on=x.device, warps=WARPS,
        )  # fmt: skip
        return dx, d_scale, None


def swiglu(x: Tensor, scale: Tensor | None) -> Tensor:
    """See `fused_ops.activation.swiglu`, which checks the arguments."""
    return _Activation.apply(x, scale, True)


def squared_relu(x: Tensor, scale: Tensor | None) -> Tensor:
    """See `fused_ops.activation.squared_relu`, which checks the arguments."""
    return _Activation.apply(x, scale, False)
