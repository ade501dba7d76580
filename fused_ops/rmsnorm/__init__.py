# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square normalization, plain and per group of features."""

from fused_ops.rmsnorm.api import rmsnorm, rmsnorm_and_input

__all__ = ["rmsnorm", "rmsnorm_and_input"]
