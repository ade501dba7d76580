# SPDX-License-Identifier: Apache-2.0
"""Packed weights decoded by the package compressed-tensors, which shares no code with ours."""

import importlib.util

import torch
from torch import Tensor

from models.conversion.safetensors import SafetensorsFolder


def reader_problem() -> str | None:
    """Why packed weights cannot be read back here; None when they can."""
    if importlib.util.find_spec("compressed_tensors") is None:
        return (
            "the proof of packed weights needs the package compressed-tensors, which is absent: "
            "install requirements-dev.txt, or pass --no-verify and go without the proof"
        )
    return None


def read_independently(layout: str, weight: str, source: SafetensorsFolder, kind: str) -> Tensor:
    """fp32 [out, in] of the weight `X.weight` of a packed folder.

    Args:
        kind: nvfp4, mxfp8 or fp8_tensorwise.
    """
    from compressed_tensors.compressors.mx_utils import decompress_mx_scale
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.quant_scheme import FP8, MXFP8, NVFP4

    base = weight.removesuffix(".weight")
    if kind == "nvfp4":
        inverse = layout == "compressed-tensors"
        codes = source.read(f"{base}.weight_packed" if inverse else weight)
        if inverse:
            global_scale = source.read(f"{base}.weight_global_scale")
        else:
            global_scale = 1.0 / source.read(f"{base}.weight_scale_2")
        rows, columns = codes.shape
        values = unpack_fp4_from_uint8(codes, rows, 2 * columns, dtype=torch.float32)
        scale = source.read(f"{base}.weight_scale").float()
        return dequantize(
            values, scale, args=NVFP4["weights"], global_scale=global_scale, dtype=torch.float32
        )
    codes, scale = source.read(weight).float(), source.read(f"{base}.weight_scale")
    if kind == "mxfp8":
        scale = decompress_mx_scale(scale).float()
        return dequantize(codes, scale, args=MXFP8["weights"], dtype=torch.float32)
    return dequantize(codes, scale.float(), args=FP8["weights"], dtype=torch.float32)
