# SPDX-License-Identifier: Apache-2.0
"""Products of quantized operands on Hopper's BF16 and FP8 tensor cores.

exact: code * block scale is exact in BF16, so BF16 cores form the products exactly.
FP8: NVFP4 with power-of-two scales is exact in E4M3; with decode "fp8" others are rounded to it;
    FP8 of a whole tensor is multiplied as it is. Sums are split accumulations, never fast ones.
The tensor scales are alpha, read from device memory in the epilogue.
"""

from typing import TypeGuard

import torch
from torch import Tensor

from fused_ops.codecs import FP8_DTYPES
from fused_ops.formats import DecodedTensor, Operand, OperandSpec, QuantizedTensor
from fused_ops.quantize import triton_backend, triton_decode
from fused_ops.scaled_matmul import cublaslt, reference
from fused_ops.triton_support import device_reason

WHOLE_TENSOR_FP8 = ("fp8_tensorwise", "fp8_delayed")


def supports(
    a: Operand,
    b: Operand,
    *,
    out_dtype: torch.dtype,
    accumulate: Tensor | None = None,
    beta: int = 1,
    bias: Tensor | None = None,
    decode: str = "exact",
) -> str | None:
    """None, or why not."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _plain_reason(a, b, accumulate)
    for operand in (a, b):
        tensor = memory(operand)
        reason = device_reason(tensor)
        if reason is not None:
            return reason
        if isinstance(operand, Tensor):
            if operand.dtype != torch.bfloat16:
                return f"a high-precision operand is bf16, got {operand.dtype}"
        elif not exact_in_bf16(operand.spec):
            return f"not exact in bf16: {operand.spec.label!r}"
        if 0 in operand.shape:
            return "an operand is empty"
    if accumulate is not None and not accumulate.is_contiguous():
        return "accumulate is not contiguous"
    return None if cublaslt.library() is not None else "cuBLASLt was not found"


def exact_in_bf16(spec: OperandSpec) -> bool:
    """Whether code * block scale has no more significant bits than BF16."""
    return bool(spec.decoded_forms) or spec.format in WHOLE_TENSOR_FP8


def memory(operand: Operand) -> Tensor:
    """The tensor that holds the operand."""
    if isinstance(operand, Tensor):
        return operand
    return operand.data if isinstance(operand, DecodedTensor) else operand.codes


def _plain_reason(a: Tensor, b: Tensor, accumulate: Tensor | None) -> str | None:
    """Why a product of two bf16 tensors is left to torch, or None."""
    if accumulate is None or not accumulate.is_cuda:
        return "two high-precision operands are torch's, unless they add to an fp32 sum on a GPU"
    for operand in (a, b):
        if operand.dtype != torch.bfloat16 or operand.dim() != 2 or 0 in operand.shape:
            return f"bf16 matrices, got {operand.dtype} {tuple(operand.shape)}"
        if operand.shape[0] % 8 or operand.shape[1] % 8 or operand.data_ptr() % 16:
            return f"sizes that are multiples of 8, got {tuple(operand.shape)}"
        if not (operand.is_contiguous() or operand.t().is_contiguous()):
            return "an operand lies neither by rows nor by columns"
    if not accumulate.is_contiguous() or accumulate.data_ptr() % 16:
        return "accumulate is not contiguous, or does not begin at a multiple of 16 bytes"
    return None if cublaslt.library() is not None else "cuBLASLt was not found"


def _is_fp8(operand: Operand, decode: str) -> TypeGuard[QuantizedTensor | DecodedTensor]:
    """Whether the operand loses nothing, or is to be rounded, on FP8 cores."""
    if isinstance(operand, Tensor):
        return False
    if isinstance(operand, DecodedTensor):
        return operand.data.dtype == torch.float8_e4m3fn
    return fits_fp8_cores(operand.spec, decode)


def fits_fp8_cores(spec: OperandSpec, decode: str) -> bool:
    """Whether codes of an operand are E4M3 or E5M2 without loss, or are to be rounded to it."""
    return spec.format in WHOLE_TENSOR_FP8 or (
        spec.format == "nvfp4" and (spec.is_pow2 or decode == "fp8")
    )


def on_fp8_cores(a: Operand, b: Operand, decode: str) -> bool:
    """Whether a product runs on FP8 cores: both operands fit, and sizes are multiples of 16."""
    if not (_is_fp8(a, decode) and _is_fp8(b, decode)):
        return False
    # Hopper multiplies E5M2 by E4M3, not by E5M2.
    both_e5m2 = a.spec.element == "e5m2" and b.spec.element == "e5m2"
    return not (both_e5m2 or a.shape[0] % 16 or b.shape[0] % 16)


def decoded_form(a: OperandSpec, b: OperandSpec, rows: tuple[int, int], decode: str) -> str:
    """The form in which quantizers may hand over the operands of a product.

    Args:
        a, b: what the operands are.
        rows: of both, M and N.
    Returns:
        "codes", or one of DECODED_FORMS for both: see `fused_ops.quantize.quantize_decoded`.
    """
    if any(not spec.decoded_forms or spec.row_scaled for spec in (a, b)):
        return "codes"
    if a.format != "nvfp4" or b.format != "nvfp4":
        return "bf16" if decode == "exact" else "codes"
    exact = a.is_pow2 and b.is_pow2
    if decode != "fp8" and not exact:
        return "bf16"
    if not any(n % 16 for n in rows):
        return "fp8"
    # On BF16 cores: values that are to be rounded to E4M3 first are rounded when codes are decoded.
    return "bf16" if exact else "codes"


def fp8_operand(operand: QuantizedTensor | DecodedTensor) -> tuple[Tensor, int]:
    """FP8 [rows, K padded to 16], and the power of two that alpha owes it."""
    if isinstance(operand, DecodedTensor):
        return operand.data, operand.shift
    if operand.spec.format == "nvfp4":
        shift = operand.spec.fp8_shift
        return triton_backend.decode(operand, e4m3=True, shift=shift), shift
    codes = _padded(operand.codes, 16)
    return codes.view(FP8_DTYPES[str(operand.spec.element)]), 0


def bf16_operand(operand: Operand, decode: str) -> Tensor:
    """Exact BF16 [rows, K padded to 8]: code * block scale, or a tensor's own values."""
    if isinstance(operand, Tensor):
        return cublaslt.aligned(_padded(operand, 8))
    if isinstance(operand, DecodedTensor):
        if operand.data.dtype == torch.bfloat16:
            return operand.data
        return operand.data.to(torch.bfloat16) * 2.0**operand.shift
    if triton_decode.supports(operand, torch.bfloat16) is None and operand.spec.format != "nvfp4":
        return triton_decode.unscaled(operand)
    if operand.spec.format != "nvfp4":
        return _padded(operand.unscaled(torch.bfloat16), 8)
    if decode == "fp8" and not operand.spec.is_pow2:
        shift = operand.spec.fp8_shift
        rounded = triton_backend.decode(operand, e4m3=True, shift=shift)
        return rounded.to(torch.bfloat16) * 2.0**shift
    return triton_backend.decode(operand)


