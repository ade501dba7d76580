# SPDX-License-Identifier: Apache-2.0
"""FP8 with fp32 scales: one a tensor (current or delayed amax), or one a block.

Sources: TransformerEngine's Float8CurrentScaling, DelayedScaling and Float8BlockScaling recipes;
"FP8 formats for deep learning", arXiv 2209.05433; blocks: DeepSeek-V3, arXiv 2412.19437.
"""

import torch
from torch import Tensor

from fused_ops.codecs import ELEMENT_MAX, FLT_MAX, encode_fp8
from fused_ops.formats import OperandSpec
from fused_ops.quantize.blocks import block_amax, scale_, true_divide


def encode_scale(amax: Tensor, spec: OperandSpec, largest: float) -> Tensor:
    """largest element / amax by true division; 1 if amax is 0, Inf or NaN.

    largest: cap of the scale: FLT_MAX, or of blocks, as TransformerEngine has it, the maximum of
    the input type. With scale pow2 the mantissa is cleared: rounded down, so nothing overflows.
    """
    scale = true_divide(ELEMENT_MAX[str(spec.element)], amax).clamp_(max=largest)
    scale = torch.where((amax > 0) & torch.isfinite(amax), scale, torch.ones_like(scale))
    if spec.scale == "pow2":
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale


def quantize_tensorwise(
    x: Tensor, spec: OperandSpec, amax: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 [rows, cols], overwritten -> FP8 bytes [rows, cols], decode scale, saturated values.

    The decode scale is fp32 [1, 1]; the counts int32 [2], (above the largest element, 0).
    """
    scale = encode_scale(amax, spec, FLT_MAX)
    fitted = x.mul_(scale)
    above = (fitted.abs() > ELEMENT_MAX[str(spec.element)]).sum(dtype=torch.int32)
    codes = encode_fp8(fitted, str(spec.element))
    return codes, true_divide(1.0, scale).view(1, 1), torch.stack([above, torch.zeros_like(above)])


def quantize_blockwise(
    x: Tensor, spec: OperandSpec, input_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """fp32 [rows, cols], cols a multiple of 128, overwritten -> FP8 bytes, fp32 decode scales.

    Bytes [rows, cols]; scales [rows, cols / 128] or [row tiles, cols / 128].
    """
    assert spec.block is not None
    scale = encode_scale(block_amax(x, spec.block), spec, torch.finfo(input_dtype).max)
    return encode_fp8(scale_(x, scale, spec.block), str(spec.element)), true_divide(1.0, scale)
