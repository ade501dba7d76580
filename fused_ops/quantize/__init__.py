# SPDX-License-Identifier: Apache-2.0
"""Quantization of GEMM operands: amax, blocks, rotation, rounding, packing."""

from fused_ops.quantize.api import (
    amax_pair,
    dequantize,
    operand_amax,
    pair_reason,
    plain_amax,
    quantize,
    quantize_decoded,
    quantize_pair,
    quantize_rows_apart,
    quantize_stale,
    requantize_columns,
)
from fused_ops.quantize.delayed import DelayedScaling
from fused_ops.quantize.implementations import QUANTIZE

__all__ = [
    "QUANTIZE",
    "DelayedScaling",
    "amax_pair",
    "dequantize",
    "operand_amax",
    "pair_reason",
    "plain_amax",
    "quantize",
    "quantize_decoded",
    "quantize_pair",
    "quantize_rows_apart",
    "quantize_stale",
    "requantize_columns",
]
