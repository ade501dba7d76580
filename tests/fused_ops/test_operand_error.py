# SPDX-License-Identifier: Apache-2.0
"""Errors of operands and products: against plain sums, published values, and samples of a whole."""

import math

import numpy as np
import pytest
import torch

from fused_ops import formats
from fused_ops.formats import OperandSpec
from fused_ops.operand_error import (
    operand_figures,
    operand_sums,
    product_figures,
    product_sums,
    products,
    spread,
    sums_together,
    take_sample,
)
from fused_ops.quantize import quantize

NVFP4 = OperandSpec(format="nvfp4")
POW2_SR = OperandSpec(format="nvfp4", scale="pow2", rounding="stochastic", hadamard=16)
SPECS = {
    "1x16": NVFP4,
    "16x16": OperandSpec(format="nvfp4", block=(16, 16)),
    "rotated sr": OperandSpec(format="nvfp4", rounding="stochastic", hadamard=16),
    "pow2 sr": POW2_SR,
    "rows": OperandSpec(format="nvfp4", row_scaled=True),
    "mxfp4 tile": OperandSpec(format="mxfp4", block=(32, 32)),
    "mxfp8": OperandSpec(format="mxfp8"),
    "blockwise": OperandSpec(format="fp8_blockwise", block=(128, 128)),
    "tensorwise": OperandSpec(format="fp8_tensorwise"),
}


def quantized(x, spec, columns=False):
    return quantize(x, spec, columns=columns, key=(5, 6) if spec.is_random else None)


def figures(x, spec, columns=False, limits=(0, 0)):
    sample = take_sample(x, quantized(x, spec, columns), columns=columns, limits=limits)
    return operand_figures(operand_sums(sample).tolist())


@pytest.mark.parametrize(
    ("spec", "mse", "slope", "slope_max", "slope_small"),
    [
        ("1x16", 0.0091, 0.9955, 0.999, 0.0),
        ("16x16", 0.0124, 0.993, 1.00, 0.0),
        ("rotated sr", 0.0189, 0.997, 0.988, 1.0),
        ("pow2 sr", 0.0259, 1.000, 1.000, 1.0),
    ],
)
def test_gaussian_data_has_the_documented_error(spec, mse, slope, slope_max, slope_small):
    """The table of relative errors and slopes that the formats' documentation gives."""
    torch.manual_seed(0)
    found = figures(torch.randn(2048, 512), SPECS[spec])
    assert 10 ** (-found["snr_db"] / 10) == pytest.approx(mse, rel=0.02)
    assert found["slope"] == pytest.approx(slope, abs=0.003)
    assert found["slope_max"] == pytest.approx(slope_max, abs=0.004)
    assert found["slope_small"] == pytest.approx(slope_small, abs=0.05)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("columns", [False, True])
