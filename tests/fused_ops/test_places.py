# SPDX-License-Identifier: Apache-2.0
"""Where tensors lie, and how large they are: sums and operands that begin anywhere in a buffer, and
matrices beyond what a grid's axis or a 32-bit place can name."""

import pytest
import torch

from fused_ops.formats import OperandSpec
from fused_ops.main_grad import Zeros
from fused_ops.quantize import quantize, triton_amax, triton_fp8
from fused_ops.scaled_matmul import cublaslt, grouped, hopper, scaled_matmul
from fused_ops.testing import assert_bitwise_equal, assert_close

MXFP8 = OperandSpec(format="mxfp8")
FIRST = (0, 1, 2, 3)
"""Where a sum begins in a buffer, in elements: only 0 is a multiple of 16 bytes."""


def inside(tensor, first):
    """The same values, `first` elements behind the beginning of a buffer."""
    whole = torch.full((first + tensor.numel(),), float("nan"), device=tensor.device)
    whole = whole.to(tensor.dtype)
    found = whole[first:].view(tensor.shape).copy_(tensor)
    assert found.data_ptr() % 16 == first * found.element_size() % 16
    return found


@pytest.fixture
def library(monkeypatch):
    """cuBLASLt by torch, which looks where its operands begin; how often it is called."""
    calls = []

    def product(a, b, alpha, *, out, accumulate=False):
        assert all(t.data_ptr() % 16 == 0 for t in (a, b, out)), "begins anywhere"
        calls.append(accumulate)
        total = a.float() @ b.float().t()
        total = total if alpha is None else total * alpha
        return out.add_(total) if accumulate else out.copy_(total.to(out.dtype))

    monkeypatch.setattr(hopper, "device_reason", lambda x: None)
    monkeypatch.setattr(cublaslt, "library", lambda: object())
    monkeypatch.setattr(cublaslt, "matmul", product)
    return calls


@pytest.mark.parametrize("first", FIRST)
def test_a_sum_may_begin_anywhere(library, first):
    """As gradients do that follow a parameter of odd size in a buffer that is not padded."""
    torch.manual_seed(0)
    a, b = (quantize(torch.randn(rows, 64).bfloat16(), MXFP8) for rows in (32, 48))
    before = torch.randn(32, 48)
    options = {"out_dtype": torch.float32, "implementation": "hopper"}
    want = scaled_matmul(a, b, out_dtype=torch.float32, implementation="reference")
    added, written = inside(before, first), inside(torch.full((32, 48), float("nan")), first)
    scaled_matmul(a, b, accumulate=added, **options)
    scaled_matmul(a, b, accumulate=Zeros(written), **options)
    assert library == [first == 0, False], "C is the library's where it may be"
    assert_bitwise_equal(added, before + want)
    assert_bitwise_equal(written, want)


@pytest.mark.parametrize("first", [0, 1, 4])
def test_a_high_precision_operand_may_begin_anywhere(library, first):
    torch.manual_seed(0)
    a = inside(torch.randn(32, 64).bfloat16(), first)
    b = quantize(torch.randn(48, 64).bfloat16(), MXFP8)
    got = scaled_matmul(a, b, out_dtype=torch.float32, implementation="hopper")
    want = scaled_matmul(a, b, out_dtype=torch.float32, implementation="reference")
    assert library == [False]
    assert_bitwise_equal(got, want)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("cols", [45, 48])
def test_outputs_whose_rows_the_library_does_not_write(library, out_dtype, cols):
    """Of a size that is no multiple of 8, and with a bias, which is added before the rounding. Sums
    of whole numbers are exact in any order."""
    torch.manual_seed(0)
    whole = (torch.randint(-8, 9, (rows, 64)).bfloat16() for rows in (30, cols))
    a, b = (quantize(x, MXFP8) for x in whole)
    for bias in (None, torch.randn(cols)):
        options = {"out_dtype": out_dtype, "bias": bias}
        got = scaled_matmul(a, b, implementation="hopper", **options)
        want = scaled_matmul(a, b, implementation="reference", **options)
        assert got.is_contiguous()
        assert_bitwise_equal(got, want)
    assert library == [False, False]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "exact", "fp8"])
