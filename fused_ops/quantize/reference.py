# SPDX-License-Identifier: Apache-2.0
"""The definition of quantization, in plain PyTorch; every other implementation equals its bytes."""

import torch
from torch import Tensor

from fused_ops.codecs import pack_nibbles
from fused_ops.formats import DecodedTensor, OperandSpec, QuantizedTensor
from fused_ops.quantize.blocks import orient
from fused_ops.quantize.hadamard import amax_from_plain
from fused_ops.quantize.philox import Key
from fused_ops.quantize.reference_fp8 import quantize_blockwise, quantize_tensorwise
from fused_ops.quantize.reference_mx import quantize_mx
from fused_ops.quantize.reference_nvfp4 import quantize_nvfp4
from fused_ops.quantize.reference_pow2 import quantize_pow2
from fused_ops.quantize.rounding import Dither


def matrix_amax(x: Tensor, row_scaled: bool = False) -> Tensor:
    """fp32 amax of a matrix, or of each row; 0 where there is nothing; NaN propagates."""
    if x.numel() == 0:
        return x.new_zeros(x.shape[0] if row_scaled else (), dtype=torch.float32)
    magnitude = x.abs()
    return (magnitude.amax(dim=1) if row_scaled else magnitude.amax()).float()


def operand_amax(
    x: Tensor, spec: OperandSpec, *, columns: bool = False, signs: Tensor | None = None
) -> Tensor:
    """See fused_ops.quantize.api.operand_amax."""
    if spec.takes_own_amax:
        return matrix_amax(orient(x, spec, columns, signs), spec.row_scaled)
    return amax_from_plain(spec, matrix_amax(x))


def quantize(
    x: Tensor,
    spec: OperandSpec,
    *,
    columns: bool = False,
    amax: Tensor | None = None,
    signs: Tensor | None = None,
    key: Key | None = None,
    origin: tuple[int, int] = (0, 0),
    form: str = "codes",
) -> QuantizedTensor | DecodedTensor:
    """See fused_ops.quantize.api.quantize, which checks the arguments."""
    dither = None if key is None else Dither(key, origin)
    matrix = orient(x, spec, columns, signs)
    rows, cols = (x.shape[1], x.shape[0]) if columns else (x.shape[0], x.shape[1])
    if spec.hadamard:
        cols = matrix.shape[1]
    if spec.format == "fp8_tensorwise" and amax is None:
        amax = matrix_amax(matrix)
    matrix = matrix.to(torch.float32, copy=True)
    out_of_range = None
    if spec.is_pow2:
        codes, scales, used, out_of_range = quantize_pow2(matrix, spec, amax, dither)
    elif spec.format == "nvfp4":
        codes, scales, used = quantize_nvfp4(matrix, spec, amax, dither)
    elif spec.format in ("mxfp4", "mxfp8"):
        codes, scales = quantize_mx(matrix, spec, dither)
        used = torch.ones((), device=x.device)
    elif spec.format == "fp8_blockwise":
        codes, scales = quantize_blockwise(matrix, spec, x.dtype)
        used = torch.ones((), device=x.device)
    else:
        assert amax is not None, spec.format
        codes, scales, saturated = quantize_tensorwise(matrix, spec, amax)
        out_of_range = saturated if spec.format == "fp8_delayed" else None
        used = amax
    if spec.is_fp4:
        codes = pack_nibbles(codes)
    result = QuantizedTensor(codes, scales, used, (rows, cols), spec, out_of_range)
    return result if form == "codes" else result.decoded(form)


def quantize_pair(
    x: Tensor,
    row: OperandSpec,
    column: OperandSpec,
    *,
    amaxes: tuple[Tensor, Tensor],
    signs: Tensor | None = None,
    keys: tuple[Key | None, Key | None] = (None, None),
    origin: tuple[int, int] = (0, 0),
    forms: tuple[str, str] = ("codes", "codes"),
) -> tuple[QuantizedTensor | DecodedTensor, QuantizedTensor | DecodedTensor]:
    """See fused_ops.quantize.api.quantize_pair."""
    return (
        quantize(x, row, amax=amaxes[0], key=keys[0], origin=origin, form=forms[0]),
        quantize(
            x, column, columns=True, amax=amaxes[1], signs=signs, key=keys[1],
            origin=(origin[1], origin[0]), form=forms[1],
        ),
    )  # fmt: skip


def requantize_columns(
    source: QuantizedTensor, spec: OperandSpec, amax: Tensor, *, form: str = "codes"
) -> QuantizedTensor | DecodedTensor:
    """See fused_ops.quantize.api.requantize_columns."""
    return quantize(source.dequantize(), spec, columns=True, amax=amax, form=form)
