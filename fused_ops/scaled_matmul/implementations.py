# SPDX-License-Identifier: Apache-2.0
"""The op behind `fused_ops.scaled_matmul.api`, and who computes it, the preferred first."""

from fused_ops.dispatch import Implementation, Op, always
from fused_ops.scaled_matmul import blackwell, blockwise, hopper, reference, torch_blockwise

SCALED_MATMUL = Op("scaled_matmul")
SCALED_MATMUL.register(Implementation("blackwell", blackwell.scaled_matmul, blackwell.supports))
SCALED_MATMUL.register(
    Implementation("torch_blockwise", torch_blockwise.scaled_matmul, torch_blockwise.supports)
)
SCALED_MATMUL.register(Implementation("hopper", hopper.scaled_matmul, hopper.supports))
SCALED_MATMUL.register(Implementation("blockwise", blockwise.scaled_matmul, blockwise.supports))
SCALED_MATMUL.register(Implementation("reference", reference.scaled_matmul, always))
SCALED_MATMUL.register(
    Implementation("blackwell_model", reference.blackwell_model, reference.blackwell_model_supports)
)
