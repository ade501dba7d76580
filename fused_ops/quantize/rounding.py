# SPDX-License-Identifier: Apache-2.0
"""Rounding of scaled values to E2M1: nearest even, stochastic with 8 or 32 bits of dither."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fused_ops.codecs import e2m1_index, e2m1_join, encode_e2m1
from fused_ops.quantize.philox import Key, dither_bytes, dither_tail


@dataclass(frozen=True)
class Dither:
    """Where the random bits of a tensor come from: the key and the place of its first element."""

    key: Key
    origin: tuple[int, int] = (0, 0)


def round_e2m1(scaled: Tensor, rounding: str, dither: Dither | None = None) -> Tensor:
    """Round fp32 [rows, cols] to E2M1 codes (uint8, unpacked), saturating at 6.

    stochastic: t = |x| + u * step(|x|) with u = byte / 256, rounded down (TransformerEngine's
        rule). E = x - step / 512 on average: 8 bits cannot do better without a midpoint.
    stochastic_exact: the same with 32 bits of u: unbiased to step / 2**32.
    """
    if rounding == "nearest":
        return encode_e2m1(scaled)
    assert dither is not None, f"{rounding} rounding without a dither"
    rows, cols = scaled.shape
    position, offset = e2m1_index(scaled.abs().clamp_(max=8.0))
    first = dither_bytes(rows, cols, dither.key, dither.origin, scaled.device)
    if rounding == "stochastic_exact":
        return e2m1_join(_floor_exact(position, first, dither), offset, scaled)
    down = first.to(torch.float32).mul_(1 / 256).add_(position).floor_()
    return e2m1_join(down, offset, scaled)


def _floor_exact(position: Tensor, first: Tensor, dither: Dither) -> Tensor:
    """floor(position + u), u = (byte + tail / 2**24) / 256, the sum taken exactly.

    The tail matters only where the first byte leaves the outcome open, for one element in 256.
    """
    lower = position.floor()
    # Exact: both are multiples of the last bit of `position`.
    level = position.sub_(lower).mul_(256.0)
    missing = 256.0 - first.to(torch.float32)
    up = level >= missing
    open_ = ~up & (level > missing - 1.0)
    row, col = open_.nonzero(as_tuple=True)
    tail = dither_tail(row + dither.origin[0], col + dither.origin[1], dither.key)
    rest = (level[row, col] - (missing[row, col] - 1.0)).mul_(2.0**24)
    up[row, col] = rest >= (2**24 - tail).to(torch.float32)
    return lower.add_(up)
