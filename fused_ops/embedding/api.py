# SPDX-License-Identifier: Apache-2.0
"""Embedding lookup: shapes, checks, choice."""

import torch
from torch import Tensor

from fused_ops.dispatch import Choice, Implementation, Op, always
from fused_ops.embedding import reference, triton_backend

EMBEDDING = Op("embedding")
EMBEDDING.register(Implementation("triton", triton_backend.embedding, triton_backend.supports))
EMBEDDING.register(Implementation("reference", reference.embedding, always))


def embedding(
    ids: Tensor, weight: Tensor, *, gaps: bool = False, implementation: Choice = None
) -> Tensor:
    """weight[ids]; the gradient is added to `weight.main_grad`.

    A gradient of the whole weight is never made: rows of main_grad that no id names are neither
    read nor written. Rows that several tokens share are summed in FP32, in the order of the tokens.

    Args:
        ids: integer [...], below the number of rows.
        weight: [rows, features], with an FP32 `main_grad` of its shape; its gradient for autograd
            is a placeholder (`fused_ops.linear.dummy_gradient`).
        gaps: ids may be negative; their rows are zeros.
        implementation: "triton", "reference", or None for the first that can.

    Returns:
        [..., features] in weight's type.

    Raises:
        ValueError: a main_grad that is missing or does not fit.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None or main_grad.dtype is not torch.float32 or main_grad.shape != weight.shape:
        raise ValueError(f"weight.main_grad must be an fp32 {tuple(weight.shape)}")
    return EMBEDDING(ids, weight, gaps, implementation=implementation)
