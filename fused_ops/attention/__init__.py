# SPDX-License-Identifier: Apache-2.0
"""Causal attention of grouped queries, within documents or windows."""

from fused_ops.attention.api import DocumentBounds, Visible, attention

__all__ = ["DocumentBounds", "Visible", "attention"]
