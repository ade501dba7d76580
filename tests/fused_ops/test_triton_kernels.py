# SPDX-License-Identifier: Apache-2.0
"""Triton quantizers on a GPU: every byte is the CPU reference's, on outputs poisoned before."""

from pathlib import Path

import pytest
import torch

from fused_ops import cases
from fused_ops.formats import OperandSpec
from fused_ops.quantize import (
    operand_amax,
    quantize,
    quantize_pair,
    triton_backend,
    triton_launch,
)
from fused_ops.scaled_matmul import scaled_matmul
from fused_ops.testing import assert_bitwise_equal, assert_close
from tools import check_vectors

KEY = (0xDEADBEEF, 0x01234567)
VECTORS = Path(__file__).parents[1] / "data" / "nvfp4_vectors_small.npz"


def nvfp4(**options):
    return OperandSpec(format="nvfp4", **options)


SPECS = {
    "1x16": nvfp4(),
    "1x16 sr": nvfp4(rounding="stochastic"),
    "1x16 rht": nvfp4(hadamard=16),
    "1x16 rht sr": nvfp4(hadamard=16, rounding="stochastic"),
    "1x16 eden": nvfp4(rounding="ms_eden"),
    "1x16 rht eden": nvfp4(hadamard=16, rounding="ms_eden"),
    "4over6 mse": nvfp4(choice="4over6_mse"),
    "4over6 mae": nvfp4(choice="4over6_mae"),
    "16x16": nvfp4(block=(16, 16)),
    "16x16 sr": nvfp4(block=(16, 16), rounding="stochastic"),
    "pow2": nvfp4(scale="pow2"),
    "pow2 sr": nvfp4(scale="pow2", rounding="stochastic"),
    "pow2 rht sr": nvfp4(scale="pow2", hadamard=16, rounding="stochastic"),
    "pow2 two": nvfp4(scale="pow2", choice="better_of_two"),
    "pow2 rht two": nvfp4(scale="pow2", hadamard=16, choice="better_of_two"),
    "pow2 16x16": nvfp4(scale="pow2", block=(16, 16)),
}
FAST = ["1x16", "1x16 rht sr", "4over6 mse", "16x16", "pow2 sr", "pow2 rht two"]

each_spec = pytest.mark.parametrize("name", SPECS)
each_direction = pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """New tensors of the back end are full of NaN bytes."""
    empty = torch.empty

    def full(*args, **kwargs):
        out = empty(*args, **kwargs)
        out.view(torch.uint8).fill_(0xFF) if out.dim() else out.fill_(float("nan"))
        return out

    monkeypatch.setattr(torch, "empty", full)


def compare(x, spec, *, what="", check_codes=True, **options):
    if spec.is_random:
        options.setdefault("key", KEY)
    want = quantize(x, spec, implementation="reference", **options)
    got = quantize(x.cuda(), spec, implementation="triton", **options)
    assert got.shape == want.shape
    if not (torch.isnan(got.amax) and torch.isnan(want.amax)):  # any NaN will do
        assert_bitwise_equal(got.amax.cpu(), want.amax, f"{what} amax")
    assert_bitwise_equal(got.scales.cpu(), want.scales, f"{what} scales")
    if check_codes:
        assert_bitwise_equal(got.codes.cpu(), want.codes, f"{what} codes")
    if want.out_of_range is not None:
        assert_bitwise_equal(got.out_of_range.cpu(), want.out_of_range, f"{what} out of range")
    return got, want


@pytest.mark.gpu
@each_direction
@each_spec
def test_every_kind_of_data(name, columns):
    for kind in cases.KINDS:
        compare(cases.make_input(kind, (80, 272), 1), SPECS[name], columns=columns, what=kind)


@pytest.mark.gpu
@each_direction
@each_spec
def test_ugly_shapes(name, columns):
    for shape in cases.SHAPES:
        x = cases.make_input("student_t3", shape, 2)
        compare(x, SPECS[name], columns=columns, what=str(shape))


@pytest.mark.gpu
@each_direction
@pytest.mark.parametrize("name", FAST)
def test_fp32_input(name, columns):
    assert torch.float32 in triton_launch.INPUTS
    for shape in ((130, 250), (64, 128)):
        x = cases.make_input("wide", shape, 3, torch.float32)
        compare(x, SPECS[name], columns=columns, what=str(shape))


@pytest.mark.gpu
@each_direction
@pytest.mark.parametrize("name", ["1x16 rht sr", "1x16 rht eden", "pow2 rht sr", "16x16 sr"])
def test_origin_amax_signs_and_keys(name, columns):
    spec, x = SPECS[name], cases.make_input("outliers", (96, 64), 4)
    options = {"origin": (2**31 + 48, 4096), "amax": torch.tensor(7.25), "columns": columns}
    if spec.hadamard:
        options["signs"] = torch.randint(0, 2, (16,)) * 2 - 1
    got, _ = compare(x, spec, **options)
    key = torch.tensor(KEY, device="cuda")
    again = quantize(x.cuda(), spec, implementation="triton", key=key, **options)
    assert_bitwise_equal(again.codes, got.codes, "key on the device")


