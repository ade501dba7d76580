# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fused_ops import operands
from fused_ops.formats import OperandSpec, QuantizedTensor
from fused_ops.keys import StreamKey, signs
from fused_ops.linear import LinearCall, linear
from fused_ops.main_grad import beta_of, mark_zeroed
from fused_ops.quantize import DelayedScaling, quantize
from fused_ops.recipe import OPERAND_FIELDS, RECIPES, recipe_from_dict

VECTORS = Path(__file__).parent.parent / "data" / "nvfp4_vectors_small.npz"
NEAREST = replace(
    RECIPES["nvfp4"],
    name="nvfp4 with nearest rounding",
    dgrad_dy=OperandSpec(format="nvfp4"),
    wgrad_dy=OperandSpec(format="nvfp4", hadamard=16),
)
KEY = StreamKey(seed=5, step=17, micro_batch=2, layer=99)


def data(tokens=70, width=40, out=24, dtype=torch.float32):
    x, w = torch.randn(tokens, width).to(dtype), (torch.randn(out, width) * 0.1).to(dtype)
    return x, w, (torch.randn(tokens, out) * 1e-3).to(dtype)


def run(call, x, w, dy, bias=None):
    """Output and gradients of one call."""
    x, w = x.clone().requires_grad_(), torch.nn.Parameter(w.clone())
    bias = None if bias is None else torch.nn.Parameter(bias.clone())
    y = linear(x, w, bias, call=call)
    y.backward(dy)
    return y.detach(), x.grad, w.grad, None if bias is None else bias.grad


def decoded(recipe, key, name, tensor, columns=False):
    """An operand in fp64 as the recipe says, from the quantizer alone."""
    spec = recipe.spec(*name.split("."))
    if spec.is_high_precision:
        return (tensor.t() if columns else tensor).double()
    amax = DelayedScaling(spec.element).amax if spec.format == "fp8_delayed" else None
    q = quantize(
        tensor, spec, columns=columns, amax=amax, key=key.operand(name),
        signs=signs(spec, key, name.split(".")[0]),
    )  # fmt: skip
    return q.dequantize().double()


def composed(recipe, key, x, w, dy):
    """Y, dX, dW in fp64: quantize, dequantize, multiply."""
    fprop_w = decoded(recipe, key, "fprop.w", w)
    y = decoded(recipe, key, "fprop.x", x) @ fprop_w.t()
    source = fprop_w.float() if recipe.dgrad_w.source == "forward" else w
    dx = decoded(recipe, key, "dgrad.dy", dy) @ decoded(recipe, key, "dgrad.w", source, True).t()
    source = x
    if recipe.wgrad_x.source == "forward":
        source = decoded(recipe, key, "fprop.x", x).float()
    x_t = decoded(recipe, key, "wgrad.x", source, True)
    dw = decoded(recipe, key, "wgrad.dy", dy, True) @ x_t.t()
    return y, dx[:, : x.shape[1]], dw


def relative(value, expected):
    return float((value.double() - expected.double()).norm() / expected.double().norm())


FROM_FORWARD = recipe_from_dict(
    {
        "name": "dequantized backward",
        "base": "mxfp8",
        "dgrad_dy": "bf16",
        "dgrad_w": {"format": "bf16", "source": "forward"},
        "wgrad_dy": "bf16",
        "wgrad_x": {"format": "bf16", "source": "forward"},
    }
)
MIXED = recipe_from_dict(
    {
        "name": "mixed",
        "fprop_w": {"format": "nvfp4", "choice": "4over6_mae"},
        "dgrad_dy": "mxfp8",
        "wgrad_x": {"format": "nvfp4"},
        "wgrad_dy": {"format": "nvfp4", "rounding": "stochastic_exact"},
    }
)
ALL = [*RECIPES.values(), FROM_FORWARD, MIXED]


