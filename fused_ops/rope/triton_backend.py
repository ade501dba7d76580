# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding on NVIDIA GPUs through Triton: what it takes, and how it launches."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fused_ops.triton_support import float_reason, launch, power_of_two

HEADS, WARPS = 16, 4
"""Heads and warps of a program."""

_TABLES: Any = WeakTensorKeyDictionary()


def supports(x: Tensor, angles: Tensor | None) -> str | None:
    """None, or why not."""
    if angles is not None and angles.device != x.device:
        return f"the angles are on {angles.device}, x on {x.device}"
    return float_reason(x)


def split_supports(mixed: Tensor, angles: Tensor | None, queries: int, head_dim: int) -> str | None:
    """None, or why not."""
    return supports(mixed, angles)


def table(angles: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, FP32 [s, rotary / 2]; made once for the angles that all layers are given."""
    kept = not angles.is_inference()  # those do not tell whether they were changed
    version, found = _TABLES.get(angles, (None, None)) if kept else (None, None)
    if found is None or version != angles._version:
        half = angles.detach().reshape(angles.shape[0], -1)[:, : angles.shape[-1] // 2].float()
        found = half.cos().contiguous(), half.sin().contiguous()
        if kept:
            _TABLES[angles] = (angles._version, found)
    return found


def _launch(
    mixed: Tensor, parts: list[Tensor], turns: tuple[Tensor, Tensor] | None, backward: bool
) -> None:
    """mixed [s, b, heads, d] and parts [s, b, heads of it, d], all with neighbouring features."""
    from fused_ops.rope import triton_kernels as kernels

    length, batch, heads, dim = mixed.shape
    half = 0 if turns is None else turns[0].shape[-1]
    cos, sin = (mixed, mixed) if turns is None else turns
    three = parts if len(parts) == 3 else parts * 3
    strides = [n for part in three for n in part.stride()[:3]]
    queries = three[0].shape[2] // three[1].shape[2] if len(parts) == 3 else heads
    launch(
        kernels.rotate_heads, (length * batch, -(-heads // HEADS)),
        mixed, *three, cos, sin, batch, heads, mixed.stride(0), mixed.stride(1), *strides,
        QUERIES=queries, DIM=dim, HALF=half, PARTS=len(parts), BACKWARD=backward,
        HEADS=HEADS, BLOCK=power_of_two(half), REST=power_of_two(dim - 2 * half),
        on=mixed.device, warps=WARPS,
    )  # fmt: skip


def _neighbours(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor) -> Tensor:
        ctx.turns = table(angles)
        x = x if x.stride(-1) == 1 and x.stride(-2) == x.shape[-1] else x.contiguous()
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _launch(x, [y], ctx.turns, backward=False)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        dx = torch.empty(dy.shape, dtype=dy.dtype, device=dy.device)
        _launch(dx, [_neighbours(dy)], ctx.turns, backward=True)
        return dx, None


class _SplitRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, angles: Tensor | None, queries: int, head_dim: int
    ) -> tuple[Tensor, ...]:
        ctx.turns = None if angles is None else table(angles)
        ctx.shape = mixed.shape
        heads = mixed.contiguous().view(*mixed.shape[:2], -1, head_dim)
        groups = heads.shape[2] // (queries + 2)
        parts = [
            torch.empty(*mixed.shape[:2], n, head_dim, dtype=mixed.dtype, device=mixed.device)
            for n in (groups * queries, groups, groups)
        ]
        _launch(heads, parts, ctx.turns, backward=False)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        parts = [_neighbours(g) for g in gradients]
        first = parts[0]
        d_mixed = torch.empty(ctx.shape, dtype=first.dtype, device=first.device)
        heads = d_mixed.view(*ctx.shape[:2], -1, first.shape[-1])
        _launch(heads, parts, ctx.turns, backward=True)
        return d_mixed, None, None, None


def rope(x: Tensor, angles: Tensor) -> Tensor:
    """See `fused_ops.rope.rope`, which checks the arguments."""
    return _Rope.apply(x, angles)


def split_rope(
    mixed: Tensor, angles: Tensor | None, queries: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `fused_ops.rope.split_rope`, which checks the arguments."""
    query, key, value = _SplitRope.apply(mixed, angles, queries, head_dim)
    return query, key, value
