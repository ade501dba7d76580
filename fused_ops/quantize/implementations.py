# SPDX-License-Identifier: Apache-2.0
"""The ops behind `fused_ops.quantize.api`, and who computes each, the preferred first."""

from fused_ops.dispatch import Implementation, Op, always
from fused_ops.formats import QuantizedTensor
from fused_ops.quantize import (
    cuda_backend,
    reference,
    triton_amax,
    triton_backend,
    triton_decode,
    triton_fp8,
    triton_wide,
)
from fused_ops.quantize.amax_op import AMAX

QUANTIZE = Op("quantize")
QUANTIZE.register(Implementation("triton", triton_backend.quantize, triton_backend.supports))
QUANTIZE.register(Implementation("triton_fp8", triton_fp8.quantize, triton_fp8.supports))
QUANTIZE.register(Implementation("triton_wide", triton_wide.quantize, triton_wide.supports))
QUANTIZE.register(Implementation("reference", reference.quantize, always))
AMAX.register(Implementation("triton", triton_amax.operand_amax, triton_amax.amax_supports))
AMAX.register(Implementation("triton_wide", triton_wide.operand_amax, triton_wide.amax_supports))
AMAX.register(Implementation("reference", reference.operand_amax, always))
PAIR = Op("quantize_pair")
PAIR.register(Implementation("cuda_sr", cuda_backend.quantize_pair, cuda_backend.preferred))
PAIR.register(Implementation("triton", triton_backend.quantize_pair, triton_backend.pair_supports))
PAIR.register(Implementation("fp8", triton_fp8.quantize_pair, triton_fp8.pair_supports))
PAIR.register(Implementation("cuda", cuda_backend.quantize_pair, cuda_backend.pair_supports))
PAIR.register(Implementation("reference", reference.quantize_pair, always))
REQUANTIZE = Op("requantize_columns")
REQUANTIZE.register(
    Implementation(
        "triton",
        triton_backend.requantize_columns,
        lambda source, spec, amax, form="codes": triton_backend.requantize_supports(source, spec),
    )
)
REQUANTIZE.register(Implementation("reference", reference.requantize_columns, always))
DEQUANTIZE = Op("dequantize")
DEQUANTIZE.register(Implementation("triton", triton_decode.dequantize, triton_decode.supports))
DEQUANTIZE.register(Implementation("reference", QuantizedTensor.dequantize, always))
