# SPDX-License-Identifier: Apache-2.0
"""Zeros, underflow, tiny, infinite and NaN amaxes, padding, empty tensors, wrong arguments."""

import math

import pytest
import torch

from fused_ops.cases import SHAPE_IDS, SHAPES, make_input
from fused_ops.codecs import unpack_nibbles
from fused_ops.formats import OperandSpec
from fused_ops.quantize import operand_amax, plain_amax, quantize
from fused_ops.testing import assert_bitwise_equal

NVFP4 = OperandSpec(format="nvfp4")
POW2 = OperandSpec(format="nvfp4", scale="pow2")
SPECS = [
    NVFP4,
    OperandSpec(format="nvfp4", block=(16, 16)),
    OperandSpec(format="nvfp4", row_scaled=True),
    OperandSpec(format="nvfp4", hadamard=16),
    OperandSpec(format="nvfp4", hadamard=128),
    OperandSpec(format="nvfp4", choice="4over6_mae"),
    OperandSpec(format="nvfp4", choice="4over6_mse", block=(16, 16)),
    OperandSpec(format="nvfp4", rounding="stochastic"),
    OperandSpec(format="nvfp4", rounding="stochastic_exact"),
    OperandSpec(format="nvfp4", rounding="ms_eden"),
    POW2,
    OperandSpec(format="nvfp4", scale="pow2", choice="better_of_two"),
    OperandSpec(format="nvfp4", scale="pow2", choice="better_of_two", block=(16, 16)),
    OperandSpec(format="mxfp4"),
    OperandSpec(format="mxfp4", block=(32, 32), rounding="stochastic"),
    OperandSpec(format="mxfp8"),
    OperandSpec(format="mxfp8", block=(32, 32)),
    OperandSpec(format="fp8_tensorwise"),
    OperandSpec(format="fp8_tensorwise", element="e5m2"),
    OperandSpec(format="fp8_blockwise"),
    OperandSpec(format="fp8_blockwise", block=(128, 128), scale="fp32"),
]
KEY = (11, 12)


def codes_of(q):
    return unpack_nibbles(q.codes)[:, : q.shape[1]]


def one_block(*values, dtype=torch.float32):
    x = torch.zeros((1, 32), dtype=dtype)
    x[0, : len(values)] = torch.tensor(values)
    return x


def test_zero_tensor():
    q = quantize(torch.zeros(16, 32), NVFP4)
    assert q.amax == 0
    assert int(q.codes.sum()) == int(q.scales.sum()) == 0
    assert int(q.dequantize().abs().sum()) == 0


def test_zero_block_beside_others():
    x = torch.randn(4, 48)
    x[:, 16:32] = 0
    q = quantize(x, NVFP4)
    assert int(q.scales[:, 1].sum()) == 0
    assert int(codes_of(q)[:, 16:32].sum()) == 0
    assert int((q.scales == 0).sum()) == 4


def test_underflowing_block_scale_saturates_codes_and_decodes_to_zero():
    """No lower bound on the scale: a * 448 / A below 2**-10 gives s = 0."""
    x = one_block(448.0)
    x[0, 16:20] = torch.tensor([0.9 * 2.0**-10, -0.5 * 2.0**-10, 0.0, 2.0**-30])
    q = quantize(x, NVFP4)
    assert q.scales.tolist() == [[0x7E, 0]]
    assert codes_of(q)[0, 16:20].tolist() == [7, 15, 0, 7]
    assert int(q.dequantize()[0, 16:].abs().sum()) == 0
    x[0, 16] = 1.1 * 2.0**-10
    assert quantize(x, NVFP4).scales.tolist() == [[0x7E, 1]]


def test_tiny_amax_caps_the_encode_scale():
    q = quantize(one_block(1e-38), NVFP4)
    assert q.block_scales()[0, 0] == 0.5625
    assert codes_of(q)[0, 0] == 5


def test_denormal_amax_gives_zero_codes():
    q = quantize(one_block(1e-45), NVFP4)
    assert q.amax == torch.tensor(1e-45)
    assert codes_of(q)[0, 0] in (0, 7)
    assert q.scales[0, 0] == 0
    assert int(q.dequantize().abs().sum()) == 0


def test_infinite_amax_encodes_with_scale_one():
    x = one_block(math.inf, 1.0)
    x[0, 16:18] = torch.tensor([3.0, -6.0])
    q = quantize(x, NVFP4)
    assert q.amax == math.inf
    assert q.block_scales().tolist() == [[448.0, 1.0]]
    assert codes_of(q)[0, [0, 16, 17]].tolist() == [7, 5, 15]
    assert not torch.isfinite(q.dequantize()).all()


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.label)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_values_never_decode_to_a_number(spec, bad):
    x = torch.randn(32, 128)
    x[3, 5] = bad
    decoded = quantize(x, spec, key=KEY).dequantize()
    if spec.format in ("fp8_tensorwise", "fp8_blockwise") and not math.isnan(bad):
        # Casts saturate: the flag is what sees an infinity.
        assert torch.isfinite(decoded).all()
    else:
        assert not torch.isfinite(decoded[3, :16]).all()
    flag = torch.tensor(False)
    plain_amax(torch.randn(32, 128), flag)
    assert not flag
    plain_amax(x, flag)
    assert flag


def test_pow2_keeps_a_bad_block_to_itself():
    x = torch.randn(8, 64)
    clean = quantize(x, POW2).dequantize()
    x[2, 20] = math.nan
    decoded = quantize(x, POW2, amax=torch.tensor(4.0)).dequantize()
    assert torch.isnan(decoded[2, 16:32]).all()
    decoded[2, 16:32] = clean[2, 16:32]
    assert torch.equal(decoded, clean)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.label)
