# SPDX-License-Identifier: Apache-2.0
"""Philox4x32-10, the counter-based random numbers behind dither and signs.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Random123). Plain
int64 arithmetic, so that every device gives the same words. The dither of an element depends on
key, row and column alone, never on the shape of the tensor or on how it is cut.
"""

import torch
from torch import Tensor

from fused_ops.errors import ConfigError

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF

Key = tuple[int, int] | Tensor
"""(k0, k1), two unsigned 32-bit numbers as ints, or an int64 tensor of two."""


def philox4x32(counter: tuple[Tensor, ...], key: Key) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox4x32.

    Args:
        counter: four int64 tensors of unsigned 32-bit numbers that broadcast together.
        key: see `Key`.
    Returns:
        Four int64 tensors with values in [0, 2**32).
    """
    words = torch.broadcast_tensors(*counter)
    c0, c1, c2, c3 = (word.clone(memory_format=torch.contiguous_format) for word in words)
    high = torch.empty_like(c0)
    k0, k1 = key[0], key[1]
    for _ in range(10):
        # A product wraps modulo 2**64, which leaves the bits of both its halves right.
        p0, p1 = c0.mul_(_MULTIPLIERS[0]), c2.mul_(_MULTIPLIERS[1])
        torch.bitwise_right_shift(p1, 32, out=high)
        c0 = c1.bitwise_xor_(high).bitwise_xor_(k0).bitwise_and_(_MASK)
        torch.bitwise_right_shift(p0, 32, out=high)
        c2 = c3.bitwise_xor_(high).bitwise_xor_(k1).bitwise_and_(_MASK)
        c1, c3 = p1, p0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1.bitwise_and_(_MASK), c2, c3.bitwise_and_(_MASK)


def block_words(
    rows: int,
    blocks: int,
    key: Key,
    origin: tuple[int, int],
    device: torch.device,
    calls: int = 1,
) -> Tensor:
    """Random words of blocks of 16 columns: counter (row, column // 16, call, 0).

    Args:
        origin: global (row, column) of the first element; the column a multiple of 16.
    Returns:
        int32 [rows, blocks, calls, 4], the bits of unsigned words.
    """
    if origin[1] % 16:
        raise ConfigError(
            f"dither comes in blocks of 16 columns; got a column origin of {origin[1]}: "
            "cut the tensor at a multiple of 16"
        )
    row = torch.arange(origin[0], origin[0] + rows, device=device).view(-1, 1, 1)
    first = origin[1] // 16
    block = torch.arange(first, first + blocks, device=device).view(1, -1, 1)
    call = torch.arange(calls, device=device).view(1, 1, -1)
    words = philox4x32((row, block, call, torch.zeros_like(call)), key)
    return torch.stack([word.to(torch.int32) for word in words], dim=-1)


def dither_bytes(
    rows: int, cols: int, key: Key, origin: tuple[int, int], device: torch.device
) -> Tensor:
    """One random byte an element: uint8 [rows, cols], cols a multiple of 16.

    The 16 bytes of a block are the four words of call 0 in little-endian order.
    """
    return block_words(rows, cols // 16, key, origin, device).view(torch.uint8).view(rows, cols)


def dither_24(
    rows: int, cols: int, key: Key, origin: tuple[int, int], device: torch.device
) -> Tensor:
    """24 random bits an element: int32 [rows, cols] in [0, 2**24), cols a multiple of 16.

    The upper 8 are `dither_bytes`; the lower 16 come from calls 1 and 2, whose eight words are
    sixteen halves in little-endian order.
    """
    words = block_words(rows, cols // 16, key, origin, device, calls=3)
    upper = words[:, :, :1].contiguous().view(torch.uint8).view(rows, cols)
    lower = words[:, :, 1:].contiguous().view(torch.int16).view(rows, cols)
    bits = upper.to(torch.int32).bitwise_left_shift_(16)
    return bits.add_(lower.to(torch.int32).bitwise_and_(0xFFFF))
