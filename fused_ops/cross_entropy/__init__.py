# SPDX-License-Identifier: Apache-2.0
"""Cross entropy over a vocabulary, whole or cut over ranks."""

from fused_ops.cross_entropy.api import cross_entropy
from fused_ops.cross_entropy.shard import VocabShard

__all__ = ["VocabShard", "cross_entropy"]
