# SPDX-License-Identifier: Apache-2.0
"""Products of FP8 blockwise operands on NVIDIA GPUs through Triton: scales of any fp32 value.

With power-of-two scales code * scale is exact in bf16, and `hopper` is faster.
"""

from typing import TypeGuard

import torch
from torch import Tensor

from fused_ops.formats import Operand, QuantizedTensor
from fused_ops.triton_support import device_reason, launch

TILE = {"m": 128, "n": 128, "warps": 8, "stages": 2}
"""Of the output. Reasoned, not measured."""


def is_blockwise(operand: Operand) -> TypeGuard[QuantizedTensor]:
    """Whether it is made of FP8 blocks."""
    return isinstance(operand, QuantizedTensor) and operand.spec.format == "fp8_blockwise"


def kind_reason(operand: Operand) -> str:
    """Why products of FP8 blocks do not take an operand of another kind."""
    kind = operand.dtype if isinstance(operand, Tensor) else operand.spec.label
    return f"fp8_blockwise times fp8_blockwise, got {kind}"


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
    for operand in (a, b):
        if not is_blockwise(operand):
            return kind_reason(operand)
        if 0 in operand.shape:
            return "an operand is empty"
        reason = device_reason(operand.codes)
        if reason is not None:
            return reason
    if accumulate is not None and not accumulate.is_contiguous():
        return "accumulate is not contiguous"
    return None


def scaled_matmul(
    a: QuantizedTensor,
    b: QuantizedTensor,
    *,
    out_dtype: torch.dtype,
    accumulate: Tensor | None = None,
    beta: int = 1,
    bias: Tensor | None = None,
    decode: str = "exact",
) -> Tensor:
    """See `fused_ops.scaled_matmul.api.scaled_matmul`."""
    from fused_ops.scaled_matmul import triton_blockwise_kernels as kernels

    rows, cols = a.shape[0], b.shape[0]
    out = accumulate
    if out is None:
        dtype = out_dtype if bias is None else torch.float32
        out = torch.empty((rows, cols), dtype=dtype, device=a.codes.device)
    assert a.spec.block is not None, a.spec.label
    assert b.spec.block is not None, b.spec.label
    launch(
        kernels.blockwise_matmul, (-(-rows // TILE["m"]) * -(-cols // TILE["n"]),),
        a.codes.contiguous(), b.codes.contiguous(), a.scales.contiguous(), b.scales.contiguous(),
        out, rows, cols, a.codes.shape[1] // 128, on=out.device, warps=TILE["warps"],
        A_E5M2=a.spec.element == "e5m2", B_E5M2=b.spec.element == "e5m2",
        A_TILE=a.spec.block[0], B_TILE=b.spec.block[0],
        ACCUMULATE=accumulate is not None and beta == 1,
        CORES=out.is_cuda, M=TILE["m"], N=TILE["n"], num_stages=TILE["stages"],
    )  # fmt: skip
    return out if bias is None else (out + bias.float()).to(out_dtype)
