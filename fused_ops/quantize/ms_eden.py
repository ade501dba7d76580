# SPDX-License-Identifier: Apache-2.0
"""MS-EDEN: codes by nearest even, the error of a block's length put right in its scale.

Source: Quartet II, arXiv 2601.22813; in the variant with sums over the 16 elements of a block.
For scaled values t with codes q a block's E4M3 scale s becomes SR(s * sum(t t) / sum(t q)), SR
being stochastic rounding to E4M3 with one 20-bit dither a block: the only random step. Both sums
are chains of fused multiply-adds in fp32, in the order of the elements.
"""

import torch
from torch import Tensor

from fused_ops.codecs import decode_fp8, encode_fp8, nearest_e2m1_
from fused_ops.quantize.blocks import elements_first
from fused_ops.quantize.philox import block_words
from fused_ops.quantize.rounding import Dither

BLOCK = (1, 16)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """fp32 a * b + c with one rounding.

    The product is exact in fp64; the fp64 sum is rounded to odd, which makes the second rounding,
    to fp32, that of the exact sum (Boldo and Melquiond, 2008).
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    towards = torch.where((lost > 0) == (total > 0), 1, -1)
    inexact = (lost != 0) & torch.isfinite(total) & ((bits & 1) == 0)
    return torch.where(inexact, bits + towards, bits).view(torch.float64).float()


def stochastic_e4m3(x: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 x >= 0 to E4M3 bytes with a 20-bit dither (int32), saturating.

    2**-120 moves E4M3's exponents to fp32's smallest, so that E4M3's subnormals are fp32's:
    dropping 20 bits is then rounding to E4M3 everywhere.
    """
    small = (x * 2.0**-120).view(torch.int32)
    kept = ((small + bits) >> 20) << 20
    return encode_fp8(kept.view(torch.float32) * 2.0**120)


def corrected_scales(fitted: Tensor, scales: Tensor, dither: Dither) -> Tensor:
    """Final E4M3 bytes [rows, blocks] of scaled values fp32 [rows, cols]."""
    values = elements_first(fitted, BLOCK)
    nearest = nearest_e2m1_(values.clone())
    square = torch.zeros_like(values[0])
    cross = torch.zeros_like(values[0])
    for value, code in zip(values, nearest):
        square = fma(value, value, square)
        cross = fma(value, code, cross)
    ratio = square / cross
    usable = (cross != 0) & torch.isfinite(ratio)
    correction = torch.where(usable, ratio, torch.ones_like(ratio)).view(scales.shape)
    rows, blocks = scales.shape
    words = block_words(rows, blocks, dither.key, dither.origin, scales.device)
    return stochastic_e4m3(decode_fp8(scales) * correction, words[:, :, 0, 0] & 0xFFFFF)
