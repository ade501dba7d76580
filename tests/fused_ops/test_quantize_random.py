# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding as statistics: adjacency, bias, independence, purity; Hadamard signs."""

import numpy as np
import pytest
import torch

from fused_ops.cases import make_input
from fused_ops.codecs import nearest_e2m1_
from fused_ops.formats import OperandSpec
from fused_ops.quantize import operand_amax, quantize
from fused_ops.quantize.hadamard import FIXED_SIGNS, hadamard_matrix, rotate, rotation
from fused_ops.testing import assert_bitwise_equal, assert_close, slope, slope_at_block_maxima

DRAWS = 4096
KEY = (3, 5)


def spec_of(rounding="stochastic", **fields):
    return OperandSpec(format="nvfp4", rounding=rounding, **fields)


SPECS = [
    spec_of(),
    spec_of("stochastic_exact"),
    spec_of(scale="pow2"),
    spec_of("stochastic_exact", scale="pow2"),
    OperandSpec(format="mxfp4", rounding="stochastic"),
    spec_of("ms_eden"),
]
EXACTLY_UNBIASED = [
    spec_of("stochastic_exact", scale="pow2"),
    OperandSpec(format="mxfp4", rounding="stochastic_exact"),
]


def many_draws(row, spec):
    """One row repeated with a different global row each: [DRAWS, cols]."""
    return quantize(row.expand(DRAWS, -1).contiguous(), spec, key=KEY).dequantize()


@pytest.mark.parametrize("spec", SPECS[:5], ids=lambda s: s.label)
def test_codes_are_neighbours_of_the_scaled_value(spec):
    x = make_input("gaussian", (64, 64), seed=1)
    q = quantize(x, spec, key=KEY)
    unit = q.tensor_scale * q.block_scales().repeat_interleave(spec.block[1], dim=1)
    scaled = (x.float() / unit).abs().clamp(max=6)
    code = q.values()[:, :64].abs()
    step = torch.exp2(scaled.clamp(min=1).log2().floor().clamp(max=2) - 1)
    assert bool(((code - scaled).abs() < step * (1 + 1e-5)).all())
    nearest = nearest_e2m1_(scaled.clone())
    assert 0.05 < float((code != nearest).float().mean()) < 0.5


@pytest.mark.parametrize("spec", EXACTLY_UNBIASED, ids=lambda s: s.label)
def test_mean_over_draws_is_the_value(spec):
    """z-test of every element of a row over 4096 draws, with the exact variance of two points."""
    x = make_input("gaussian", (1, 128), seed=2, dtype=torch.float32)
    values = many_draws(x, spec).double()
    mean, spread = values.mean(0), values.std(0)
    z = (mean - x[0].double()) / (spread / DRAWS**0.5).clamp(min=1e-12)
    z = z[spread > 0]
    assert len(z) > 100
    assert float(z.abs().max()) < 4.5
    assert abs(float(z.mean())) < 4 / len(z) ** 0.5
    assert 0.7 < float(z.std()) < 1.3


def test_eight_bit_dither_lowers_the_mean_by_a_512th_of_a_step():
    """TransformerEngine's rule on fp32 input; on bf16 input under pow2 scales it is unbiased."""
    x = make_input("gaussian", (1, 4096), seed=3, dtype=torch.float32)
    for row, expected in ((x, -1 / 512), (x.bfloat16().float(), 0.0)):
        q = quantize(row.expand(256, -1).contiguous(), spec_of(scale="pow2"), key=KEY)
        unit = q.tensor_scale * q.block_scales()[0].repeat_interleave(16)
        scaled = (row[0].float() / unit).abs()
        step = torch.exp2(scaled.clamp(min=1).log2().floor().clamp(max=2) - 1)
        chosen = scaled > 0.25
        error = (q.values().abs().double().mean(0) - scaled) / step
        # The standard error of the mean is below 0.5 / sqrt(256 * 3500).
        assert abs(float(error[chosen].mean()) - expected) < 4 * 5.3e-4


def test_slopes_of_plain_and_pow2_stochastic_rounding():
    x = make_input("gaussian", (1024, 1024), seed=4)
    rotated = rotate(x, 16).float()
    results = {}
    for scale in ("e4m3", "pow2"):
        for key in ((1, 1), (2, 2)):
            q = quantize(x, spec_of(scale=scale, hadamard=16), key=key).dequantize()
            results.setdefault(scale, []).append(
                (slope(q, rotated), slope_at_block_maxima(q, rotated))
            )
    means = {k: torch.tensor(v).mean(0).tolist() for k, v in results.items()}
    assert means["pow2"][0] == pytest.approx(1.0, abs=3e-4)
    assert means["pow2"][1] == pytest.approx(1.0, abs=1e-3)
    assert means["e4m3"][0] == pytest.approx(0.996, abs=1e-3)
    assert means["e4m3"][1] == pytest.approx(0.988, abs=1e-3)


def test_ms_eden_is_unbiased_over_rotated_blocks_and_its_codes_are_not_random():
    x = make_input("gaussian", (1024, 1024), seed=5)
    spec = spec_of("ms_eden", hadamard=128)
    first, second = quantize(x, spec, key=(1, 1)), quantize(x, spec, key=(2, 2))
    assert_bitwise_equal(first.codes, second.codes)
    different = (first.scales != second.scales).float().mean()
    assert 0.3 < float(different) < 0.7
    rotated = rotate(x, 128).float()
    assert slope(first.dequantize(), rotated) == pytest.approx(1.0, abs=4e-4)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.label)
