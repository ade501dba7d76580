# SPDX-License-Identifier: Apache-2.0
"""The op that takes an amax, below the back ends that need one themselves.

Who computes it is registered in `fused_ops.quantize.implementations`.
"""

from fused_ops.dispatch import Op

AMAX = Op("operand_amax")
