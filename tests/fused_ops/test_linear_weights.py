# SPDX-License-Identifier: Apache-2.0
"""The codes of a weight across micro-batches: made once, and never stale."""

import copy
import pickle

import pytest
import torch

from fused_ops import weight_operands
from fused_ops.formats import OperandSpec
from fused_ops.keys import StreamKey
from fused_ops.linear import LinearCall, linear
from fused_ops.quantize import quantize
from fused_ops.recipe import RECIPES, recipe_from_dict
from fused_ops.weight_codes import WeightCodes
from fused_ops.weight_operands import weight_operand

KEY = StreamKey(seed=5, step=17, micro_batch=2, layer=99)


class Layer(torch.nn.Module):
    """What a module does with its codes."""

    def __init__(self, recipe="nvfp4", dtype=torch.bfloat16):
        super().__init__()
        self.weight = torch.nn.Parameter((torch.randn(48, 64) * 0.1).to(dtype))
        self.recipe, self.weight_codes, self.epoch = RECIPES[recipe], WeightCodes(), 0

    def forward(self, x, key=KEY):
        call = LinearCall(
            recipe=self.recipe, key=key, weight_codes=self.weight_codes, weights_epoch=self.epoch
        )
        return linear(x, self.weight, call=call)


@pytest.fixture
def built(monkeypatch):
    """Names of the weight operands that were quantized, in order."""
    names, original, again = (
        [],
        weight_operands.quantize_operand,
        weight_operands.requantize_columns,
    )

    def count(call, name, x, **options):
        if name.endswith(".w"):
            names.append(name)
        return original(call, name, x, **options)

    def from_codes(*args, **options):
        names.append("dgrad.w")
        return again(*args, **options)

    monkeypatch.setattr(weight_operands, "quantize_operand", count)
    monkeypatch.setattr(weight_operands, "requantize_columns", from_codes)
    return names


def fresh(layer, x, dy):
    """Output and input gradient of a layer without kept codes."""
    x = x.to(layer.weight.dtype).requires_grad_()
    y = linear(x, layer.weight.detach(), call=LinearCall(recipe=layer.recipe, key=KEY))
    y.backward(dy.to(y.dtype))
    return y.detach(), x.grad


def kept(layer, x, dy):
    """Output and input gradient of a layer with kept codes."""
    x = x.to(layer.weight.dtype).requires_grad_()
    y = layer(x)
    y.backward(dy.to(y.dtype))
    return y.detach(), x.grad


def agree(layer):
    x, dy = torch.randn(32, 64), torch.randn(32, 48)
    return all(torch.equal(a, b) for a, b in zip(kept(layer, x, dy), fresh(layer, x, dy)))


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("nvfp4", ["fprop.w"]),
        ("nvfp4_requant", ["fprop.w", "dgrad.w"]),
        ("nvfp4_fast", ["fprop.w", "dgrad.w"]),
        ("mxfp8", ["fprop.w", "dgrad.w"]),
    ],
)
def test_codes_are_made_once_for_all_micro_batches(recipe, expected, built):
    layer = Layer(recipe)
    for m in range(3):
        x = torch.randn(32, 64).bfloat16().requires_grad_()
        layer(x, StreamKey(seed=5, step=17, micro_batch=m)).sum().backward()
    assert built == expected


def optimizer_step(layer):
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    layer.weight.grad = torch.randn_like(layer.weight)
    optimizer.step()


def fused_optimizer_step(layer):
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, foreach=True)
    layer.weight.grad = torch.randn_like(layer.weight)
    optimizer.step()


def load(layer):
    layer.load_state_dict({"weight": torch.randn(48, 64)})


def cast(layer):
    layer.weight.data[0, 0] = 1.00390625  # what bf16 cannot hold is lost on the way
    layer.float()


def cast_there_and_back(layer):
    layer.to(torch.float16)
    layer.weight.data = layer.weight.data * 3.0
    layer.to(torch.bfloat16)


def edit_in_place(layer):
    with torch.no_grad():
        layer.weight[3].mul_(10.0)


def edit_a_view(layer):
    layer.weight.detach()[:, 5] = 3.0


def new_storage(layer):
    layer.weight.data = torch.randn(48, 64).bfloat16()


def swap_storages(layer):
    # The old memory is free for the new tensor, if nobody keeps its address.
    for _ in range(4):
        layer.weight.data = layer.weight.data.clone() * 1.5


CHANGES = [optimizer_step, fused_optimizer_step, load, cast, cast_there_and_back, edit_in_place,
           edit_a_view, new_storage, swap_storages]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4_fast"])
def test_codes_are_never_stale(recipe, change):
    layer = Layer(recipe)
    assert agree(layer)
    before = layer.weight.detach().clone()
    change(layer)
    assert layer.weight.dtype != before.dtype or not torch.equal(layer.weight, before)
    assert agree(layer)


