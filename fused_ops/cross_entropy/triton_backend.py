# SPDX-License-Identifier: Apache-2.0
"""Cross entropy on NVIDIA GPUs through Triton: which calls it takes, and how it launches."""

from typing import Any

import torch
from torch import Tensor

from fused_ops.cross_entropy.shard import VocabShard
from fused_ops.triton_support import float_reason, launch, power_of_two

FORWARD_BLOCK, BACKWARD_BLOCK, WARPS = 4096, 4096, 8
"""Columns that a program takes at once, and its warps."""


def supports(
    logits: Tensor, labels: Tensor, shard: VocabShard | None, overwrite: bool
) -> str | None:
    """None, or why not."""
    return float_reason(logits)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, shard: VocabShard | None, overwrite: bool
    ) -> Tensor:
        from fused_ops.cross_entropy import triton_kernels as kernels

        flat = logits.reshape(-1, logits.shape[-1]).contiguous()
        column = labels.reshape(-1).long()
        start = 0 if shard is None else shard.start
        rows, width = flat.shape
        peak, total, target = torch.empty((3, rows), dtype=torch.float32, device=flat.device)
        launch(
            kernels.cross_entropy_forward, (rows,),
            flat, column, peak, total, target, start, width, shard is None,
            min(FORWARD_BLOCK, power_of_two(width)), on=flat.device, warps=WARPS,
        )  # fmt: skip
        loss, log_norm = target, peak
        if shard is not None:
            held = (column >= start) & (column < start + width)
            loss, log_norm = _over_shards(peak, total, target, held, shard)
        ctx.start, ctx.shape = start, logits.shape
        ctx.overwrite = overwrite and logits.is_contiguous()
        ctx.save_for_backward(logits if logits.is_contiguous() else flat, column, log_norm)
        return loss.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        from fused_ops.cross_entropy import triton_kernels as kernels

        logits, column, log_norm = ctx.saved_tensors
        flat = logits.view(-1, logits.shape[-1])
        out = flat if ctx.overwrite else torch.empty_like(flat)
        rows, width = flat.shape
        block = min(BACKWARD_BLOCK, power_of_two(width))
        launch(
            kernels.cross_entropy_backward, (rows, -(-width // block)),
            flat, column, log_norm, dy.reshape(-1).float().contiguous(), out, ctx.start, width,
            block, on=flat.device, warps=WARPS,
        )  # fmt: skip
        if ctx.overwrite:  # autograd then refuses what still wanted to read the logits
            torch.autograd.graph.increment_version(logits)
        return out.view(ctx.shape), None, None, None


def _over_shards(
    peak: Tensor, total: Tensor, target: Tensor, held: Tensor, shard: VocabShard
) -> tuple[Tensor, Tensor]:
    """Loss and log of the sum of exp(logit), from what each holder of columns has found."""
    highest = peak.clone()
    shard.reduce_max(highest)
    total = total * torch.exp(peak - highest)
    shard.reduce_sum(total)
    target = torch.where(held, target - highest, 0.0)
    shard.reduce_sum(target)
    log_total = total.log()
    return log_total - target, highest + log_total


def cross_entropy(
    logits: Tensor, labels: Tensor, shard: VocabShard | None, overwrite: bool
) -> Tensor:
    """See `fused_ops.cross_entropy.cross_entropy`, which checks the arguments."""
    return _CrossEntropy.apply(logits, labels, shard, overwrite)
