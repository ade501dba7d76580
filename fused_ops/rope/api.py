# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: shapes, checks, choice."""

from torch import Tensor

from fused_ops.dispatch import Choice, Implementation, Op, always
from fused_ops.rope import reference, triton_backend

ROPE = Op("rope")
ROPE.register(Implementation("triton", triton_backend.rope, triton_backend.supports))
ROPE.register(Implementation("reference", reference.rope, always))
SPLIT_ROPE = Op("split_rope")
SPLIT_ROPE.register(
    Implementation("triton", triton_backend.split_rope, triton_backend.split_supports)
)
SPLIT_ROPE.register(Implementation("reference", reference.split_rope, always))


def rope(x: Tensor, angles: Tensor, *, implementation: Choice = None) -> Tensor:
    """Rotates features i and i + rotary / 2 of each head by angles[i] (Su et al., 2104.09864).

    Args:
        x: [s, b, heads, d].
        angles: FP32 [s, 1, 1, rotary] in radians, rotary <= d, the second half equal to the first,
            as megatron-core makes them; further features stay as they are.
        implementation: "triton", "reference", or None for the first that can.

    Returns:
        The shape and type of x; rounded once.

    Raises:
        ValueError: angles that do not fit.
    """
    _check(angles, x.shape[0], x.shape[-1])
    return ROPE(x, angles, implementation=implementation)


def split_rope(
    mixed: Tensor,
    angles: Tensor | None,
    queries: int,
    head_dim: int,
    *,
    implementation: Choice = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output of megatron-core's linear_qkv as queries, keys and values, the first two rotated.

    Args:
        mixed: [s, b, groups * (queries + 2) * head_dim]: each group's query heads, its key head and
            its value head.
        angles: as for `rope`, or None to rotate nothing.
        queries: query heads of a group.
        head_dim: features of a head.
        implementation: "triton", "reference", or None for the first that can.

    Returns:
        Contiguous [s, b, groups * queries, head_dim], and twice [s, b, groups, head_dim].

    Raises:
        ValueError: shapes that do not fit.
    """
    if mixed.dim() != 3 or mixed.shape[-1] % ((queries + 2) * head_dim):
        raise ValueError(
            f"mixed must be [s, b, groups * ({queries} + 2) * {head_dim}], got {tuple(mixed.shape)}"
        )
    if angles is not None:
        _check(angles, mixed.shape[0], head_dim)
    return SPLIT_ROPE(mixed, angles, queries, head_dim, implementation=implementation)


def _check(angles: Tensor, length: int, head_dim: int) -> None:
    rotary = angles.shape[-1]
    if tuple(angles.shape) != (length, 1, 1, rotary) or rotary % 2 or rotary > head_dim:
        raise ValueError(
            f"angles must be [{length}, 1, 1, rotary] with an even rotary <= {head_dim}, got "
            f"{tuple(angles.shape)}"
        )
