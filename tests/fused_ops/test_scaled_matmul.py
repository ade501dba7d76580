# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from fused_ops.dispatch import UnsupportedError
from fused_ops.formats import OperandSpec
from fused_ops.main_grad import Zeros
from fused_ops.quantize import quantize
from fused_ops.scaled_matmul import scaled_matmul
from fused_ops.scaled_matmul.reference import add_toward_zero, alpha, values

KEY = (12, 34)
PLAIN = OperandSpec(format="nvfp4")
TILE = OperandSpec(format="nvfp4", block=(16, 16))
FOUR = OperandSpec(format="nvfp4", choice="4over6_mse")
POW2 = OperandSpec(format="nvfp4", scale="pow2")
EDEN = OperandSpec(format="nvfp4", rounding="ms_eden")
ROWS = OperandSpec(format="nvfp4", row_scaled=True)
SPECS = {
    "1x16": PLAIN,
    "16x16": TILE,
    "4over6": FOUR,
    "pow2": POW2,
    "ms_eden": EDEN,
    "row_scaled": ROWS,
    "mxfp8": OperandSpec(format="mxfp8"),
    "mxfp4": OperandSpec(format="mxfp4"),
    "fp8": OperandSpec(format="fp8_tensorwise"),
    "fp8_e5m2": OperandSpec(format="fp8_tensorwise", element="e5m2"),
    "fp8_blockwise": OperandSpec(format="fp8_blockwise"),
    "fp8_blockwise_fp32": OperandSpec(format="fp8_blockwise", block=(128, 128), scale="fp32"),
    "bf16": None,
}


def operand(spec, rows, cols, scale=1.0):
    x = (torch.randn(rows, cols) * scale).bfloat16()
    if spec is None:
        return x
    return quantize(x, spec, key=KEY if spec.is_random else None)


def decoded(x):
    """What an operand stands for, in fp64, without the library's product or alpha."""
    if isinstance(x, torch.Tensor):
        return x.double()
    scale = x.tensor_scale.double()
    if x.spec.format == "nvfp4":
        scale = x.amax.double().reshape(-1, 1) / x.spec.numerator
    return x.unscaled(torch.float32).double() * scale


PAIRS = [
    ("1x16", "16x16"), ("4over6", "4over6"), ("ms_eden", "1x16"), ("pow2", "pow2"),
    ("row_scaled", "16x16"), ("row_scaled", "row_scaled"), ("mxfp8", "mxfp8"), ("mxfp4", "mxfp4"),
    ("fp8_e5m2", "fp8"), ("fp8_blockwise", "fp8_blockwise_fp32"), ("1x16", "bf16"),
    ("bf16", "pow2"), ("mxfp8", "1x16"),
]  # fmt: skip


@pytest.mark.parametrize(("left", "right"), PAIRS, ids=[f"{a}-{b}" for a, b in PAIRS])
def test_product_of_decoded_operands(left, right):
    """Products are exact; fp32 sums over K = 200 and four epilogue roundings stay below 1e-6."""
    a, b = operand(SPECS[left], 37, 200, 3.0), operand(SPECS[right], 21, 200, 0.02)
    expected = decoded(a) @ decoded(b).t()
    out = scaled_matmul(a, b, out_dtype=torch.float32)
    assert out.dtype == torch.float32
    assert float((out.double() - expected).abs().max() / expected.abs().max()) < 1e-6


def test_alpha_in_the_documented_order():
    """((1 * A_a) * A_b) * RN(1 / (num_a * num_b)), each operation rounded to fp32, by NumPy."""
    others, f32 = 0, np.float32
    for spec_a, spec_b in ((PLAIN, TILE), (EDEN, PLAIN), (FOUR, FOUR)):
        a, b = operand(spec_a, 16, 16), operand(spec_b, 16, 16)
        product = f32(spec_a.numerator * spec_b.numerator)
        for amax_a, amax_b in (torch.rand(200, 2) * 5.0).numpy():
            a, b = replace(a, amax=torch.tensor(amax_a)), replace(b, amax=torch.tensor(amax_b))
            expected = ((f32(1.0) * amax_a) * amax_b) * (f32(1.0) / product)
            assert f32(alpha(a, b).item()) == expected
            other = (amax_a / f32(spec_a.numerator)) * (amax_b / f32(spec_b.numerator))
            others += int(other != expected)
    # The other plausible order differs in the last bit for a good part of the pairs.
    assert 100 < others < 500


