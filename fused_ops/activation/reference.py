# SPDX-License-Identifier: Apache-2.0
"""SwiGLU and squared ReLU in PyTorch, with backward passes that recompute from the input."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx


class SwiGLU(torch.autograd.Function):
    """See `fused_ops.activation.swiglu`."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, scale: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, scale)  # type: ignore[arg-type]
        gate, up = x.float().chunk(2, -1)
        y = F.silu(gate) * up
        return (y if scale is None else y * scale.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        x, scale = ctx.saved_tensors  # type: ignore[attr-defined]
        gate, up = x.float().chunk(2, -1)
        dy, silu, d_scale = dy.float(), F.silu(gate), None
        if scale is not None:
            d_scale = (dy * (silu * up)).sum(-1, keepdim=True).to(scale.dtype)
            dy = dy * scale.float()
        d_gate = torch.ops.aten.silu_backward(dy * up, gate)
        return torch.cat([d_gate, dy * silu], -1).to(x.dtype), d_scale


class SquaredReLU(torch.autograd.Function):
    """See `fused_ops.activation.squared_relu`."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, scale: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, scale)  # type: ignore[arg-type]
        y = F.relu(x.float()).square()
        return (y if scale is None else y * scale.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        x, scale = ctx.saved_tensors  # type: ignore[attr-defined]
        positive, dy, d_scale = F.relu(x.float()), dy.float(), None
        if scale is not None:
            d_scale = (dy * positive.square()).sum(-1, keepdim=True).to(scale.dtype)
            dy = dy * scale.float()
        return (2.0 * positive * dy).to(x.dtype), d_scale
