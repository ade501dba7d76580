# SPDX-License-Identifier: Apache-2.0
"""What all launches of the Triton quantizers share: tiles, inputs as words, keys, the device."""

import torch
from torch import Tensor

from fused_ops.codecs import pad_to, roundup
from fused_ops.quantize.hadamard import FIXED_SIGNS
from fused_ops.quantize.philox import Key

ROW_TILE = {"rows": 4, "groups": 64, "warps": 4}
"""Blocks of a program: rows x groups of 16 columns. Measured on an H200; so are the others."""
ROW_TILE_2D = {"rows": 16, "groups": 16, "warps": 4}
COLUMN_TILE = {"blocks": 4, "words": 32, "warps": 4}
ROTATED_AMAX_TILE = {"blocks": 1, "words": 64, "tiles": 4, "warps": 1}
"""Blocks of 16 rows x words of a tile, and tiles of a program, one below the other."""
PAIR_TILE = {"blocks": 4, "words": 64, "rows": 16, "warps": 4}
"""Blocks of 16 rows x words of a program; `rows` of it at a time when it goes along rows."""
REQUANTIZE_TILE = {"blocks": 4, "words": 32, "warps": 4}
WIDE_TILE = {"lanes": 128, "warps": 4}
"""Long pieces of a program, one a thread. Reasoned, not measured; so is the next."""
DECODE_TILE = {"rows": 4, "cols": 256, "warps": 4}
FP8_TILE = {"rows": 64, "cols": 128, "warps": 8}
AMAX_TILE = {"size": 2048, "iters": 8, "warps": 8}

INPUTS: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
"""Types of inputs that are taken."""

_SIGNS: dict[torch.device, Tensor] = {}


def words(x: Tensor, columns: bool) -> Tensor:
    """x as contiguous int32 words [rows, words], padded to whole blocks (columns: whole words)."""
    x = x.detach()
    x = pad_to(x, x.shape[0], roundup(x.shape[1], 2 if columns else 16)).contiguous()
    if x.data_ptr() % 16:
        x = x.clone()
    return x.view(torch.int32)


def sign_factors(signs: Tensor | None, device: torch.device) -> Tensor:
    """fp32 [16] of +-1/4."""
    if signs is not None:
        if signs.shape != (16,):
            raise ValueError(
                f"a Hadamard rotation of 16 needs 16 signs; got shape {tuple(signs.shape)}"
            )
        return signs.to(device=device, dtype=torch.float32) * 0.25
    if device not in _SIGNS:
        _SIGNS[device] = torch.tensor(FIXED_SIGNS, dtype=torch.float32, device=device) * 0.25
    return _SIGNS[device]


def key_words(key: Key | None) -> tuple[int, int]:
    """The two words of a key of numbers as a kernel takes them; 0 without one."""
    return (0, 0) if key is None else (signed(int(key[0])), signed(int(key[1])))


def signed(word: int) -> int:
    """An unsigned 32-bit word as the signed number with its bits."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word
