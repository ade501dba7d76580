# SPDX-License-Identifier: Apache-2.0
"""What codes stand for, on NVIDIA GPUs through Triton; nothing here waits for the device."""

import torch
from torch import Tensor

from fused_ops.formats import QuantizedTensor
from fused_ops.quantize.triton_launch import DECODE_TILE
from fused_ops.triton_support import device_reason, launch

ELEMENTS = ("e2m1", "e4m3", "e5m2")
SCALES = {"nvfp4": 0, "mxfp4": 1, "mxfp8": 1, "fp8_blockwise": 2}
DTYPES = (torch.float32, torch.bfloat16)


def supports(operand: QuantizedTensor, dtype: torch.dtype = torch.float32) -> str | None:
    """None, or why not."""
    if operand.spec.format not in SCALES:
        return f"block formats only, got {operand.spec.label!r}"
    if dtype not in DTYPES:
        return f"results in fp32 or bf16, got {dtype}"
    if operand.codes.numel() == 0:
        return "the operand is empty"
    return device_reason(operand.codes)


def unscaled(operand: QuantizedTensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """code * block scale with the format's padding: [rows, padded cols]; see `exact_in_bf16`."""
    return _decode(operand, dtype, 0.0)


def dequantize(operand: QuantizedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """operand.dequantize(dtype), in one kernel: [rows, cols]."""
    numerator = operand.spec.numerator if operand.spec.format == "nvfp4" else 0.0
    return _decode(operand, dtype, numerator)[:, : operand.shape[1]].contiguous()


def _decode(operand: QuantizedTensor, dtype: torch.dtype, numerator: float) -> Tensor:
    from fused_ops.quantize import triton_decode_kernels as kernels

    spec, codes = operand.spec, operand.codes.contiguous()
    assert spec.block is not None, spec.label
    rows, width = codes.shape[0], codes.shape[1] * (2 if spec.is_fp4 else 1)
    out = torch.empty((rows, width), dtype=dtype, device=codes.device)
    tile = DECODE_TILE
    grid = (-(-rows // tile["rows"]) * -(-width // tile["cols"]),)
    launch(
        kernels.decode_codes, grid, codes, operand.scales.contiguous(), operand.amax, out,
        rows, width, operand.scales.shape[1], on=codes.device, warps=tile["warps"],
        ELEMENT=ELEMENTS.index(str(spec.element)), SCALE=SCALES[spec.format],
        BLOCK=spec.block[1], TILE=spec.block[0], NUMERATOR=numerator, ROW_SCALED=spec.row_scaled,
        ROWS=tile["rows"], COLS=tile["cols"],
    )  # fmt: skip
    return out