@pytest.mark.parametrize("recipe", ALL, ids=lambda recipe: recipe.name)
def test_forward_and_gradients_are_the_composition(recipe):
    """Ragged in all three sizes. fp32 tensors, so that only fp32 sums separate the two: 1e-6."""
    x, w, dy = data()
    call = LinearCall(recipe=recipe, key=KEY, delayed={})
    y, dx, dw, _ = run(call, x, w, dy)
    for value, expected in zip((y, dx, dw), composed(recipe, KEY, x, w, dy)):
        assert value.dtype == torch.float32
        assert relative(value, expected) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_fast", "mxfp8", "bf16"])
def test_outputs_are_rounded_once_to_the_dtype_of_the_input(name, dtype):
    x, w, dy = data(dtype=dtype)
    dy = dy * 1024  # within fp16's normal range
    y, dx, dw, _ = run(LinearCall(recipe=RECIPES[name], key=KEY), x, w, dy)
    for value, expected in zip((y, dx, dw), composed(RECIPES[name], KEY, x, w, dy)):
        assert value.dtype == dtype
        # Equal to the rounded fp64 product but where fp32 sums cross a rounding boundary.
        assert float((value != expected.to(dtype)).float().mean()) < 5e-3
        assert relative(value, expected) < torch.finfo(dtype).eps


def test_leading_axes_and_bias():
    x, w, dy = data(tokens=12 * 8)
    bias = torch.randn(24)
    call = LinearCall(recipe=RECIPES["nvfp4"], key=KEY)
    flat = run(call, x, w, dy, bias)
    deep = run(call, x.view(12, 8, 40), w, dy.view(12, 8, 24), bias)
    assert deep[0].shape == (12, 8, 24)
    for a, b in zip(flat, deep):
        assert torch.equal(a.flatten(), b.flatten())
    without = run(call, x, w, dy)[0]
    torch.testing.assert_close(flat[0] - bias, without, rtol=0, atol=2e-6)
    torch.testing.assert_close(flat[3], dy.sum(0), rtol=0, atol=0)


def test_error_bands_on_gaussian_data():
    """Relative errors of the three GEMMs of the paper's recipe, nearest rounding, to 2 %."""
    x, w, dy = data(1024, 512, 512)
    exact = run(LinearCall(recipe=RECIPES["fp32"]), x, w, dy)
    quantized = run(LinearCall(recipe=NEAREST, key=KEY), x, w, dy)
    for value, expected, band in zip(quantized, exact, (0.145, 0.145, 0.135)):
        assert relative(value, expected) == pytest.approx(band, rel=0.02)


def test_gemms_of_the_stored_vectors():
    """The three products of one layer, computed with Transformer Engine's Python reference."""
    vectors = np.load(VECTORS)
    layers = sorted({name.split(".")[0] for name in vectors.files if name.startswith("gemm")})
    assert layers
    for layer in layers:
        x, w, dy = (
            torch.from_numpy(vectors[f"{layer}.{name}"].astype(np.int16)).view(torch.bfloat16)
            for name in ("x", "w", "dy")
        )
        call = LinearCall(recipe=NEAREST, key=KEY)
        results = run(call, x.float(), w.float(), dy.float())
        for value, name in zip(results, ("fprop", "dgrad_rne", "wgrad_rne")):
            expected = torch.from_numpy(vectors[f"{layer}.{name}"])
            assert float((value - expected).abs().max() / expected.abs().max()) <= 1e-6


def test_gradients_are_unbiased_over_micro_batches():
    """Stochastic rounding: means over 64 micro-batches approach the product of exact dY."""
    recipe = replace(
        RECIPES["nvfp4_pow2"], name="sr on dY only",
        fprop_w=OperandSpec(), dgrad_w=OperandSpec(),
    )  # fmt: skip
    x, w, dy = data(32, 32, 64)
    grads = [run(LinearCall(recipe=recipe, key=replace(KEY, micro_batch=m)), x, w, dy)[1]
             for m in range(64)]  # fmt: skip
    exact = dy @ w
    single, mean = relative(grads[0], exact), relative(torch.stack(grads).mean(0), exact)
    # Independent errors shrink by 8; shared dither would leave them as they are.
    assert mean == pytest.approx(single / 8, rel=0.2)
    assert not torch.equal(grads[0], grads[1])