def test_sums_are_those_of_numpy(name, columns):
    """Ragged sizes, heavy tails, zeros, a block far below the others."""
    spec = SPECS[name]
    torch.manual_seed(1)
    x = torch.randn(70, 90) ** 3
    x[:, 16:32] = 0.0
    x[3, 32:48] = 1e-9
    if columns:
        x = x.t().contiguous()
    operand = quantized(x, spec, columns)
    sample = take_sample(x, operand, columns=columns)
    found = operand_figures(operand_sums(sample).tolist())
    exact = sample.exact.double().numpy()
    q = operand.dequantize().double().numpy()
    assert q.shape == exact.shape
    nonzero = exact != 0
    power, noise = (exact**2).sum(), ((q - exact) ** 2).sum()
    assert found["snr_db"] == pytest.approx(10 * math.log10(power / noise), rel=1e-5)
    assert found["slope"] == pytest.approx((q * exact).sum() / power, rel=1e-6)
    assert found["flushed"] == (nonzero & (q == 0)).sum() / nonzero.sum()
    tall, wide = spec.block or exact.shape
    crosses, squares, low, live = 0.0, 0.0, 0, 0
    scales = operand.block_scales().numpy()
    for i in range(0, exact.shape[0], tall):
        for j in range(0, exact.shape[1], wide):
            block = exact[i : i + tall, j : j + wide]
            at = np.unravel_index(np.abs(block).argmax(), block.shape)
            value = q[i : i + tall, j : j + wide][at]
            crosses, squares = crosses + value * block[at], squares + block[at] ** 2
            live += block[at] != 0
            low += block[at] != 0 and scales[i // tall, j // wide] == 0
    assert found["slope_max"] == pytest.approx(crosses / squares, rel=1e-6)
    assert found["underflow"] == low / live
    if name == "1x16" and not columns:
        assert low == 1


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("columns", [False, True])
def test_sums_together_are_those_of_each(name, columns):
    """To the bit, of ragged sizes; what was summed later is what was seen."""
    torch.manual_seed(3)
    tensors = [torch.randn(90, 300) * scale for scale in (1.0, 1e-3, 50.0)]
    tensors[1][:, :64] = 0.0
    found, alone = [], []
    for x in tensors:
        operand = quantized(x, SPECS[name], columns)
        found.append(take_sample(x, operand, columns=columns, limits=(32, 128)))
        alone.append(operand_sums(found[-1]))
        assert found[-1].is_copy
        assert found[-1].key == found[0].key
        for changed in (x, operand.codes, operand.scales, operand.amax):
            changed.zero_()
    assert torch.equal(sums_together(found), torch.stack(alone))
    whole = take_sample(tensors[0], quantized(tensors[0], SPECS[name], columns), columns=columns)
    assert whole.key != found[0].key


def test_block_scales_are_decoded_once(monkeypatch):
    """For the values, and for the blocks that underflow."""
    decoded, decode = [], formats.decode_fp8
    monkeypatch.setattr(formats, "decode_fp8", lambda x: decoded.append(x.shape) or decode(x))
    x = torch.randn(32, 64)
    operand_sums(take_sample(x, quantized(x, NVFP4), columns=False))
    assert decoded == [(32, 4)]


def test_what_is_a_part_of_the_tensor_may_not_wait():
    x = torch.randn(64, 128)
    assert not take_sample(x, quantize(x, NVFP4), columns=False).is_copy


def test_product_sums_of_several_are_those_of_each():
    exact, product = torch.randn(2, 3, 40, 24)
    alone = [product_sums(*pair) for pair in zip(exact, product)]
    assert torch.equal(product_sums(exact, product), torch.stack(alone))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("columns", [False, True])
def test_padding_is_no_scale_of_zero(name, columns):
    """70 x 90 is no multiple of any block: what fills the last ones up is not in the figures."""
    torch.manual_seed(4)
    found = figures(torch.randn(70, 90), SPECS[name], columns)
    assert found["underflow"] == 0.0
    assert found["slope"] > 0.97


def test_saturation_is_what_lies_beyond_the_largest_code():
    """A tensor scale of 1, block scales of exactly 1, and one block beyond the largest of 448."""
    x = torch.full((16, 32), 6.0)
    x[0, 0] = 2700.0
    operand = quantize(x, NVFP4, amax=torch.tensor(2688.0))
    sums = operand_sums(take_sample(x, operand, columns=False)).tolist()
    assert operand_figures(sums)["saturated"] == 1 / (16 * 32)
    assert figures(x, NVFP4)["saturated"] == 0.0


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("columns", [False, True])
def test_a_sample_is_a_part_of_the_whole(name, columns):
    spec = SPECS[name]
    torch.manual_seed(2)
    x = torch.randn(700, 520)
    operand = quantized(x, spec, columns)
    part = take_sample(x, operand, columns=columns, limits=(256, 256))
    whole = take_sample(x, operand, columns=columns)
    size = whole.plain.shape
    rows = spread(size[0], 256, max(16, (spec.block or (1, 1))[0]), x.device)
    cols = spread(size[1], 256, 128, x.device)
    assert part.plain.shape == (256, 256)
    assert torch.equal(part.plain, whole.plain[rows][:, cols])
    assert torch.equal(part.exact, whole.exact[rows][:, cols])
    assert torch.equal(part.operand.dequantize(), operand.dequantize()[rows][:, cols])
    assert len(set(rows.tolist())) == 256
    assert rows.max() > size[0] // 2, "spread over the whole"


def test_products_show_a_rotation_that_does_not_cancel():
    torch.manual_seed(3)
    a, b = torch.randn(64, 256), torch.randn(48, 256)
    spec = OperandSpec(format="nvfp4", hadamard=16)
    left = take_sample(a, quantized(a, spec), columns=False)
    right = take_sample(b, quantized(b, spec), columns=False)
    exact, product = products(left, right, "exact")
    torch.testing.assert_close(exact, a @ b.t())
    wanted = left.operand.dequantize() @ right.operand.dequantize().t()
    torch.testing.assert_close(product, wanted)
    good = product_figures(product_sums(exact, product).tolist())
    assert good["cosine"] == pytest.approx(0.991, abs=0.003)
    assert good["signed"] == pytest.approx(-0.01, abs=0.01)
    other = torch.where(torch.rand(16) < 0.5, -1.0, 1.0)
    stale = take_sample(b, quantize(b, spec, signs=other), columns=False)
    broken = product_figures(product_sums(*products(left, stale, "exact")).tolist())
    assert abs(broken["cosine"]) < 0.5


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", SPECS)
def test_values_that_are_not_finite_stop_nothing(name, value):
    """A bad step is monitored like any other; its figures may be NaN."""
    torch.manual_seed(5)
    x = torch.randn(64, 256)
    x[3, 7] = value
    sample = take_sample(x, quantized(x, SPECS[name]), columns=False)
    found = operand_figures(operand_sums(sample).tolist())
    assert set(found) >= {"flushed", "slope"}
    both = product_figures(product_sums(*products(sample, sample, "exact")).tolist())
    assert not math.isfinite(both["cosine"]) or abs(both["cosine"]) <= 1.0 + 1e-6


def test_decode_fp8_rounds_what_the_cores_round():
    torch.manual_seed(4)
    a, b = torch.randn(64, 256), torch.randn(48, 256)
    spec = OperandSpec(format="nvfp4", choice="4over6_mse")
    samples = [take_sample(t, quantized(t, spec), columns=False) for t in (a, b)]
    cosines = [
        product_figures(product_sums(*products(*samples, decode)).tolist())["cosine"]
        for decode in ("exact", "fp8")
    ]
    assert cosines[1] < cosines[0]
    assert cosines[1] == pytest.approx(cosines[0], abs=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPECS)
def test_nothing_waits_for_the_device(name):
    x = torch.randn(4096, 1024, device="cuda").bfloat16()
    operand = quantized(x, SPECS[name], True)
    sample = take_sample(x, operand, columns=True, limits=(128, 512))  # tables are made here
    sums = operand_sums(sample)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sample = take_sample(x, operand, columns=True, limits=(128, 512))
        again = operand_sums(sample)
        product_sums(*products(sample, sample, "fp8"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(sums, again)
