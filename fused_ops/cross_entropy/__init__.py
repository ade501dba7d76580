# SPDX-License-Identifier: Apache-2.0
"""Cross entropy over a vocabulary, whole or cut over ranks."""

from fused_ops.cross_entropy.api import VocabShard, cross_entropy

__all__ = ["VocabShard", "cross_entropy"]