def test_the_epoch_covers_writes_that_no_counter_shows():
    """A distributed optimizer gathers into the flat buffer that `weight.data` is a view of."""
    layer = Layer()
    buffer = torch.randn(48 * 64).bfloat16()
    layer.weight.data = buffer.view(48, 64)
    assert agree(layer)
    buffer.mul_(-2.0)
    assert not agree(layer)
    layer.epoch += 1
    assert agree(layer)
    layer.weight.data.add_(1.0)
    layer.weight_codes.drop()
    assert agree(layer)


def test_codes_are_no_part_of_the_state():
    layer = Layer()
    assert agree(layer)
    assert list(layer.state_dict()) == ["weight"]
    assert layer.weight_codes.nbytes > 0
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert copied.weight_codes.nbytes == 0
        assert agree(copied)


def test_two_forms_cost_their_codes_and_no_more():
    layer = Layer("nvfp4_requant")
    assert layer.weight_codes.nbytes == 0
    assert agree(layer)
    # Two forms of 4 bits and a scale byte per 16: 0.28 of BF16 each, an amax of 4 bytes.
    assert layer.weight_codes.nbytes == 2 * (48 * 64 * 9 // 16 + 4)


def test_resampled_signs_rebuild_dgrad_each_step_and_the_forward_never(built):
    layer = Layer("nvfp4_v2")
    for step in (1, 2):
        for m in range(2):
            x = torch.randn(32, 64).bfloat16().requires_grad_()
            layer(x, StreamKey(seed=5, step=step, micro_batch=m)).sum().backward()
    assert built == ["fprop.w", "dgrad.w", "dgrad.w"]


def test_a_change_of_recipe_is_seen(built):
    """A schedule switches recipes in the middle of a run."""
    layer = Layer("nvfp4")
    assert agree(layer)
    layer.recipe = RECIPES["nvfp4_requant"]
    assert agree(layer)
    layer.recipe = RECIPES["nvfp4"].with_gemm("fprop", RECIPES["bf16"])
    assert agree(layer)


@pytest.mark.parametrize(
    "spec",
    [
        OperandSpec(format="nvfp4", block=(16, 16)),
        OperandSpec(format="mxfp4", block=(32, 32)),
        OperandSpec(format="mxfp8", block=(32, 32)),
        OperandSpec(format="fp8_blockwise", block=(128, 128)),
        OperandSpec(format="fp8_tensorwise"),
    ],
    ids=lambda spec: spec.label,
)
def test_square_blocks_are_transposed_exactly(spec, built):
    """Ragged: the dgrad form is the forward's, and the bytes are those of quantizing W^T."""
    weight = torch.randn(200, 104)
    recipe = RECIPES["bf16"]
    recipe = type(recipe)(name="square", fprop_w=spec, dgrad_w=spec)
    call = LinearCall(recipe=recipe, weight_codes=WeightCodes())
    forward = weight_operand(call, "fprop.w", weight)
    dgrad = weight_operand(call, "dgrad.w", weight)
    assert built == ["fprop.w"]
    assert dgrad.shape == (104, 200)
    assert torch.equal(dgrad.dequantize(), forward.dequantize().t())
    other = quantize(weight, spec, columns=True)
    assert torch.equal(dgrad.codes, other.codes)
    assert torch.equal(dgrad.scales, other.scales)
    assert torch.equal(dgrad.amax, other.amax)


def test_a_weight_changed_between_forward_and_backward_is_an_error():
    layer = Layer()
    x = torch.randn(32, 64).bfloat16().requires_grad_()
    y = layer(x)
    with torch.no_grad():
        layer.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_cast_alone_is_seen():
    """Storage, version and shape as before, another dtype: the bytes mean other numbers."""
    weight = torch.randn(48, 64).bfloat16()
    codes = WeightCodes()
    call = LinearCall(recipe=RECIPES["nvfp4"], weight_codes=codes)
    first = weight_operand(call, "fprop.w", weight).dequantize()
    second = weight_operand(call, "fprop.w", weight.view(torch.float16)).dequantize()
    torch.testing.assert_close(
        second, quantize(weight.view(torch.float16), call.spec("fprop.w")).dequantize()
    )
    assert not torch.equal(first, second)


def test_dgrad_codes_follow_a_forward_weight_that_is_rounded_anew():
    """A weight that stays while the step moves on (a skipped update) gets other dither."""
    recipe = recipe_from_dict(
        {
            "name": "random_weight",
            "base": "nvfp4_requant",
            "fprop_w": {"format": "nvfp4", "rounding": "stochastic"},
        }
    )
    weight, x = torch.nn.Parameter(torch.randn(48, 64).bfloat16()), torch.randn(32, 64).bfloat16()
    dy, codes = torch.randn(32, 48).bfloat16(), WeightCodes()

    def gradient(step, kept):
        leaf = x.clone().requires_grad_()
        call = LinearCall(recipe=recipe, key=StreamKey(seed=1, step=step), weight_codes=kept)
        linear(leaf, weight, call=call).backward(dy)
        return leaf.grad

    gradient(1, codes)
    assert torch.equal(gradient(2, codes), gradient(2, None))
    assert not torch.equal(gradient(1, None), gradient(2, None))