@pytest.mark.gpu
def test_parts_equal_the_whole():
    x = cases.make_input("laplace", (64, 256), 5).cuda()
    spec, amax = SPECS["1x16 sr"], torch.tensor(9.0)
    whole = quantize(x, spec, key=KEY, amax=amax, implementation="triton")
    part = quantize(
        x[32:, 128:], spec, key=KEY, amax=amax, origin=(32, 128), implementation="triton"
    )
    assert_bitwise_equal(part.codes, whole.codes[32:, 64:].contiguous())


@pytest.mark.gpu
@each_direction
@each_spec
def test_not_finite(name, columns):
    spec = SPECS[name]
    for value in (float("nan"), float("inf"), -float("inf")):
        x = cases.make_input("gaussian", (48, 64), 6)
        x[17, 33] = value
        if spec.block == (16, 16) or not spec.is_pow2:
            compare(x, spec, columns=columns, check_codes=False, what=str(value))
            continue
        got, want = compare(x, spec, columns=columns, check_codes=False, what=str(value))
        good = want.scales.repeat_interleave(8, 1) != 0x7F
        assert_bitwise_equal(got.codes.cpu()[good], want.codes[good], f"{value} other blocks")


@pytest.mark.gpu
@each_direction
@pytest.mark.parametrize("name", ["1x16", "1x16 rht", "16x16", "pow2 rht two"])
def test_operand_amax(name, columns):
    for kind in cases.KINDS:
        for shape in ((80, 272), (17, 33), (1, 1)):
            x = cases.make_input(kind, shape, 7)
            got = operand_amax(x.cuda(), SPECS[name], columns=columns)
            assert_bitwise_equal(got.cpu(), operand_amax(x, SPECS[name], columns=columns), kind)
    x[0, 0] = float("nan")
    assert torch.isnan(operand_amax(x.cuda(), SPECS[name], columns=columns))


@pytest.mark.gpu
@each_direction
@pytest.mark.parametrize(
    "options",
    [{}, {"element": "e5m2"}, {"scale": "pow2"}, {"format": "fp8_delayed", "element": "e5m2"}],
)
def test_casts_to_fp8(options, columns):
    spec = OperandSpec(**({"format": "fp8_tensorwise"} | options))
    for kind in cases.KINDS:
        for shape in ((80, 272), (17, 33), (300, 500)):
            x = cases.make_input(kind, shape, 7)
            amax = operand_amax(x, spec) / 3.0 if spec.format == "fp8_delayed" else None
            arguments = {"columns": columns, "amax": amax}
            want = quantize(x, spec, implementation="reference", **arguments)
            got = quantize(x.cuda(), spec, implementation="triton_fp8", **arguments)
            assert_bitwise_equal(got.codes.cpu(), want.codes, f"{kind} {shape} codes")
            assert_bitwise_equal(got.scales.cpu(), want.scales, f"{kind} {shape} scales")
            if want.out_of_range is not None:
                assert_bitwise_equal(got.out_of_range.cpu(), want.out_of_range, kind)
            both = quantize_pair(
                x.cuda(), spec, spec, amaxes=(got.amax, got.amax), forms=("codes", "codes")
            )
            assert_bitwise_equal(both[columns].codes.cpu(), want.codes, f"{kind} {shape} pair")


@pytest.mark.gpu
def test_stored_vectors():
    arrays = check_vectors.load(str(VECTORS))
    groups = check_vectors.group(arrays)
    pairs = [(c, t) for c, tags in groups.items() for t in tags if t and "gemm" not in c]
    seen = 0
    for case, tag in pairs:
        spec, columns = check_vectors.parse_tag(tag)
        x = check_vectors.to_tensor(arrays[f"{case}.x"], f"{case}.x").cuda()
        if triton_backend.supports(x, spec, columns=columns) is not None:
            continue
        seen += 1
        q = quantize(x, spec, columns=columns, implementation="triton")
        stored = {p: torch.from_numpy(arrays[f"{case}.{tag}.{p}"]) for p in check_vectors.PARTS}
        assert_bitwise_equal(q.codes.cpu(), stored["codes"], f"{case}.{tag} codes")
        assert_bitwise_equal(q.row_scales().cpu(), stored["scales"], f"{case}.{tag} scales")
        assert_bitwise_equal(q.amax.view(1).cpu(), stored["amax"], f"{case}.{tag} amax")
    assert seen > len(pairs) // 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["1x16", "16x16", "4over6 mse", "pow2 sr"])
