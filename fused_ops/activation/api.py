# SPDX-License-Identifier: Apache-2.0
"""SwiGLU and squared ReLU: shapes, checks, choice."""

from torch import Tensor

from fused_ops.activation import reference


def swiglu(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """silu(gate) * up * scale with [gate, up] = x (Shazeer, arXiv 2002.05202).

    Only x and scale are kept for the backward pass; intermediate values are FP32.

    Args:
        x: [..., 2 * features], the gate first.
        scale: [..., 1], a factor for each row (the router's probability), or None.

    Returns:
        [..., features] in x's type.

    Raises:
        ValueError: an odd last axis, or a scale of another shape.
    """
    if x.shape[-1] % 2:
        raise ValueError(f"the last axis holds gate and up and must be even, got {x.shape[-1]}")
    _check_scale(x, scale)
    return reference.SwiGLU.apply(x, scale)


def squared_relu(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """max(x, 0)^2 * scale (So et al., arXiv 2109.08668); only x and scale are kept.

    Args:
        x: [..., features].
        scale: [..., 1] or None.

    Returns:
        [..., features] in x's type.
    """
    _check_scale(x, scale)
    return reference.SquaredReLU.apply(x, scale)


def _check_scale(x: Tensor, scale: Tensor | None) -> None:
    if scale is not None and tuple(scale.shape) != (*x.shape[:-1], 1):
        raise ValueError(f"scale must be {(*x.shape[:-1], 1)}, got {tuple(scale.shape)}")
