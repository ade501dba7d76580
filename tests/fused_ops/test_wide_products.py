# SPDX-License-Identifier: Apache-2.0
"""Products of MX, FP8 blocks and row-scaled NVFP4 against the reference's fp32 sums.

On a GPU, and the kernel for FP8 blocks in Triton's interpreter too, with products of fp32.
"""

import pytest
import torch

from fused_ops import cases
from fused_ops.formats import OperandSpec
from fused_ops.quantize import quantize
from fused_ops.scaled_matmul import blockwise, scaled_matmul, torch_blockwise
from fused_ops.testing import assert_close
from tests.fused_ops.ptx import emulate

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
SHAPES = ((256, 384, 512), (200, 100, 250), (1, 3, 16))
FP8 = OperandSpec(format="fp8_blockwise", scale="fp32")
SPECS = {
    "mxfp8": OperandSpec(format="mxfp8"),
    "mxfp8 e5m2": OperandSpec(format="mxfp8", element="e5m2"),
    "mxfp4": OperandSpec(format="mxfp4"),
    "mxfp4 tile": OperandSpec(format="mxfp4", block=(32, 32)),
    "fp8": OperandSpec(format="fp8_blockwise"),
    "fp8 tile": OperandSpec(format="fp8_blockwise", block=(128, 128)),
    "row scaled": OperandSpec(format="nvfp4", row_scaled=True),
    "nvfp4": OperandSpec(format="nvfp4"),
    "fp8 fp32": FP8,
    "fp8 fp32 tile": OperandSpec(format="fp8_blockwise", scale="fp32", block=(128, 128)),
    "fp8 fp32 e5m2": OperandSpec(format="fp8_blockwise", scale="fp32", element="e5m2"),
}


def check(left, right, shape, device, implementation, tolerance, decode="exact"):
    m, n, k = shape
    for kind in ("gaussian", "wide"):
        a = quantize(cases.make_input(kind, (m, k), 1).to(device), SPECS[left])
        b = quantize(cases.make_input(kind, (n, k), 2).to(device), SPECS[right])
        forms = {
            "out_dtype": torch.float32, "implementation": implementation, "decode": decode,
        }  # fmt: skip
        want = scaled_matmul(a, b, out_dtype=torch.float32, implementation="reference")
        assert_close(scaled_matmul(a, b, **forms), want, tolerance, kind)
        bias = torch.randn(n, device=device)
        assert_close(scaled_matmul(a, b, bias=bias, **forms), want + bias, tolerance, "bias")
        grad = torch.randn(m, n, device=device)
        expected = grad + want
        assert scaled_matmul(a, b, accumulate=grad, **forms) is grad
        assert_close(grad, expected, tolerance, f"{kind} accumulated")
        if device == "cuda":
            forms["out_dtype"] = torch.bfloat16
            assert_close(scaled_matmul(a, b, **forms), want, "bf16_output", f"{kind} bf16")


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize(
    ("left", "right"),
    [("fp8 fp32", "fp8 fp32 tile"), ("fp8 fp32 e5m2", "fp8 fp32"), ("fp8 fp32 tile", "fp8")],
)
def test_blocks_with_fp32_scales(left, right, device, monkeypatch):
    if device == "cpu":
        emulate(monkeypatch)
        monkeypatch.setattr(blockwise, "device_reason", lambda x: None)
    for shape in SHAPES[1:] if device == "cpu" else SHAPES:
        tolerance = "fp32_sum" if device == "cpu" else "bf16_core_sum"
        check(left, right, shape, device, "blockwise", tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("mxfp8", "mxfp8"),
        ("mxfp8 e5m2", "mxfp8"),
        ("mxfp4", "mxfp4 tile"),
        ("fp8", "fp8 tile"),
        ("fp8", "fp8"),
        ("row scaled", "nvfp4"),
        ("row scaled", "row scaled"),
    ],
)
def test_exact_products(left, right):
    for shape in SHAPES:
        check(left, right, shape, "cuda", "hopper", "bf16_core_sum")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("left", "right"), [("fp8", "fp8 tile"), ("fp8 tile", "fp8"), ("fp8 fp32", "fp8 fp32")]
)
def test_blocks_on_fp8_cores(left, right):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("torch has this product for compute capability 9.0 alone")
    for shape in ((256, 384, 512), (208, 112, 250)):
        check(left, right, shape, "cuda", "torch_blockwise", "fp8_core_full", decode="fp8")


def test_scales_lie_as_torch_wants_them():
    rows = quantize(torch.randn(48, 640), SPECS["fp8"])
    turned = torch_blockwise.layout(rows)
    assert (turned.shape, turned.stride()) == ((48, 5), (1, 48))
    assert torch.equal(turned, rows.scales)
    tiles = quantize(torch.randn(300, 640), SPECS["fp8 tile"])
    turned = torch_blockwise.layout(tiles)
    assert (turned.shape, turned.stride()) == ((8, 3), (1, 8))
    assert torch.equal(turned[:5], tiles.scales.t())
    assert not turned[5:].any()


def test_fp8_cores_are_for_those_who_ask():
    a = quantize(torch.randn(32, 128), SPECS["fp8"])
    for decode, word in (("exact", "for decode fp8"), ("fp8", "CUDA devices")):
        options = {"out_dtype": torch.bfloat16, "decode": decode}
        reason = torch_blockwise.supports(a, a, **options)
        assert reason is not None
        assert word in reason
