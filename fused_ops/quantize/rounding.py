# SPDX-License-Identifier: Apache-2.0
"""Rounding of scaled values to E2M1: nearest even, stochastic with 8 or 24 bits of dither."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fused_ops.codecs import e2m1_join, e2m1_split_, encode_e2m1_
from fused_ops.quantize.philox import Key, dither_24, dither_bytes


@dataclass(frozen=True)
class Dither:
    """Where the random bits of a tensor come from: the key and the place of its first element."""

    key: Key
    origin: tuple[int, int] = (0, 0)


def round_e2m1_(x: Tensor, rounding: str, dither: Dither | None = None) -> Tensor:
    """Round fp32 [rows, cols] to E2M1 codes (uint8, unpacked), saturating at 6. Overwrites x.

    stochastic: t = |x| + u * step(|x|) with u = byte / 256, rounded down (TransformerEngine's
        rule), the sum exact. On average x - step / 512: dither of 8 bits has no midpoint.
    stochastic_exact: the same with 24 bits of u: unbiased to step / 2**24.
    """
    if rounding == "nearest":
        return encode_e2m1_(x)
    assert dither is not None, f"{rounding} rounding without a dither"
    rows, cols = x.shape
    position, offset, sign = e2m1_split_(x)
    if rounding == "stochastic":
        first = dither_bytes(rows, cols, dither.key, dither.origin, x.device)
        whole = position.mul_(256.0).floor_().to(torch.int16)
        integer = whole.add_(first).bitwise_right_shift_(8).to(torch.int8)
    else:
        dither24 = dither_24(rows, cols, dither.key, dither.origin, x.device)
        lower = position.floor()
        part = position.sub_(lower).mul_(2.0**24).to(torch.int32)
        carry = part.add_(dither24).bitwise_right_shift_(24)
        integer = lower.to(torch.int8).add_(carry.to(torch.int8))
    return e2m1_join(integer, offset, sign)
