# SPDX-License-Identifier: Apache-2.0
"""Quantization of GEMM operands: amax, blocks, rotation, rounding, packing."""

from fused_ops.quantize.api import (
    QUANTIZE,
    nonfinite_flag,
    operand_amax,
    quantize,
    quantize_stale,
)
from fused_ops.quantize.delayed import DelayedScaling

__all__ = [
    "QUANTIZE",
    "DelayedScaling",
    "nonfinite_flag",
    "operand_amax",
    "quantize",
    "quantize_stale",
]