@pytest.mark.parametrize("first", FIRST)
def test_sums_that_begin_anywhere_on_a_gpu(kind, first):
    torch.manual_seed(0)
    a, b = (torch.randn(rows, 256, device="cuda").bfloat16() for rows in (64, 48))
    if kind != "bf16":
        a, b = (quantize(x, OperandSpec(format="nvfp4", scale="pow2")) for x in (a, b))
    decode = "fp8" if kind == "fp8" else "exact"
    before = torch.randn(64, 48, device="cuda")
    want = scaled_matmul(a, b, out_dtype=torch.float32, decode=decode)
    added, written = inside(before, first), inside(torch.full_like(before, float("nan")), first)
    scaled_matmul(a, b, out_dtype=torch.float32, accumulate=added, decode=decode)
    scaled_matmul(a, b, out_dtype=torch.float32, accumulate=Zeros(written), decode=decode)
    assert_close(added, before + want, "fp32_sum")
    assert_close(written, want, "fp32_sum")


@pytest.mark.gpu
@pytest.mark.parametrize("first", FIRST)
def test_sums_of_experts_that_begin_anywhere_on_a_gpu(first):
    """Triton's kernel takes them; the library, which one may ask for, says why it does not."""
    torch.manual_seed(0)
    groups = grouped.Groups([16, 0, 40], torch.device("cuda"))
    a, b = (torch.randn(56, n, device="cuda").bfloat16().t() for n in (32, 48))
    before = torch.randn(3, 32, 48, device="cuda")
    options = {"padded": False, "accumulate": True}
    got, want = inside(before, first), before.clone()
    grouped.inner_matmul(a, b, groups, out=got, **options)
    grouped.inner_matmul(a, b, groups, out=want, implementation="reference", **options)
    assert_close(got, want, "fp32_sum")
    if first:
        with pytest.raises(ValueError, match="out begins at a multiple of 16 bytes"):
            grouped.inner_matmul(a, b, groups, out=got, implementation="cublaslt", **options)


@pytest.mark.parametrize("rows", [64, 65535 * 64, 65535 * 64 + 1, 65535 * 256])
def test_an_amax_of_many_rows_has_a_grid_that_a_gpu_takes(monkeypatch, rows):
    """Programs go down a matrix along the grid's second axis, which has 65535 at most."""
    found = []
    monkeypatch.setattr(triton_amax, "launch", lambda *args, **options: found.append(args))
    triton_amax.rotated_amax(torch.zeros(rows, 2, dtype=torch.bfloat16))
    ((_, (across, down), *_, blocks, words, tiles),) = found
    assert (across, blocks, words) == (1, 1, 64)
    assert down <= 65535
    assert down * blocks * tiles * 16 >= rows > (down - 1) * blocks * tiles * 16
    assert tiles == 4 if rows <= 65535 * 64 else tiles > 4


def test_casts_to_fp8_name_places_in_32_bits(monkeypatch):
    monkeypatch.setattr(triton_fp8, "device_reason", lambda x: None)
    spec, one = OperandSpec(format="fp8_tensorwise"), torch.zeros(1, 1, dtype=torch.bfloat16)
    side = triton_fp8.LARGEST_SIDE
    assert side * max(triton_fp8.FP8_TILE["rows"], triton_fp8.FP8_TILE["cols"]) <= 2**31
    for shape in ((side, 128), (128, side)):
        assert triton_fp8.supports(one.expand(shape), spec) is None
        larger = tuple(n + (n == side) for n in shape)
        assert "at most 16777216 rows and columns" in triton_fp8.supports(one.expand(larger), spec)
