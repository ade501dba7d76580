# SPDX-License-Identifier: Apache-2.0
"""Every quantizer against a second definition in plain Python, element by element."""

import itertools
from fractions import Fraction

import pytest
import torch

from fused_ops.cases import make_input
from fused_ops.codecs import decode_fp8, unpack_nibbles
from fused_ops.formats import OperandSpec
from fused_ops.quantize import DelayedScaling, operand_amax, quantize
from fused_ops.quantize.ms_eden import fma, stochastic_e4m3
from fused_ops.quantize.philox import dither_24, dither_bytes, philox4x32
from fused_ops.quantize.reference_mx import inverse_e8m0
from fused_ops.quantize.reference_pow2 import ceil_exponent, power
from fused_ops.quantize.rounding import Dither, round_e2m1_
from tests.fused_ops import plain_python as plain

KEY = (0xDEADBEEF, 0x12345678)
CPU = torch.device("cpu")
KINDS = ["gaussian", "student_t3", "wide", "ties", "zero_blocks", "tiny"]


def fractions(x):
    return [[Fraction(v) for v in row] for row in x.float().tolist()]


def blocks(x, width):
    """(row, block, values) of every 1 x width block."""
    for r, row in enumerate(fractions(x)):
        for c in range(0, len(row), width):
            yield r, c // width, row[c : c + width]


def codes_of(q):
    return unpack_nibbles(q.codes) if q.spec.is_fp4 else q.codes


def compare(x, spec, define, **options):
    """define(values, row, block) -> (codes, scale byte), for every block of the result."""
    q = quantize(x, spec, **options)
    width = spec.block[1]
    codes = codes_of(q)
    for row, block, values in blocks(x, width):
        expected_codes, expected_scale = define(values, row, block)
        got = codes[row, block * width : (block + 1) * width].tolist()
        assert (got, q.scales[row, block].item()) == (expected_codes, expected_scale), (row, block)


@pytest.mark.parametrize("kind", KINDS)
def test_nvfp4(kind):
    x = make_input(kind, (6, 64), seed=1)
    amax = Fraction(operand_amax(x, OperandSpec(format="nvfp4")).item())
    compare(x, OperandSpec(format="nvfp4"), lambda v, r, b: plain.nvfp4_block(v, amax))


def test_nvfp4_of_fp32_input():
    x = make_input("student_t3", (6, 64), seed=3, dtype=torch.float32)
    amax = Fraction(x.abs().max().item())
    compare(x, OperandSpec(format="nvfp4"), lambda v, r, b: plain.nvfp4_block(v, amax))


