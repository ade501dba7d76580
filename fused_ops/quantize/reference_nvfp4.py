# SPDX-License-Identifier: Apache-2.0
"""NVFP4 with E4M3 block scales: the definition, one fp32 rounding per written operation.

Sources: "Pretraining LLMs with NVFP4", arXiv 2509.25149, appendix B; the order of operations is
TransformerEngine's with fast math off, which takes 1/6 into the factor of the tensor, where the
paper divides a by 6. Four-over-six: arXiv 2512.02010 and TransformerEngine. MS-EDEN: arXiv
2601.22813, in the variant with sums over 16 elements and amax mapped to 6.

    S_enc = min(numerator / A, FLT_MAX), 1 if A is 0 or S_enc is 0      A: amax of the tensor
    s     = E4M3(min(a * (S_enc * RN(1/6)), FLT_MAX))                   a: amax of the block
    e     = min(1 / (s * (1 / S_enc)), FLT_MAX)
    code  = E2M1(x * e)                             decodes to code * s * A / numerator

The other two multiply in another order, as the code that they come from does:

    MS-EDEN         s = E4M3(min((a * RN(1/6)) * S_enc, FLT_MAX)), corrected once codes are known
    four-over-six   s = E4M3((a / 6) * S_enc) or E4M3((a / 6) * S_enc * 1.5), the better of the two

There is no lower bound on s: a block far below the tensor's amax gets s = 0, saturated codes, and
decodes to zero.
"""

import torch
from torch import Tensor

from fused_ops.codecs import FLT_MAX, decode_fp8, encode_fp8, nearest_e2m1_, per_row
from fused_ops.formats import OperandSpec
from fused_ops.quantize.blocks import (
    block_amax,
    block_sum,
    capped_reciprocal,
    elements_first,
    scale_,
    tensor_amax,
    true_divide,
)
from fused_ops.quantize.ms_eden import corrected_scales
from fused_ops.quantize.rounding import Dither, round_e2m1_

RN_SIXTH = torch.tensor(1.0 / 6.0, dtype=torch.float32).item()


def encode_scale(amax: Tensor, numerator: float) -> Tensor:
    """S_enc of a tensor amax, fp32."""
    scale = true_divide(numerator, amax).clamp_(max=FLT_MAX)
    return torch.where((amax == 0) | (scale == 0), torch.ones_like(scale), scale)


def quantize_nvfp4(
    x: Tensor, spec: OperandSpec, amax: Tensor | None, dither: Dither | None
) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 [rows, cols], cols a multiple of 16, overwritten -> codes, block scales, amax.

    Returns:
        codes uint8 0..15 [rows, cols], one a byte; scales E4M3 bytes [rows, cols / 16], or
        [row tiles, cols / 16]; the amax that was used, fp32 scalar, or [rows] if row-scaled.
    """
    assert spec.block is not None
    amaxes = block_amax(x, spec.block)
    if amax is None:
        amax = tensor_amax(amaxes, spec.row_scaled)
    s_enc = encode_scale(amax, spec.numerator)
    if spec.row_scaled:
        s_enc = s_enc.unsqueeze(1)
    if spec.choice:
        scales = four_over_six_scales(x, spec, amaxes, amax, s_enc)
    elif spec.rounding == "ms_eden":
        scales = encode_fp8(((amaxes * RN_SIXTH) * s_enc).clamp_(max=FLT_MAX))
    else:
        scales = encode_fp8((amaxes * (s_enc * RN_SIXTH)).clamp_(max=FLT_MAX))
    fitted = scale_(x, block_encode_scale(scales, s_enc), spec.block)
    if spec.rounding == "ms_eden":
        assert dither is not None
        scales = corrected_scales(fitted, scales, dither)
        return round_e2m1_(fitted, "nearest"), scales, amax
    return round_e2m1_(fitted, spec.rounding, dither), scales, amax


def block_encode_scale(scales: Tensor, s_enc: Tensor) -> Tensor:
    """e = min(1 / (s * (1 / S_enc)), FLT_MAX) of E4M3 bytes, fp32 in their shape."""
    return capped_reciprocal(decode_fp8(scales) * true_divide(1.0, s_enc))


def four_over_six_scales(
    x: Tensor, spec: OperandSpec, amaxes: Tensor, amax: Tensor, s_enc: Tensor
) -> Tensor:
    """E4M3 bytes: per block the scale that maps its amax to 6, or to 4 if that errs less.

    Errors are taken on decoded fp32 values, absolute (mae) or squared (mse).
    """
    assert spec.block is not None
    six = torch.full_like(amaxes, 6.0)
    base = (amaxes / six) * s_enc
    candidates = [encode_fp8(base.clamp(max=FLT_MAX)), encode_fp8((base * 1.5).clamp(max=FLT_MAX))]
    values = elements_first(x, spec.block)
    error = torch.empty_like(values)
    numerator = torch.full((), spec.numerator, device=x.device)
    row_amax = amax.unsqueeze(1).expand_as(amaxes).reshape(-1) if spec.row_scaled else amax
    errors = []
    for scales in candidates:
        encode = per_row(block_encode_scale(scales, s_enc), spec.block, x.shape[0]).reshape(-1)
        decode = per_row(decode_fp8(scales), spec.block, x.shape[0]).reshape(-1)
        nearest_e2m1_(torch.mul(values, encode, out=error))
        error.mul_(decode).mul_(row_amax).div_(numerator).sub_(values)
        error = error.abs_() if spec.choice == "4over6_mae" else error.square_()
        errors.append(block_sum(error, spec.block, x.shape))
    return torch.where(errors[1] < errors[0], candidates[1], candidates[0])
