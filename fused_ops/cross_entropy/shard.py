# SPDX-License-Identifier: Apache-2.0
"""Logits of a vocabulary that is cut over ranks."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class VocabShard:
    """Which columns of the vocabulary these logits are, and how to reduce over the others."""

    start: int
    """Vocabulary index of the first column."""
    reduce_max: Callable[[Tensor], None]
    """In place: the maximum over all holders of columns. A matter of the caller's groups."""
    reduce_sum: Callable[[Tensor], None]
    """In place: the sum over all holders of columns."""
