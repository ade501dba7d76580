# SPDX-License-Identifier: Apache-2.0
"""Mamba-2: the selective scan (state space duality) and the causal convolution before it."""

from fused_ops.mamba2_scan.api import (
    causal_conv1d,
    chosen,
    mamba2_scan,
    mamba2_scan_from,
    prefer,
)

__all__ = ["causal_conv1d", "chosen", "mamba2_scan", "mamba2_scan_from", "prefer"]
