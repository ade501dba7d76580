# SPDX-License-Identifier: Apache-2.0
"""Bits of the number formats, packing, scale layout, and what an OperandSpec accepts."""

import itertools
import math
from fractions import Fraction

import pytest
import torch

from fused_ops import codecs
from fused_ops.codecs import (
    decode_e2m1,
    decode_e8m0,
    decode_fp8,
    encode_e2m1,
    encode_e8m0_up,
    encode_fp8,
    nearest_e2m1_,
    pack_nibbles,
    swizzle_scales,
    unpack_nibbles,
    unswizzle_scales,
)
from fused_ops.errors import ConfigError
from fused_ops.formats import FORMATS, OperandSpec
from fused_ops.testing import assert_bitwise_equal
from tests.fused_ops import plain_python as plain

ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def neighbours(value):
    """A float32 value and the float32 numbers next to it."""
    x = torch.tensor(value, dtype=torch.float32)
    return [
        float(torch.nextafter(x, torch.tensor(-math.inf))),
        float(x),
        float(torch.nextafter(x, torch.tensor(math.inf))),
    ]


def critical_values(table):
    """Every value of a grid, every midpoint, and their float32 neighbours, both signs."""
    values = [float(value) for value, _ in table]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(values)]
    points = [p for v in values + middles for p in neighbours(v)]
    return torch.tensor(sorted({sign * p for p in points for sign in (1, -1)}))


def test_e2m1_rounds_every_value_tie_and_neighbour():
    x = torch.cat([critical_values(plain.E2M1_TABLE), torch.tensor([7.0, 1e30, -1e30, 8.0, 1e-45])])
    expected = torch.tensor([plain.e2m1_code(Fraction(v)) for v in x.tolist()], dtype=torch.uint8)
    assert_bitwise_equal(encode_e2m1(x), expected, "E2M1 codes")
    values = torch.tensor([float(plain.e2m1_value(c)) for c in expected.tolist()])
    assert torch.equal(nearest_e2m1_(x.clone()), values)


def test_e2m1_infinity_and_negative_zero():
    x = torch.tensor([math.inf, -math.inf, -0.0, 0.0, -0.2, -0.25])
    assert encode_e2m1(x).tolist() == [7, 15, 0, 0, 0, 0]


def test_e2m1_leaves_its_input_alone():
    x = torch.randn(64)
    before = x.clone()
    encode_e2m1(x)
    assert_bitwise_equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decode_of_all_packed_bytes(dtype):
    decoded = decode_e2m1(ALL_BYTES, dtype).double()
    expected = [float(plain.e2m1_value(n)) for b in range(256) for n in (b & 15, b >> 4)]
    assert decoded.tolist() == expected


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_fp8_all_codes_decode_and_come_back(element):
    decoded = decode_fp8(ALL_BYTES, element)
    for code, value in enumerate(decoded.tolist()):
        expected = plain.fp8_value(code, element)
        if expected is None:
            assert math.isnan(value)
        elif expected == plain.INF:
            assert math.isinf(value)
        else:
            assert value == float(expected)
    finite = torch.isfinite(decoded)
    assert_bitwise_equal(encode_fp8(decoded[finite], element), ALL_BYTES[finite])


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_fp8_rounds_every_tie_and_saturates(element):
    top = codecs.ELEMENT_MAX[element]
    x = critical_values(plain.FP8_TABLES[element])
    x = torch.cat([x, torch.tensor([top * 1.04, top * 1.07, 1e30, -1e30, math.inf, -math.inf])])
    got = encode_fp8(x, element)
    sign = torch.signbit(x)
    for value, code, negative in zip(x.tolist(), got.tolist(), sign.tolist()):
        capped = Fraction(max(-top, min(top, value)))
        assert code & 0x7F == plain.nearest_code(capped, plain.FP8_TABLES[element]), value
        assert code >> 7 == negative
    assert encode_fp8(torch.tensor([math.nan]), element).item() & 0x7F == 0x7F


def test_torch_casts_still_need_the_clamp():
    """If this fails torch has changed, and the clamp in encode_fp8 may have become needless."""
    assert math.isnan(torch.tensor(464.1).to(torch.float8_e4m3fn).float())
    assert math.isinf(torch.tensor(61440.0).to(torch.float8_e5m2).float())


def test_e8m0_rounds_up_over_all_scales():
    powers = [2.0**e for e in range(-149, 128)]
    x = torch.tensor([v for p in powers for v in neighbours(p) if 0 <= v < math.inf])
    expected = torch.tensor([plain.e8m0_up(Fraction(v)) for v in x.tolist()], dtype=torch.uint8)
    assert_bitwise_equal(encode_e8m0_up(x), expected, "E8M0 codes")
    special = torch.tensor([0.0, math.inf, math.nan, torch.finfo(torch.float32).max])
    assert encode_e8m0_up(special).tolist() == [0x00, 0xFE, 0xFF, 0xFE]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_e8m0_decodes_all_codes(dtype):
    decoded = decode_e8m0(ALL_BYTES, dtype).double().tolist()
    assert decoded[:255] == [2.0 ** (code - 127) for code in range(255)]
    assert math.isnan(decoded[255])


