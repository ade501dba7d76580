# SPDX-License-Identifier: Apache-2.0
"""Philox4x32-10, the counter-based random numbers behind dither and signs.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Random123). Plain
int64 arithmetic, so that every device gives the same words. The dither of an element depends on
key, row and column alone, never on the shape of the tensor or on how it is cut.
"""

import torch
from torch import Tensor

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
    c0, c1, c2, c3 = counter
    k0, k1 = key[0], key[1]
    for _ in range(10):
        # The product wraps modulo 2**64, which leaves the bits of its two halves right.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((p1 >> 32) ^ c1 ^ k0) & _MASK
        c2 = ((p0 >> 32) ^ c3 ^ k1) & _MASK
        c1, c3 = p1 & _MASK, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def block_words(
    rows: int, blocks: int, key: Key, origin: tuple[int, int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of each block of 16 columns: counter (row, column // 16, 0, 0).

    Args:
        origin: global (row, column) of the first element; the column a multiple of 16.
    Returns:
        Four int64 tensors [rows, blocks].
    """
    if origin[1] % 16:
        raise ValueError(
            f"dither comes in blocks of 16 columns; got a column origin of {origin[1]}: "
            "cut the tensor at a multiple of 16"
        )
    row = torch.arange(origin[0], origin[0] + rows, device=device).unsqueeze(1)
    first = origin[1] // 16
    block = torch.arange(first, first + blocks, device=device).unsqueeze(0)
    zero = torch.zeros((1, 1), dtype=torch.int64, device=device)
    words = philox4x32((row, block, zero, zero), key)
    shape = (rows, blocks)
    w0, w1, w2, w3 = (word.expand(shape) for word in words)
    return w0, w1, w2, w3


def dither_bytes(
    rows: int, cols: int, key: Key, origin: tuple[int, int], device: torch.device
) -> Tensor:
    """One random byte an element: uint8 [rows, cols], cols a multiple of 16.

    The 16 bytes of a block are its four words in little-endian order.
    """
    words = block_words(rows, cols // 16, key, origin, device)
    quads = torch.stack([word.to(torch.int32) for word in words], dim=-1)
    return quads.view(torch.uint8).view(rows, cols)


def dither_tail(row: Tensor, col: Tensor, key: Key) -> Tensor:
    """24 more random bits of single elements: int64 in [0, 2**24).

    Counter (row, column // 16, 1 + (column % 16) // 4, 0), word column % 4, its upper 24 bits.
    Args:
        row, col: int64 [n], global.
    """
    inside = col & 15
    counter = (row, col >> 4, 1 + (inside >> 2), torch.zeros_like(row))
    words = torch.stack(philox4x32(counter, key), dim=-1)
    return words.gather(-1, (inside & 3).unsqueeze(-1)).squeeze(-1) >> 8
