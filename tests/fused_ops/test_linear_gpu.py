# SPDX-License-Identifier: Apache-2.0
"""The linear layer on a GPU: the same codes as on a CPU, and no waiting for the device."""

from dataclasses import replace

import pytest
import torch

from fused_ops import operands, weight_operands
from fused_ops.formats import QuantizedTensor
from fused_ops.grouped_linear import grouped_linear
from fused_ops.keys import KeyTable, StreamKey
from fused_ops.linear import LinearCall, linear
from fused_ops.main_grad import mark_zeroed
from fused_ops.recipe import RECIPES
from fused_ops.scaled_matmul import scaled_matmul
from fused_ops.testing import TOLERANCES, assert_bitwise_equal, assert_close
from fused_ops.weight_codes import WeightCodes

pytestmark = pytest.mark.gpu
KEY = StreamKey(seed=5, step=17, micro_batch=2, layer=99)


class Watch:
    def __init__(self):
        self.seen = {}

    def observe(self, gemm, operand, tensor, quantized, call):
        self.seen[gemm, operand] = quantized


def run(name, device, x, w, dy, **options):
    x = x.to(device, copy=True).requires_grad_()
    w, dy = torch.nn.Parameter(w.to(device, copy=True)), dy.to(device)
    call = LinearCall(recipe=RECIPES[name], key=KEY, delayed={}, **options)
    y = linear(x, w, call=call)
    y.backward(dy)
    return y.detach(), x.grad, w.grad


def data():
    return torch.randn(200, 192), torch.randn(96, 192) * 0.1, torch.randn(200, 96) * 1e-3


@pytest.mark.parametrize("name", RECIPES)
def test_cuda_equals_cpu(name):
    """Codes and scales byte for byte; sums as exact as the cores that form them."""
    torch.manual_seed(1)
    tensors, watches = data(), {"cpu": Watch(), "cuda": Watch()}
    results = {d: run(name, d, *tensors, observer=watch) for d, watch in watches.items()}
    for key, cpu in watches["cpu"].seen.items():
        if isinstance(cpu, QuantizedTensor):
            cuda = watches["cuda"].seen[key]
            for field in ("codes", "scales", "amax"):
                equal = torch.equal(getattr(cpu, field), getattr(cuda, field).cpu())
                assert equal, f"{name} {key}: {field}"
    sums = TOLERANCES["fp8_core_full" if name in ("fp8_tensorwise", "fp8_delayed") else "fp32_sum"]
    for cpu, cuda in zip(results["cpu"], results["cuda"]):
        assert float((cuda.cpu().double() - cpu).norm() / cpu.double().norm()) < sums.relative