def test_same_key_same_result_and_another_key_another():
    x, w, dy = data()
    for name in ("nvfp4", "nvfp4_v2", "nvfp4_fast"):
        one = run(LinearCall(recipe=RECIPES[name], key=KEY), x, w, dy)
        again = run(LinearCall(recipe=RECIPES[name], key=KEY), x, w, dy)
        assert all(torch.equal(a, b) for a, b in zip(one[:3], again[:3]))
        for change in ({"seed": 6}, {"step": 18}, {"micro_batch": 3}, {"layer": 98}, {"expert": 1}):
            other = run(LinearCall(recipe=RECIPES[name], key=replace(KEY, **change)), x, w, dy)
            assert torch.equal(one[0], other[0])
            assert not torch.equal(one[1], other[1])
            assert not torch.equal(one[2], other[2])


def test_micro_batches_in_flight_do_not_disturb_each_other():
    """Four forwards, then four backwards in either order, as pipeline schedules run them."""
    x, w, _ = data()
    dys = [data()[2] for _ in range(4)]
    recipe = RECIPES["nvfp4_v2"]
    calls = [LinearCall(recipe=recipe, key=replace(KEY, micro_batch=m)) for m in range(4)]
    alone = [run(call, x, w, dy) for call, dy in zip(calls, dys)]
    for order in ((0, 1, 2, 3), (3, 1, 2, 0)):
        leaves = [(x.clone().requires_grad_(), torch.nn.Parameter(w.clone())) for _ in calls]
        outputs = [linear(a, b, call=call) for (a, b), call in zip(leaves, calls)]
        for m in order:
            outputs[m].backward(dys[m])
        for m in range(4):
            assert torch.equal(leaves[m][0].grad, alone[m][1])
            assert torch.equal(leaves[m][1].grad, alone[m][2])


def test_recomputed_forward_gives_the_same_gradients():
    x, w, dy = data()
    call = LinearCall(recipe=RECIPES["nvfp4_v2_4over6"], key=KEY)
    expected = run(call, x, w, dy)
    x, w = x.clone().requires_grad_(), torch.nn.Parameter(w.clone())
    y = torch.utils.checkpoint.checkpoint(
        lambda x, w: linear(x, w, call=call), x, w, use_reentrant=False
    )
    y.backward(dy)
    assert torch.equal(x.grad, expected[1])
    assert torch.equal(w.grad, expected[2])


def test_row_and_column_dither_of_a_gradient_are_independent():
    """Tiles with a 6 in each row and column have one scale: errors compare one by one."""
    dy = (torch.rand(64, 16, 16) * 5.5).diagonal_scatter(torch.full((64, 16), 6.0), 0, 1, 2)
    dy = dy.reshape(8, 8, 16, 16).transpose(1, 2).reshape(128, 128)
    spec = OperandSpec(format="nvfp4", scale="pow2", rounding="stochastic")
    row = quantize(dy, spec, key=KEY.operand("dgrad.dy")).dequantize() - dy
    col = quantize(dy, spec, columns=True, key=KEY.operand("wgrad.dy")).dequantize().t() - dy
    same = quantize(dy, spec, columns=True, key=KEY.operand("dgrad.dy")).dequantize().t() - dy
    for other in (col, same):
        correlation = float((row * other).sum() / (row.norm() * other.norm()))
        # What both roundings share (the 8-bit dither's bias and exact values) is far below.
        assert abs(correlation) < 4 / 128


def saved_bytes(call, x, w):
    """Bytes that autograd keeps, the weight itself left out."""
    weight, total = torch.nn.Parameter(w.clone()), []

    def pack(t):
        if t.data_ptr() != weight.data_ptr():
            total.append(t.numel() * t.element_size())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        linear(x.clone().requires_grad_(), weight, call=call)
    return sum(total)


