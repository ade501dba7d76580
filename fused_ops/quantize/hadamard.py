# SPDX-License-Identifier: Apache-2.0
"""Random Hadamard transform along the last axis, in groups of 16 to 128.

Source: "Pretraining LLMs with NVFP4", arXiv 2509.25149, section 4.2, and TransformerEngine.

R = diag(signs) H / sqrt(size), H of Sylvester's construction. Each group of `size` consecutive
elements v becomes v R in fp32, and is rounded to bf16, as the unfused path of TransformerEngine
does. Since R R^T = 1, two operands that share their signs multiply to the same product.

Groups of 16 are summed in the order of the elements, as TransformerEngine's bytes want it. Longer
ones by the fast transform, each operation one fp32 rounding: v_i * (sign_i * RN(1 / sqrt(size))),
then in log2(size) stages, at distance d = 1, 2, 4 .., the pair (i, i + d) becomes sum and
difference. Seven additions a value instead of 128, less rounding, and the same bits everywhere.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fused_ops.formats import OperandSpec

FIXED_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""TransformerEngine's sign vector; repeated for rotations longer than 16."""

_MATRICES: dict[tuple[int, torch.device], Tensor] = {}
_FIXED: dict[tuple[int, torch.device], Tensor] = {}


def hadamard_matrix(size: int, device: torch.device | str = "cpu") -> Tensor:
    """Sylvester's Hadamard matrix [size, size], entries +-1 / sqrt(size), fp32."""
    key = (size, torch.device(device))
    if key not in _MATRICES:
        index = torch.arange(size)
        common = index.unsqueeze(0) & index.unsqueeze(1)
        parity = torch.zeros_like(common)
        for bit in range(size.bit_length()):
            parity ^= (common >> bit) & 1
        _MATRICES[key] = ((1 - 2 * parity).float() / size**0.5).to(device)
    return _MATRICES[key]


def rotation(size: int, signs: Tensor | None, device: torch.device | str) -> Tensor:
    """R = diag(signs) H / sqrt(size), fp32 [size, size]; None is the fixed vector."""
    if signs is None:
        # Kept: a copy from the host in every call would wait for the device.
        key = (size, torch.device(device))
        if key not in _FIXED:
            _FIXED[key] = rotation(size, torch.tensor(FIXED_SIGNS * 8)[:size], device)
        return _FIXED[key]
    _check_signs(size, signs)
    column = signs.to(device=device, dtype=torch.float32).unsqueeze(1)
    return column * hadamard_matrix(size, device)


def _check_signs(size: int, signs: Tensor) -> None:
    if signs.shape != (size,):
        raise ValueError(
            f"a Hadamard rotation of {size} needs {size} signs; got shape {tuple(signs.shape)}"
        )


def amax_bound(size: int) -> float:
    """The smallest power of two that no rotation of `size` multiplies an amax by more than.

    Each rotated value is a sum of `size` values of magnitude at most A / sqrt(size).
    """
    return 2.0 ** ((size.bit_length()) // 2)


def amax_from_plain(spec: "OperandSpec", plain: Tensor) -> Tensor:
    """The amax of an operand that does not take its own, from that of the matrix: it, or a bound.

    A rotated pow2 operand is moved into range by a bound; see `operand_amax`.
    """
    return plain * amax_bound(spec.hadamard) if spec.hadamard else plain


def rotate(x: Tensor, size: int, signs: Tensor | None = None) -> Tensor:
    """Rotate groups of `size` along the last axis: [rows, cols] -> bf16 [rows, cols]."""
    groups = x.reshape(-1, size).to(torch.float32)
    if size == 16:
        groups = groups @ rotation(size, signs, x.device)
    else:
        groups = _fast_transform(groups * factors(size, signs, x.device))
    return groups.to(torch.bfloat16).view(x.shape)


def factors(size: int, signs: Tensor | None, device: torch.device | str) -> Tensor:
    """sign / sqrt(size) of each element of a group, fp32 [size]; None is the fixed vector."""
    if signs is None:
        return rotation(size, None, device)[:, 0].contiguous()
    _check_signs(size, signs)
    return signs.to(device=device, dtype=torch.float32) * hadamard_matrix(size, device)[0]


def _fast_transform(x: Tensor) -> Tensor:
    """x H without its 1 / sqrt(size), fp32 [groups, size]; see the head of this file."""
    distance, size = 1, x.shape[1]
    while distance < size:
        pairs = x.view(-1, size // (2 * distance), 2, distance)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        x = torch.stack([first + second, first - second], 2).view(-1, size)
        distance *= 2
    return x
