# SPDX-License-Identifier: Apache-2.0
"""Cross entropy over a vocabulary: shapes, checks, choice."""

from torch import Tensor

from fused_ops.cross_entropy import reference, triton_backend
from fused_ops.cross_entropy.shard import VocabShard
from fused_ops.dispatch import Choice, Implementation, Op, always

CROSS_ENTROPY = Op("cross_entropy")
CROSS_ENTROPY.register(
    Implementation("triton", triton_backend.cross_entropy, triton_backend.supports)
)
CROSS_ENTROPY.register(Implementation("reference", reference.CrossEntropy.apply, always))


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    shard: VocabShard | None = None,
    overwrite: bool = False,
    implementation: Choice = None,
) -> Tensor:
    """-log softmax(logits)[label], one value a token.

    The logits are widened to FP32 a block at a time and never as a whole; kept for the
    backward pass are the logits as given and one FP32 number a token.

    Args:
        logits: [..., vocabulary (or this shard of it)], any float type.
        labels: integer [...], indices into the whole vocabulary.
        shard: None when these are all columns.
        overwrite: the backward pass may write its gradient over the logits, which saves their
            size in memory. Right if nothing else reads them, and there is one backward pass.
        implementation: "triton", "reference", or None for the first that can.

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
    return CROSS_ENTROPY(logits, labels, shard, overwrite, implementation=implementation)
