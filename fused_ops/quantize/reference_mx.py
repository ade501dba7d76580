# SPDX-License-Identifier: Apache-2.0
"""MXFP8 and MXFP4: blocks of 32 with E8M0 scales rounded up, so that nothing saturates.

Sources: OCP Microscaling Formats v1.0; rounding up instead of OCP's floor: "Recipes for
Pre-training LLMs with MXFP8", arXiv 2506.08027, and TransformerEngine. There is no tensor scale.
"""

import torch
from torch import Tensor

from fused_ops.codecs import ELEMENT_MAX, encode_e8m0_up, encode_fp8
from fused_ops.formats import OperandSpec
from fused_ops.quantize.blocks import block_amax, scale_
from fused_ops.quantize.rounding import Dither, round_e2m1_


def inverse_e8m0(codes: Tensor) -> Tensor:
    """2**(127 - code) in fp32; the subnormal 2**-127 for code 254, NaN for 255."""
    bits = (254 - codes.to(torch.int32)) << 23
    bits = torch.where(codes == 254, torch.full_like(bits, 1 << 22), bits)
    bits = torch.where(codes == 255, torch.full_like(bits, 0x7FC00000), bits)
    return bits.view(torch.float32)


def quantize_mx(x: Tensor, spec: OperandSpec, dither: Dither | None) -> tuple[Tensor, Tensor]:
    """fp32 [rows, cols], cols a multiple of 32, overwritten -> codes [rows, cols], E8M0 bytes.

    4-bit codes come one a byte; scales are [rows, cols / 32], or [row tiles, cols / 32].

    scale = up(a * RN(1 / largest element)), code = element(x / scale).
    """
    assert spec.block is not None
    element = str(spec.element)
    # Filled on the device: a copy from the host would wait for it.
    inverse_max = torch.full((), 1.0 / ELEMENT_MAX[element], device=x.device)
    scales = encode_e8m0_up(block_amax(x, spec.block) * inverse_max)
    fitted = scale_(x, inverse_e8m0(scales), spec.block)
    if spec.is_fp4:
        return round_e2m1_(fitted, spec.rounding, dither), scales
    return encode_fp8(fitted, element), scales
