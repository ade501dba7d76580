# SPDX-License-Identifier: Apache-2.0
"""MS-EDEN's block scale as Triton computes it, through its interpreter; and longer rotations."""

import importlib.util
import sys

import pytest
import torch

from fused_ops import cases, triton_support
from fused_ops.codecs import decode_fp8, encode_fp8
from fused_ops.formats import OperandSpec
from fused_ops.quantize import (
    operand_amax,
    quantize,
    reference,
    rotated,
    triton_amax,
    triton_block_kernels,
)
from fused_ops.quantize.blocks import block_amax, scale_
from fused_ops.quantize.ms_eden import corrected_scales
from fused_ops.quantize.philox import block_words
from fused_ops.quantize.reference_nvfp4 import RN_SIXTH, block_encode_scale, encode_scale
from fused_ops.quantize.rounding import Dither
from fused_ops.testing import assert_bitwise_equal

KEY = (0xDEADBEEF, 0x01234567)
KERNEL = """
import triton
import triton.language as tl
from {module} import eden_byte


@triton.jit
def scales(x_ptr, byte_ptr, factor_ptr, random_ptr, out_ptr, BLOCKS: tl.constexpr):
    block = tl.arange(0, BLOCKS)
    v = ()
    for i in tl.static_range(0, 16):
        v = v + (tl.load(x_ptr + block * 16 + i),)
    byte, factor = tl.load(byte_ptr + block), tl.load(factor_ptr + block)
    tl.store(out_ptr + block, eden_byte(v, byte, factor, tl.load(random_ptr + block)))
"""


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """A kernel of `eden_byte` alone: the quantizers around it are full of PTX."""
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    spec = importlib.util.spec_from_file_location("interpreted", triton_block_kernels.__file__)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "interpreted", module)
    spec.loader.exec_module(module)
    path = tmp_path / "eden_kernel.py"
    path.write_text(KERNEL.format(module="interpreted"))
    spec = importlib.util.spec_from_file_location("eden_kernel", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "eden_kernel", module)
    spec.loader.exec_module(module)
    return module.scales


@pytest.mark.parametrize("kind", ["gaussian", "student_t3", "wide", "zero_blocks", "ties", "tiny"])
def test_the_scale_is_the_references(kernel, kind):
    rows, blocks = 8, 16
    x = cases.make_input(kind, (rows, 16 * blocks), 3).float()
    amaxes = block_amax(x, (1, 16))
    s_enc = encode_scale(amaxes.amax(), 1536.0)
    first = encode_fp8(((amaxes * RN_SIXTH) * s_enc).clamp_(max=3.4028234663852886e38))
    factor = block_encode_scale(first, s_enc)
    want = corrected_scales(scale_(x.clone(), factor, (1, 16)), first, Dither(KEY))
    assert kind in ("ties", "zero_blocks") or not torch.equal(want, first)
    words = block_words(rows, blocks, KEY, (0, 0), x.device)[:, :, 0, 0].contiguous()
    got = torch.zeros_like(first)
    kernel[(1,)](x, first, factor, words, got, BLOCKS=rows * blocks)
    assert_bitwise_equal(got, want, kind)
    spec = OperandSpec(format="nvfp4", rounding="ms_eden")
    assert_bitwise_equal(quantize(x, spec, key=KEY).scales, want, "and quantize's own")
    assert torch.isfinite(decode_fp8(got)).all()


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("rounding", ["nearest", "ms_eden"])
def test_long_rotations_are_turned_first(monkeypatch, rounding, columns):
    """With the definition in place of the plain kernel: all bytes, and where dither falls."""
    spec = OperandSpec(format="nvfp4", hadamard=128, signs="step", rounding=rounding)
    x = cases.make_input("student_t3", (200, 144), 5)
    signs = torch.randint(0, 2, (128,), generator=torch.Generator().manual_seed(1)) * 2 - 1
    options = {"columns": columns, "signs": signs}
    monkeypatch.setattr(triton_support, "device_reason", lambda x: None)
    monkeypatch.setattr(triton_amax, "device_reason", lambda x: None)
    for module in (rotated.triton_backend, rotated.triton_amax):
        name = "quantize" if module is rotated.triton_backend else "operand_amax"
        monkeypatch.setattr(module, name, getattr(reference, name))
    assert rotated.supports(x, spec, **options) is None
    assert rotated.amax_supports(x, spec, **options) is None
    assert rotated.supports(x, OperandSpec(format="nvfp4", hadamard=16)) is not None
    assert_bitwise_equal(
        operand_amax(x, spec, **options), reference.operand_amax(x, spec, **options), "amax"
    )
    options |= {"key": KEY, "origin": (7, 32)}
    want = quantize(x, spec, implementation="reference", **options)
    got = quantize(x, spec, implementation="triton_rotated", **options)
    assert (got.shape, got.spec) == (want.shape, want.spec)
    for name in ("codes", "scales", "amax"):
        assert_bitwise_equal(getattr(got, name), getattr(want, name), name)