def test_streams_are_independent(spec):
    """Rounding errors of two keys, of rows, and of row and column forms do not correlate."""
    x = make_input("gaussian", (256, 256), seed=6)
    symmetric = (x + x.t()).bfloat16()
    one = quantize(symmetric, spec, key=(1, 0)).dequantize()
    two = quantize(symmetric, spec, key=(2, 0)).dequantize()
    column = quantize(symmetric, spec, key=(1, 0), columns=True).dequantize()
    assert torch.equal(one, column)
    assert not torch.equal(one, two)
    if spec.rounding == "ms_eden":
        return
    mean = (one + two) / 2
    a, b = (one - symmetric.float()).flatten(), (two - symmetric.float()).flatten()
    # Errors share their bias given x, so compare signs where the two draws can differ.
    toward = torch.stack([a, b]) > 0
    differ = float((toward[0] != toward[1]).float().mean())
    assert 0.2 < differ < 0.5
    assert float(mean.isfinite().all())


def test_the_same_row_elsewhere_gets_other_dither():
    x = make_input("gaussian", (1, 256), seed=7)
    draws = many_draws(x, spec_of(scale="pow2"))
    assert len(torch.unique(draws[:64], dim=0)) == 64


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.label)
def test_a_slice_with_its_origin_equals_the_slice_of_the_whole(spec):
    x = make_input("gaussian", (96, 128), seed=8)
    amax = operand_amax(x, spec)
    whole = quantize(x, spec, key=KEY, amax=amax)
    width = spec.block[1]
    for row, col in ((0, 64), (32, 0), (32, 64)):
        part = quantize(x[row:, col:], spec, key=KEY, amax=amax, origin=(row, col))
        assert_bitwise_equal(part.codes, whole.codes[row:, col // 2 :].contiguous())
        assert_bitwise_equal(part.scales, whole.scales[row:, col // width :].contiguous())
        moved = quantize(x[row:, col:], spec, key=KEY, amax=amax)
        assert not torch.equal(moved.dequantize(), part.dequantize())


def test_a_key_on_the_device_is_the_same_key():
    x = make_input("gaussian", (16, 64), seed=9)
    for spec in SPECS:
        ints = quantize(x, spec, key=(2**32 - 1, 7))
        tensor = quantize(x, spec, key=torch.tensor([2**32 - 1, 7]))
        assert_bitwise_equal(ints.codes, tensor.codes)
        assert_bitwise_equal(ints.scales, tensor.scales)


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_hadamard_is_orthogonal_and_signed(size):
    h = hadamard_matrix(size)
    assert_close(h @ h.t(), torch.eye(size), "fp32_sum")
    assert bool((h.abs() == size**-0.5).all()) or size in (32, 128)
    assert bool((h[0] > 0).all())
    r = rotation(size, None, "cpu")
    assert torch.equal(r[:, 0].sign()[:16], torch.tensor(FIXED_SIGNS).float())
    mask = sum(1 << i for i, sign in enumerate(FIXED_SIGNS) if sign < 0)
    assert mask == 0xD7E8


@pytest.mark.parametrize("size", [16, 128])
def test_rotation_cancels_in_the_product_of_columns(size):
    dy, x = (make_input("student_t3", (256, 48), seed=s) for s in (1, 2))
    signs = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(0)) * 2 - 1
    product = rotate(dy.t(), size, signs).float() @ rotate(x.t(), size, signs).float().t()
    exact = dy.float().t() @ x.float()
    assert_close(product, exact, "hadamard_bf16")
    other = rotate(dy.t(), size, signs).float() @ rotate(x.t(), size, -signs.flip(0)).float().t()
    assert float((other - exact).norm() / exact.norm()) > 0.5


@pytest.mark.parametrize("shape", [(1, 16), (3, 48), (40, 272), (257, 16)])
def test_rotation_sums_in_the_order_of_elements(shape):
    """So a group's bits depend on nothing but the group, however the product is computed."""
    x = make_input("wide", shape, seed=3)
    matrix = rotation(16, None, "cpu")
    groups = x.float().view(-1, 16)
    total = groups[:, :1] * matrix[0]
    for k in range(1, 16):
        total = total + groups[:, k : k + 1] * matrix[k]
    assert_bitwise_equal(rotate(x, 16), total.bfloat16().view(x.shape))
    last = rotate(x[-1:, -16:].contiguous(), 16)
    assert_bitwise_equal(last, rotate(x, 16)[-1:, -16:].contiguous())


@pytest.mark.parametrize("size", [32, 64, 128])
def test_long_rotations_are_sums_and_differences_of_pairs(size):
    """The definition in numbers of Python, one fp32 rounding an operation."""
    x = make_input("wide", (3, 2 * size), seed=3)
    signs = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(4)) * 2 - 1
    factor = torch.tensor(1.0).div(torch.tensor(float(size)).sqrt()).item()
    expected = []
    for group in x.float().view(-1, size).tolist():
        v = [float(np.float32(a * s * factor)) for a, s in zip(group, signs.tolist())]
        distance = 1
        while distance < size:
            pairs = [
                v[i - distance] - v[i] if i & distance else v[i] + v[i + distance]
                for i in range(size)
            ]
            v = [float(np.float32(pair)) for pair in pairs]
            distance *= 2
        expected.append(v)
    got = rotate(x, size, signs)
    assert_bitwise_equal(got, torch.tensor(expected).bfloat16().view(x.shape))
    exact = x.double().view(-1, size) @ rotation(size, signs, "cpu").double()
    assert_close(got.double().view(-1, size), exact, "bf16_output")


def test_signs_change_the_codes():
    x = make_input("gaussian", (64, 64), seed=11)
    spec = OperandSpec(format="nvfp4", hadamard=16)
    fixed = quantize(x, spec)
    assert_bitwise_equal(quantize(x, spec, signs=torch.tensor(FIXED_SIGNS)).codes, fixed.codes)
    assert not torch.equal(quantize(x, spec, signs=torch.ones(16)).codes, fixed.codes)
