# SPDX-License-Identifier: Apache-2.0
"""Tokens that go to their experts in codes give what BF16 dispatch gives, bit for bit."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from fused_ops.quantize import quantize
from fused_ops.recipe import get_recipe
from models.config import ParallelConfig
from models.dispatch import TokenDispatcher, codes_to_all, dispatch_reason
from models.gather_bytes import communication_lines
from models.parallel_linear import GemmModule
from models.precision import PrecisionState, apply_precision
from models.precision_config import PrecisionConfig
from tests.distributed import run_distributed
from tests.models import toy

EP2 = {"expert_model_parallel_size": 2}
FROM_CODES = "nvfp4_pow2_from_codes"
# Name: recipe, dtype, and fields of the toy.
TOYS = {
    "bf16 activations": (FROM_CODES, torch.bfloat16, {}),
    "fp32 activations": (FROM_CODES, torch.float32, {}),
    "shared experts": (
        FROM_CODES,
        torch.bfloat16,
        {"moe_shared_expert_intermediate_size": 48, "moe_shared_expert_overlap": True},
    ),
    "a capacity": (
        FROM_CODES,
        torch.bfloat16,
        {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    ),
    "a recipe that needs X": ("nvfp4_pow2", torch.bfloat16, {}),
}


def train(communicate, recipe, dtype, fields):
    """One step of a toy: loss, gradients by name, bytes sent to all, and what is announced."""
    (chunk,), config = toy.make("E-", parallel=ParallelConfig(**EP2), dtype=dtype, **fields)
    section = PrecisionConfig(recipe=recipe, communicate=communicate)
    plan = apply_precision([chunk], section, PrecisionState(seed=4))
    sent, exchange = {}, dist.all_to_all_single

    def counted(output, x, *splits, **options):
        sent[str(x.dtype)] = sent.get(str(x.dtype), 0) + x.numel() * x.element_size()
        return exchange(output, x, *splits, **options)

    dist.all_to_all_single = torch.distributed.all_to_all_single = counted
    try:
        loss = toy.step([chunk], config)
    finally:
        dist.all_to_all_single = torch.distributed.all_to_all_single = exchange
    gradients = {name: p.main_grad.clone() for name, p in chunk.named_parameters()}
    return loss, gradients, sent, communication_lines(plan, 2)


def uneven():
    """Rank 0 sends everything to rank 1, and nothing comes to it: values and gradient."""
    torch.manual_seed(dist.get_rank())
    x = torch.randn(6, 32).bfloat16().requires_grad_()
    splits = ([0, 0], [0, 6]) if dist.get_rank() == 0 else ([6, 6], [0, 6])
    y = codes_to_all(x, get_recipe(FROM_CODES).fprop_x, dist.group.WORLD, splits)
    y.sum().backward()
    nothing = x[:0].detach().requires_grad_()
    splits = ([0, 6], [0, 0]) if dist.get_rank() == 0 else ([0, 0], [6, 0])
    sent = nothing if dist.get_rank() == 0 else x.detach()
    z = codes_to_all(sent, get_recipe(FROM_CODES).fprop_x, dist.group.WORLD, splits)
    return x.detach(), y.detach(), x.grad, z


def two_ranks():
    dist.init_process_group("gloo")
    said = {"uneven": uneven()}
    for name, toy_ in TOYS.items():
        said[name] = [train(how, *toy_) for how in ("bf16", "packed")]
    return said


@pytest.fixture(scope="module")
def said():
    return run_distributed(two_ranks, 2, timeout=300)


@pytest.mark.parametrize("name", TOYS)
def test_a_model_trains_the_same(said, name):
    for rank in said:
        plain, packed = rank[name]
        assert plain[0] == packed[0]
        for parameter, gradient in plain[1].items():
            assert torch.equal(gradient, packed[1][parameter]), parameter


def test_bytes(said):
    """Both top experts of 4 x 64 tokens of 64 features: 0.5625 of a byte a value, not 2."""
    plain, packed = said[0]["bf16 activations"]
    values = toy.MICRO_BATCHES // 2 * 64 * 2 * 64
    assert packed[2]["torch.uint8"] == values * 0.5625
    assert plain[2]["torch.bfloat16"] - packed[2]["torch.bfloat16"] == values * 2
    assert plain[3] == []
    assert packed[3] == [
        "tokens on their way to experts, all layers, evenly loaded: 0.0 MiB a micro-batch and "
        "rank, 0.28 of the 0.0 MiB in bf16"
    ]


def test_what_stays(said):
    plain, packed = said[0]["a recipe that needs X"]
    assert plain[2] == packed[2]
    assert packed[3][1] == (
        "precision.communicate packed: dispatch of 1 layers stays in bf16: wgrad.x is not made of "
        "the forward's operand (source: forward) (first layers.0.mlp.experts.linear_fc1)"
    )


def test_ranks_that_send_or_get_nothing(said):
    (x0, y0, dx0, z0), (x1, y1, dx1, z1) = (rank["uneven"] for rank in said)
    spec = get_recipe(FROM_CODES).fprop_x
    both = torch.cat([x0, x1])
    assert torch.equal(y1, quantize(both, spec).dequantize(torch.bfloat16))
    assert y0.shape == z1.shape == (0, 32)
    assert torch.equal(z0, y1[6:])
    assert torch.equal(dx0, torch.ones_like(dx0))
    assert torch.equal(dx1, torch.ones_like(dx1))


def test_decoded_values_are_quantized_to_themselves():
    """Whatever scale a block had, its values lie on the grid of the one that it gets again."""
    spec = get_recipe(FROM_CODES).fprop_x
    x = torch.randn(4096, 64) * torch.exp2(torch.randint(-2, 3, (4096, 1)).float())
    once = quantize(x, spec)
    assert once.out_of_range.tolist() == [0, 0]
    again = quantize(once.dequantize(torch.bfloat16), spec)
    assert torch.equal(again.dequantize(), once.dequantize())
    assert torch.equal(once.dequantize(), once.dequantize(torch.bfloat16).float())
    assert not torch.equal(again.scales, once.scales)  # equal values, not always equal bytes


def test_reasons():
    recipe = get_recipe(FROM_CODES)
    assert dispatch_reason(recipe, 64) is None
    assert dispatch_reason(recipe, 40) == "40 features are no multiple of 16"
    rotated = replace(recipe.fprop_x, hadamard=16)
    fields = {"fprop_x": rotated, "fprop_w": replace(recipe.fprop_w, hadamard=16)}
    for other in (get_recipe("nvfp4"), get_recipe("bf16"), replace(recipe, **fields)):
        assert dispatch_reason(other, 64) == "fprop.x is not nvfp4 1x16 with pow2 scales"


def test_dispatchers_of_another_kind_stay():
    (chunk,), _ = toy.make("E", moe_token_dispatcher_type="allgather")
    layer = chunk.decoder.layers[0].mlp
    assert not isinstance(layer.token_dispatcher, TokenDispatcher)
    (chunk,), _ = toy.make("E")
    assert isinstance(chunk.decoder.layers[0].mlp.token_dispatcher, TokenDispatcher)
    assert isinstance(chunk.decoder.layers[0].mlp.token_dispatcher.experts.linear_fc1, GemmModule)