def test_codes_are_saved_for_backward_and_not_bf16():
    x, w, _ = data(512, 256, 64, torch.bfloat16)
    full = 512 * 256 * 2
    assert saved_bytes(LinearCall(recipe=RECIPES["bf16"]), x, w) == full
    for name in ("nvfp4", "nvfp4_requant", "nvfp4_v2", "nvfp4_fast", "nvfp4_pow2"):
        assert saved_bytes(LinearCall(recipe=RECIPES[name]), x, w) <= 0.30 * full
    assert saved_bytes(LinearCall(recipe=RECIPES["mxfp8"]), x, w) <= 0.53 * full
    assert saved_bytes(LinearCall(recipe=FROM_FORWARD), x, w) <= 0.53 * full


def test_a_frozen_weight_saves_no_input_and_a_frozen_input_no_gradient():
    x, w, dy = data()
    call = LinearCall(recipe=RECIPES["nvfp4"], key=KEY)
    leaf = x.clone().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = linear(leaf, w, call=call)
    assert [t.data_ptr() for t in kept] == [w.data_ptr()]
    y.backward(dy)
    assert torch.equal(leaf.grad, run(call, x, w, dy)[1])
    weight = torch.nn.Parameter(w.clone())
    linear(x, weight, call=call).backward(dy)
    assert torch.equal(weight.grad, run(call, x, w, dy)[2])


@pytest.mark.parametrize("name", ["bf16", "nvfp4", "nvfp4_fast"])
def test_main_grad_is_the_sum_over_micro_batches(name):
    batches = [data(dtype=torch.bfloat16) for _ in range(3)]
    w = batches[0][1]
    weight = torch.nn.Parameter(w.clone())
    weight.main_grad, weight.grad_added_to_main_grad = torch.full(w.shape, 0.5), False
    expected = torch.full(w.shape, 0.5)
    for m, (x, _, dy) in enumerate(batches):
        key = replace(KEY, micro_batch=m)
        call = LinearCall(recipe=RECIPES[name], key=key, main_grad=True)
        linear(x.clone().requires_grad_(), weight, call=call).backward(dy)
        assert weight.grad_added_to_main_grad is True
        # The data-parallel hook wants a gradient, ignores it and drops it.
        assert weight.grad.shape == w.shape
        assert weight.grad.dtype == torch.bfloat16
        weight.grad = None
        product = composed(RECIPES[name], key, x, w, dy)[2]
        expected += product.float()
    # fp32 additions to 0.5: half an ulp (3e-8) each, and as much for sums in another order.
    assert float((weight.main_grad - expected).abs().max()) < 2e-7
    assert relative(weight.main_grad - 0.5, expected - 0.5) < 1e-3


