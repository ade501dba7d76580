# SPDX-License-Identifier: Apache-2.0
"""Codes of weights that tensor-parallel ranks cut: whose blocks are not those of the whole."""

import torch

from fused_ops.formats import OperandSpec
from fused_ops.quantize import operand_amax, quantize
from models.conversion.cuts import Cut
from models.conversion.layouts import high_modules
from models.conversion.quantized import dequantized_ours
from models.conversion.safetensors import TensorSpec

TILES = OperandSpec(format="nvfp4", block=(16, 16))
ROWS = OperandSpec(format="nvfp4", block=(1, 16))


def test_only_cuts_through_a_block_count():
    assert Cut(2, (64, 64)).shards(TILES) is None
    assert Cut(2, (48, 48)).shards(ROWS) is None
    assert Cut(2, (48, 48)).shards(OperandSpec(format="fp8_tensorwise")) is None
    first, second = Cut(2, (48, 32)).shards(TILES)
    assert first.tolist() == [*range(24), *range(48, 64)]
    assert second.tolist() == [*range(24, 48), *range(64, 80)]
    assert Cut(2).problem(TILES, 64) is None
    assert "has 24 of their 48 inputs, no multiple of 16" in Cut(2).problem(TILES, 48)
    assert Cut(2, (48,)).problem(TILES, 40) is None  # its inputs are whole


def test_values_are_those_of_each_rank():
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight *= torch.arange(1, 97)[:, None]  # so that tiles differ in scale
    amax = operand_amax(weight, TILES)
    ranks = [torch.cat([weight[i : i + 24], weight[48 + i : 72 + i]]) for i in (0, 24)]
    made = [quantize(rank, TILES, amax=amax).dequantize().split(24) for rank in ranks]
    expected = torch.cat([made[0][0], made[1][0], made[0][1], made[1][1]])
    (found,) = dequantized_ours([weight], TILES, Cut(2, (48, 48)))
    assert torch.equal(found, expected)
    assert not torch.equal(found, dequantized_ours([weight], TILES)[0])


def test_experts_in_one_tensor_are_named_as_high():
    bf16 = torch.bfloat16
    theirs = {
        "model.layers.0.mlp.experts.gate_up_proj": TensorSpec((12, 8, 8), bf16),
        "model.layers.0.mlp.experts.down_proj": TensorSpec((12, 8, 8), bf16),
        "model.layers.0.self_attn.q_proj.weight": TensorSpec((8, 8), bf16),
    }
    high = high_modules(theirs, ["model.layers.0.self_attn.q_proj.weight"])
    assert high == ["model.layers.0.mlp.experts", "lm_head"]
