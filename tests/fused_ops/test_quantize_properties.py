# SPDX-License-Identifier: Apache-2.0
"""Properties that hold for every matrix: bounds, powers of two, tiles, rows cut and gathered."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from fused_ops.cases import KINDS, make_input
from fused_ops.formats import OperandSpec
from fused_ops.quantize import operand_amax, quantize
from fused_ops.testing import assert_bitwise_equal

# How far a decoded value may lie from x, relative to the block's amax: half the largest step over 6
# is 1/6; E4M3 scales that round down or up move the top by 1/16 more.
BOUNDS = {
    OperandSpec(format="nvfp4"): 1 / 6 + 1 / 16,
    OperandSpec(format="nvfp4", block=(16, 16)): 1 / 6 + 1 / 16,
    OperandSpec(format="nvfp4", choice="4over6_mse"): 1 / 4 + 1 / 16,
    OperandSpec(format="nvfp4", scale="pow2"): 1 / 6 + 1 / 6,
    OperandSpec(format="mxfp4"): 1 / 6 + 1 / 6,
    OperandSpec(format="mxfp8"): 2.0**-4,
    OperandSpec(format="fp8_blockwise"): 2.0**-4,
}
ORDINARY = ("gaussian", "laplace", "student_t3", "relu_squared", "outliers", "ties", "zero_blocks")
matrices = st.builds(
    make_input,
    st.sampled_from(ORDINARY),
    st.tuples(st.integers(1, 40), st.integers(1, 80)),
    st.integers(0, 10**6),
)
quick = settings(max_examples=25, deadline=None)
specs = pytest.mark.parametrize("spec", BOUNDS, ids=lambda s: s.label)


@specs
@quick
@given(x=matrices)
def test_decoded_values_stay_near(spec, x):
    rows, cols = spec.block
    height, width = -(-x.shape[0] // rows) * rows, -(-x.shape[1] // cols) * cols
    padded = torch.zeros((height, width))
    padded[: x.shape[0], : x.shape[1]] = x.float()
    tiles = padded.view(height // rows, rows, width // cols, cols).abs().amax(dim=(1, 3))
    amax = tiles.repeat_interleave(rows, 0).repeat_interleave(cols, 1)
    error = (quantize(x, spec).dequantize() - x.float()).abs()
    # Blocks far below the tensor's amax flush to zero: at most 448 * 2**10 below it.
    floor = float(x.float().abs().max()) * 2.0**-10
    bound = BOUNDS[spec] * amax[: x.shape[0], : x.shape[1]] + floor
    assert bool((error <= bound).all())


@specs
@quick
@given(x=matrices, exponent=st.integers(-40, 40))
def test_powers_of_two_change_scales_only(spec, x, exponent):
    one, other = quantize(x, spec), quantize(x * 2.0**exponent, spec)
    assert_bitwise_equal(other.codes, one.codes)
    assert_bitwise_equal(other.dequantize(), one.dequantize() * 2.0**exponent)


@pytest.mark.parametrize(
    "spec",
    [
        OperandSpec(format="nvfp4", block=(16, 16)),
        OperandSpec(format="nvfp4", block=(16, 16), scale="pow2"),
        OperandSpec(format="nvfp4", block=(16, 16), choice="4over6_mse"),
        OperandSpec(format="mxfp4", block=(32, 32)),
        OperandSpec(format="mxfp8", block=(32, 32)),
        OperandSpec(format="fp8_blockwise", block=(128, 128)),
        OperandSpec(format="fp8_tensorwise"),
    ],
    ids=lambda s: s.label,
)
@quick
@given(x=matrices)
def test_tiles_transpose_exactly(spec, x):
    turned, direct = quantize(x, spec).transposed(), quantize(x, spec, columns=True)
    assert turned.shape == direct.shape
    if (spec.choice or "").startswith("4over6"):
        # The error of a tile is summed in another order: only ties may fall differently.
        assert float((turned.scales != direct.scales).float().mean()) <= 0.05
        return
    assert_bitwise_equal(turned.codes, direct.codes)
    assert_bitwise_equal(turned.scales, direct.scales)


@specs
@quick
@given(x=matrices, cut=st.integers(0, 40))
def test_gathering_quantized_parts_equals_quantizing_the_gathered(spec, x, cut):
    cut = min(-(-cut // spec.block[0]) * spec.block[0], x.shape[0])
    amax = operand_amax(x, spec)
    whole = quantize(x, spec, amax=amax)
    parts = [quantize(part, spec, amax=amax) for part in (x[:cut], x[cut:])]
    assert_bitwise_equal(torch.cat([p.codes for p in parts]), whole.codes)
    assert_bitwise_equal(torch.cat([p.scales for p in parts]), whole.scales)


@specs
@quick
@given(x=matrices)
def test_quantizing_a_decoded_tensor_again_changes_nothing(spec, x):
    if (spec.choice or "").startswith("4over6") or (spec.format == "nvfp4" and not spec.is_pow2):
        # The amax of the decoded tensor may differ in its last bits.
        amax = operand_amax(x, spec)
        once = quantize(x, spec, amax=amax).dequantize()
        twice = quantize(once, spec, amax=amax).dequantize()
        error = (once - twice).abs().max() if x.numel() else torch.tensor(0.0)
        assert float(error) <= 0.35 * float(x.float().abs().max())
        return
    once = quantize(x, spec).dequantize()
    assert_bitwise_equal(quantize(once, spec).dequantize(), once)


@pytest.mark.parametrize("kind", KINDS)
def test_save_for_backward_is_small(kind):
    x = make_input(kind, (128, 256), seed=1)
    q = quantize(x, OperandSpec(format="nvfp4"))
    assert q.nbytes == 128 * 256 // 2 + 128 * 256 // 16 + 4
    assert x.nbytes / q.nbytes == pytest.approx(3.55, abs=0.01)
