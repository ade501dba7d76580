# SPDX-License-Identifier: Apache-2.0
"""Causal attention: shapes, checks, choice."""

from dataclasses import dataclass

from torch import Tensor

from fused_ops.attention import reference, torch_backend
from fused_ops.dispatch import Choice, Implementation, Op, always

ATTENTION = Op("attention")
ATTENTION.register(Implementation("varlen", torch_backend.varlen, torch_backend.varlen_supports))
ATTENTION.register(Implementation("sdpa", torch_backend.sdpa, torch_backend.sdpa_supports))
ATTENTION.register(Implementation("reference", reference.attention, always))


@dataclass(frozen=True)
class DocumentBounds:
    """Documents that do not see each other; every sample of a batch starts one."""

    ids: Tensor
    """Integer [batch, length]: which document a token belongs to."""
    cu_seqlens: Tensor
    """int32 [documents + 1]: starts of documents in the flattened [batch, length], and its end."""
    longest: int
    """Tokens of the longest document."""


@dataclass(frozen=True)
class Visible:
    """Which keys a query sees; by itself all up to its own position."""

    documents: DocumentBounds | None = None
    """Those of its own document only."""
    window: int | None = None
    """Itself and so many before it."""
    mask: Tensor | None = None
    """Just these: bool, broadcast to [b, heads, queries, keys]; then without the other two."""

    def __post_init__(self) -> None:
        if self.mask is not None and not (self.documents is None and self.window is None):
            raise ValueError("a mask says all: pass it without documents and window")


CAUSAL = Visible()


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