@pytest.mark.parametrize("name", ["bf16", "nvfp4"])
def test_the_first_gradient_is_written_and_later_ones_are_added(name):
    """A weight that is used twice in each of two micro-batches, one of its uses recomputed."""
    batches = [data(dtype=torch.bfloat16) for _ in range(4)]
    found = {}
    for marked in (False, True):
        weight = torch.nn.Parameter(batches[0][1].clone())
        # What a mark says is taken at its word: a sum that was read would be NaN.
        weight.main_grad = torch.full(weight.shape, float("nan") if marked else 0.0)
        mark_zeroed([weight], marked)
        for m, (x, _, dy) in enumerate(batches):
            call = LinearCall(
                recipe=RECIPES[name], key=replace(KEY, micro_batch=m // 2), main_grad=True
            )
            leaf = x.clone().requires_grad_()
            if m == 1:
                run_again = partial(linear, call=call)
                y = checkpoint(run_again, leaf, weight, use_reentrant=False)
            else:
                y = linear(leaf, weight, call=call)
            assert beta_of(weight) == (0 if marked and m == 0 else 1)
            y.backward(dy)
        found[marked] = weight.main_grad
    assert float(found[False].abs().max()) > 0.0
    assert torch.equal(found[True], found[False])


def test_dummy_gradient_as_megatron_core_expects_it():
    x, w, dy = data(dtype=torch.bfloat16)
    call = LinearCall(recipe=RECIPES["nvfp4"], key=KEY, main_grad=True)
    weight = torch.nn.Parameter(w.clone())
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(w.shape), False
    weight.zero_out_wgrad = True
    linear(x, weight, call=call).backward(dy)
    assert float(weight.grad.abs().max()) == 0.0
    # Without the attribute there is no hook that would drop a dummy, so none is returned.
    weight = torch.nn.Parameter(w.clone())
    weight.main_grad = torch.zeros(w.shape)
    linear(x, weight, call=call).backward(dy)
    assert weight.grad is None
    assert float(weight.main_grad.abs().max()) > 0.0


class Watch:
    def __init__(self):
        self.seen = {}

    def observe(self, gemm, operand, tensor, quantized, call):
        self.seen.setdefault(f"{gemm}_{operand}", []).append((tensor, quantized))


@pytest.mark.parametrize("recipe", ALL, ids=lambda recipe: recipe.name)
def test_observer_sees_each_operand_once_as_the_recipe_says(recipe):
    watch = Watch()
    x, w, dy = data()
    run(LinearCall(recipe=recipe, key=KEY, observer=watch, delayed={}), x, w, dy)
    assert sorted(watch.seen) == sorted(OPERAND_FIELDS)
    tensors = {"x": x, "w": w, "dy": dy}
    for field, events in watch.seen.items():
        [(tensor, operand)] = events
        spec = getattr(recipe, field)
        assert isinstance(operand, QuantizedTensor) != spec.is_high_precision
        if spec.is_high_precision and spec.source == "forward":
            continue
        assert torch.equal(tensor, tensors[field.split("_")[1]])
        if not spec.is_high_precision:
            assert operand.spec == spec


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["x", "w", "dy"])
def test_non_finite_operands_raise_the_flag(where, value):
    for recipe in ("nvfp4", "nvfp4_fast", "mxfp8", "fp8_tensorwise"):
        tensors = dict(zip(("x", "w", "dy"), data()))
        flag = torch.zeros((), dtype=torch.bool)
        call = LinearCall(recipe=RECIPES[recipe], key=KEY, nonfinite=flag)
        run(call, **tensors)
        assert not flag
        tensors[where][3, 5] = value
        run(call, **tensors)
        assert flag
        # It stays raised until its owner lowers it.
        run(call, *data())
        assert flag


@pytest.mark.parametrize(
    ("where", "operand", "gemm"), [("x", "x", "fprop"), ("w", "w", "fprop"), ("dy", "dy", "dgrad")]
)
def test_check_finite_names_layer_gemm_and_operand(where, operand, gemm):
    tensors = dict(zip(("x", "w", "dy"), data()))
    tensors[where][3, 5] = float("nan")
    tensors[where][4, 5] = float("inf")
    call = LinearCall(recipe=RECIPES["nvfp4"], key=KEY, check_finite=True, name="layers.3.mlp.fc1")
    message = rf"layers\.3\.mlp\.fc1: operand {operand} of {gemm} holds 2 values of \d+"
    with pytest.raises(FloatingPointError, match=message):
        run(call, **tensors)


