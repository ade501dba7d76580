# SPDX-License-Identifier: Apache-2.0
"""The one entry to matrix products of quantized and high-precision operands."""

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fused_ops.dispatch import Choice
from fused_ops.formats import Operand
from fused_ops.main_grad import Zeros
from fused_ops.scaled_matmul import custom, reference
from fused_ops.scaled_matmul.implementations import SCALED_MATMUL


def scaled_matmul(
    a: Operand,
    b: Operand,
    *,
    out_dtype: torch.dtype,
    accumulate: Tensor | Zeros | None = None,
    bias: Tensor | None = None,
    decode: str = "exact",
    row_block: int | None = None,
    implementation: Choice = None,
) -> Tensor:
    """a . b^T, with both operands' contraction along their last axis.

        sum   = fp32 sum over k of (code * block scale)_a * (code * block scale)_b
        out   = round_to(out_dtype, alpha * sum + bias)
        or accumulate = beta * accumulate + alpha * sum

    Two high-precision operands are multiplied plainly, in their own dtype with fp32 sums.

    Args:
        a: [M, K], codes or a tensor.
        b: [N, K], codes or a tensor.
        out_dtype: of a new output.
        accumulate: fp32 [M, N], updated in place, after alpha; then it is the result. `Zeros` are
            written without being read: beta 0, else 1.
        bias: [N], added in fp32 after alpha.
        decode: "exact", or "fp8": what E4M3 cannot hold of code * block scale is rounded to it
            (NVFP4 with full-precision block scales), or FP8 blocks meet on FP8 cores, which align
            products to fewer bits.
        row_block: take the product in GEMMs of this many rows, so that a row of the result does
            not depend on how many others there are; only the reference does that.
        implementation: name of one, or names in order of preference; a forced one never falls
            back. None: the first that supports the call.

    Returns:
        [M, N] in out_dtype, or `accumulate`.

    Raises:
        ValueError: operands that do not fit.
        UnsupportedError: no allowed implementation takes them.
    """
    sums, beta = (accumulate.tensor, 0) if isinstance(accumulate, Zeros) else (accumulate, 1)
    _check(a, b, sums, bias, decode)
    if row_block is not None:
        if implementation not in (None, "reference"):
            raise ValueError(
                f"row_block is for the reference, got implementation {implementation!r}; pass None"
            )
        return reference.scaled_matmul(
            a, b, out_dtype=out_dtype, accumulate=sums, beta=beta, bias=bias, decode=decode,
            row_block=row_block,
        )  # fmt: skip
    call = custom.scaled_matmul if is_dynamo_compiling() else SCALED_MATMUL
    return call(
        a, b, out_dtype=out_dtype, accumulate=sums, beta=beta, bias=bias, decode=decode,
        implementation=implementation,
    )  # fmt: skip


def _check(
    a: Operand, b: Operand, accumulate: Tensor | None, bias: Tensor | None, decode: str
) -> None:
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(
            "operands must be [M, K] and [N, K] with one K, got "
            f"{tuple(a.shape)} and {tuple(b.shape)}; transpose or pad one of them"
        )
    if accumulate is not None:
        shape = (a.shape[0], b.shape[0])
        if accumulate.dtype != torch.float32 or tuple(accumulate.shape) != shape:
            raise ValueError(
                f"accumulate must be fp32 {shape}, got {accumulate.dtype} "
                f"{tuple(accumulate.shape)}; gradients are summed in fp32"
            )
        if bias is not None:
            raise ValueError("accumulate and bias exclude each other; add the bias separately")
    if decode not in ("exact", "fp8"):
        raise ValueError(f"decode must be 'exact' or 'fp8', got {decode!r}")