@pytest.mark.parametrize("name", RECIPES)
def test_nothing_waits_for_the_device(name):
    x, w, dy = (t.cuda().bfloat16() for t in data())
    flag = torch.zeros((), dtype=torch.bool, device="cuda")
    w = torch.nn.Parameter(w)
    w.main_grad, w.grad_added_to_main_grad = torch.zeros_like(w, dtype=torch.float32), False
    call = LinearCall(recipe=RECIPES[name], key=KEY, nonfinite=flag, main_grad=True, delayed={})
    # Tables (of decoded bytes, of Hadamard matrices) are copied from the host once.
    linear(x.clone().requires_grad_(), w, call=call).backward(dy)
    call.weight_codes = WeightCodes()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        linear(x.clone().requires_grad_(), w, call=call).backward(dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recorded_layer_is_the_layer(name):
    """Forward and backward in a CUDA graph, replayed for another step: the bits of plain calls."""
    x, w, dy = (t.cuda().bfloat16() for t in data())
    w = torch.nn.Parameter(w)
    table = KeyTable("cuda")
    call = LinearCall(recipe=RECIPES[name], main_grad=True, delayed={}, note_amax=False)

    def step(key):
        call.key, call.weight_codes = key, WeightCodes()
        w.main_grad = torch.zeros_like(w, dtype=torch.float32)
        leaf = x.clone().requires_grad_()
        y = linear(leaf, w, call=call)
        y.backward(dy)
        return y.detach(), leaf.grad, w.main_grad

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(replace(KEY, table=table))
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            recorded = step(replace(KEY, table=table))
        later = replace(KEY, step=KEY.step + 1)
        table.refresh(later.seed, later.step)
        graph.replay()
        for got, want in zip(recorded, step(later)):
            assert_bitwise_equal(got, want, name)


@pytest.mark.parametrize("name", ["bf16", "nvfp4", "nvfp4_v2", "nvfp4_fast", "mxfp8"])
def test_grouped_cuda_equals_cpu(name):
    torch.manual_seed(1)
    counts = [0, 1, 44, 33]
    x, w, dy = torch.randn(78, 48), torch.randn(4, 40, 48), torch.randn(78, 40)
    results = {}
    for device in ("cpu", "cuda"):
        a = x.to(device, copy=True).requires_grad_()
        b = torch.nn.Parameter(w.to(device, copy=True))
        call = LinearCall(recipe=RECIPES[name], key=KEY)
        grouped_linear(a, b, counts, call=call).backward(dy.to(device))
        results[device] = (a.grad, b.grad)
    for cpu, cuda in zip(results["cpu"], results["cuda"]):
        assert float((cuda.cpu().double() - cpu).norm() / cpu.double().norm()) < 1e-6
    assert float(results["cuda"][1][0].abs().max()) == 0.0


@pytest.mark.parametrize("decode", ["exact", "fp8"])
def test_dgrad_reads_the_forward_codes_as_their_transpose(decode):
    """The values are those of codes of the transpose, byte for byte; the product is theirs."""
    recipe = replace(RECIPES["nvfp4"], decode=decode)
    x, w, dy = (t.cuda().bfloat16() for t in (torch.randn(208, 192), *data()[1:]))
    dy = torch.cat([dy, dy[:8]])
    w = torch.nn.Parameter(w)
    call = LinearCall(recipe=recipe, key=KEY, weight_codes=WeightCodes())
    leaf = x.clone().requires_grad_()
    linear(leaf, w, call=call).backward(dy)
    assert set(call.weight_codes._entries) == {("fprop.w", 0)}, "one set of codes"
    got = weight_operands.transposed_weight(call, w, dy, len(dy))
    codes = weight_operands.weight_operand(call, "dgrad.w", w)
    want = codes.decoded("bf16" if decode == "exact" else "fp8")
    assert got.shape == codes.shape == (192, 96)
    assert_bitwise_equal(got.data.contiguous(), want.data, "operand")
    qdy = operands.quantize_operand(call, "dgrad.dy", dy)
    product = scaled_matmul(qdy, codes, out_dtype=torch.bfloat16, decode=decode)
    assert_close(leaf.grad, product, "bf16_output", "dx")


def test_gradients_are_written_over_zeros():
    """As `fused_ops.main_grad` says: dense layers and experts, marked or not, the same bits."""
    torch.manual_seed(2)
    counts = [0, 64, 130, 0, 14]
    x, w, dy = torch.randn(208, 192), torch.randn(5, 96, 192) * 0.1, torch.randn(208, 96)
    for name in ("bf16", "nvfp4", "nvfp4_fast", "nvfp4_fast:fp8", "nvfp4_pow2", "fp8_tensorwise"):
        base, _, decode = name.partition(":")
        recipe = replace(RECIPES[base], decode=decode or "exact")
        found = {}
        for marked in (False, True):
            weights = [torch.nn.Parameter(t.cuda().bfloat16()) for t in (w[0], w)]
            for weight in weights:
                start = float("nan") if marked else 0.0
                weight.main_grad = torch.full(weight.shape, start, device="cuda")
            mark_zeroed(weights, marked)
            for m in range(2):
                call = LinearCall(recipe=recipe, key=replace(KEY, micro_batch=m), main_grad=True)
                leaf = x.cuda().bfloat16().requires_grad_()
                linear(leaf, weights[0], call=call).backward(dy.cuda().bfloat16())
                y = grouped_linear(leaf, weights[1], counts, call=call)
                y.backward(dy.cuda().bfloat16())
            found[marked] = [weight.main_grad for weight in weights]
        for got, want in zip(found[True], found[False]):
            assert float(want.abs().max()) > 0.0
            assert torch.equal(got, want), name
        assert not found[True][1][0].any()
        assert not found[True][1][3].any()