def test_decoded_operands(name):
    for shape in ((80, 272), (17, 33)):
        q = quantize(cases.make_input("wide", shape, 8), SPECS[name], key=KEY)
        on_gpu = quantize(
            cases.make_input("wide", shape, 8).cuda(), SPECS[name], key=KEY, implementation="triton"
        )
        cols = q.shape[1]
        got = triton_backend.decode(on_gpu)[:, :cols].cpu()
        assert_bitwise_equal(got, q.unscaled() + 0.0, "bf16")  # decoded operands have no -0
        shift = 2 if q.spec.numerator == 1536 or q.spec.is_pow2 else 3
        got = triton_backend.decode(on_gpu, e4m3=True, shift=shift)[:, :cols].cpu()
        want = q.fp8_operand()[0]
        want = torch.where(want.float() == 0, torch.zeros_like(want), want)
        assert_bitwise_equal(got.view(torch.uint8), want.view(torch.uint8), "e4m3")


@pytest.mark.gpu
@each_direction
def test_real_size_and_no_synchronization(columns):
    x = cases.make_input("student_t3", (2048, 5120), 9)
    for name in FAST:
        compare(x, SPECS[name], columns=columns, what=name)
    gpu, amax = x.cuda(), x.abs().max().float().cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for name in FAST:
            quantize(gpu, SPECS[name], columns=columns, key=KEY, implementation="triton")
            quantize(gpu, SPECS[name], columns=columns, key=KEY, amax=amax)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.slow
def test_beyond_two_to_the_31_elements():
    rows = (1 << 31) // 4096 + 32
    x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
    for columns in (False, True):
        q = quantize(x, SPECS["1x16"], columns=columns, implementation="triton")
        last = x[-32:].cpu()
        want = quantize(last, SPECS["1x16"], columns=columns, amax=q.amax.cpu())
        got = q.codes[:, -16:] if columns else q.codes[-32:]
        assert_bitwise_equal(got.cpu().contiguous(), want.codes)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("left", "right", "decode", "tolerance"),
    [
        ("1x16", "16x16", "exact", "bf16_core_sum"),
        ("4over6 mse", "4over6 mse", "exact", "bf16_core_sum"),
        ("4over6 mse", "4over6 mse", "fp8", "fp8_core_full"),
        ("1x16", "1x16", "fp8", "fp8_core_full"),
        ("pow2 sr", "pow2 two", "exact", "fp8_core_sum"),
        ("pow2 sr", "1x16", "exact", "bf16_core_sum"),
        ("fp8", "fp8", "exact", "fp8_core_full"),
        ("e5m2", "fp8", "exact", "fp8_core_full"),
        ("mxfp8", "mxfp8", "exact", "bf16_core_sum"),
        ("bf16", "1x16", "exact", "bf16_core_sum"),
    ],
)
def test_products(left, right, decode, tolerance):
    for m, n, k in ((256, 384, 512), (200, 100, 250), (96, 40, 48), (1, 3, 16)):
        for kind in ("gaussian", "student_t3", "wide"):
            a, b = operand(left, kind, (m, k), 1), operand(right, kind, (n, k), 2)
            options = {"decode": decode, "implementation": "reference"}
            want = scaled_matmul(a, b, out_dtype=torch.float32, **options)
            options["implementation"] = "hopper"
            got = scaled_matmul(a, b, out_dtype=torch.float32, **options)
            # Reference and hardware each round sums in their own order.
            assert_close(got, want, tolerance, f"{kind} fp32")
            got = scaled_matmul(a, b, out_dtype=torch.bfloat16, **options)
            assert_close(got, want, "bf16_output", f"{kind} bf16")
            grad = torch.randn(m, n, device="cuda")
            expected = grad + want
            again = scaled_matmul(a, b, out_dtype=torch.bfloat16, accumulate=grad, **options)
            assert again is grad
            assert_close(grad, expected, tolerance, f"{kind} accumulated")
            bias = torch.randn(n, device="cuda")
            got = scaled_matmul(a, b, out_dtype=torch.bfloat16, bias=bias, **options)
            assert_close(got, want + bias, "bf16_output", f"{kind} bias")


def operand(name, kind, shape, seed):
    x = cases.make_input(kind, shape, seed).cuda()
    if name == "bf16":
        return x
    others = {
        "fp8": OperandSpec(format="fp8_tensorwise"),
        "e5m2": OperandSpec(format="fp8_tensorwise", element="e5m2"),
        "mxfp8": OperandSpec(format="mxfp8"),
    }
    return quantize(x, (SPECS | others)[name], key=KEY)


def test_a_cpu_tensor_is_refused_with_a_reason():
    reason = triton_backend.supports(torch.zeros(16, 16).bfloat16(), SPECS["1x16"])
    assert reason is not None
    assert "cpu" in reason
