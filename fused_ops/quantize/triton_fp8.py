# SPDX-License-Identifier: Apache-2.0
"""FP8 with one scale a tensor on NVIDIA GPUs through Triton: current and delayed scaling."""

import torch
from torch import Tensor

from fused_ops.codecs import ELEMENT_MAX
from fused_ops.formats import OperandSpec, QuantizedTensor
from fused_ops.quantize.triton_amax import matrix_amax
from fused_ops.quantize.triton_launch import FP8_TILE
from fused_ops.triton_support import device_reason, launch

FORMATS = ("fp8_tensorwise", "fp8_delayed")
LARGEST_SIDE = 1 << 24
"""Rows, and columns: places within a tile of up to 128 of either are 32-bit numbers."""


def supports(x: Tensor, spec: OperandSpec, **_unused: object) -> str | None:
    """None, or why not."""
    if spec.format not in FORMATS or spec.hadamard:
        return f"fp8 with one scale a tensor, not rotated; got {spec.label!r}"
    if x.dtype not in (torch.bfloat16, torch.float32) or x.numel() == 0:
        return f"bf16 or fp32 that is not empty, got {x.dtype} {tuple(x.shape)}"
    if max(x.shape) > LARGEST_SIDE:
        return f"at most {LARGEST_SIDE} rows and columns, got {tuple(x.shape)}"
    return device_reason(x)


def pair_supports(
    x: Tensor, row: OperandSpec, column: OperandSpec, **_unused: object
) -> str | None:
    """Why quantize_pair cannot take x, or None."""
    if row != column:
        return f"two operands of one kind, got {row.label!r} and {column.label!r}"
    if x.dtype != torch.bfloat16:
        # Of fp32 Triton 3.6 compiles one of the two stores wrong (the tests' finding, on an H200).
        return f"bf16, got {x.dtype}"
    return supports(x, row)


def quantize(
    x: Tensor,
    spec: OperandSpec,
    *,
    columns: bool = False,
    amax: Tensor | None = None,
    **_unused: object,
) -> QuantizedTensor:
    """See fused_ops.quantize.api.quantize."""
    amax = matrix_amax(x) if amax is None else amax
    row, column = _cast(x, spec, amax, not columns, columns)
    result = column if columns else row
    assert result is not None, "asked for"
    return result


def quantize_pair(
    x: Tensor, row: OperandSpec, column: OperandSpec, *, amaxes: tuple[Tensor, Tensor], **_: object
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """x and its transpose, from one read; both with the first amax, which the second equals."""
    first, second = _cast(x, row, amaxes[0], True, True)
    assert first is not None, "asked for"
    assert second is not None, "asked for"
    return first, second


def _cast(
    x: Tensor, spec: OperandSpec, amax: Tensor, row: bool, column: bool
) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
    from fused_ops.quantize import triton_fp8_kernels as kernels

    x = x.detach().contiguous()
    rows, cols = x.shape
    delayed = spec.format == "fp8_delayed"
    codes = [
        torch.empty(shape if wanted else (0,), dtype=torch.uint8, device=x.device)
        for shape, wanted in (((rows, cols), row), ((cols, rows), column))
    ]
    scale = torch.empty((1, 1), dtype=torch.float32, device=x.device)
    counts = torch.zeros(2, dtype=torch.int32, device=x.device) if delayed else None
    tile = FP8_TILE
    grid = (-(-rows // tile["rows"]), -(-cols // tile["cols"]))
    launch(
        kernels.cast_fp8, grid, x, amax, codes[0], codes[1], scale,
        scale if counts is None else counts, rows, cols, cols, rows,
        E5M2=spec.element == "e5m2", LARGEST=ELEMENT_MAX[str(spec.element)],
        POW2=spec.scale == "pow2", ROW=row, COLUMN=column, COUNT=delayed,
        ROWS=tile["rows"], COLS=tile["cols"], on=x.device, warps=tile["warps"],
    )  # fmt: skip
    shapes = ((rows, cols), (cols, rows))
    made = [
        QuantizedTensor(main, scale, amax, shape, spec, counts) if wanted else None
        for main, shape, wanted in zip(codes, shapes, (row, column))
    ]
    return made[0], made[1]
