# SPDX-License-Identifier: Apache-2.0
"""Activations between the two matrices of an MLP."""

from fused_ops.activation.api import squared_relu, swiglu

__all__ = ["squared_relu", "swiglu"]
