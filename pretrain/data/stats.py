# SPDX-License-Identifier: Apache-2.0
"""Figures of a folder of shards."""

import math
from pathlib import Path

import numpy as np

from pretrain.data.manifest import load_manifest
from pretrain.data.shards import ShardSet

_TOKENS_AT_ONCE = 1 << 22


def token_counts(directory: str | Path) -> np.ndarray:
    """int64[vocab_size]: how often each id occurs."""
    shards = ShardSet(directory, load_manifest(directory))
    counts = np.zeros(shards.manifest.vocab_size, dtype=np.int64)
    for start in range(0, shards.tokens, _TOKENS_AT_ONCE):
        block = shards.window(start, min(_TOKENS_AT_ONCE, shards.tokens - start))
        counts += np.bincount(block, minlength=counts.size)
    return counts


def unigram_entropy(directory: str | Path) -> float:
    """Entropy of the folder's token frequencies, in nats per token.

    The lowest loss that a model without context can reach on these tokens; divide by log(2) for
    bits.
    """
    counts = token_counts(directory)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def bits(nats: float) -> float:
    """Nats to bits."""
    return nats / math.log(2)
