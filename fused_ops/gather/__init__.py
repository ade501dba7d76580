# SPDX-License-Identifier: Apache-2.0
"""Rows taken from a matrix, and rows summed up where they came from: tokens to experts and back."""

from fused_ops.gather.api import Places, sum_rows, take_rows

__all__ = ["Places", "sum_rows", "take_rows"]
