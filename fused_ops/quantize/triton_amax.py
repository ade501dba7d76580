# SPDX-License-Identifier: Apache-2.0
"""Amaxes of GEMM operands through Triton: of a matrix, of its rotated blocks, of both at once."""

import torch
from torch import Tensor

from fused_ops.formats import OperandSpec
from fused_ops.quantize import triton_launch
from fused_ops.quantize.hadamard import amax_from_plain
from fused_ops.quantize.triton_launch import (
    AMAX_TILE,
    COLUMN_TILE,
    ROTATED_AMAX_TILE,
    ROW_TILE,
    sign_factors,
    words,
)
from fused_ops.triton_support import device_reason, launch

MOST_PROGRAMS = 65535
"""Along a grid's second axis (CUDA C++ programming guide, compute capabilities)."""


def amax_supports(
    x: Tensor, spec: OperandSpec, *, columns: bool = False, signs: Tensor | None = None
) -> str | None:
    """None, or why not."""
    if x.dtype not in triton_launch.INPUTS:
        return f"inputs are {', '.join(map(str, triton_launch.INPUTS))}, got {x.dtype}"
    if x.numel() == 0:
        return "the tensor is empty"
    if spec.hadamard not in (0, 16):
        return f"rotations of 16 only, got {spec.hadamard}"
    if spec.row_scaled:
        return "one amax a row is left to the reference"
    return device_reason(x)


def matrix_amax(x: Tensor, flag: Tensor | None = None) -> Tensor:
    """fp32 amax of a matrix, NaN if it has one; one read. flag (bool): raised by Inf and NaN."""
    from fused_ops.quantize import triton_kernels as kernels

    x = x.detach()
    if not x.is_contiguous() and x.t().is_contiguous():
        x = x.t()
    flat = x.reshape(-1)
    if flat.numel() % 2 or flat.data_ptr() % 16:
        flat = torch.nn.functional.pad(flat, (0, flat.numel() % 2)).clone()
    source = flat.view(torch.int32)
    out = torch.zeros((), dtype=torch.int32, device=x.device)
    size, iters = AMAX_TILE["size"], AMAX_TILE["iters"]
    grid = (-(-source.numel() // (size * iters)),)
    launch(
        kernels.amax_flat, grid, source, out, out if flag is None else flag.view(torch.uint8),
        source.numel(), x.dtype == torch.bfloat16, flag is not None, size, iters,
        on=x.device, warps=AMAX_TILE["warps"],
    )  # fmt: skip
    return out.view(torch.float32)


def block_amax(
    x: Tensor, spec: OperandSpec, columns: bool, signs: Tensor | None, finite: bool
) -> Tensor:
    """Amax over blocks: after the rotation, or (finite) without blocks that hold Inf or NaN."""
    from fused_ops.quantize import triton_kernels as kernels

    if columns:
        return _column_amax(x, spec, signs, finite)
    source = words(x, False)
    bf16 = x.dtype == torch.bfloat16
    rows, cols = source.shape[0], source.shape[1] * (2 if bf16 else 1)
    out = torch.zeros((), dtype=torch.int32, device=x.device)
    tile = ROW_TILE
    grid = (-(-rows // tile["rows"]), -(-cols // (16 * tile["groups"])))
    launch(
        kernels.amax_rows, grid, source, sign_factors(signs, x.device), out, rows, cols // 16,
        cols, bf16, spec.hadamard == 16, finite, tile["rows"], tile["groups"],
        on=x.device, warps=tile["warps"],
    )  # fmt: skip
    return out.view(torch.float32)


def _column_amax(
    x: Tensor,
    spec: OperandSpec,
    signs: Tensor | None,
    finite: bool,
    plain: Tensor | None = None,
    flag: Tensor | None = None,
) -> Tensor:
    """Amax over blocks of columns; `plain` (int32 zero) gets that of x itself, from one read."""
    if spec.hadamard == 16 and x.dtype == torch.bfloat16:
        return rotated_amax(x, signs, finite, plain, flag)
    from fused_ops.quantize import triton_kernels as kernels

    source = words(x, True)
    bf16 = x.dtype == torch.bfloat16
    rows, cols = source.shape[0], source.shape[1] * (2 if bf16 else 1)
    out = torch.zeros((), dtype=torch.int32, device=x.device)
    tile = COLUMN_TILE
    grid = (-(-rows // (16 * tile["blocks"])), -(-source.shape[1] // tile["words"]))
    launch(
        kernels.amax_columns, grid, source, sign_factors(signs, x.device), out,
        out if plain is None else plain, out if flag is None else flag.view(torch.uint8),
        rows, cols, -(-rows // 16), bf16, spec.hadamard == 16, finite, plain is not None,
        flag is not None, rows % 16 == 0, tile["blocks"], tile["words"],
        on=x.device, warps=tile["warps"],
    )  # fmt: skip
    return out.view(torch.float32)


def rotated_amax(
    x: Tensor,
    signs: Tensor | None = None,
    finite: bool = False,
    plain: Tensor | None = None,
    flag: Tensor | None = None,
    tile: dict[str, int] = ROTATED_AMAX_TILE,
) -> Tensor:
    """fp32 amax of the columns of x bf16 [rows, cols], rotated in groups of 16; see _column_amax.

    finite: without blocks that hold Inf or NaN.
    """
    from fused_ops.quantize import triton_amax_kernels as kernels

    source = words(x, True)
    rows, cols, blocks = source.shape[0], 2 * source.shape[1], -(-source.shape[0] // 16)
    out = torch.zeros((), dtype=torch.int32, device=x.device)
    tiles = tile["tiles"]
    while -(-blocks // (tile["blocks"] * tiles)) > MOST_PROGRAMS:
        tiles *= 2
    grid = (-(-source.shape[1] // tile["words"]), -(-blocks // (tile["blocks"] * tiles)))
    launch(
        kernels.amax_rotated, grid, source, sign_factors(signs, x.device), out,
        out if plain is None else plain, out if flag is None else flag.view(torch.uint8),
        rows, cols, blocks, finite, plain is not None, flag is not None, rows % 16 == 0,
        tile["blocks"], tile["words"], tiles, on=x.device, warps=tile["warps"],
    )  # fmt: skip
    return out.view(torch.float32)


def amax_pair(
    x: Tensor, column: OperandSpec, signs: Tensor | None = None, flag: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Amax of x, and that of its columns as `column` rotates them, reading x once.

    flag: raised if x holds Inf or NaN.
    """
    plain = torch.zeros((), dtype=torch.int32, device=x.device)
    rotated = _column_amax(x, column, signs, False, plain, flag)
    return plain.view(torch.float32), rotated


def operand_amax(
    x: Tensor, spec: OperandSpec, *, columns: bool = False, signs: Tensor | None = None
) -> Tensor:
    """See fused_ops.quantize.api.operand_amax."""
    if spec.takes_own_amax:
        return block_amax(x, spec, columns, signs, finite=False)
    return amax_from_plain(spec, matrix_amax(x))