class NoWaiting(TorchDispatchMode):
    """Refuses whatever would wait for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        waits = name in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select")
        assert not waits, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", ALL, ids=lambda recipe: recipe.name)
def test_nothing_waits_for_the_device(recipe):
    x, w, dy = data()
    flag = torch.zeros((), dtype=torch.bool)
    with NoWaiting():
        run(LinearCall(recipe=recipe, key=KEY, nonfinite=flag, delayed={}), x, w, dy)
        with pytest.raises(AssertionError, match="waits for the device"):
            bool(flag)


def test_no_tokens_at_all():
    for name in ("bf16", "nvfp4", "nvfp4_v2", "nvfp4_fast", "mxfp8", "fp8_blockwise"):
        x, w, dy = data(tokens=0)
        call = LinearCall(
            recipe=RECIPES[name], key=KEY, nonfinite=torch.zeros((), dtype=torch.bool)
        )
        y, dx, dw, db = run(call, x, w, dy, torch.zeros(24))
        assert y.shape == (0, 24)
        assert dx.shape == (0, 40)
        assert float(dw.abs().max()) == 0.0
        assert float(db.abs().max()) == 0.0
        assert not call.nonfinite


def test_delayed_scaling_uses_the_amax_of_earlier_steps():
    x, w, dy = data()
    state = {}
    call = LinearCall(recipe=RECIPES["fp8_delayed"], key=KEY, delayed=state)
    run(call, x, w, dy)
    # dgrad multiplies by the forward's own codes, transposed.
    used = [f"{f.replace('_', '.')}.0" for f in OPERAND_FIELDS if f != "dgrad_w"]
    assert sorted(state) == sorted(used)
    assert float(state["fprop.x.0"].history[0]) == float(x.abs().max())
    for scaling in state.values():
        scaling.update()
    assert float(state["wgrad.dy.0"].amax) == float(dy.abs().max())
    later = run(call, x * 2, w, dy)[0]
    spec = RECIPES["fp8_delayed"].fprop_x
    stale = quantize(x * 2, spec, amax=x.abs().max()).dequantize()
    w_now = quantize(w, spec, amax=w.abs().max()).dequantize()
    assert relative(later, stale.double() @ w_now.double().t()) < 1e-6
    with pytest.raises(ValueError, match=r"fprop\.x is fp8_delayed and needs a state"):
        run(LinearCall(recipe=RECIPES["fp8_delayed"]), x, w, dy)


@pytest.mark.parametrize(
    ("x", "w", "bias", "message"),
    [
        (torch.zeros(4, 30), torch.zeros(8, 32), None, r"got x \(4, 30\) and weight \(8, 32\)"),
        (torch.zeros(4, 32).half(), torch.zeros(8, 32), None, "must have one dtype"),
        (torch.zeros(4, 32).double(), torch.zeros(8, 32).double(), None, "fp32, bf16 or fp16"),
        (torch.zeros(4, 32), torch.zeros(8, 32), torch.zeros(4), r"bias must be \[8\], got \(4,\)"),
    ],
)
def test_bad_input(x, w, bias, message):
    with pytest.raises(ValueError, match=rf"fc1: .*{message}"):
        linear(x, w, bias, call=LinearCall(recipe=RECIPES["nvfp4"], name="fc1"))


def test_an_evaluation_quantizes_for_the_forward_alone():
    """Without gradients X is not quantized for wgrad, and the output is the same to the bit."""
    seen: list[str] = []

    class Watch:
        def observe(self, gemm, operand, tensor, quantized, call):
            seen.append(f"{gemm}.{operand}")

    x, weight = torch.randn(32, 64), torch.nn.Parameter(torch.randn(48, 64))
    call = LinearCall(recipe=RECIPES["nvfp4"], key=KEY, observer=Watch())
    trained = linear(x, weight, call=call)
    assert seen == ["fprop.x", "fprop.w", "wgrad.x"]
    seen.clear()
    with torch.no_grad():
        evaluated = linear(x, weight, call=call)
    assert seen == ["fprop.x", "fprop.w"]
    assert torch.equal(trained.detach(), evaluated)


def test_delayed_operands_are_made_one_by_one(monkeypatch):
    """Also where a kernel would make two at once: each notes its amax and takes an earlier one."""
    monkeypatch.setattr(operands, "pair_reason", lambda *_: None)
    monkeypatch.setattr(operands, "quantize_pair", None)  # not to be called
    call = LinearCall(recipe=RECIPES["fp8_delayed"], key=KEY, delayed={})
    x = torch.randn(32, 64).bfloat16().requires_grad_()
    linear(x, torch.nn.Parameter(torch.randn(48, 64).bfloat16()), call=call).sum().backward()
    assert set(call.delayed) == {
        f"{name}.0" for name in ("fprop.x", "fprop.w", "dgrad.dy", "wgrad.dy", "wgrad.x")
    }
