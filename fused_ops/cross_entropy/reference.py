# SPDX-License-Identifier: Apache-2.0
"""Cross entropy in PyTorch, a block of rows at a time."""

from typing import Any

import torch
from torch import Tensor

from fused_ops.cross_entropy.shard import VocabShard

# Rows times columns that are widened to FP32 at once: 64 MiB.
BLOCK_ELEMENTS = 1 << 24


class CrossEntropy(torch.autograd.Function):
    """See `fused_ops.cross_entropy.cross_entropy`."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, shard: VocabShard | None, overwrite: bool
    ) -> Tensor:
        flat = logits.reshape(-1, logits.shape[-1])
        column, held = _columns(labels.reshape(-1), flat.shape[-1], shard)
        peak = flat.amax(-1).float()
        if shard is not None:
            shard.reduce_max(peak)
        total, target = torch.empty_like(peak), torch.empty_like(peak)
        for rows in _blocks(flat):
            block = flat[rows].float() - peak[rows, None]
            target[rows] = block.gather(-1, column[rows, None]).squeeze(-1)
            total[rows] = block.exp_().sum(-1)
        target.masked_fill_(~held, 0.0)
        if shard is not None:
            shard.reduce_sum(total)
            shard.reduce_sum(target)
        log_total = total.log()
        ctx.overwrite = overwrite
        ctx.save_for_backward(logits, column, held, peak + log_total)
        return (log_total - target).view(labels.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        logits, column, held, log_norm = ctx.saved_tensors
        flat, dy = logits.reshape(-1, logits.shape[-1]), dy.reshape(-1).float()
        d_logits = flat if ctx.overwrite else torch.empty_like(flat)
        for rows in _blocks(flat):
            block = (flat[rows].float() - log_norm[rows, None]).exp_()
            block.scatter_add_(-1, column[rows, None], -held[rows, None].float())
            d_logits[rows] = block.mul_(dy[rows, None]).to(d_logits.dtype)
        return d_logits.view(logits.shape), None, None, None


def _columns(labels: Tensor, width: int, shard: VocabShard | None) -> tuple[Tensor, Tensor]:
    """The column of each label among these, and whether it is one of them."""
    column = labels - (0 if shard is None else shard.start)
    held = (column >= 0) & (column < width)
    return column.clamp(0, width - 1), held


def _blocks(flat: Tensor) -> list[slice]:
    step = max(1, BLOCK_ELEMENTS // flat.shape[-1])
    return [slice(i, i + step) for i in range(0, flat.shape[0], step)]
