# SPDX-License-Identifier: Apache-2.0
"""Operands that quantizers hand over decoded, two at once, or made from codes: the same values."""

import pytest
import torch

from fused_ops import cases
from fused_ops.formats import DecodedTensor, OperandSpec, QuantizedTensor
from fused_ops.quantize import (
    amax_pair,
    operand_amax,
    plain_amax,
    quantize,
    quantize_decoded,
    quantize_pair,
    requantize_columns,
    triton_backend,
)
from fused_ops.scaled_matmul import scaled_matmul
from fused_ops.scaled_matmul.hopper import decoded_form
from fused_ops.testing import assert_bitwise_equal, assert_close

KEYS = ((0xDEADBEEF, 0x01234567), (0x0BADCAFE, 0x76543210))


def nvfp4(**options):
    return OperandSpec(format="nvfp4", **options)


SPECS = {
    "1x16": nvfp4(),
    "1x16 sr": nvfp4(rounding="stochastic"),
    "1x16 rht sr": nvfp4(hadamard=16, rounding="stochastic"),
    "4over6": nvfp4(choice="4over6_mse"),
    "16x16": nvfp4(block=(16, 16)),
    "pow2 sr": nvfp4(scale="pow2", rounding="stochastic"),
    "pow2 rht sr": nvfp4(scale="pow2", hadamard=16, rounding="stochastic"),
    "pow2 rht two": nvfp4(scale="pow2", hadamard=16, choice="better_of_two"),
}
PAIRS = [
    ("1x16", nvfp4(hadamard=16)),
    ("1x16 sr", SPECS["1x16 rht sr"]),
    ("4over6", SPECS["pow2 rht two"]),
    ("pow2 sr", SPECS["pow2 rht sr"]),
]
each_spec = pytest.mark.parametrize("name", SPECS)
each_form = pytest.mark.parametrize("form", ["bf16", "fp8"])
each_direction = pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def in_form(form, x, spec, **options):
    if form == "codes":
        return quantize(x, spec, **options)
    return quantize_decoded(x, spec, form, **options)


def as_bytes(operand):
    if isinstance(operand, DecodedTensor):
        return operand.data.view(torch.uint8).cpu()
    return operand.codes.cpu()


def assert_same(got, want, what=""):
    """One operand against another: kind, bytes, amax, shape and counts."""
    assert type(got) is type(want), what
    assert got.shape == want.shape, what
    assert_bitwise_equal(as_bytes(got), as_bytes(want), f"{what} main")
    assert_bitwise_equal(got.amax.cpu(), want.amax.cpu(), f"{what} amax")
    if isinstance(want, QuantizedTensor):
        assert_bitwise_equal(got.scales.cpu(), want.scales.cpu(), f"{what} scales")
    if want.out_of_range is not None:
        assert_bitwise_equal(got.out_of_range.cpu(), want.out_of_range.cpu(), f"{what} range")


def test_ragged_products_round_what_is_to_be_rounded():
    """Off the FP8 cores too, decode fp8 rounds values that E4M3 does not hold: codes are decoded
    so, where a quantizer's bf16 form would be exact."""
    plain, pow2 = SPECS["1x16"], SPECS["pow2 sr"]
    for a, b, decode, whole, ragged in (
        (plain, plain, "exact", "bf16", "bf16"),
        (plain, plain, "fp8", "fp8", "codes"),
        (plain, pow2, "fp8", "fp8", "codes"),
        (pow2, pow2, "exact", "fp8", "bf16"),
        (pow2, pow2, "fp8", "fp8", "bf16"),
    ):
        assert decoded_form(a, b, (32, 48), decode) == whole
        assert decoded_form(a, b, (32, 50), decode) == ragged