def test_nvfp4_row_scaled():
    x = make_input("student_t3", (6, 64), seed=4)
    amaxes = [max(abs(v) for v in row) for row in fractions(x)]
    spec = OperandSpec(format="nvfp4", row_scaled=True)
    compare(x, spec, lambda v, r, b: plain.nvfp4_block(v, amaxes[r]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("choice", ["4over6_mae", "4over6_mse"])
def test_four_over_six(kind, choice):
    x = make_input(kind, (2, 64), seed=6)
    amax = Fraction(x.float().abs().max().item())
    compare(
        x,
        OperandSpec(format="nvfp4", choice=choice),
        lambda v, r, b: plain.four_over_six_block(v, amax, choice == "4over6_mse"),
    )


@pytest.mark.parametrize("kind", ["gaussian", "student_t3", "wide", "zero_blocks"])
def test_ms_eden(kind):
    x = make_input(kind, (6, 64), seed=7)
    amax = Fraction(x.float().abs().max().item())

    def define(values, row, block):
        word = plain.philox((row + 5, block + 2, 0, 0), KEY)[0]
        return plain.ms_eden_block(values, amax, word)

    spec = OperandSpec(format="nvfp4", rounding="ms_eden")
    compare(x, spec, define, key=KEY, origin=(5, 32))


def test_fma_has_one_rounding():
    """Random operands, and sums that fp64 rounds onto the middle between two fp32 numbers."""
    generator = torch.Generator().manual_seed(0)
    shape = (4000,)
    exponents = torch.randint(-20, 20, (3, *shape), generator=generator).float()
    a, b, c = torch.randn((3, *shape), generator=generator) * torch.exp2(exponents)
    a = torch.cat([a, torch.tensor([1.0, 1.0, 1.0, -1.0])])
    b = torch.cat([b, torch.tensor([2.0**-60, -(2.0**-60), 2.0**-24, 2.0**-60])])
    c = torch.cat([c, torch.tensor([1.0 + 2.0**-23, 1.0, 1.0, 1.0])])
    middle = torch.tensor(1.0 + 2.0**-12)
    a, b = torch.cat([a, middle.view(1)]), torch.cat([b, middle.view(1)])
    c = torch.cat([c, torch.tensor([2.0**-70])])
    for x, y, z, got in zip(a.tolist(), b.tolist(), c.tolist(), fma(a, b, c).tolist()):
        assert got == float(plain.f32(Fraction(x) * Fraction(y) + Fraction(z)))


def test_stochastic_e4m3_over_all_scales():
    """Between all neighbouring E4M3 values, at 20-bit dithers around the threshold."""
    values = [float(v) for v, _ in plain.FP8_TABLES["e4m3"]]
    rows = []
    for lower, (low, high) in enumerate(itertools.pairwise(values)):
        for part in (0.0, 0.25, 0.625):
            threshold = round((1 - part) * 2**20)
            for bits in {0, threshold - 1, min(threshold, 2**20 - 1), 2**20 - 1}:
                up = part + bits / 2**20 >= 1
                rows.append((low + (high - low) * part, bits, lower + up))
    x, bits, expected = zip(*rows, strict=True)
    got = stochastic_e4m3(torch.tensor(x), torch.tensor(bits, dtype=torch.int32))
    assert got.tolist() == list(expected)
    assert stochastic_e4m3(torch.tensor([460.0]), torch.tensor([2**20 - 1]).int()) == 0x7E


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("kind", ["gaussian", "wide", "denormal", "zeros"])
def test_mxfp8(kind, element):
    spec = OperandSpec(format="mxfp8", element=element)
    x = make_input(kind, (4, 64), seed=8).abs()
    compare(x, spec, lambda v, r, b: plain.mx_block(v, element))


@pytest.mark.parametrize("kind", KINDS)
def test_mxfp4(kind):
    x = make_input(kind, (6, 64), seed=9)
    compare(x, OperandSpec(format="mxfp4"), lambda v, r, b: plain.mx_block(v, "e2m1"))


def test_mx_over_all_scales():
    """One block for every E8M0 scale that a float32 amax can give."""
    exponents = torch.arange(-126, 128, dtype=torch.float32).view(-1, 1)
    x = torch.randn((254, 32), generator=torch.Generator().manual_seed(1))
    x = x.clamp(-1.9, 1.9) * torch.exp2(exponents)
    for name, element in (("mxfp4", "e2m1"), ("mxfp8", "e4m3")):
        q = quantize(x, OperandSpec(format=name))
        for row in range(0, 254, 7):
            codes, scale = plain.mx_block([Fraction(v) for v in x[row].tolist()], element)
            got = [c & 0x7F if c & 0x7F == 0 else c for c in codes_of(q)[row].tolist()]
            assert (got, q.scales[row].item()) == (
                [c & 0x7F if c & 0x7F == 0 else c for c in codes],
                scale,
            )
    inverse = inverse_e8m0(torch.arange(256, dtype=torch.uint8)).double()
    assert inverse[:255].tolist() == [2.0 ** (127 - code) for code in range(255)]
    assert torch.isnan(inverse[255])


@pytest.mark.parametrize("better", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_pow2(kind, better):
    x = make_input(kind, (6, 64), seed=10)
    amax = Fraction(x.float().abs().max().item())
    shift = max(-120, min(116, plain.pow2_exponent(amax) - 8))
    spec = OperandSpec(format="nvfp4", scale="pow2", choice="better_of_two" if better else None)

    def define(values, row, block):
        codes, exponent = plain.pow2_block(values, shift, better)
        return codes, exponent - shift + 7 << 3

    compare(x, spec, define)
    assert quantize(x, spec).amax == 2688 * 2.0**shift


def test_pow2_exponent_over_all_scales():
    """The smallest power of two that maps to at most 6, at every boundary and one ulp beside it."""
    middle = torch.tensor([6 * 2.0**e for e in range(-128, 125)])
    infinity = torch.tensor(float("inf"))
    x = torch.cat([middle, middle.nextafter(infinity), middle.nextafter(-infinity)])
    expected = [plain.pow2_exponent(Fraction(v)) for v in x.tolist()]
    assert ceil_exponent(x).tolist() == expected
    assert power(torch.arange(-126, 128, dtype=torch.int32)).tolist() == [
        2.0**e for e in range(-126, 128)
    ]


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("kind", ["gaussian", "wide", "huge", "denormal", "zeros"])
@pytest.mark.parametrize("scale", ["fp32", "pow2"])
def test_fp8_tensorwise(kind, element, scale):
    x = make_input(kind, (6, 40), seed=11).abs()
    q = quantize(x, OperandSpec(format="fp8_tensorwise", element=element, scale=scale))
    values = [v for row in fractions(x) for v in row]
    codes, encode = plain.fp8_scaled(values, max(values), element, scale == "pow2")
    assert q.codes.flatten().tolist() == codes
    assert q.scales.item() == float(plain.f32(1 / encode))


@pytest.mark.parametrize("scale", ["fp32", "pow2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["gaussian", "wide", "denormal", "zero_blocks"])
def test_fp8_blockwise(kind, dtype, scale):
    x = make_input(kind, (3, 256), seed=12).abs().to(dtype)
    q = quantize(x, OperandSpec(format="fp8_blockwise", scale=scale))
    largest = Fraction(torch.finfo(dtype).max)
    for row, block, values in blocks(x, 128):
        codes, encode = plain.fp8_scaled(values, max(values), pow2=scale == "pow2", largest=largest)
        assert q.codes[row, block * 128 : (block + 1) * 128].tolist() == codes
        assert q.scales[row, block].item() == float(plain.f32(1 / encode))


def test_tiles_share_the_scale_of_their_largest_element():
    x = make_input("student_t3", (48, 64), seed=13)
    for spec, small in (
        (OperandSpec(format="nvfp4", block=(16, 16)), OperandSpec(format="nvfp4")),
        (OperandSpec(format="mxfp4", block=(32, 32)), OperandSpec(format="mxfp4")),
    ):
        side = spec.block[1]
        tiles = quantize(x, spec).scales
        lines = quantize(x, small).scales
        padded = torch.zeros((-(-48 // side) * side, lines.shape[1]), dtype=torch.uint8)
        padded[:48] = lines
        assert torch.equal(tiles, padded.view(-1, side, lines.shape[1]).amax(1))


def test_philox_known_answers():
    """The vectors that Random123 publishes."""
    rows = [
        ((0,) * 4, (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ]
    for counter, key, words in rows:
        expected = [int(word, 16) for word in words.split()]
        tensors = tuple(torch.tensor(c) for c in counter)
        assert [int(w) for w in philox4x32(tensors, key)] == expected
        assert [int(w) for w in philox4x32(tensors, torch.tensor(key))] == expected
        assert plain.philox(counter, key) == expected


def test_dither_is_keyed_by_global_row_and_column():
    got = dither_bytes(5, 48, KEY, (7, 32), CPU).tolist()
    assert got == [[plain.dither_byte(7 + r, 32 + c, KEY) for c in range(48)] for r in range(5)]
    got = dither_24(5, 48, KEY, (7, 32), CPU).tolist()
    assert got == [[plain.dither_24(7 + r, 32 + c, KEY) for c in range(48)] for r in range(5)]


def test_stochastic_rounding_over_all_dithers(monkeypatch):
    """All 256 bytes at the grid, between it, beside thresholds, and above the largest value."""
    grid = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    points = [low + (high - low) * part / 256 for low, high in itertools.pairwise(grid)
              for part in (0, 1, 77, 255)] + [6.0, 6.5, 1e30]  # fmt: skip
    x = torch.tensor([s * p for p in points for s in (1, -1)]).repeat(256, 1)
    every = torch.arange(256, dtype=torch.uint8).view(-1, 1).expand(x.shape)
    monkeypatch.setattr("fused_ops.quantize.rounding.dither_bytes", lambda *a: every)
    codes = round_e2m1_(x.clone(), "stochastic", Dither(KEY)).tolist()
    for byte in range(256):
        u = Fraction(byte, 256)
        assert codes[byte] == [plain.e2m1_stochastic(Fraction(v), u) for v in x[0].tolist()]


def test_exact_stochastic_rounding_uses_24_bits():
    x = make_input("gaussian", (8, 64), seed=14, dtype=torch.float32) * 2
    codes = round_e2m1_(x.clone(), "stochastic_exact", Dither(KEY, (3, 16))).tolist()
    for r, row in enumerate(fractions(x)):
        for c, value in enumerate(row):
            u = Fraction(plain.dither_24(3 + r, 16 + c, KEY), 2**24)
            assert codes[r][c] == plain.e2m1_stochastic(value, u)


def test_delayed_scaling_follows_its_history():
    state = DelayedScaling(history_length=3, margin=1)
    spec = OperandSpec(format="fp8_delayed")
    x = torch.tensor([[1.0, -448.0, 500.0, 3.0]])
    first = quantize(x, spec, amax=state.amax)
    assert first.tensor_scale == 1.0
    assert first.out_of_range.tolist() == [1, 0]
    used = []
    for amax in (7.0, 3.0, 0.0, 0.0, 0.0, float("nan"), 2.0):
        state.observe(torch.tensor(amax / 2))
        state.observe(torch.tensor(amax))
        state.update()
        used.append(float(state.amax) / 2)
    assert used[:5] == [7.0, 7.0, 7.0, 3.0, 3.0]
    assert used[5:] == [3.0, 2.0], "a step that was not finite holds the scale for itself alone"
    q = quantize(x, spec, amax=state.amax)
    scale = 448 / 2 / 2
    assert q.tensor_scale.item() == pytest.approx(1 / scale, rel=1e-6)
    assert decode_fp8(q.codes)[0, 0] == 112.0
    copy = DelayedScaling(history_length=3, margin=1)
    place = copy.history.data_ptr()
    copy.load_state_dict(state.state_dict())
    assert copy.history.data_ptr() == place, "recorded launches know where it is"
    for each in (state, copy):
        each.observe(torch.tensor(9.0))
        each.update()
    assert torch.equal(copy.history, state.history)
    assert copy.amax == state.amax
    latest = DelayedScaling(history_length=4, algorithm="most_recent")
    for amax in (8.0, 2.0):
        latest.observe(torch.tensor(amax))
        latest.update()
    assert latest.amax == 2.0


def test_delayed_scaling_refuses_wrong_settings():
    with pytest.raises(ValueError, match="algorithm is max or most_recent") as error:
        DelayedScaling("e2m1", history_length=0, algorithm="mean")
    assert len(error.value.problems) == 3
    with pytest.raises(ValueError, match="set history_length"):
        DelayedScaling(history_length=3).load_state_dict(DelayedScaling().state_dict())