def test_even_column_is_the_low_nibble():
    codes = torch.randint(0, 16, (5, 32), dtype=torch.uint8)
    packed = pack_nibbles(codes)
    assert_bitwise_equal(packed, codes[:, ::2] | codes[:, 1::2] << 4)
    assert_bitwise_equal(unpack_nibbles(packed), codes)


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (128, 4), (130, 5), (300, 17), (32, 8)])
def test_swizzle_follows_its_formula_and_comes_back(rows, blocks):
    scales = torch.randint(1, 256, (rows, blocks), dtype=torch.uint8)
    flat = swizzle_scales(scales)
    width = -(-blocks // 4) * 4
    seen = torch.zeros_like(flat)
    for r in range(rows):
        for c in range(blocks):
            tile = (r // 128) * (width // 4) + c // 4
            place = tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
            assert flat[place] == scales[r, c]
            seen[place] = 1
    assert int(flat[seen == 0].sum()) == 0
    assert_bitwise_equal(unswizzle_scales(flat, rows, blocks), scales)


def test_unswizzle_refuses_a_cut_buffer():
    with pytest.raises(ValueError, match="512 bytes, got 508"):
        unswizzle_scales(torch.zeros(508, dtype=torch.uint8), 3, 3)


def test_defaults_by_format():
    spec = OperandSpec(format="nvfp4")
    assert (spec.element, spec.block, spec.scale) == ("e2m1", (1, 16), "e4m3")
    assert OperandSpec(format="fp8_blockwise").scale == "pow2"
    assert OperandSpec(format="mxfp8").block == (1, 32)
    assert OperandSpec().is_high_precision
    assert all(OperandSpec(format=name).format == name for name in FORMATS)
    assert OperandSpec(format="nvfp4", block=[16, 16]) == OperandSpec(format="nvfp4", block="16x16")


@pytest.mark.parametrize(
    ("fields", "numerator"),
    [
        ({}, 2688),
        ({"choice": "4over6_mse"}, 1536),
        ({"choice": "4over6_mae"}, 1536),
        ({"rounding": "ms_eden", "hadamard": 128}, 1536),
        ({"scale": "pow2", "choice": "better_of_two"}, 2688),
        ({"rounding": "stochastic"}, 2688),
    ],
)
def test_numerator_belongs_to_the_quantizer(fields, numerator):
    assert OperandSpec(format="nvfp4", **fields).numerator == numerator


def test_unknown_format_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean nvfp4"):
        OperandSpec(format="nvpf4")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"format": "nvfp4", "block": (1, 32)}, "block is one of"),
        ({"format": "nvfp4", "element": "e4m3"}, "element is one of"),
        ({"format": "nvfp4", "scale": "e8m0"}, "scale is one of"),
        ({"format": "nvfp4", "rounding": "up"}, "rounding is one of"),
        ({"format": "nvfp4", "hadamard": 24}, "hadamard is one of"),
        ({"format": "nvfp4", "choice": "best"}, "choice is one of"),
        ({"format": "nvfp4", "source": "input"}, "source is one of"),
        ({"format": "nvfp4", "signs": "step"}, "without a hadamard"),
        ({"format": "nvfp4", "choice": "4over6_mse", "hadamard": 16}, "no hadamard"),
        ({"format": "nvfp4", "choice": "4over6_mse", "rounding": "stochastic"}, "nearest"),
        ({"format": "nvfp4", "choice": "4over6_mse", "scale": "pow2"}, "e4m3 scales"),
        ({"format": "nvfp4", "choice": "better_of_two"}, "pow2 scales"),
        ({"format": "nvfp4", "rounding": "ms_eden", "block": (16, 16)}, "1x16"),
        ({"format": "mxfp4", "row_scaled": True}, "row_scaled needs"),
        ({"format": "mxfp8", "rounding": "stochastic"}, "4-bit elements"),
        ({"format": "bf16", "hadamard": 16}, "high-precision"),
    ],
)
def test_impossible_specs_are_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        OperandSpec(**fields)


def test_all_problems_are_reported_at_once():
    with pytest.raises(ConfigError) as error:
        OperandSpec(format="nvfp4", block=(1, 32), rounding="up", hadamard=3)
    assert len(error.value.problems) == 3
    assert all("got" in problem and ":" in problem for problem in error.value.problems)


def test_labels_tell_specs_apart():
    label = OperandSpec(format="nvfp4", scale="pow2", hadamard=16, rounding="stochastic").label
    assert label == "nvfp4 1x16 pow2 hadamard16 stochastic"
