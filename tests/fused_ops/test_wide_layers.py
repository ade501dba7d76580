# SPDX-License-Identifier: Apache-2.0
"""Whole layers on the kernels of long pieces, on a CPU that passes for a GPU: the bits of the
reference, since both quantize to the same bytes and the products here are torch's."""

import pytest
import torch

from fused_ops import linear as linear_module, operands
from fused_ops.keys import KeyTable, StreamKey
from fused_ops.linear import LinearCall, linear
from fused_ops.quantize import triton_amax, triton_decode, triton_fp8, triton_launch, triton_wide
from fused_ops.recipe import RECIPES
from fused_ops.scaled_matmul import blockwise, cublaslt, hopper
from fused_ops.testing import assert_bitwise_equal
from tests.fused_ops.ptx import emulate


def product(a, b, alpha, *, out, accumulate=False):
    """cublaslt.matmul of bf16 operands."""
    assert a.dtype == b.dtype == torch.bfloat16
    total = a.float() @ b.float().t()
    total = total if alpha is None else total * alpha
    return out.add_(total) if accumulate else out.copy_(total.to(out.dtype))


def form(call, gemm, x, rows):
    """operand_form, as it is of tensors on a GPU."""
    return hopper.decoded_form(*call.recipe.specs(gemm), rows, call.recipe.decode)


@pytest.fixture
def gpu(monkeypatch):
    emulate(monkeypatch)
    for module in (triton_amax, triton_decode, triton_fp8, triton_wide, hopper, blockwise):
        monkeypatch.setattr(module, "device_reason", lambda x: None)
    monkeypatch.setitem(triton_launch.WIDE_TILE, "lanes", 512)
    monkeypatch.setitem(triton_launch.DECODE_TILE, "rows", 64)
    monkeypatch.setattr(cublaslt, "library", lambda: object())
    monkeypatch.setattr(cublaslt, "matmul", product)
    for module in (operands, linear_module):
        monkeypatch.setattr(module, "operand_form", form)


def step(name, implementation):
    torch.manual_seed(0)
    x = torch.randn(66, 64).bfloat16().requires_grad_()
    w = torch.nn.Parameter((torch.randn(48, 64) * 0.1).bfloat16())
    w.main_grad = torch.zeros(48, 64)
    key = StreamKey(seed=5, step=17, micro_batch=2, layer=99, table=KeyTable("cpu", 64))
    call = LinearCall(
        recipe=RECIPES[name], key=key, main_grad=True, implementation=implementation,
        nonfinite=torch.zeros((), dtype=torch.bool),
    )  # fmt: skip
    y = linear(x, w, call=call)
    y.backward((torch.randn(66, 48) * 1e-3).bfloat16())
    return y.detach(), x.grad, w.main_grad


@pytest.mark.parametrize(
    "name", ["mxfp8", "mxfp4_hadamard", pytest.param("nvfp4_v2_4over6", marks=pytest.mark.slow)]
)
def test_forward_and_gradients(gpu, name):
    for got, want in zip(step(name, None), step(name, "reference")):
        assert bool(want.any())
        assert_bitwise_equal(got, want, name)