def _padded(x: Tensor, multiple: int) -> Tensor:
    """Contiguous, with zero columns up to a multiple."""
    add = -x.shape[1] % multiple
    return torch.nn.functional.pad(x, (0, add)) if add else x.contiguous()


def _alike(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both with the wider K: operands are padded by their own formats.

    One that lies as its transpose (bf16 alone) stays so.
    """
    if a.shape[1] == b.shape[1]:
        own = [x if x.t().is_contiguous() else x.contiguous() for x in (a, b)]
        return own[0], own[1]
    wide = max(a.shape[1], b.shape[1])
    return _padded(a, wide), _padded(b, wide)


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
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        assert accumulate is not None, "see supports"
        return cublaslt.matmul(a, b, None, out=accumulate, accumulate=beta == 1)
    if on_fp8_cores(a, b, decode) and _is_fp8(a, decode) and _is_fp8(b, decode):
        (left, shift_a), (right, shift_b) = fp8_operand(a), fp8_operand(b)
        alpha = reference.alpha(a, b, shift_a + shift_b)
    else:
        left, right = bf16_operand(a, decode), bf16_operand(b, decode)
        alpha = reference.alpha(a, b)
    left, right = _alike(left, right)
    rows, cols = a.shape[0], b.shape[0]
    if alpha is not None and alpha.dim():  # of rows: not for the library
        total = torch.empty((rows, cols), dtype=torch.float32, device=left.device)
        total = _accumulate(left, right, None, total, 0)
        return reference.finish(total, alpha, out_dtype, accumulate, beta, bias)
    if accumulate is not None:
        return _accumulate(left, right, alpha, accumulate, beta)
    # The bias is added in fp32, after alpha; rows of the output start at multiples of 16 bytes.
    fused = bias is None and out_dtype in (torch.bfloat16, torch.float16, torch.float32)
    dtype = out_dtype if fused else torch.float32
    right = _padded_rows(right, 8)
    out = torch.empty((rows, right.shape[0]), dtype=dtype, device=left.device)
    total = cublaslt.matmul(left, right, alpha, out=out)[:, :cols]
    return reference.finish(total, None, out_dtype, None, beta, bias).contiguous()


def _padded_rows(x: Tensor, multiple: int) -> Tensor:
    add = -x.shape[0] % multiple
    if not add:
        return x
    return torch.cat([x.view(torch.uint8), x.new_zeros(add, x.shape[1]).view(torch.uint8)]).view(
        x.dtype
    )


def _accumulate(
    left: Tensor, right: Tensor, alpha: Tensor | None, accumulate: Tensor, beta: int
) -> Tensor:
    # A sum in a buffer of gradients begins where the parameter before it ends.
    if right.shape[0] % 4 == 0 and accumulate.data_ptr() % 16 == 0:
        return cublaslt.matmul(left, right, alpha, out=accumulate, accumulate=beta == 1)
    right = _padded_rows(right, 8)
    out = torch.empty((left.shape[0], right.shape[0]), dtype=torch.float32, device=left.device)
    cublaslt.matmul(left, right, alpha, out=out)
    return reference.add_into(accumulate, out[:, : accumulate.shape[1]], beta)