@each_spec
def test_a_decoded_form_is_the_codes_decoded(name):
    """bf16 exactly; E4M3 as the rounded product, and exact for pow2."""
    spec = SPECS[name]
    x = cases.make_input("student_t3", (80, 48), 1)
    codes = quantize(x, spec, key=KEYS[0])
    bf16 = quantize_decoded(x, spec, "bf16", key=KEYS[0])
    assert bf16.shift == 0
    assert torch.equal(bf16.data[:, : codes.shape[1]], codes.unscaled())
    fp8 = quantize_decoded(x, spec, "fp8", key=KEYS[0])
    want, _ = codes.fp8_operand()
    assert torch.equal(fp8.data[:, : codes.shape[1]].float(), want.float())
    if spec.is_pow2:
        assert torch.equal(fp8.data.float() * 2.0**fp8.shift, bf16.data.float())
    for form in (bf16, fp8):
        assert not (form.data.float() == 0).logical_and(form.data.float().signbit()).any()


@devices
@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_products_of_decoded_forms(form, device):
    """A product of decoded operands is that of their codes, sums and alpha included."""
    decode = "fp8" if form == "fp8" else "exact"
    a, b = (cases.make_input("gaussian", shape, 3).to(device) for shape in ((64, 96), (32, 96)))
    spec = SPECS["4over6"]
    codes = [quantize(x, spec) for x in (a, b)]
    decoded = [quantize_decoded(x, spec, form) for x in (a, b)]
    want = scaled_matmul(*codes, out_dtype=torch.float32, decode=decode)
    for left, right in (decoded, (codes[0], decoded[1]), (decoded[0], codes[1])):
        got = scaled_matmul(left, right, out_dtype=torch.float32, decode=decode)
        assert_bitwise_equal(got, want, form)
    grad = torch.ones_like(want)
    scaled_matmul(*decoded, out_dtype=torch.float32, decode=decode, accumulate=grad)
    assert_close(grad, want + 1.0, "fp8_core_full" if form == "fp8" else "bf16_core_sum", form)


@pytest.mark.gpu
@each_direction
@each_form
@each_spec
def test_kernels_write_decoded_forms(name, form, columns):
    spec = SPECS[name]
    for kind in cases.KINDS:
        for shape in ((80, 272), (17, 33), (256, 256)):
            x = cases.make_input(kind, shape, 2)
            options = {"columns": columns, "key": KEYS[0]}
            want = quantize_decoded(x, spec, form, implementation="reference", **options)
            got = quantize_decoded(x.cuda(), spec, form, implementation="triton", **options)
            assert_same(got, want, f"{name} {kind} {shape}")


@pytest.mark.gpu
@pytest.mark.parametrize("forms", [("codes", "codes"), ("bf16", "codes"), ("fp8", "fp8")])
@pytest.mark.parametrize("pair", range(len(PAIRS)))
@pytest.mark.parametrize("implementation", ["triton", "cuda"])
def test_a_pair_is_its_two_operands(implementation, pair, forms):
    row, column = SPECS[PAIRS[pair][0]], PAIRS[pair][1]
    for kind in cases.KINDS:
        for shape in ((80, 272), (16, 16), (512, 1024)):
            x = cases.make_input(kind, shape, 4).cuda()
            amaxes = operand_amax(x, row), operand_amax(x, column, columns=True)
            options = {"origin": (32, 64), "forms": forms, "implementation": implementation}
            got = quantize_pair(x, row, column, amaxes=amaxes, keys=KEYS, **options)
            want = (
                in_form(forms[0], x, row, amax=amaxes[0], key=KEYS[0], origin=(32, 64)),
                in_form(
                    forms[1], x, column, columns=True, amax=amaxes[1], key=KEYS[1],
                    origin=(64, 32),
                ),
            )  # fmt: skip
            for g, w in zip(got, want):
                assert_same(g, w, f"{kind} {shape} {forms}")


