# SPDX-License-Identifier: Apache-2.0
"""Power-of-two block scales: valid NVFP4, exact in E4M3, local; FP8 operands; the error table."""

import pytest
import torch

from fused_ops.cases import KINDS, make_input
from fused_ops.codecs import decode_e2m1, decode_fp8
from fused_ops.formats import OperandSpec
from fused_ops.quantize import operand_amax, quantize, quantize_rows_apart, quantize_stale
from fused_ops.quantize.hadamard import rotate
from fused_ops.testing import assert_bitwise_equal, relative_mse, slope, slope_at_block_maxima

POW2 = OperandSpec(format="nvfp4", scale="pow2")
BETTER = OperandSpec(format="nvfp4", scale="pow2", choice="better_of_two")
RANDOM = OperandSpec(format="nvfp4", scale="pow2", rounding="stochastic")
TILES = OperandSpec(format="nvfp4", scale="pow2", block=(16, 16))
ALL = [POW2, BETTER, RANDOM, TILES]
KEY = (8, 9)


def ordinary_reader(q):
    """Any NVFP4 reader: code * E4M3 scale * (amax / 2688)."""
    scales = decode_fp8(q.row_scales()).repeat_interleave(16, dim=1)
    return (decode_e2m1(q.codes) * scales * (q.amax / 2688.0))[:, : q.shape[1]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", ALL, ids=lambda s: s.label)
def test_valid_nvfp4_and_exact_in_e4m3(spec, kind):
    q = quantize(make_input(kind, (48, 64), seed=1), spec, key=KEY)
    assert q.scales.dtype == torch.uint8
    assert bool(((q.scales & 7) == 0).all())
    assert int(q.scales.min()) >= 1 << 3
    assert int(q.scales.max()) <= 15 << 3
    assert_bitwise_equal(ordinary_reader(q), q.dequantize())
    operand, factor = q.fp8_operand()
    assert operand.dtype == torch.float8_e4m3fn
    assert_bitwise_equal(operand.float() * 4, q.unscaled(torch.float32))
    assert_bitwise_equal(operand.float() * factor, q.dequantize())


@pytest.mark.parametrize("spec", ALL, ids=lambda s: s.label)
def test_no_value_saturates_with_the_ceil_rule(spec):
    x = make_input("student_t3", (64, 64), seed=2)
    q = quantize(x, spec, key=KEY)
    height = spec.block[0]
    unit = q.tensor_scale * q.block_scales().repeat_interleave(height, 0).repeat_interleave(16, 1)
    largest = float((x.float() / unit).abs().max())
    assert 3 < largest <= (12 if spec.choice else 6)


@pytest.mark.parametrize("spec", ALL, ids=lambda s: s.label)
@pytest.mark.parametrize("shift", [-2, 0, 1, 3])
def test_decoded_values_do_not_depend_on_the_shift(spec, shift):
    x = make_input("gaussian", (64, 64), seed=3)
    own = quantize(x, spec, key=KEY)
    amax = x.float().abs().max() * 2.0**shift
    other = quantize(x, spec, key=KEY, amax=amax)
    if shift < 0:
        assert int(other.out_of_range[0]) > 0
        return
    assert other.amax == own.amax * 2.0**shift
    assert other.out_of_range.tolist() == [0, 0]
    assert_bitwise_equal(other.codes, own.codes)
    assert_bitwise_equal(other.dequantize(), own.dequantize())


@pytest.mark.parametrize("spec", ALL, ids=lambda s: s.label)
def test_blocks_do_not_depend_on_other_blocks(spec):
    x = make_input("gaussian", (64, 64), seed=4)
    before = quantize(x, spec, key=KEY).dequantize()
    x[16:32, 16:32] *= 64
    x[0:16, 48:64] = 0
    after = quantize(x, spec, key=KEY).dequantize()
    assert not torch.equal(before, after)
    before[16:32, 16:32], before[0:16, 48:64] = after[16:32, 16:32], after[0:16, 48:64]
    assert_bitwise_equal(before, after)


def test_blocks_out_of_range_are_counted():
    x = torch.ones(4, 64)
    x[0, :16], x[1, 16:32], x[2] = 2.0**5, 2.0**-20, 0.0
    q = quantize(x, POW2, amax=torch.tensor(1.0))
    assert q.out_of_range.tolist() == [1, 1]
    assert q.dequantize()[0, 0] == 1.5
    assert q.dequantize()[1, 16] == 0.0
    assert quantize(x[3:], POW2).out_of_range.tolist() == [0, 0]


def test_smallest_blocks_flush_on_the_grid_of_the_smallest_scale():
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16], x[0, 17] = 6.0, 2.0**-15, 2.0**-16
    q = quantize(x, POW2)
    assert q.block_scales().tolist() == [[256.0, 2.0**-6]]
    assert q.dequantize()[0, 16:18].tolist() == [2.0**-15, 0.0]
    assert q.out_of_range.tolist() == [0, 1]