def test_each_operand_decodes_with_its_own_numerator():
    """One number for both is wrong by 1.75 on one side: MS-EDEN has 1536, a cast 2688."""
    a, b = operand(EDEN, 16, 64), operand(PLAIN, 16, 64)
    expected = decoded(a) @ decoded(b).t()
    out = scaled_matmul(a, b, out_dtype=torch.float32).double()
    assert float((out - expected).norm() / expected.norm()) < 1e-6
    wrong = a.amax.double() * b.amax.double() / 2688.0**2
    assert float(alpha(a, b)) / float(wrong) == pytest.approx(1.75, rel=1e-6)


def test_accumulates_in_place_after_alpha():
    a, b = operand(PLAIN, 32, 64), operand(PLAIN, 16, 64)
    product = scaled_matmul(a, b, out_dtype=torch.float32)
    target = torch.randn(32, 16) * 100.0
    before = target.clone()
    out = scaled_matmul(a, b, out_dtype=torch.bfloat16, accumulate=target)
    assert out is target
    assert torch.equal(target, before + product)


@pytest.mark.parametrize("plain", [False, True])
def test_zeros_are_written_without_being_read(plain):
    """What was there is no matter; the sum is that of an addition to zeros."""
    a, b = operand(PLAIN, 32, 64), operand(PLAIN, 16, 64)
    if plain:
        a, b = a.dequantize(torch.bfloat16), b.dequantize(torch.bfloat16)
    added, written = torch.zeros(32, 16), torch.full((32, 16), float("nan"))
    scaled_matmul(a, b, out_dtype=torch.float32, accumulate=added)
    scaled_matmul(a, b, out_dtype=torch.float32, accumulate=Zeros(written))
    assert float(added.abs().min()) > 0.0
    assert torch.equal(written, added)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "exact", "fp8", "odd"])
def test_zeros_written_on_a_gpu_get_the_bits_of_an_addition(kind):
    """By cuBLASLt with C unread, in the order of sums that it has with C; "odd": N is no multiple
    of 4."""
    n = 46 if kind == "odd" else 48
    x, y = (torch.randn(rows, 256, device="cuda").bfloat16() for rows in (64, n))
    a, b = (x, y) if kind == "bf16" else (quantize(x, PLAIN), quantize(y, PLAIN))
    options = {"out_dtype": torch.float32, "decode": "fp8" if kind == "fp8" else "exact"}
    added = torch.zeros(64, n, device="cuda")
    written = torch.full((64, n), float("nan"), device="cuda")
    scaled_matmul(a, b, accumulate=added, implementation="hopper", **options)
    scaled_matmul(a, b, accumulate=Zeros(written), implementation="hopper", **options)
    assert float(added.abs().max()) > 1.0
    assert torch.equal(written, added)


def test_bias_is_added_before_the_output_is_rounded():
    a, b = operand(PLAIN, 32, 64), operand(TILE, 16, 64)
    bias = torch.randn(16).bfloat16()
    exact = scaled_matmul(a, b, out_dtype=torch.float32)
    out = scaled_matmul(a, b, out_dtype=torch.bfloat16, bias=bias)
    assert torch.equal(out, (exact + bias.float()).bfloat16())
    twice = exact.bfloat16() + bias
    assert not torch.equal(out, twice)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_high_precision_operands_multiply_in_their_own_dtype(dtype):
    a, b = torch.randn(33, 100).to(dtype), torch.randn(17, 100).to(dtype)
    expected = a.double() @ b.double().t()
    out = scaled_matmul(a, b, out_dtype=dtype)
    assert out.dtype == dtype
    # The sum's bound K * 2^-24 * |a| |b|, and half an ulp for the output.
    half_ulp = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}[dtype]
    bound = 100 * 2.0**-24 * (a.double().abs() @ b.double().abs().t())
    assert ((out.double() - expected).abs() <= bound + half_ulp * 2 * expected.abs()).all()


