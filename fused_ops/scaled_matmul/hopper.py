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

from fused_ops.formats import QuantizedTensor
from fused_ops.quantize import triton_backend
from fused_ops.scaled_matmul import cublaslt, reference
from fused_ops.scaled_matmul.reference import Operand, fp8_shift
from fused_ops.triton_support import device_reason

EXACT_IN_BF16 = ("nvfp4", "mxfp8", "mxfp4", "fp8_tensorwise", "fp8_delayed")
WHOLE_TENSOR_FP8 = ("fp8_tensorwise", "fp8_delayed")


def supports(
    a: Operand,
    b: Operand,
    *,
    out_dtype: torch.dtype,
    accumulate: Tensor | None = None,
    bias: Tensor | None = None,
    decode: str = "exact",
) -> str | None:
    """None, or why not."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return "two high-precision operands are torch's"
    for operand in (a, b):
        tensor = operand if isinstance(operand, Tensor) else operand.codes
        reason = device_reason(tensor)
        if reason is not None:
            return reason
        if isinstance(operand, Tensor):
            if operand.dtype != torch.bfloat16:
                return f"a high-precision operand is bf16, got {operand.dtype}"
        elif operand.spec.format not in EXACT_IN_BF16 or operand.spec.row_scaled:
            return f"not exact in bf16, or scaled by rows: {operand.spec.label!r}"
        if 0 in operand.shape:
            return "an operand is empty"
    if accumulate is not None and not accumulate.is_contiguous():
        return "accumulate is not contiguous"
    return None if cublaslt.library() is not None else "cuBLASLt was not found"


def _is_fp8(operand: Operand, decode: str) -> TypeGuard[QuantizedTensor]:
    """Whether the operand loses nothing, or is to be rounded, on FP8 cores."""
    if isinstance(operand, Tensor):
        return False
    spec = operand.spec
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


def fp8_operand(operand: QuantizedTensor) -> tuple[Tensor, int]:
    """FP8 [rows, K padded to 16], and the power of two that alpha owes it."""
    if operand.spec.format == "nvfp4":
        shift = fp8_shift(operand.spec)
        return triton_backend.decode(operand, e4m3=True, shift=shift), shift
    codes = _padded(operand.codes, 16)
    dtype = torch.float8_e5m2 if operand.spec.element == "e5m2" else torch.float8_e4m3fn
    return codes.view(dtype), 0


def bf16_operand(operand: Operand, decode: str) -> Tensor:
    """Exact BF16 [rows, K padded to 8]: code * block scale, or a tensor's own values."""
    if isinstance(operand, Tensor):
        return _padded(operand, 8)
    if operand.spec.format != "nvfp4":
        return _padded(operand.unscaled(torch.bfloat16), 8)
    if decode == "fp8" and not operand.spec.is_pow2:
        shift = fp8_shift(operand.spec)
        rounded = triton_backend.decode(operand, e4m3=True, shift=shift)
        return rounded.to(torch.bfloat16) * 2.0**shift
    return triton_backend.decode(operand)


def _padded(x: Tensor, multiple: int) -> Tensor:
    """Contiguous, with zero columns up to a multiple."""
    add = -x.shape[1] % multiple
    return torch.nn.functional.pad(x, (0, add)) if add else x.contiguous()


def _alike(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both with the wider K: operands are padded by their own formats."""
    wide = max(a.shape[1], b.shape[1])
    return _padded(a, wide), _padded(b, wide)


def scaled_matmul(
    a: Operand,
    b: Operand,
    *,
    out_dtype: torch.dtype,
    accumulate: Tensor | None = None,
    bias: Tensor | None = None,
    decode: str = "exact",
) -> Tensor:
    """See `fused_ops.scaled_matmul.api.scaled_matmul`."""
    alpha = reference.alpha(a, b)
    if on_fp8_cores(a, b, decode) and _is_fp8(a, decode) and _is_fp8(b, decode):
        (left, shift_a), (right, shift_b) = fp8_operand(a), fp8_operand(b)
        if shift_a + shift_b:
            assert alpha is not None
            alpha = alpha * 2.0 ** (shift_a + shift_b)
    else:
        left, right = bf16_operand(a, decode), bf16_operand(b, decode)
    left, right = _alike(left, right)
    rows, cols = a.shape[0], b.shape[0]
    if accumulate is not None:
        return _accumulate(left, right, alpha, accumulate)
    # The bias is added in fp32, after alpha; rows of the output start at multiples of 16 bytes.
    fused = bias is None and out_dtype in (torch.bfloat16, torch.float16, torch.float32)
    dtype = out_dtype if fused else torch.float32
    right = _padded_rows(right, 8)
    out = torch.empty((rows, right.shape[0]), dtype=dtype, device=left.device)
    cublaslt.matmul(left, right, alpha, out=out)
    out = out[:, :cols]
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype).contiguous()


def _padded_rows(x: Tensor, multiple: int) -> Tensor:
    add = -x.shape[0] % multiple
    if not add:
        return x
    return torch.cat([x.view(torch.uint8), x.new_zeros(add, x.shape[1]).view(torch.uint8)]).view(
        x.dtype
    )


def _accumulate(left: Tensor, right: Tensor, alpha: Tensor | None, accumulate: Tensor) -> Tensor:
    if right.shape[0] % 4 == 0:
        return cublaslt.matmul(left, right, alpha, out=accumulate, accumulate=True)
    right = _padded_rows(right, 8)
    out = torch.empty((left.shape[0], right.shape[0]), dtype=torch.float32, device=left.device)
    cublaslt.matmul(left, right, alpha, out=out)
    return accumulate.add_(out[:, : accumulate.shape[1]])
