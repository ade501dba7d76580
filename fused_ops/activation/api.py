# SPDX-License-Identifier: Apache-2.0
"""SwiGLU and squared ReLU: shapes, checks, choice."""

from torch import Tensor

from fused_ops.activation import reference, triton_backend
from fused_ops.dispatch import Choice, Implementation, Op, always

SWIGLU = Op("swiglu")
SWIGLU.register(Implementation("triton", triton_backend.swiglu, triton_backend.supports))
SWIGLU.register(Implementation("reference", reference.SwiGLU.apply, always))
SQUARED_RELU = Op("squared_relu")
SQUARED_RELU.register(
    Implementation("triton", triton_backend.squared_relu, triton_backend.supports)
)
SQUARED_RELU.register(Implementation("reference", reference.SquaredReLU.apply, always))


def swiglu(x: Tensor, scale: Tensor | None = None, *, implementation: Choice = None) -> Tensor:
    """silu(gate) * up * scale with [gate, up] = x (Shazeer, arXiv 2002.05202).

    Only x and scale are kept for the backward pass; intermediate values are FP32.

    Args:
        x: [..., 2 * features], the gate first.
        scale: [..., 1], a factor for each row (the router's probability), or None.
        implementation: "triton", "reference", or None for the first that can.

    Returns:
        [..., features] in x's type.

    Raises:
        ValueError: an odd last axis, or a scale of another shape.
    """
    if x.shape[-1] % 2:
        raise ValueError(f"the last axis holds gate and up and must be even, got {x.shape[-1]}")
    _check_scale(x, scale)
    return SWIGLU(x, scale, implementation=implementation)


def squared_relu(
    x: Tensor, scale: Tensor | None = None, *, implementation: Choice = None
) -> Tensor:
    """max(x, 0)^2 * scale (So et al., arXiv 2109.08668); only x and scale are kept.

    Args:
        x: [..., features].
        scale: [..., 1] or None.
        implementation: as for `swiglu`.

    Returns:
        [..., features] in x's type.
    """
    _check_scale(x, scale)
    return SQUARED_RELU(x, scale, implementation=implementation)


def _check_scale(x: Tensor, scale: Tensor | None) -> None:
    if scale is not None and tuple(scale.shape) != (*x.shape[:-1], 1):
        raise ValueError(f"scale must be {(*x.shape[:-1], 1)}, got {tuple(scale.shape)}")
