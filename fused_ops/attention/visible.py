# SPDX-License-Identifier: Apache-2.0
"""Which keys a query sees."""

from dataclasses import dataclass

from torch import Tensor


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
