# SPDX-License-Identifier: Apache-2.0
"""The output layer in 16 bits: sums in FP32 and one rounding, in forward and backward."""

import pytest
import torch

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
