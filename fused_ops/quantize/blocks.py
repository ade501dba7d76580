# SPDX-License-Identifier: Apache-2.0
"""Block geometry shared by all formats: padding, block amax, factors of blocks, block errors.

A tensor is fp32 [rows, cols] with cols a multiple of the block; a block is (r, c). Factors have
one entry a block: [rows, cols / c], or for tiles [ceil(rows / r), cols / c].
"""

import torch
from torch import Tensor

from fused_ops.codecs import FLT_MAX, pad_to, per_row, roundup
from fused_ops.formats import OperandSpec
from fused_ops.quantize.hadamard import rotate

Block = tuple[int, int]


def orient(x: Tensor, spec: OperandSpec, columns: bool, signs: Tensor | None) -> Tensor:
    """The matrix that is quantized: transposed, padded along the contraction axis, rotated.

    Returns [rows, padded cols], contiguous, in the dtype of x, or bf16 after a rotation.
    """
    x = x.t() if columns else x
    x = pad_to(x, x.shape[0], roundup(x.shape[1], spec.multiple)).contiguous()
    return rotate(x, spec.hadamard, signs) if spec.hadamard else x


def block_amax(x: Tensor, block: Block) -> Tensor:
    """Largest magnitude of each block, fp32; NaN if there is one in it. Any floating dtype."""
    rows, cols = x.shape
    # Without their sign, floating-point numbers order like their bits, NaN above Inf.
    integers = torch.int32 if x.element_size() == 4 else torch.int16
    bits = x.view(integers).view(-1, block[1]) & torch.iinfo(integers).max
    width = block[1]
    while width > 1:
        width //= 2
        bits = torch.maximum(bits[:, :width], bits[:, width:])
    amax = bits.view(x.dtype).view(rows, cols // block[1]).float()
    if block[0] == 1:
        return amax
    tiles = pad_to(amax, roundup(rows, block[0]), amax.shape[1])
    return tiles.view(tiles.shape[0] // block[0], block[0], tiles.shape[1]).amax(dim=1)


def scale_(x: Tensor, factors: Tensor, block: Block) -> Tensor:
    """x times the factor of its block, one fp32 multiplication an element, in place."""
    rows = x.shape[0]
    factors = per_row(factors, block, rows).unsqueeze(-1)
    x.view(rows, x.shape[1] // block[1], block[1]).mul_(factors)
    return x


def tensor_amax(amaxes: Tensor, row_scaled: bool = False) -> Tensor:
    """Amax of the tensor (scalar) or of each row ([rows]) from those of blocks; 0 if empty."""
    if amaxes.numel() == 0:
        return amaxes.new_zeros(amaxes.shape[0] if row_scaled else ())
    return amaxes.amax(dim=1) if row_scaled else amaxes.amax()


def true_divide(numerator: float, x: Tensor) -> Tensor:
    """numerator / x with one fp32 rounding (torch's own `number / tensor` has two)."""
    return torch.full_like(x, numerator) / x


def capped_reciprocal(x: Tensor) -> Tensor:
    """min(1 / x, FLT_MAX)."""
    return true_divide(1.0, x).clamp_(max=FLT_MAX)


def elements_first(x: Tensor, block: Block) -> Tensor:
    """[rows, cols] -> [c, rows * cols / c]: sums over a block's columns become row sums."""
    return x.view(-1, block[1]).t().contiguous()


def block_sum(errors: Tensor, block: Block, shape: torch.Size) -> Tensor:
    """Sum of errors (elements first) over each block: columns in order, then rows as a tree.

    shape: (rows, cols) of the matrix.
    """
    total = errors[0].clone()
    for error in errors[1:]:
        total += error
    total = total.view(shape[0], shape[1] // block[1])
    if block[0] == 1:
        return total
    total = pad_to(total, roundup(shape[0], block[0]), total.shape[1])
    tree = total.view(total.shape[0] // block[0], block[0], total.shape[1])
    height = block[0]
    while height > 1:
        height //= 2
        tree = tree[:, :height] + tree[:, height:]
    return tree.squeeze(1)
