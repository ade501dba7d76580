# SPDX-License-Identifier: Apache-2.0
"""Causal attention: shapes, checks, choice."""

from torch import Tensor

from fused_ops.attention import reference, torch_backend
from fused_ops.attention.visible import CAUSAL, Visible
from fused_ops.dispatch import Choice, Implementation, Op, always

ATTENTION = Op("attention")
ATTENTION.register(Implementation("varlen", torch_backend.varlen, torch_backend.varlen_supports))
ATTENTION.register(Implementation("sdpa", torch_backend.sdpa, torch_backend.sdpa_supports))
ATTENTION.register(Implementation("reference", reference.attention, always))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Visible = CAUSAL,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
    implementation: Choice = None,
) -> Tensor:
    """softmax(scale * Q K^T) V over the keys that each query sees.

    Args:
        query: [s, b, heads, d].
        key: [keys, b, groups, d], groups dividing heads: consecutive heads share one.
        value: [keys, b, groups, d_value].
        visible: which keys a query sees.
        dropout: of the attention weights.
        scale: None for 1 / sqrt(d).
        implementation: "varlen" (flash attention over documents or windows), "sdpa" (torch's, the
            fastest back end first), "reference", or None for the first that can.

    Returns:
        [s, b, heads * d_value] in query's type.

    Raises:
        ValueError: shapes that do not fit.
    """
    _check(query, key, value, visible)
    return ATTENTION(
        query, key, value, visible, dropout=dropout, scale=scale, implementation=implementation
    )


def _check(query: Tensor, key: Tensor, value: Tensor, visible: Visible) -> None:
    length, batch, heads, dim = query.shape
    if key.shape[1] != batch or key.shape[3] != dim or heads % key.shape[2]:
        raise ValueError(
            f"key must be [keys, {batch}, groups, {dim}] with groups dividing {heads} heads, got "
            f"{tuple(key.shape)}"
        )
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(f"value must be {tuple(key.shape[:3])} + [d], got {tuple(value.shape)}")
    if visible.mask is None and key.shape[0] != length:
        raise ValueError(f"{length} queries and {key.shape[0]} keys need a mask")
    ids = None if visible.documents is None else visible.documents.ids
    if ids is not None and tuple(ids.shape) != (batch, length):
        raise ValueError(f"document ids must be {(batch, length)}, got {tuple(ids.shape)}")