def test_decode_fp8_leaves_pow2_alone_and_rounds_the_others():
    for spec in (POW2, OperandSpec(format="nvfp4", scale="pow2", choice="better_of_two")):
        a = operand(spec, 64, 256)
        assert torch.equal(values(a, "fp8"), values(a, "exact"))
    for spec in (PLAIN, FOUR, TILE, EDEN):
        a = operand(spec, 64, 256)
        exact, rounded = values(a, "exact"), values(a, "fp8")
        scale = 2.0**spec.fp8_shift
        step = torch.exp2(torch.floor(torch.log2((exact / scale).abs().clamp(min=2.0**-6))) - 3)
        assert float(((rounded - exact).abs() / scale / step).max()) <= 0.5
        assert not torch.equal(exact, rounded)
        assert float((rounded / scale).abs().max()) <= 448.0
    mx = operand(OperandSpec(format="mxfp4"), 64, 256)
    assert torch.equal(values(mx, "fp8"), values(mx, "exact"))


def test_decode_fp8_multiplies_what_fp8_cores_are_given():
    a, b = operand(FOUR, 48, 128), operand(POW2, 32, 128)
    (ca, fa), (cb, fb) = a.fp8_operand(), b.fp8_operand()
    expected = (ca.double() * fa.double()) @ (cb.double() * fb.double()).t()
    out = scaled_matmul(a, b, out_dtype=torch.float32, decode="fp8").double()
    assert float((out - expected).abs().max() / expected.abs().max()) < 1e-6


def test_decode_fp8_adds_a_twentieth_to_the_error_of_four_over_six():
    x = torch.randn(512, 1024)
    a = quantize(x, FOUR)
    scale = a.amax.double() / a.spec.numerator
    errors = [
        float(((values(a, d).double() * scale - x) ** 2).mean() / (x.double() ** 2).mean())
        for d in ("exact", "fp8")
    ]
    assert errors[0] == pytest.approx(0.00757, rel=0.02)
    assert errors[1] == pytest.approx(0.00791, rel=0.02)


def toward_zero(exact):
    """An exact rational number rounded toward zero to fp32."""
    nearest = np.float32(float(exact))
    if abs(Fraction(float(nearest))) > abs(exact):
        nearest = np.nextafter(nearest, np.float32(0.0))
    return Fraction(float(nearest))


def test_add_toward_zero_against_rational_arithmetic():
    torch.manual_seed(3)
    x = torch.randn(20000) * torch.exp2(torch.randint(-30, 30, (20000,)).float())
    y = torch.randn(20000) * torch.exp2(torch.randint(-30, 30, (20000,)).float())
    y[:2000] = -x[:2000] * (1 + torch.randn(2000) * 1e-6)
    y[2000:2100] = -x[2000:2100]
    got = add_toward_zero(x, y)
    different = 0
    for a, b, c in zip(x.tolist(), y.tolist(), got.tolist()):
        assert Fraction(c) == toward_zero(Fraction(a) + Fraction(b))
        different += Fraction(c) != Fraction(float(np.float32(a) + np.float32(b)))
    assert different > 5000