@pytest.mark.parametrize("spec", [POW2, BETTER, RANDOM], ids=lambda s: s.label)
def test_a_stale_shift_is_used_while_it_fits_and_redone_when_not(spec):
    x = make_input("gaussian", (32, 64), seed=5)
    amax = x.float().abs().max()
    expected = quantize(x, spec, key=KEY).dequantize()
    for factor, redone in ((1.0, False), (0.3, False), (0.02, True), (2.0**12, True)):
        q, again = quantize_stale(x, spec, amax * factor, key=KEY)
        assert again is redone, factor
        assert q.out_of_range.tolist() == [0, 0]
        assert_bitwise_equal(q.dequantize(), expected)


def test_a_stale_amax_is_refused_where_every_code_depends_on_it():
    with pytest.raises(ValueError, match="use quantize"):
        quantize_stale(torch.ones(2, 16), OperandSpec(format="nvfp4"), torch.tensor(1.0))


@pytest.mark.parametrize(
    ("fields", "shift"),
    [({}, 3), ({"choice": "4over6_mse"}, 2), ({"rounding": "ms_eden"}, 2)],
)
def test_fp8_operand_of_full_scales_is_the_rounded_product(fields, shift):
    x = make_input("student_t3", (64, 128), seed=6)
    q = quantize(x, OperandSpec(format="nvfp4", **fields), key=KEY)
    operand, factor = q.fp8_operand()
    product = q.unscaled(torch.float32) / 2.0**shift
    assert float(product.abs().max()) <= 448
    expected = product.to(torch.float8_e4m3fn)
    assert_bitwise_equal(operand.view(torch.uint8), expected.view(torch.uint8))
    assert factor == q.tensor_scale * 2.0**shift
    changed = float((operand.float() != product).float().mean())
    assert 0.01 < changed < 0.9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_unscaled_is_exact_in_half_precision(dtype):
    for spec in (OperandSpec(format="nvfp4"), POW2, OperandSpec(format="nvfp4", block=(16, 16))):
        q = quantize(make_input("wide", (64, 128), seed=7), spec)
        assert_bitwise_equal(q.unscaled(dtype).float(), q.unscaled(torch.float32))
    q = quantize(make_input("wide", (64, 128), seed=7), OperandSpec(format="mxfp8"))
    assert_bitwise_equal(q.unscaled().float(), q.unscaled(torch.float32))


# Relative squared errors, measured before this code was written: Gaussian, Laplace, t(3), ReLU^2.
TABLE = [
    (OperandSpec(format="nvfp4"), (0.0091, 0.0086, 0.0082, 0.0056)),
    (OperandSpec(format="nvfp4", block=(16, 16)), (0.0124, 0.0168, 0.0319, None)),
    (POW2, (0.0127, 0.0152, 0.0175, 0.0141)),
    (BETTER, (0.0121, 0.0136, 0.0154, 0.0131)),
    (
        OperandSpec(format="nvfp4", rounding="stochastic", hadamard=16),
        (0.0189, 0.0191, 0.0199, 0.0198),
    ),
    (
        OperandSpec(format="nvfp4", scale="pow2", rounding="stochastic", hadamard=16),
        (0.0259, 0.0256, 0.0247, 0.0244),
    ),
    (OperandSpec(format="nvfp4", choice="4over6_mse"), (0.00757, 0.00758, None, None)),
    (OperandSpec(format="nvfp4", choice="4over6_mse", block=(16, 16)), (0.01234, None, None, None)),
    (OperandSpec(format="nvfp4", rounding="ms_eden"), (0.0094, None, None, None)),
]


