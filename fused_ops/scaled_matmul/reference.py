# SPDX-License-Identifier: Apache-2.0
"""Definition of the quantized matrix product, in PyTorch, on any device.

Why the sum may be taken over decoded values: a product of an E2M1 code and an E4M3 block scale has
at most 6 significant bits and is exact in BF16, so a product of two of them is exact in fp32, and
only the sum rounds. The tensor scale A / 2688 is never folded into an operand, where it would round
each value; it is part of alpha, after the sum.

    alpha = ((1 * A_a) * A_b) * RN(1 / (num_a * num_b))          NVFP4, each operation one rounding

with each operand's own numerator (2688, or 1536 for four-over-six and MS-EDEN).
"""

import struct

import torch
from torch import Tensor

from fused_ops.formats import DecodedTensor, Operand, QuantizedTensor

BLOCK_SCALES_ONLY = ("mxfp8", "mxfp4", "fp8_blockwise")
"""Formats without a tensor scale: nothing of theirs is left for the epilogue."""


def scaled_matmul(
    a: Operand,
    b: Operand,
    *,
    out_dtype: torch.dtype,
    accumulate: Tensor | None = None,
    beta: int = 1,
    bias: Tensor | None = None,
    decode: str = "exact",
    row_block: int | None = None,
) -> Tensor:
    """See `fused_ops.scaled_matmul.api.scaled_matmul`; sums in fp32 in the matmul's own order."""
    if row_block is None and isinstance(a, Tensor) and isinstance(b, Tensor):
        return _plain(a, b, out_dtype, accumulate, beta, bias)
    total = _product(values(a, decode), values(b, decode), row_block)
    return _epilogue(total, a, b, out_dtype, accumulate, beta, bias)


def _plain(
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype,
    accumulate: Tensor | None,
    beta: int,
    bias: Tensor | None,
) -> Tensor:
    if accumulate is None and a.is_cuda and a.dtype == out_dtype:
        return torch.nn.functional.linear(a, b, bias)
    # BF16 products are exact in fp32, and a CPU multiplies fp32 10 to 40 times faster than BF16.
    total = a.float() @ b.float().t()
    if accumulate is not None:
        return add_into(accumulate, total, beta)
    return (total if bias is None else total + bias.float()).to(out_dtype)


def _product(a: Tensor, b: Tensor, rows: int | None) -> Tensor:
    """a . b^T, in one GEMM or in GEMMs of `rows` rows each, the last filled up with zeros.

    The order of a library's sums depends on a GEMM's shape. With one shape for all, a row of the
    result depends on its own row of a and on b, and not on how many rows there are.
    """
    if rows is None:
        return a @ b.t()
    blocks = []
    for block in a.split(rows):
        missing = rows - block.shape[0]
        filled = torch.cat([block, block.new_zeros(missing, block.shape[1])]) if missing else block
        blocks.append((filled @ b.t())[: block.shape[0]])
    return torch.cat(blocks) if blocks else a.new_zeros(0, b.shape[0])


def values(operand: Operand, decode: str = "exact") -> Tensor:
    """What is multiplied, in fp32: code * block scale, or a tensor's own values."""
    if isinstance(operand, Tensor):
        return operand.float()
    if isinstance(operand, DecodedTensor):
        return operand.data[:, : operand.shape[1]].float().mul_(2.0**operand.shift)
    if decode == "fp8" and operand.spec.format == "nvfp4":
        return operand.fp8_operand()[0].float().mul_(2.0**operand.spec.fp8_shift)
    return operand.unscaled(torch.float32)


def alpha(a: Operand, b: Operand, shift: int = 0) -> Tensor | None:
    """The factor of the epilogue: fp32 scalar, or [M, 1], [1, N], [M, N] with row-scaled operands.

    None if neither operand has a tensor scale. It is times 2**shift, which rounds nothing.
    """
    result: Tensor | None = None
    numerators = 1.0
    for operand, shape in ((a, (-1, 1)), (b, (1, -1))):
        if isinstance(operand, Tensor) or operand.spec.format in BLOCK_SCALES_ONLY:
            continue
        scale = operand.amax
        if isinstance(operand, QuantizedTensor) and operand.spec.format != "nvfp4":
            scale = operand.tensor_scale
        scale = scale.view(shape) if scale.dim() else scale
        result = scale if result is None else result * scale
        numerators *= operand.spec.numerator
    return None if result is None else result * (fp32_reciprocal(numerators) * 2.0**shift)


