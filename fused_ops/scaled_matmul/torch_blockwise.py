# SPDX-License-Identifier: Apache-2.0
"""FP8 blockwise operands on Hopper's FP8 cores through torch: where decode "fp8" asks for it.

torch hands them to cuBLASLt, which scales the sums of 128 products in fp32 (torch 2.11, compute
capability 9.0 alone). The cores align products to fewer bits than `hopper` and `blockwise` keep.
"""

import torch
from torch import Tensor

from fused_ops.codecs import roundup
from fused_ops.formats import Operand, QuantizedTensor
from fused_ops.scaled_matmul.blockwise import is_blockwise, kind_reason
from fused_ops.scaled_matmul.reference import add_into
from fused_ops.triton_support import device_reason


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
    if decode != "fp8":
        return f"for decode fp8, got {decode}"
    for operand in (a, b):
        if not is_blockwise(operand):
            return kind_reason(operand)
        if operand.spec.element != "e4m3" or operand.shape[0] % 16 or 0 in operand.shape:
            return f"e4m3 with rows that are multiples of 16, got {operand.shape}"
    assert is_blockwise(a), "checked"
    assert is_blockwise(b), "checked"
    if a.spec.block == b.spec.block == (128, 128):
        return "blocks of 1x128 in one operand at least"
    if out_dtype not in (torch.bfloat16, torch.float32):
        return f"results in bf16 or fp32, got {out_dtype}"
    if not hasattr(torch.nn.functional, "scaled_mm"):
        return "this torch has no scaled_mm"
    reason = device_reason(a.codes)
    if reason is None and torch.cuda.get_device_capability(a.codes.device) != (9, 0):
        return "torch has it for compute capability 9.0 alone"
    return reason


def layout(operand: QuantizedTensor) -> Tensor:
    """Decode scales as torch wants them, both kinds with stride 1 along their first axis.

    Blocks of 1x128: [rows, blocks]. Tiles: [blocks, tiles], blocks zero-padded to a multiple of 4.
    """
    scales = operand.scales
    assert operand.spec.block is not None, operand.spec.label
    if operand.spec.block[0] == 1:
        turned = scales.new_empty((scales.shape[1], scales.shape[0]))
        return turned.copy_(scales.t()).t()
    padded = scales.new_zeros((scales.shape[0], roundup(scales.shape[1], 4)))
    padded[:, : scales.shape[1]] = scales
    return padded.t()


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
    from torch.nn.functional import ScalingType, scaled_mm

    kinds = [
        ScalingType.BlockWise1x128 if x.spec.block == (1, 128) else ScalingType.BlockWise128x128
        for x in (a, b)
    ]
    left, right = (x.codes.contiguous().view(torch.float8_e4m3fn) for x in (a, b))
    plain = accumulate is None and bias is None
    out = scaled_mm(
        left, right.t(), layout(a), kinds[0], layout(b), kinds[1],
        output_dtype=out_dtype if plain else torch.float32,
    )  # fmt: skip
    if accumulate is not None:
        return add_into(accumulate, out, beta)
    return out if bias is None else (out + bias.float()).to(out_dtype)