def test_zero_and_negative_zero_inputs(spec):
    x = torch.zeros(17, 33)
    x[::2] = -0.0
    q = quantize(x, spec, key=KEY)
    assert int(q.dequantize().abs().sum()) == 0
    if spec.is_fp4:
        assert int(q.codes.sum()) == 0


@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_IDS)
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.label)
def test_padding_is_zero_padding(spec, shape):
    """A ragged matrix has the codes of the same matrix padded by hand; sizes are remembered."""
    x = make_input("student_t3", shape, seed=5)
    padded = torch.zeros((256, 384), dtype=x.dtype)
    padded[: shape[0], : shape[1]] = x
    for columns in (False, True):
        q = quantize(x, spec, columns=columns, key=KEY)
        whole = quantize(padded, spec, columns=columns, key=KEY)
        rows, cols = (shape[1], shape[0]) if columns else shape
        assert q.shape == (
            rows,
            -(-cols // spec.hadamard) * spec.hadamard if spec.hadamard else cols,
        )
        assert_bitwise_equal(q.codes, whole.codes[:rows, : q.codes.shape[1]], "codes")
        if q.scales.numel() > 1:
            part = whole.scales[: q.scales.shape[0], : q.scales.shape[1]]
            assert_bitwise_equal(q.scales, part.contiguous(), "scales")
        amax = whole.amax[:rows] if spec.row_scaled else whole.amax
        assert_bitwise_equal(q.amax, amax, "amax")
        assert_bitwise_equal(
            q.dequantize(), whole.dequantize()[: q.shape[0], : q.shape[1]].contiguous()
        )


@pytest.mark.parametrize("kind", ["student_t3", "wide", "zeros", "tiny", "huge"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.label)
def test_given_amax_equals_own_amax(spec, kind):
    x = make_input(kind, (48, 64), seed=2)
    amax = operand_amax(x, spec)
    own, given = quantize(x, spec, key=KEY), quantize(x, spec, key=KEY, amax=amax)
    assert_bitwise_equal(own.codes, given.codes)
    assert_bitwise_equal(own.scales, given.scales)
    assert_bitwise_equal(own.amax, given.amax)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.label)
def test_empty_operands(spec):
    x = torch.zeros(0, 64, dtype=torch.bfloat16)
    width = max(64, spec.hadamard)
    assert quantize(x, spec, key=KEY).dequantize().shape == (0, width)
    assert quantize(x, spec, columns=True, key=KEY).dequantize().shape == (64, 0)
    assert int(operand_amax(x, spec).sum()) == 0


def test_amax_of_rows():
    x = torch.arange(1.0, 33.0).view(8, 4)
    assert operand_amax(x, NVFP4).tolist() == 32.0
    assert operand_amax(x, OperandSpec(format="nvfp4", row_scaled=True)).tolist() == [
        4.0 * row for row in range(1, 9)
    ]


def test_amax_of_a_rotated_operand_is_taken_after_rotation_and_bf16():
    x = make_input("outliers", (64, 48), seed=1)
    spec = OperandSpec(format="nvfp4", hadamard=16)
    for columns in (False, True):
        amax = operand_amax(x, spec, columns=columns)
        assert amax == amax.bfloat16().float()
        assert amax != x.abs().max().float()
        assert_bitwise_equal(amax, quantize(x, spec, columns=columns).amax)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.label)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_input_is_left_alone(spec, dtype):
    x = make_input("gaussian", (32, 128), seed=9, dtype=dtype)
    before = x.clone()
    quantize(x, spec, key=KEY)
    quantize(x, spec, columns=True, key=KEY)
    assert_bitwise_equal(x, before)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.label)
def test_uninitialised_memory_does_not_leak(spec, monkeypatch):
    x = make_input("gaussian", (40, 72), seed=4)
    clean = quantize(x, spec, key=KEY)
    real_empty, real_like = torch.empty, torch.empty_like

    def poison(t):
        return t.fill_(math.nan if t.is_floating_point() else 77)

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(real_empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(real_like(*a, **k)))
    dirty = quantize(x, spec, key=KEY)
    assert_bitwise_equal(clean.codes, dirty.codes)
    assert_bitwise_equal(clean.scales, dirty.scales)
    assert_bitwise_equal(clean.dequantize(), dirty.dequantize())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: quantize(torch.zeros(2, 3, 4), NVFP4), "are matrices"),
        (lambda: quantize(torch.zeros(2, 3, dtype=torch.int32), NVFP4), "are matrices"),
        (lambda: quantize(torch.zeros(2, 3), OperandSpec()), "is not quantized"),
        (
            lambda: quantize(torch.zeros(2, 3), OperandSpec(format="nvfp4", rounding="stochastic")),
            "pass key",
        ),
        (lambda: quantize(torch.zeros(2, 3), OperandSpec(format="fp8_delayed")), "DelayedScaling"),
        (
            lambda: quantize(
                torch.zeros(2, 32),
                OperandSpec(format="nvfp4", rounding="stochastic"),
                key=KEY,
                origin=(0, 8),
            ),
            "multiple of 16",
        ),
        (
            lambda: quantize(
                torch.zeros(2, 32), OperandSpec(format="nvfp4", hadamard=16), signs=torch.ones(8)
            ),
            "needs 16 signs",
        ),
        (lambda: quantize(torch.zeros(2, 3), NVFP4, implementation="cuda"), "no implementation"),
    ],
)
def test_wrong_arguments_name_rule_and_remedy(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_wrong_conversions_are_refused():
    q = quantize(torch.randn(4, 32), NVFP4)
    with pytest.raises(ValueError, match="do not transpose"):
        q.transposed()
    with pytest.raises(ValueError, match="decode exact"):
        quantize(torch.randn(4, 32), OperandSpec(format="mxfp4")).fp8_operand()
