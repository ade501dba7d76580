# SPDX-License-Identifier: Apache-2.0
"""The output layer in 16 bits: sums in FP32 and one rounding, in forward and backward."""

import pytest
import torch
from megatron.core.tensor_parallel import layers

from models.parallel_linear import OutputLayer
from tests.models import toy


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_are_rounded_once(dtype):
    layer = toy.make("*-", dtype=dtype)[0][0].output_layer
    assert isinstance(layer, OutputLayer)
    torch.manual_seed(0)
    x = torch.randn(32, 2, layer.weight.shape[1], dtype=dtype, requires_grad=True)
    y, _ = layer(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    rows, dy = x.detach().flatten(0, 1).float(), dy.flatten(0, 1).float()
    weight = layer.weight.detach().float()
    torch.testing.assert_close(y.flatten(0, 1), (rows @ weight.T).to(dtype), rtol=0, atol=0)
    torch.testing.assert_close(x.grad.flatten(0, 1), (dy @ weight).to(dtype), rtol=0, atol=0)
    torch.testing.assert_close(layer.weight.grad, (dy.T @ rows).to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_the_gradient_added_by_the_gemm_is_the_same(tied, monkeypatch):
    """What a GPU does, on a CPU in fp32; a weight that the embedding shares is left alone."""
    calls = []

    def gradients():
        chunks, config = toy.make("*-", model={"tie_embeddings": tied})
        toy.step(chunks, config)
        return {n: p.main_grad.clone() for n, p in chunks[0].named_parameters()}

    def as_on_a_gpu(self, input, weight, *args, **kwargs):
        calls.append(self.adds_to_main_grad(weight))
        if calls[-1]:
            return self._into_main_grad(input, weight, *args, **kwargs)
        return layers.ColumnParallelLinear._forward_impl(self, input, weight, *args, **kwargs)

    want = gradients()
    monkeypatch.setattr(OutputLayer, "_forward_impl", as_on_a_gpu)
    got = gradients()
    assert calls == [not tied] * toy.MICRO_BATCHES
    for name, gradient in want.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-8)
