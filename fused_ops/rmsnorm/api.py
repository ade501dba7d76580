# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square normalization: shapes, checks, choice."""

from torch import Tensor

from fused_ops.rmsnorm import reference


def rmsnorm(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-5,
    group_size: int | None = None,
    zero_centered: bool = False,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich, 1910.07467).

    Args:
        x: [..., features], any float type; the statistics are FP32.
        weight: [features]; with `zero_centered` the factor is 1 + weight.
        eps: added to the mean square.
        group_size: normalize each run of that many features by itself (Mamba-2's output norm);
            None for all features together.
        zero_centered: the weight is stored minus one.

    Returns:
        [..., features] in x's type.

    Raises:
        ValueError: the weight or the groups do not fit the features.
    """
    features = x.shape[-1]
    if weight.shape != (features,):
        raise ValueError(
            f"weight must be [{features}], the features of x; got {tuple(weight.shape)}"
        )
    if group_size is not None and (group_size < 1 or features % group_size):
        raise ValueError(f"group_size {group_size} must divide the {features} features")
    return reference.rmsnorm(x, weight, eps, group_size, zero_centered)
