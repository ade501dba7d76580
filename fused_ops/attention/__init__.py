# SPDX-License-Identifier: Apache-2.0
"""Causal attention of grouped queries, within documents or windows."""

from fused_ops.attention.api import attention
from fused_ops.attention.visible import DocumentBounds, Visible

__all__ = ["DocumentBounds", "Visible", "attention"]