@pytest.mark.gpu
@pytest.mark.parametrize("on_device", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("implementation", ["triton", "cuda"])
def test_each_key_of_a_pair_is_where_it_is(implementation, on_device):
    x = cases.make_input("laplace", (80, 272), 5).cuda()
    row, column = SPECS["pow2 sr"], SPECS["pow2 rht sr"]
    options = {"amaxes": amax_pair(x, column), "origin": (32, 64)}
    want = quantize_pair(x, row, column, keys=KEYS, implementation="reference", **options)
    pairs = zip(KEYS, on_device)
    keys = tuple(torch.tensor(k, device="cuda") if there else k for k, there in pairs)
    got = quantize_pair(x, row, column, keys=keys, implementation=implementation, **options)
    for g, w in zip(got, want):
        assert_same(g, w, str(on_device))


def test_a_pair_on_a_cpu_is_the_reference():
    x = cases.make_input("laplace", (32, 48), 5)
    row, column = SPECS["1x16 sr"], SPECS["1x16 rht sr"]
    amaxes = operand_amax(x, row), operand_amax(x, column, columns=True)
    got = quantize_pair(x, row, column, amaxes=amaxes, keys=KEYS, origin=(0, 16))
    want = quantize(x, column, columns=True, amax=amaxes[1], key=KEYS[1], origin=(16, 0))
    assert_same(got[1], want)
    assert triton_backend.pair_supports(x, row, column) is not None


@devices
def test_two_amaxes_of_one_read(device):
    for kind in cases.KINDS:
        x = cases.make_input(kind, (80, 272), 6).to(device)
        for spec in (nvfp4(hadamard=16), nvfp4(), SPECS["pow2 rht sr"]):
            plain, rotated = amax_pair(x, spec)
            assert_bitwise_equal(plain.cpu(), operand_amax(x.cpu(), nvfp4()), kind)
            want = operand_amax(x.cpu(), spec, columns=True)
            assert_bitwise_equal(rotated.cpu(), want, kind)


@devices
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_an_amax_raises_the_flag(value, device):
    x = cases.make_input("gaussian", (80, 272), 6).to(device)
    for broken in (False, True):
        x[70, 3] = value if broken else 1.0
        for spec in (nvfp4(hadamard=16), SPECS["pow2 rht sr"], None):
            flag = torch.zeros((), dtype=torch.bool, device=device)
            plain_amax(x, flag) if spec is None else amax_pair(x, spec, None, flag)
            assert bool(flag) is broken


@devices
@pytest.mark.parametrize("source", ["4over6", "16x16"])
@pytest.mark.parametrize("form", ["codes", "fp8"])
def test_requantizing_from_codes_is_quantizing_what_they_decode_to(source, form, device):
    own = nvfp4(scale="pow2", choice="better_of_two")
    for kind in cases.KINDS:
        codes = quantize(cases.make_input(kind, (96, 272), 7).to(device), SPECS[source])
        amax = codes.amax * 2.0
        chosen = "triton" if device == "cuda" else "reference"
        got = requantize_columns(codes, own, amax, form=form, implementation=chosen)
        on_cpu = codes.dequantize().cpu()
        want = in_form(form, on_cpu, own, columns=True, amax=amax.cpu())
        assert_same(got, want, f"{kind} {source}")
        assert int(want.out_of_range[0]) == 0, "twice the forward's amax is above every block"


def test_the_bound_of_a_rotated_amax_is_one():
    """No rotated block lies above the range that the bound sets, whatever the data."""
    for size in (16, 32, 64, 128):
        spec = nvfp4(scale="pow2", hadamard=size)
        x = torch.full((size, 128), 3.0).bfloat16()
        signs = torch.randint(0, 2, (size,)) * 2 - 1
        x *= signs.view(-1, 1)  # all of a column's terms add up in its first rotated value
        amax = operand_amax(x, spec, columns=True, signs=signs)
        q = quantize(x, spec, columns=True, amax=amax, signs=signs)
        assert int(q.out_of_range[0]) == 0
        assert float(amax) >= float(x.abs().max()) * size**0.5
