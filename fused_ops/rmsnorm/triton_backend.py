# SPDX-License-Identifier: Apache-2.0
"""RMSNorm on NVIDIA GPUs through Triton: which calls it takes, and how kernels are launched."""

from typing import Any

import torch
from torch import Tensor

from fused_ops.triton_support import float_reason, launch, power_of_two

TILE = 4096
"""Elements of a tile: short rows are taken several at a time."""
PROGRAMS = 264
"""Partial sums of the weight's gradient: two an SM of an H200, and fixed, so that a GPU with
another number of SMs sums in the same order."""
LARGEST = 16384
"""Features of a group that fit into the registers of a program."""


def supports(x: Tensor, weight: Tensor, eps: float, group_size: int | None, _: bool) -> str | None:
    """None, or why not."""
    size = group_size or x.shape[-1]
    if size > LARGEST:
        return f"at most {LARGEST} features are normalized together, got {size}"
    if weight.device != x.device:
        return f"the weight is on {weight.device}, x on {x.device}"
    return float_reason(x)


def tile(size: int) -> dict[str, int]:
    """Rows and columns of a tile of rows of `size` features, and the `warps` that take it."""
    block = power_of_two(size)
    rows = max(1, TILE // block)
    return {"ROWS": rows, "BLOCK": block, "warps": min(16, max(4, rows * block // 512))}


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, size: int, zero_centered: bool, keep: bool
    ) -> Any:
        """y, or (y, x) if `keep`: the gradient that reaches this x is then added in the pass."""
        from fused_ops.rmsnorm import triton_kernels as kernels

        given, x, weight = x, x.contiguous(), weight.contiguous()
        ctx.set_materialize_grads(False)
        features = x.shape[-1]
        tokens, groups = x.numel() // features, features // size
        y = torch.empty_like(x)
        rstd = torch.empty(tokens * groups, dtype=torch.float32, device=x.device)
        shape = tile(size)
        launch(
            kernels.rmsnorm_forward, (-(-tokens // shape["ROWS"]), groups),
            x, weight, y, rstd, tokens, groups, size, eps, zero_centered, on=x.device, **shape,
        )  # fmt: skip
        ctx.size, ctx.zero_centered = size, zero_centered
        ctx.save_for_backward(x, weight, rstd)
        return (y, given) if keep else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, more: Tensor | None = None) -> tuple[Any, ...]:
        from fused_ops.rmsnorm import triton_kernels as kernels

        if dy is None:
            return more, None, None, None, None, None
        x, weight, rstd = ctx.saved_tensors
        features, size = x.shape[-1], ctx.size
        tokens, groups = x.numel() // features, features // size
        shape = tile(size)
        programs = max(1, min(-(-tokens // shape["ROWS"]), PROGRAMS // groups))
        dx, d_weight = torch.empty_like(x), torch.empty_like(weight)
        partial = torch.empty((programs, features), dtype=torch.float32, device=x.device)
        dy = dy.contiguous()
        other = dy if more is None else more.contiguous()
        launch(
            kernels.rmsnorm_backward, (programs, groups),
            x, weight, rstd, dy, other, dx, partial, tokens, groups, size,
            ctx.zero_centered, more is not None, on=x.device, **shape,
        )  # fmt: skip
        launch(
            kernels.sum_partials, (-(-features // 32),),
            partial, d_weight, programs, features, 32, 32, on=x.device, warps=4,
        )  # fmt: skip
        return dx, d_weight, None, None, None, None


def rmsnorm(
    x: Tensor, weight: Tensor, eps: float, group_size: int | None, zero_centered: bool
) -> Tensor:
    """See `fused_ops.rmsnorm.rmsnorm`, which checks the arguments."""
    return _RMSNorm.apply(x, weight, eps, group_size or x.shape[-1], zero_centered, False)


def rmsnorm_and_input(
    x: Tensor, weight: Tensor, eps: float, group_size: int | None, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """See `fused_ops.rmsnorm.rmsnorm_and_input`, which checks the arguments."""
    return _RMSNorm.apply(x, weight, eps, group_size or x.shape[-1], zero_centered, True)
