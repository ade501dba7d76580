# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square normalization in PyTorch."""

import torch.nn.functional as F
from torch import Tensor


def rmsnorm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    group_size: int | None = None,
    zero_centered: bool = False,
) -> Tensor:
    """See `fused_ops.rmsnorm.rmsnorm`."""
    size = group_size or x.shape[-1]
    gain = weight.float() + 1.0 if zero_centered else weight.float()
    normalized = F.rms_norm(x.float().unflatten(-1, (-1, size)), (size,), None, eps)
    return (normalized.flatten(-2) * gain).to(x.dtype)


def rmsnorm_and_input(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    group_size: int | None = None,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `fused_ops.rmsnorm.rmsnorm_and_input`."""
    return rmsnorm(x, weight, eps, group_size, zero_centered), x
