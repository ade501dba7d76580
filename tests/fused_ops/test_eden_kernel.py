# SPDX-License-Identifier: Apache-2.0
"""MS-EDEN's block scale as Triton computes it, through its interpreter."""

import importlib.util
import sys

import pytest
import torch

from fused_ops import cases
from fused_ops.codecs import decode_fp8, encode_fp8
from fused_ops.formats import OperandSpec
from fused_ops.quantize import quantize, triton_block_kernels
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
