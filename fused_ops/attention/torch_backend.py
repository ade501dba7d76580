# SPDX-License-Identifier: Apache-2.0
"""Causal attention on NVIDIA GPUs through torch: cuDNN first, and flash attention over documents.

cuDNN's kernels are the fastest that torch 2.11 brings for Hopper, and take grouped queries as they
are; so does flash attention. torch's memory-efficient back end does not: grouped queries that
neither of the first two takes fall to the plain product.
"""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fused_ops.attention import reference
from fused_ops.attention.visible import Visible

BACK_ENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""In order of speed on an H200: forward and backward of 8192 tokens run at 501 TFLOP/s with cuDNN
and at 295 with flash attention."""

FLASH_HEAD = 256
"""Largest head that flash attention takes."""


def sdpa_supports(query: Tensor, *_others: object, **_options: object) -> str | None:
    """None, or why not."""
    return None if query.is_cuda else f"it runs on CUDA devices, not on {query.device.type}"


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Visible,
    *,
    dropout: float,
    scale: float | None,
) -> Tensor:
    """See `fused_ops.attention.attention`. The permuted inputs are views; nothing is copied."""
    with sdpa_kernel(BACK_ENDS, set_priority=True):
        return reference.attention(query, key, value, visible, dropout=dropout, scale=scale)


def varlen_supports(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Visible,
    *,
    dropout: float,
    scale: float | None,
) -> str | None:
    """None, or why not."""
    if visible.documents is None and visible.window is None:
        return "it is for documents and windows; plain causal attention is faster elsewhere"
    if dropout:
        return "it has no dropout"
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"inputs are bf16 or fp16, got {query.dtype}"
    head = query.shape[-1]
    if value.shape[-1] != head or head > FLASH_HEAD or head % 8:
        return (
            f"heads of one size, a multiple of 8 up to {FLASH_HEAD}; got {head}, {value.shape[-1]}"
        )
    return sdpa_supports(query)


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Visible,
    *,
    dropout: float,
    scale: float | None,
) -> Tensor:
    """Documents one after the other, without a mask in memory: work grows with their squares."""
    from torch.nn.attention.varlen import varlen_attn

    length, batch = query.shape[:2]
    documents, window = visible.documents, visible.window
    if documents is None:
        bounds = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * length
        longest = length
    else:
        bounds, longest = documents.cu_seqlens, documents.longest
    query, key, value = (t.transpose(0, 1).flatten(0, 1) for t in (query, key, value))
    out = varlen_attn(
        query, key, value, bounds, bounds, longest, longest, scale=scale,
        window_size=(-1 if window is None else window, 0),
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out.unflatten(0, (batch, length)).transpose(0, 1).flatten(2)