def fp32_reciprocal(x: float) -> float:
    """RN(1 / x) in fp32, as a Python number (no tensor, so nothing waits for a device)."""
    return struct.unpack("f", struct.pack("f", 1.0 / x))[0]


def _epilogue(
    total: Tensor,
    a: Operand,
    b: Operand,
    out_dtype: torch.dtype,
    accumulate: Tensor | None,
    beta: int,
    bias: Tensor | None,
) -> Tensor:
    return finish(total, alpha(a, b), out_dtype, accumulate, beta, bias)


def add_into(accumulate: Tensor, total: Tensor, beta: int) -> Tensor:
    """accumulate = beta * accumulate + total, in place; beta is 0 or 1, and 0 reads nothing."""
    return accumulate.add_(total) if beta else accumulate.copy_(total)


def finish(
    total: Tensor,
    factor: Tensor | None,
    out_dtype: torch.dtype,
    accumulate: Tensor | None,
    beta: int,
    bias: Tensor | None,
) -> Tensor:
    """The epilogue of fp32 sums [M, N]: times factor, plus bias, rounded; or into accumulate."""
    if factor is not None:
        total = total * factor
    if accumulate is not None:
        return add_into(accumulate, total, beta)
    return (total if bias is None else total + bias.float()).to(out_dtype)


GROUP = 64
"""Products that the native GEMM sums exactly before it rounds."""


def blackwell_model(
    a: Operand,
    b: Operand,
    *,
    out_dtype: torch.dtype,
    accumulate: Tensor | None = None,
    beta: int = 1,
    bias: Tensor | None = None,
    decode: str = "exact",
) -> Tensor:
    """The sum as GB200's NVFP4 GEMM forms it (Graphcore, arXiv 2609.02846, section 6).

    K is cut into groups of 64 products in their order; the exact sum of a group is rounded to fp32
    (nearest even); group sums are added one after the other, each addition rounded toward zero.
    Equal to the hardware after conversion to BF16 in all published probes; fp32 outputs of tensors
    whose block scales span many binades are known to differ by units in the last place.
    """
    va, vb = values(a).double(), values(b).double()
    total = torch.zeros(va.shape[0], vb.shape[0], dtype=torch.float32, device=va.device)
    for start in range(0, va.shape[1], GROUP):
        # Products are multiples of 2^-20 below 2^23: 64 of them are summed exactly in fp64.
        group = va[:, start : start + GROUP] @ vb[:, start : start + GROUP].t()
        total = add_toward_zero(total, group.float())
    return _epilogue(total, a, b, out_dtype, accumulate, beta, bias)


def blackwell_model_supports(
    a: Operand, b: Operand, *, decode: str = "exact", **_unused: object
) -> str | None:
    """None, or why not."""
    for operand in (a, b):
        if (
            not isinstance(operand, QuantizedTensor)
            or operand.spec.format != "nvfp4"
            or decode != "exact"
        ):
            kind = operand.dtype if isinstance(operand, Tensor) else operand.spec.label
            return f"it describes NVFP4 x NVFP4 with decode exact; got {kind}, decode {decode}"
    return None


def add_toward_zero(x: Tensor, y: Tensor) -> Tensor:
    """x + y in fp32, rounded toward zero (finite x, y without overflow)."""
    total = x + y
    # TwoSum (Knuth): total + error is the exact sum.
    back = total - x
    error = (x - (total - back)) + (y - back)
    too_far = (error != 0) & (torch.signbit(error) != torch.signbit(total))
    return torch.where(too_far, torch.nextafter(total, torch.zeros_like(total)), total)