@pytest.mark.parametrize(("spec", "errors"), TABLE, ids=[s.label for s, _ in TABLE])
def test_relative_errors_of_the_formats(spec, errors):
    for kind, expected in zip(("gaussian", "laplace", "student_t3", "relu_squared"), errors):
        if expected is None:
            continue
        x = make_input(kind, (1024, 512), seed=8)
        exact = (rotate(x, spec.hadamard) if spec.hadamard else x).float()
        measured = relative_mse(quantize(x, spec, key=KEY).dequantize(), exact)
        assert measured == pytest.approx(expected, rel=0.05), kind


@pytest.mark.parametrize(
    ("spec", "overall", "at_maxima"),
    [
        (OperandSpec(format="nvfp4"), 0.9955, 0.999),
        (POW2, 0.990, 0.986),
        (BETTER, 0.987, 0.980),
    ],
)
def test_biases_of_the_formats(spec, overall, at_maxima):
    x = make_input("gaussian", (1024, 512), seed=9)
    q = quantize(x, spec).dequantize()
    assert slope(q, x) == pytest.approx(overall, abs=2e-3)
    assert slope_at_block_maxima(q, x) == pytest.approx(at_maxima, abs=3e-3)


def test_rounding_to_fp8_costs_little_of_four_over_six():
    x = make_input("gaussian", (1024, 512), seed=10)
    q = quantize(x, OperandSpec(format="nvfp4", choice="4over6_mse"))
    operand, factor = q.fp8_operand()
    assert relative_mse(operand.float() * factor, x) == pytest.approx(0.00791, rel=0.02)


def test_half_a_scale_that_is_clamped_is_counted():
    """At the bottom of the range the better of two may want less: the shift must not decide."""
    x = torch.randn(64, 16)
    x *= 3.2 / x.abs().amax(1, keepdim=True)
    own = quantize(x, BETTER)
    assert own.out_of_range.tolist() == [0, 0]
    assert len(own.scales.unique()) == 2, "some blocks take half the scale"
    last = quantize(x, BETTER, amax=x.abs().amax() * 2.0**13)
    assert last.out_of_range.tolist() == [0, 0]
    assert torch.equal(last.dequantize(), own.dequantize())
    clamped = quantize(x, BETTER, amax=x.abs().amax() * 2.0**14)
    assert clamped.out_of_range.tolist() == [0, 64]
    assert not torch.equal(clamped.dequantize(), own.dequantize())
    redone, was = quantize_stale(x, BETTER, x.abs().amax() * 2.0**12, margin=2)
    assert was
    assert torch.equal(redone.dequantize(), own.dequantize())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "spec", [POW2, BETTER, OperandSpec(format="nvfp4", scale="pow2", hadamard=16)]
)
def test_rows_in_their_own_range_have_the_codes_that_they_have_alone(spec, dtype):
    """Rows 30 binades apart, blocks below the range of their row, a row of zeros."""
    x = make_input("student_t3", (5, 64), seed=6).to(dtype)
    x *= 2.0 ** torch.tensor([[0], [-30], [20], [3], [0]])
    x[1, 16:32] *= 2.0**-20
    x[4] = 0.0
    found = quantize_rows_apart(x, spec)
    for i, row in enumerate(x):
        alone = quantize(row[None], spec, amax=operand_amax(row[None], spec))
        assert torch.equal(found.codes[i], alone.codes[0])
        assert torch.equal(found.scales[i], alone.scales[0])
        assert found.amax[i] == alone.amax
        assert_bitwise_equal(found.dequantize()[i], alone.dequantize()[0])
