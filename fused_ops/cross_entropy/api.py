# SPDX-License-Identifier: Apache-2.0
"""Cross entropy over a vocabulary: shapes, checks, choice."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fused_ops.cross_entropy import reference


@dataclass(frozen=True)
class VocabShard:
    """Which columns of the vocabulary these logits are, and how to reduce over the others."""

    start: int
    """Vocabulary index of the first column."""
    reduce_max: Callable[[Tensor], None]
    """In place: the maximum over all holders of columns. A matter of the caller's groups."""
    reduce_sum: Callable[[Tensor], None]
    """In place: the sum over all holders of columns."""


def cross_entropy(logits: Tensor, labels: Tensor, *, shard: VocabShard | None = None) -> Tensor:
    """-log softmax(logits)[label], one value a token.

    The logits are widened to FP32 a block of rows at a time and never as a whole; kept for the
    backward pass are the logits as given and one FP32 number a token.

    Args:
        logits: [..., vocabulary (or this shard of it)], any float type.
        labels: integer [...], indices into the whole vocabulary.
        shard: None when these are all columns.

    Returns:
        FP32 [...].

    Raises:
        ValueError: labels of another shape.
    """
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels must be {tuple(logits.shape[:-1])} for logits {tuple(logits.shape)}, got "
            f"{tuple(labels.shape)}"
        )
    return reference.CrossEntropy.apply(logits, labels, shard)
