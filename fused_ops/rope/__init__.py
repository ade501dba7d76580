# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding, alone and with the split of queries, keys and values before it."""

from fused_ops.rope.api import rope, split_rope

__all__ = ["rope", "split_rope"]
