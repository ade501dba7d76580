# SPDX-License-Identifier: Apache-2.0
"""Products of quantized operands: exact products, fp32 sums, tensor scales in the epilogue."""

from fused_ops.scaled_matmul.api import scaled_matmul

__all__ = ["scaled_matmul"]
