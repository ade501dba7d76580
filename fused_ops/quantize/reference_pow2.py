# SPDX-License-Identifier: Apache-2.0
"""NVFP4 with power-of-two block scales: ordinary NVFP4 bytes, and exact in E4M3.

The scale of a block is the smallest power of two that brings its amax to at most 6: this project's
rule, near arXiv 2603.02731. With it no value saturates, so stochastic rounding is unbiased, and
code * scale has one mantissa bit, which FP8 tensor cores multiply exactly. The tensor scale is a
power of two 2**shift that puts the block scales into E4M3's 2**-6 .. 2**8; while none is clamped,
no decoded value depends on the shift, nor on any other block.
"""

import torch
from torch import Tensor

from fused_ops.codecs import nearest_e2m1_, per_row
from fused_ops.formats import OperandSpec
from fused_ops.quantize.blocks import (
    block_amax,
    block_sum,
    elements_first,
    scale_,
    tensor_amax,
)
from fused_ops.quantize.hadamard import amax_from_plain
from fused_ops.quantize.rounding import Dither, round_e2m1_

LARGEST, SMALLEST = 8, -6
"""Exponents of stored block scales. 2**-6 is E4M3's smallest normal number; 6 * 2**8 / 4 still
fits E4M3, and 0.5 * 2**-6 / 4 is its smallest subnormal."""
SHIFT_RANGE = (-120, 116)
"""Shifts for which 2688 * 2**shift and every 2**(exponent + shift) are normal fp32 numbers."""
NAN_SCALE = 0x7F


def ceil_exponent(amax: Tensor) -> Tensor:
    """Smallest e with 6 * 2**e >= amax, int32; -129 for zero and fp32 subnormals below 1.5 2**-127.

    6 = 1.5 * 4, and adding 0x3FFFFF to the bits carries into the exponent above a mantissa of 1.5.
    """
    return ((amax.contiguous().view(torch.int32) + 0x3FFFFF) >> 23) - 129


def power(exponent: Tensor) -> Tensor:
    """2**exponent for int32 exponents -126..127, fp32."""
    return ((exponent + 127) << 23).view(torch.float32)


def shift_of(amax: Tensor) -> Tensor:
    """Shift (int32 scalar) that stores the scale of a block with this amax as 2**8."""
    finite = torch.where(torch.isfinite(amax), amax, torch.zeros_like(amax))
    return (ceil_exponent(finite) - LARGEST).clamp(*SHIFT_RANGE)


def in_own_range(x: Tensor, spec: OperandSpec) -> tuple[Tensor, Tensor]:
    """Each row moved into range by its own shift, so that it does not matter what the others hold.

    Args:
        x: [rows, cols] fp32, bf16 or fp16, not rotated yet.

    Returns:
        x * 2**-shift, fp32, whose codes under `OWN_AMAX` are those of the row by itself; and
        2688 * 2**shift, fp32 [rows].
    """
    shift = shift_of(amax_from_plain(spec, x.abs().amax(1).float()))
    return x.float() * power(-shift).unsqueeze(1), 2688.0 * power(shift)


OWN_AMAX = 6.0 * 2.0**LARGEST
"""The amax whose shift is 0."""


def quantize_pow2(
    x: Tensor, spec: OperandSpec, amax: Tensor | None, dither: Dither | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """fp32 [rows, cols], cols a multiple of 16, overwritten -> codes, block scales, amax, counts.

    Returns:
        codes uint8 0..15 [rows, cols], one a byte; scales E4M3 bytes [rows, cols / 16], or
        [row tiles, cols / 16]; 2688 * 2**shift, fp32 scalar; blocks above and below the range,
        int32 [2].

    Blocks above the range saturate, those below are rounded on the grid of the smallest scale.
    Only the power of two of `amax` matters: it may be stale, with a margin. A block that is not
    finite gets a NaN scale and leaves the others alone.
    """
    assert spec.block is not None
    amaxes = block_amax(x, spec.block)
    finite = torch.isfinite(amaxes)
    amaxes = torch.where(finite, amaxes, torch.zeros_like(amaxes))
    shift = shift_of(tensor_amax(amaxes) if amax is None else amax)
    wanted = ceil_exponent(amaxes) - shift
    above = (wanted > LARGEST).sum(dtype=torch.int32)
    # The better of two may want half the scale: where that is clamped the shift would decide.
    lowest = SMALLEST + (spec.choice == "better_of_two")
    below = ((wanted < lowest) & (amaxes > 0)).sum(dtype=torch.int32)
    exponent = wanted.clamp(SMALLEST, LARGEST)
    if spec.choice == "better_of_two":
        exponent = better_of_two(x, spec, exponent, shift)
    codes = round_e2m1_(scale_(x, power(-exponent - shift), spec.block), spec.rounding, dither)
    scales = ((exponent + 7) << 3).to(torch.uint8)
    scales = torch.where(finite, scales, torch.full_like(scales, NAN_SCALE))
    return codes, scales, 2688.0 * power(shift), torch.stack([above, below])


def better_of_two(x: Tensor, spec: OperandSpec, exponent: Tensor, shift: Tensor) -> Tensor:
    """Exponent of each block, or one less if the squared error (saturation included) is smaller."""
    assert spec.block is not None
    rows = x.shape[0]
    smaller = (exponent - 1).clamp_(min=SMALLEST)
    values = elements_first(x, spec.block)
    fitted, error = torch.empty_like(values), torch.empty_like(values)
    errors = []
    for candidate in (exponent, smaller):
        factor = per_row(power(-candidate - shift), spec.block, rows).reshape(-1)
        torch.mul(values, factor, out=fitted)
        nearest_e2m1_(error.copy_(fitted)).sub_(fitted)
        # In units of the larger scale: powers of two, so the comparison is that of decoded values.
        unit = per_row(power(candidate - exponent), spec.block, rows).reshape(-1)
        errors.append(block_sum(error.mul_(unit).square_(), spec.block, x.shape))
    return torch.where(errors[1] < errors[0], smaller, exponent)
