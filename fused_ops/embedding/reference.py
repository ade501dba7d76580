# SPDX-License-Identifier: Apache-2.0
"""Embedding lookup in PyTorch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_ops.linear import dummy_gradient


def rows_of(ids: Tensor, weight: Tensor, gaps: bool) -> Tensor:
    """weight[ids]; if there are gaps, with zeros for negative ids."""
    if not gaps:
        return F.embedding(ids, weight)
    rows = F.embedding(ids.clamp(min=0), weight)
    return rows.masked_fill_((ids < 0).unsqueeze(-1), 0.0)


class LookUp(torch.autograd.Function):
    """Rows of the weight [entries, h]; the backward pass adds to `weight.main_grad`."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, gaps: bool) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(ids)
        return rows_of(ids, weight, gaps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, None]:
        (ids,) = ctx.saved_tensors
        held = ids.reshape(-1) >= 0
        rows = dy.reshape(-1, dy.shape[-1]).float()[held]
        ctx.weight.main_grad.index_add_(0, ids.reshape(-1)[held], rows)
        return None, dummy_gradient(ctx.weight), None


def embedding(ids: Tensor, weight: Tensor, gaps: bool) -> Tensor:
    """See `fused_ops.embedding.embedding`."""
    return LookUp.apply(ids, weight, gaps)
