# SPDX-License-Identifier: Apache-2.0
"""The weight of a linear layer as its forward pass multiplies with it."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fused_ops.formats import QuantizedTensor
from fused_ops.linear import LinearCall
from fused_ops.linear_call import Comm
from fused_ops.quantize import dequantize
from fused_ops.weight_operands import follows_weight, weight_operand
from models.parallel_linear import GemmModule


def weight_matrices(module: GemmModule, comm: Comm) -> Iterator[tuple[int, Tensor, LinearCall]]:
    """(expert, weight [out, in], how its GEMMs compute) of each matrix of a layer's weight.

    Args:
        module: a linear layer (expert 0), or the stack of this rank's experts.
        comm: how operands are cut over ranks.
    """
    weight = module.weight.detach()
    call = module.gemm_call(module.weight, comm)
    if weight.dim() == 2:
        yield 0, weight, call
        return
    for expert, each in enumerate(weight):
        yield expert, each, replace(call, key=call.key.with_expert(expert))


@torch.no_grad()
def forward_weight(module: GemmModule, start: int, end: int) -> Tensor:
    """Elements `start` to `end` of a layer's weight as the operand fprop.w, dequantized.

    The weight is quantized anew: codes that layers keep may lie in the memory of a CUDA graph. A
    collective over the ranks that share an amax of the weight, which must ask for the same range.

    Args:
        module: its recipe's fprop.w must be one that `follows_weight`.
        start: of the range, in the flattened weight of this rank; matrices outside are left out.
        end: of the range.

    Returns:
        fp32 [end - start].
    """
    assert follows_weight(module.recipe.fprop_w), f"{module.gemm_name}: {module.recipe.fprop_w}"
    parts = []
    size = module.weight[0].numel() if module.weight.dim() == 3 else module.weight.numel()
    for number, weight, call in weight_matrices(module, module.comm()):
        first, last = max(start - number * size, 0), min(end - number * size, size)
        if first < last:
            call = replace(call, weight_codes=None, observer=None)
            codes = weight_operand(call, "fprop.w", weight, number)
            assert isinstance(codes, QuantizedTensor), f"{module.gemm_name} is quantized"
            parts.append(dequantize(codes).reshape(-1)[first:last])
    return torch.cat(parts)
