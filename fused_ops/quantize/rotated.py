# SPDX-License-Identifier: Apache-2.0
"""Rotations longer than a block: turned by a matrix product, then quantized by the plain kernel.

The tensor is written once more than by a kernel that rotates in registers, which those of 16 have.
"""

from dataclasses import replace

from torch import Tensor

from fused_ops.formats import DecodedTensor, OperandSpec, QuantizedTensor
from fused_ops.quantize import triton_amax, triton_backend
from fused_ops.quantize.blocks import orient
from fused_ops.quantize.philox import Key


def _plain(spec: OperandSpec) -> OperandSpec:
    return replace(spec, hadamard=0, signs="fixed")


def _reason(spec: OperandSpec) -> str | None:
    if spec.hadamard <= 16:
        return f"rotations longer than 16, got {spec.hadamard}"
    return "e4m3 block scales, got pow2" if spec.is_pow2 else None


def amax_supports(
    x: Tensor, spec: OperandSpec, *, columns: bool = False, signs: Tensor | None = None
) -> str | None:
    """None, or why not."""
    return _reason(spec) or triton_amax.amax_supports(x, _plain(spec))


def operand_amax(
    x: Tensor, spec: OperandSpec, *, columns: bool = False, signs: Tensor | None = None
) -> Tensor:
    """See fused_ops.quantize.api.operand_amax."""
    return triton_amax.operand_amax(orient(x, spec, columns, signs), _plain(spec))


def supports(x: Tensor, spec: OperandSpec, **arguments: object) -> str | None:
    """None, or why not."""
    return _reason(spec) or triton_backend.supports(x, _plain(spec))


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
    turned = orient(x, spec, columns, signs)
    made = triton_backend.quantize(
        turned, _plain(spec), amax=amax, key=key, origin=origin, form=form
    )
    return replace(made, spec=spec)
