# SPDX-License-Identifier: Apache-2.0
"""Rows of an embedding, whose gradient touches only rows that were read."""

from fused_ops.embedding.api import embedding

__all__ = ["embedding"]
