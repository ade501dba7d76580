# SPDX-License-Identifier: Apache-2.0
"""Which implementation every operand and product of every named recipe gets on a GPU.

The choice is made by the supports() of back ends, here of tensors on a CPU that passes for a GPU.
"""

import pytest
import torch

from fused_ops.formats import DecodedTensor
from fused_ops.keys import OPERANDS
from fused_ops.quantize import triton_amax, triton_decode, triton_fp8, triton_wide
from fused_ops.quantize.implementations import AMAX, DEQUANTIZE, QUANTIZE
from fused_ops.recipe import RECIPES, is_quantized
from fused_ops.scaled_matmul import blockwise, cublaslt, hopper
from fused_ops.scaled_matmul.implementations import SCALED_MATMUL

EAGER = {
    ("nvfp4_4over6", "fprop.w"): "four-over-six of 16x16 tiles",
    ("nvfp4_4over6", "dgrad.w"): "four-over-six of 16x16 tiles",
}
"""Operands that still are made by the reference, on the device: weights, once a step."""


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    for module in (triton_amax, triton_decode, triton_fp8, triton_wide, hopper, blockwise):
        monkeypatch.setattr(module, "device_reason", lambda x: None)
    monkeypatch.setattr(cublaslt, "library", lambda: object())


def chosen(spec, x):
    """(quantizer, amax) of an operand of a gradient or activation."""
    options = {"columns": False, "key": (0, 1), "amax": torch.ones(())}
    quantizer = QUANTIZE.choose(None, x, spec, **options).name
    return quantizer, AMAX.choose(None, x, spec).name


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("operand", OPERANDS)
def test_operands_are_made_by_kernels(name, operand):
    spec = RECIPES[name].spec(*operand.split("."))
    if not is_quantized(spec):
        return
    x = torch.randn(128, 256).bfloat16()
    quantizer, amax = chosen(spec, x)
    assert (quantizer == "reference") == ((name, operand) in EAGER), quantizer
    if spec.needs_amax and not spec.row_scaled:
        assert amax != "reference"
    if spec.source == "forward":
        forward = RECIPES[name].spec("fprop", operand[-1])
        codes = QUANTIZE(x, forward, implementation="reference")
        assert DEQUANTIZE.choose(None, codes).name == "triton"


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_products_run_on_tensor_cores(name, gemm):
    left, right = RECIPES[name].specs(gemm)
    if not (is_quantized(left) and is_quantized(right)):
        return
    x = torch.randn(32, 128).bfloat16()
    operands = [QUANTIZE(x, spec, implementation="reference", amax=torch.ones(32) if spec.row_scaled
                         else torch.ones(()), key=(0, 1)) for spec in (left, right)]  # fmt: skip
    assert not any(isinstance(o, DecodedTensor) for o in operands)
    product = SCALED_MATMUL.choose(None, *operands, out_dtype=torch.bfloat16).name
    assert product == ("blockwise" if name == "fp8_blockwise_fp32" else "hopper")