def wide(rows, cols):
    """Block scales over many binades, where the order and rounding of sums shows."""
    blocks = torch.exp2(torch.randint(-12, 1, (rows, cols // 16)).float())
    return torch.randn(rows, cols) * blocks.repeat_interleave(16, dim=1)


def test_blackwell_model_against_rational_arithmetic():
    a, b = quantize(wide(6, 320), PLAIN), quantize(wide(5, 320), PLAIN)
    va, vb = values(a).tolist(), values(b).tolist()
    out = scaled_matmul(a, b, out_dtype=torch.float32, implementation="blackwell_model")
    factor = np.float32(alpha(a, b).item())
    for i in range(6):
        for j in range(5):
            products = [Fraction(x) * Fraction(y) for x, y in zip(va[i], vb[j])]
            total = Fraction(0)
            for start in range(0, 320, 64):
                group = np.float32(float(sum(products[start : start + 64])))
                total = toward_zero(total + Fraction(float(group)))
            assert np.float32(out[i, j].item()) == np.float32(float(total)) * factor


def test_blackwell_model_and_plain_sums_where_they_differ():
    """Gaussian operands sum exactly in every order; operands over many binades do not."""
    a, b = operand(PLAIN, 64, 1024), operand(TILE, 32, 1024)
    plain = scaled_matmul(a, b, out_dtype=torch.float32)
    model = scaled_matmul(a, b, out_dtype=torch.float32, implementation="blackwell_model")
    assert torch.equal(plain, model)
    a, b = quantize(wide(64, 4096), PLAIN), quantize(wide(32, 4096), PLAIN)
    plain = scaled_matmul(a, b, out_dtype=torch.float32)
    model = scaled_matmul(a, b, out_dtype=torch.float32, implementation="blackwell_model")
    assert float((plain != model).float().mean()) > 0.05
    exact = values(a).double() @ values(b).double().t() * alpha(a, b).double()
    # Rounding toward zero shrinks: the mean signed error along the exact output is negative.
    shrink = ((model.double() - exact) * exact).sum() / (exact * exact).sum()
    assert -5e-6 < float(shrink) < 0
    assert float((model.double() - exact).abs().max() / exact.abs().max()) < 1e-5


def test_blackwell_model_says_what_it_does_not_describe():
    mx = operand(OperandSpec(format="mxfp8"), 32, 64)
    with pytest.raises(UnsupportedError, match=r"NVFP4 x NVFP4 with decode exact; got mxfp8 1x32"):
        scaled_matmul(mx, mx, out_dtype=torch.float32, implementation="blackwell_model")
    with pytest.raises(UnsupportedError, match="no implementation 'hoper'"):
        scaled_matmul(mx, mx, out_dtype=torch.float32, implementation="hoper")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"a": torch.zeros(4, 32)}, r"one K, got \(4, 32\) and \(8, 64\); transpose or pad"),
        ({"accumulate": torch.zeros(4, 8).bfloat16()}, "accumulate must be fp32"),
        ({"accumulate": torch.zeros(8, 4)}, r"accumulate must be fp32 \(4, 8\)"),
        ({"accumulate": torch.zeros(4, 8), "bias": torch.zeros(8)}, "exclude each other"),
        ({"accumulate": Zeros(torch.zeros(8, 4))}, r"accumulate must be fp32 \(4, 8\)"),
        ({"decode": "fp4"}, "decode must be 'exact' or 'fp8', got 'fp4'"),
    ],
)
def test_bad_input(options, message):
    arguments = {"a": torch.zeros(4, 64), "b": torch.zeros(8, 64), "out_dtype": torch.float32}
    with pytest.raises(ValueError, match=message):
        scaled_matmul(**(arguments | options))


@pytest.mark.parametrize("spec", ["row_scaled", "pow2", "bf16"])
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 33])
def test_blocks_of_rows_give_each_row_the_same_bits(spec, rows):
    x, w = (torch.randn(40, 96) + 0.1).bfloat16(), operand(SPECS[spec], 24, 96)

    def product(part, **options):
        a = part if SPECS[spec] is None else quantize(part, SPECS[spec])
        return scaled_matmul(a, w, out_dtype=torch.float32, **options)

    whole = product(x, row_block=16)
    torch.testing.assert_close(whole, product(x), rtol=1e-5, atol=1e-4)
    for start in (0, 40 - rows):
        part = product(x[start : start + rows], row_block=16)
        assert torch.equal(part, whole[start : start + rows])
    with pytest.raises(ValueError, match="row_block is for the reference"):
        product(x, row_block=16, implementation="hopper")
