# SPDX-License-Identifier: Apache-2.0
"""Fused ops under torch.compile: custom ops that pass torch's checks, layers as in eager mode."""

from dataclasses import replace

import pytest
import torch
from torch.library import opcheck

from fused_ops.activation import swiglu
from fused_ops.compiling import parse_spec, spec_text
from fused_ops.errors import ConfigError
from fused_ops.formats import OperandSpec, QuantizedTensor
from fused_ops.grouped_linear import grouped_linear
from fused_ops.keys import StreamKey
from fused_ops.linear import LinearCall, linear
from fused_ops.quantize import (
    amax_pair,
    custom,
    operand_amax,
    quantize,
    quantize_decoded,
    quantize_pair,
    requantize_columns,
)
from fused_ops.recipe import RECIPES, get_recipe
from fused_ops.rmsnorm import rmsnorm
from fused_ops.scaled_matmul import scaled_matmul
from fused_ops.testing import assert_bitwise_equal
from fused_ops.weight_codes import WeightCodes

KEY = (0x12345678, 0x9ABCDEF0)


def nvfp4(**fields):
    return OperandSpec(format="nvfp4", **fields)


SPECS = [
    nvfp4(),
    nvfp4(block=(16, 16)),
    nvfp4(scale="pow2", choice="better_of_two"),
    nvfp4(rounding="stochastic", hadamard=16),
    nvfp4(scale="pow2", rounding="stochastic", hadamard=16),
    nvfp4(choice="4over6_mse"),
    nvfp4(row_scaled=True),
    nvfp4(rounding="ms_eden", hadamard=128, signs="step"),
    OperandSpec(format="mxfp8"),
    OperandSpec(format="mxfp4", block=(32, 32)),
    OperandSpec(format="fp8_tensorwise", element="e5m2"),
    OperandSpec(format="fp8_blockwise", block=(128, 128)),
    OperandSpec(format="fp8_blockwise", scale="fp32"),
    OperandSpec(format="fp8_delayed"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def compiling():
    """cpu_compat turns torch.compile off for megatron-core's own uses of it."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(disable=False, error_on_recompile=False):
        yield
    torch._dynamo.reset()


def compiled(function, **options):
    return torch.compile(function, backend="aot_eager", **options)


def matrix(rows, cols, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, cols, generator=generator).bfloat16().to(device)


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same(got, want):
    """The same operand: the bytes, shape and type of every tensor."""
    assert type(got) is type(want)
    assert (got.shape, got.spec) == (want.shape, want.spec)
    names = ("codes", "scales") if isinstance(want, QuantizedTensor) else ("data",)
    for name in (*names, "amax", "out_of_range"):
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None), name
        if a is not None:
            assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device), name
            assert_bitwise_equal(raw(a), raw(b), name)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_specs_survive_as_text(recipe):
    for gemm in ("fprop", "dgrad", "wgrad"):
        for spec in recipe.specs(gemm):
            assert parse_spec(spec_text(spec)) == spec
            assert parse_spec(spec_text(replace(spec, source="forward"))) != spec or (
                spec.source == "forward"
            )


def arguments(x, spec, columns=False):
    found = {"columns": columns, "origin": (3, 16)}
    if spec.format == "fp8_delayed":
        found["amax"] = operand_amax(x, spec, columns=columns)
    return found | ({"key": KEY} if spec.is_random else {})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.label.replace(" ", "-"))
def test_the_op_gives_what_quantize_gives_and_its_fake_has_the_shapes(spec, device):
    x = matrix(48, 80, device)
    checks = ("test_schema", "test_faketensor")
    for columns in (False, True):
        options = arguments(x, spec, columns)
        assert_same(custom.quantize(x, spec, **options), quantize(x, spec, **options))
        key = list(KEY) if spec.is_random else []
        for form in ("codes", "bf16", "fp8") if spec.format == "nvfp4" else ("codes",):
            if form != "codes" and not spec.row_scaled:
                want = quantize_decoded(x, spec, form, **options)
                assert_same(custom.quantize(x, spec, form=form, **options), want)
            what = f"{spec_text(spec)}|{form}|{'columns' if columns else 'rows'}|"
            call = (x, what, options.get("amax"), None, None, [3, 16, *key])
            opcheck(torch.ops.nibble.quantize, call, test_utils=checks)
        want = operand_amax(x, spec, columns=columns)
        assert_bitwise_equal(custom.operand_amax(x, spec, columns), want, "amax")
        call = (x, spec_text(spec), columns, None, "")
        opcheck(torch.ops.nibble.operand_amax, call, test_utils=checks)


@pytest.mark.parametrize("device", DEVICES)
def test_all_of_torchs_checks(device):
    """All of opcheck, on keys of numbers and in device memory, pairs, products and sums."""
    ops, x, y = torch.ops.nibble, matrix(32, 64, device), matrix(48, 64, device, seed=1)
    row, column = nvfp4(rounding="stochastic"), nvfp4(scale="pow2", hadamard=16)
    text, words = spec_text(row), list(KEY)
    opcheck(ops.quantize, (x, f"{text}|codes|rows|", None, None, None, [0, 0, *words]))
    key = torch.tensor(KEY, device=device)
    opcheck(ops.quantize, (x, f"{text}|fp8|columns|reference", None, None, key, [0, 0]))
    amaxes = list(amax_pair(x, column))
    what = f"{text}|{spec_text(column)}|codes|bf16|"
    opcheck(ops.quantize_pair, (x, what, amaxes, None, None, None, [16, 32, *words, 0, 0]))
    a, b = quantize(x, nvfp4()), quantize(y, nvfp4())
    left, right = [a.codes, a.scales, a.amax], [b.codes, b.scales, b.amax]
    source = (right, spec_text(b.spec), [48, 64])
    opcheck(ops.requantize_columns, (*source, spec_text(column), b.amax, "codes", ""))
    bias = torch.randn(48, device=device)
    kind, sizes = f"codes:{spec_text(a.spec)}", [32, 48, 64]
    what = f"{kind}|{kind}|exact|"
    opcheck(ops.scaled_matmul, (left, right, what, sizes, torch.bfloat16, bias))
    opcheck(ops.scaled_matmul, ([x], right, f"tensor|{kind}|fp8|", sizes, torch.float32, None))
    total = torch.randn(32, 48, device=device)
    opcheck(ops.scaled_matmul_into, (total, left, right, what, sizes))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_graph_of_everything_equals_eager(device, backend):
    """Row and column operands from one read, requantized weights, decoded forms, both products."""
    row = nvfp4(scale="pow2", rounding="stochastic")
    column = nvfp4(scale="pow2", rounding="stochastic", hadamard=16)

    def work(x, y, total, words, key):
        amaxes = amax_pair(x, column)
        pair = quantize_pair(x, row, column, amaxes=amaxes, keys=(words, key), origin=(16, 0))
        w = quantize(y, nvfp4(block=(16, 16)))
        back = requantize_columns(w, nvfp4(scale="pow2"), w.amax)
        decoded = quantize_decoded(y, nvfp4(choice="4over6_mse"), "fp8")
        out = scaled_matmul(pair[0], decoded, out_dtype=torch.bfloat16)
        scaled_matmul(pair[1], pair[1], out_dtype=torch.float32, accumulate=total)
        return (*pair, w, back, decoded, out)

    x, y = matrix(32, 64, device), matrix(48, 64, device, seed=1)
    run = torch.compile(work, backend=backend, fullgraph=True)
    key = torch.tensor((5, 6), device=device)
    for words in (KEY, (1, 2), (3, 4)):  # a key of numbers that changes is no constant
        sums = [torch.ones(64, 64, device=device) for _ in range(2)]
        want, got = work(x, y, sums[0], words, key), run(x, y, sums[1], words, key)
        for a, b in zip(got[:-1], want[:-1]):
            assert_same(a, b)
        assert_bitwise_equal(raw(got[-1]), raw(want[-1]), "product")
        assert_bitwise_equal(sums[1], sums[0], "sum")
        key.add_(1)


def test_errors_in_a_graph_are_those_of_eager_mode():
    run = compiled(lambda x: quantize(x, nvfp4(rounding="stochastic")))
    with pytest.raises(ConfigError, match="needs random numbers: pass key"):
        run(matrix(16, 16))
    run = compiled(lambda a, b: scaled_matmul(a, b, out_dtype=torch.float32))
    with pytest.raises(ValueError, match="with one K"):
        run(matrix(16, 16), matrix(16, 32))


class Layers(torch.nn.Module):
    """A norm, a gated feed-forward layer and experts; the key is the module's, as in a run."""

    def __init__(self, recipe, device):
        super().__init__()
        torch.manual_seed(3)
        shapes = {"norm": (64,), "up": (192, 64), "down": (64, 96), "experts": (2, 64, 64)}
        for name, shape in shapes.items():
            weight = torch.randn(shape, device=device).div(8).bfloat16()
            self.register_parameter(name, torch.nn.Parameter(weight))
        for name in ("up", "down", "experts"):
            weight = self.get_parameter(name)
            weight.main_grad = torch.zeros(weight.shape, device=device)
        self.recipe, self.step = get_recipe(recipe), 0
        self.codes = {name: WeightCodes() for name in ("up", "down", "experts")}

    def call(self, name):
        layer = ("up", "down", "experts").index(name)
        key = StreamKey(seed=1, step=self.step, layer=layer)
        codes = self.codes[name]
        return LinearCall(recipe=self.recipe, key=key, main_grad=True, weight_codes=codes)

    def forward(self, x):
        hidden = rmsnorm(x, self.norm)
        hidden = swiglu(linear(hidden, self.up, call=self.call("up")) * 1.5)
        x = x + linear(hidden, self.down, call=self.call("down"))
        return x + grouped_linear(x, self.experts, [20, 12], call=self.call("experts"))


def two_steps(model, run, device):
    """Outputs, input gradients and gradients of two steps, the weights changed between them."""
    found = []
    for step in (1, 2):
        model.step = step
        x = matrix(32, 64, device, seed=7).requires_grad_()  # only the keys differ
        out = run(x)
        out.backward(matrix(32, 64, device, seed=9))
        found += [out.detach(), x.grad, model.norm.grad.clone()]
        found += [model.get_parameter(name).main_grad.clone() for name in ("up", "down", "experts")]
        if step == 1:
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(1.5)
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("recipe", ["nvfp4", pytest.param("nvfp4_fast", marks=pytest.mark.slow)])
def test_compiled_layers_train_as_eager_ones(recipe, backend, device):
    models = [Layers(recipe, device) for _ in range(2)]
    want = two_steps(models[0], models[0], device)
    got = two_steps(models[1], torch.compile(models[1], backend=backend), device)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    for number, (a, b) in enumerate(zip(got, want)):
        assert_bitwise_equal(raw(a), raw(b), f"result {number}")
    # The dither is another in the second step: with the same one this would be a scaled copy.
    first, second = want[5], want[11] - want[5]
    assert not torch.equal(second / second.norm(), first / first.norm())
