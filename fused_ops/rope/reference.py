# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding in PyTorch."""

import torch
from torch import Tensor


def rope(x: Tensor, angles: Tensor) -> Tensor:
    """See `fused_ops.rope.rope`."""
    rotary = angles.shape[-1]
    angles = angles[..., : rotary // 2].float()
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :rotary].float().chunk(2, -1)
    turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
    return turned if rotary == x.shape[-1] else torch.cat([turned, x[..., rotary:]], -1)


def split_rope(
    mixed: Tensor, angles: Tensor | None, queries: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `fused_ops.rope.split_rope`."""
    heads = mixed.unflatten(-1, (-1, queries + 2, head_dim))
    query, key, value = heads.split([queries, 1, 1], -2)
    query, key, value = (t.flatten(2, 3).contiguous() for t in (query, key, value))
    if angles is not None:
        query, key = rope(query, angles), rope(key, angles)
    return query, key, value
