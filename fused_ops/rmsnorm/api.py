# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square normalization: shapes, checks, choice."""

from torch import Tensor

from fused_ops.dispatch import Choice, Implementation, Op, always
from fused_ops.rmsnorm import reference, triton_backend

RMSNORM = Op("rmsnorm")
RMSNORM.register(Implementation("triton", triton_backend.rmsnorm, triton_backend.supports))
RMSNORM.register(Implementation("reference", reference.rmsnorm, always))
RMSNORM_AND_INPUT = Op("rmsnorm_and_input")
RMSNORM_AND_INPUT.register(
    Implementation("triton", triton_backend.rmsnorm_and_input, triton_backend.supports)
)
RMSNORM_AND_INPUT.register(Implementation("reference", reference.rmsnorm_and_input, always))


def rmsnorm(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-5,
    group_size: int | None = None,
    zero_centered: bool = False,
    implementation: Choice = None,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich, 1910.07467).

    Args:
        x: [..., features], any float type; the statistics are FP32.
        weight: [features]; with `zero_centered` the factor is 1 + weight.
        eps: added to the mean square.
        group_size: normalize each run of that many features by itself (Mamba-2's output norm);
            None for all features together.
        zero_centered: the weight is stored minus one.
        implementation: "triton", "reference", or None for the first that can.

    Returns:
        [..., features] in x's type.

    Raises:
        ValueError: the weight or the groups do not fit the features.
    """
    _check(x, weight, group_size)
    return RMSNORM(x, weight, eps, group_size, zero_centered, implementation=implementation)


def rmsnorm_and_input(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-5,
    zero_centered: bool = False,
    implementation: Choice = None,
) -> tuple[Tensor, Tensor]:
    """`rmsnorm`, and x itself for a residual connection around what follows the norm.

    Whoever uses both results lets the norm's backward pass add the two gradients of x, instead of
    a pass over memory of its own.

    Returns:
        The normalized x, and x, both [..., features].
    """
    _check(x, weight, None)
    return RMSNORM_AND_INPUT(x, weight, eps, None, zero_centered, implementation=implementation)


def _check(x: Tensor, weight: Tensor, group_size: int | None) -> None:
    features = x.shape[-1]
    if weight.shape != (features,):
        raise ValueError(
            f"weight must be [{features}], the features of x; got {tuple(weight.shape)}"
        )
    if group_size is not None and (group_size < 1 or features % group_size):
        raise ValueError(f"group_size {group_size} must divide the {features} features")
