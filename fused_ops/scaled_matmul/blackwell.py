# SPDX-License-Identifier: Apache-2.0
"""Products of NVFP4 and MXFP8 operands on Blackwell's block-scaled tensor cores, by cuBLASLt.

The cores take codes and block scales as they are kept; the tensor scales are alpha, read from
device memory in the epilogue. How they round sums is `reference.blackwell_model`.

Written after the cuBLAS manual, and never run: the first product on a device is held against its
definition, and where they differ BF16 and FP8 cores multiply as on Hopper, which the log says.
"""

import functools
import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_ops.codecs import E4M3_MAX, FP8_DTYPES, pad_to, roundup, swizzle_scales
from fused_ops.formats import Operand, OperandSpec, QuantizedTensor
from fused_ops.scaled_matmul import cublaslt, reference

SCALE_MODES = {"nvfp4": cublaslt.VEC16_UE4M3, "mxfp8": cublaslt.VEC32_UE8M0}
_ROWS = 16
"""Rows of both operands are filled up to multiples of this, and rows of codes to 16 bytes."""
_log = logging.getLogger(__name__)


def supports(
    a: Operand,
    b: Operand,
    *,
    decode: str = "exact",
    **_unused: object,
) -> str | None:
    """None, or why not."""
    for operand in (a, b):
        if not isinstance(operand, QuantizedTensor):
            return "codes of both operands, which is how these cores take them"
        if 0 in operand.shape:
            return "an operand is empty"
    assert isinstance(a, QuantizedTensor), "checked"
    assert isinstance(b, QuantizedTensor), "checked"
    return device_reason(a.codes.device) or spec_reason(a.spec, b.spec, decode)


def spec_reason(a: OperandSpec, b: OperandSpec, decode: str) -> str | None:
    """Why these cores do not multiply operands of two kinds, or None."""
    if a.format not in SCALE_MODES or b.format != a.format:
        return f"two operands in nvfp4, or two in mxfp8; got {a.format} and {b.format}"
    if a.element == b.element == "e5m2":
        return "E5M2 is multiplied by E4M3, not by E5M2"
    if decode == "fp8" and a.format == "nvfp4" and not (a.is_pow2 and b.is_pow2):
        return "decode fp8 rounds operands that these cores multiply exactly: set decode exact"
    return None


def multiplies(a: OperandSpec, b: OperandSpec, decode: str, device: torch.device) -> bool:
    """Whether operands of these kinds are to be handed over as codes on this device."""
    return device_reason(device) is None and spec_reason(a, b, decode) is None


@functools.cache
def device_reason(device: torch.device) -> str | None:
    """Why a device does not multiply codes, or None."""
    if device.type != "cuda":
        return f"block-scaled tensor cores are a GPU's, the tensor is on {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (10, 0):
        return f"compute capability 10.0 is needed, the device has {capability}"
    if cublaslt.library() is None:
        return "cuBLASLt was not found"
    problem = first_product(device)
    if problem is not None:
        _log.warning(
            "block-scaled products of cuBLASLt are not used on %s, and operands are decoded for "
            "BF16 and FP8 cores: %s",
            torch.cuda.get_device_name(device),
            problem,
        )
    return problem


def first_product(device: torch.device) -> str | None:
    """What is wrong with a product of each kind against the reference's; None: nothing."""
    for name in SCALE_MODES:
        a, b = (_example(name, rows, 96, device) for rows in (40, 24))
        wanted = reference.scaled_matmul(a, b, out_dtype=torch.float32)
        try:
            found = scaled_matmul(a, b, out_dtype=torch.float32)
            error = float((found - wanted).norm() / wanted.norm())
        except RuntimeError as problem:
            return f"{name}: {problem}"
        # Products are exact and sums of 96 differ by units in the last place of fp32.
        if not error < 1e-5:
            return f"{name}: a product differs from its definition by {error:.2g} of its norm"
    return None


def _example(name: str, rows: int, cols: int, device: torch.device) -> QuantizedTensor:
    """Codes and block scales of all kinds; no two blocks are alike."""
    made = torch.Generator(device=device).manual_seed(rows)
    spec = OperandSpec(format=name)
    assert spec.block is not None, "formats with block scales"
    width = cols // 2 if spec.is_fp4 else cols
    high = 256 if spec.is_fp4 else 120  # E4M3 bytes below 0x78 are finite and positive
    codes = torch.randint(0, high, (rows, width), generator=made, device=device)
    low, high = (40, 100) if spec.is_fp4 else (120, 135)
    shape = (rows, cols // spec.block[1])
    scales = torch.randint(low, high, shape, generator=made, device=device)
    amax = torch.full((), E4M3_MAX if spec.is_fp4 else 1.0, device=device)
    return QuantizedTensor(codes.to(torch.uint8), scales.to(torch.uint8), amax, (rows, cols), spec)


@dataclass(frozen=True)
class _Codes:
    """As the cores read them: rows of multiples of 16 bytes, scales in tiles."""

    codes: Tensor
    scales: Tensor

    @property
    def rows(self) -> int:
        return self.codes.shape[0]


def _laid_out(operand: QuantizedTensor) -> _Codes:
    rows = roundup(operand.shape[0], _ROWS)
    codes = cublaslt.aligned(pad_to(operand.codes, rows, roundup(operand.codes.shape[1], 16)))
    element = str(operand.spec.element)
    dtype = torch.float4_e2m1fn_x2 if operand.spec.is_fp4 else FP8_DTYPES[element]
    return _Codes(codes.view(dtype), swizzle_scales(operand.row_scales()))


def _takes(accumulate: Tensor, left: _Codes, right: _Codes) -> bool:
    """Whether the library may add to it: a sum in a buffer of gradients begins anywhere."""
    fits = tuple(accumulate.shape) == (left.rows, right.rows)
    return fits and accumulate.is_contiguous() and accumulate.data_ptr() % 16 == 0


def scaled_matmul(
    a: Operand,
    b: Operand,
    *,
    out_dtype: torch.dtype,
    accumulate: Tensor | None = None,
    beta: int = 1,
    bias: Tensor | None = None,
    decode: str = "exact",
) -> Tensor:
    """See `fused_ops.scaled_matmul.api.scaled_matmul`."""
    assert isinstance(a, QuantizedTensor), "see supports"
    assert isinstance(b, QuantizedTensor), "see supports"
    left, right, alpha = _laid_out(a), _laid_out(b), reference.alpha(a, b)
    assert left.codes.shape[1] == right.codes.shape[1], "one format pads one K alike"
    multiply = functools.partial(
        cublaslt.block_scaled_matmul,
        left.codes,
        right.codes,
        (left.scales, right.scales),
        scale_mode=SCALE_MODES[a.spec.format],
    )
    rows, cols = a.shape[0], b.shape[0]
    of_rows = alpha if alpha is not None and alpha.dim() else None  # not for the library
    factor = alpha if of_rows is None else None
    if accumulate is not None and of_rows is None and _takes(accumulate, left, right):
        return multiply(factor, out=accumulate, accumulate=beta == 1)
    # The bias is added in fp32, after alpha.
    plain = of_rows is None and accumulate is None and bias is None
    dtype = out_dtype if plain and out_dtype == torch.bfloat16 else torch.float32
    out = torch.empty((left.rows, right.rows), dtype=dtype, device=left.codes.device)
    total = multiply(factor, out=out)[:rows, :cols]
    if plain:
        return total.to(out_dtype).contiguous()
    return reference.finish(total, of_rows, out_dtype, accumulate, beta, bias)
