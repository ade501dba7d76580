# SPDX-License-Identifier: Apache-2.0
"""MX, FP8 blocks, MS-EDEN and long rotations in Triton: every byte is the reference's.

On a GPU, and on a CPU with the kernels in Triton's interpreter (see ptx.py).
"""

from dataclasses import replace

import pytest
import torch

from fused_ops import cases
from fused_ops.formats import OperandSpec
from fused_ops.quantize import (
    dequantize,
    operand_amax,
    quantize,
    quantize_decoded,
    triton_decode,
    triton_launch,
    triton_wide,
)
from fused_ops.quantize.implementations import AMAX
from fused_ops.scaled_matmul.hopper import exact_in_bf16
from fused_ops.testing import assert_bitwise_equal
from tests.fused_ops.ptx import emulate

KEY = (0xDEADBEEF, 0x01234567)


def spec_of(format, **options):
    return OperandSpec(format=format, **options)


SPECS = {
    "mxfp8": spec_of("mxfp8"),
    "mxfp8 e5m2": spec_of("mxfp8", element="e5m2"),
    "mxfp8 tile": spec_of("mxfp8", block=(32, 32)),
    "mxfp4": spec_of("mxfp4"),
    "mxfp4 tile": spec_of("mxfp4", block=(32, 32)),
    "mxfp4 sr": spec_of("mxfp4", rounding="stochastic"),
    "mxfp4 rht": spec_of("mxfp4", hadamard=32),
    "mxfp4 rht sr": spec_of("mxfp4", hadamard=32, rounding="stochastic"),
    "fp8": spec_of("fp8_blockwise"),
    "fp8 tile": spec_of("fp8_blockwise", block=(128, 128)),
    "fp8 fp32": spec_of("fp8_blockwise", scale="fp32"),
    "fp8 fp32 tile": spec_of("fp8_blockwise", scale="fp32", block=(128, 128)),
    "fp8 e5m2": spec_of("fp8_blockwise", element="e5m2"),
    "eden": spec_of("nvfp4", rounding="ms_eden"),
    "eden rht16": spec_of("nvfp4", rounding="ms_eden", hadamard=16),
    "eden rht128": spec_of("nvfp4", rounding="ms_eden", hadamard=128),
    "rht32 sr": spec_of("nvfp4", rounding="stochastic", hadamard=32),
    "rht64": spec_of("nvfp4", hadamard=64),
    "rht128": spec_of("nvfp4", hadamard=128),
    "row scaled": spec_of("nvfp4", row_scaled=True),
}
SHAPES = ((80, 272), (17, 33), (1, 1), (130, 250), (300, 640))
# What the slow interpreter sees: each kind of arithmetic once.
FEW = ("mxfp8", "mxfp4 tile", "mxfp4 rht sr", "fp8 fp32 tile", "eden rht128")
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
places = pytest.mark.parametrize("device", ["cpu", GPU])


def each(*few, gpu=tuple(SPECS)):
    """Some specs on a CPU, all on a GPU or those that are named: each is compiled, for seconds."""
    on_gpu = [pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in gpu]
    return pytest.mark.parametrize(("name", "device"), [(name, "cpu") for name in few] + on_gpu)


each_direction = pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])


@pytest.fixture
def place(device, monkeypatch):
    """The device; new tensors hold NaN bytes on it, and a CPU passes for one with kernels."""
    if device == "cpu":
        emulate(monkeypatch)
        for module in (triton_wide, triton_decode):
            monkeypatch.setattr(module, "device_reason", lambda x: None)
        # An operation costs the interpreter as much for a few values as for many.
        monkeypatch.setitem(triton_launch.WIDE_TILE, "lanes", 512)
        monkeypatch.setitem(triton_launch.DECODE_TILE, "rows", 64)
    for name in ("empty", "new_empty"):
        owner = torch if name == "empty" else torch.Tensor
        monkeypatch.setattr(owner, name, _full(getattr(owner, name)))
    return torch.device(device)


def _full(make):
    def full(*args, **kwargs):
        out = make(*args, **kwargs)
        if out.numel():
            out.view(torch.uint8).fill_(0xFF) if out.dim() else out.fill_(float("nan"))
        return out

    return full


def compare(x, spec, place, *, what="", check_codes=True, **options):
    if spec.is_random:
        options.setdefault("key", KEY)
    want = quantize(x, spec, implementation="reference", **options)
    got = quantize(x.to(place), spec, implementation="triton_wide", **options)
    assert got.shape == want.shape
    for name in ("amax", "scales", "codes") if check_codes else ("scales",):
        left, right = getattr(got, name).cpu(), getattr(want, name)
        assert_bitwise_equal(left, right, f"{what} {name}")
    return got, want


def inputs(spec, place, columns):
    """Matrices of every kind of data; on a CPU few, in which the blocks of each are next to each
    other, but where one amax for all would hide the small ones."""
    if place.type == "cuda":
        return [cases.make_input(kind, shape, 1) for kind in cases.KINDS for shape in SHAPES]
    if spec.format == "nvfp4":
        return [cases.make_input("wide", (40, 272), 1)]
    x = torch.cat([cases.make_input(kind, (3, 250), 1) for kind in cases.KINDS])
    return [x.t().contiguous() if columns else x]


@each_direction
@each(*FEW)
def test_every_kind_of_data(name, columns, place):
    for x in inputs(SPECS[name], place, columns):
        compare(x, SPECS[name], place, columns=columns, what=str(tuple(x.shape)))


@each_direction
@each("mxfp8", gpu=("mxfp8", "fp8 tile", "rht128"))
def test_fp32_input(name, columns, place):
    x = cases.make_input("student_t3", (33, 140), 3, torch.float32)
    compare(x, SPECS[name], place, columns=columns)


@each_direction
@each("mxfp8", "fp8 tile", "eden")
def test_not_finite(name, columns, place):
    """A block with Inf or NaN has the reference's scale, and leaves the codes of others alone."""
    spec = SPECS[name]
    for value in (float("nan"), float("inf")):
        x = cases.make_input("gaussian", (48, 140), 6)
        x[17, 33] = value
        amax = torch.tensor(3.0) if spec.format == "nvfp4" and not spec.row_scaled else None
        got, want = compare(x, spec, place, columns=columns, check_codes=False, amax=amax)
        decoded = want.dequantize()
        good = torch.isfinite(decoded)
        again = got.codes.cpu() == want.codes
        again = again.repeat_interleave(2, 1) if spec.is_fp4 else again
        assert bool(again[:, : want.shape[1]][good].all()), f"{value}: other blocks"


@each_direction
@each("mxfp4 sr", gpu=("mxfp4 rht sr", "eden rht128"))
def test_origin_signs_and_keys(name, columns, place):
    spec, x = SPECS[name], cases.make_input("outliers", (130, 64), 4)
    options = {"origin": (2**31 + 48, 4096), "amax": torch.tensor(7.25), "columns": columns}
    if spec.hadamard:
        options["signs"] = torch.randint(0, 2, (spec.hadamard,)) * 2 - 1
    if spec.format != "nvfp4" or spec.row_scaled:
        del options["amax"]
    got, _ = compare(x, spec, place, **options)
    if not spec.is_random:
        return
    key = torch.tensor(KEY, device=place)
    again = quantize(x.to(place), spec, implementation="triton_wide", key=key, **options)
    assert_bitwise_equal(again.codes, got.codes, "key on the device")
    assert_bitwise_equal(again.scales, got.scales, "key on the device, scales")


@each_direction
@each(
    "rht32 sr", "mxfp8 e5m2", "mxfp4 sr", "fp8",
    gpu=("rht128", "eden rht128", "mxfp8", "mxfp8 e5m2", "mxfp4 tile", "mxfp4 rht sr", "fp8 tile"),
)  # fmt: skip
def test_decoded_forms(name, columns, place):
    spec, options = SPECS[name], {"columns": columns, "key": KEY}
    for kind in ("wide",) if place.type == "cpu" else ("laplace", "wide"):
        x = cases.make_input(kind, (130, 40), 4)
        for form in spec.decoded_forms:
            want = quantize(x, spec, implementation="reference", **options).decoded(form)
            made = quantize_decoded(
                x.to(place), spec, form, implementation="triton_wide", **options
            )
            assert made.shape == want.shape
            for left, right in ((made.data.cpu(), want.data), (made.amax.cpu(), want.amax)):
                assert_bitwise_equal(left, right, form)


@each_direction
@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("rht32 sr", "cpu"),
        *(
            pytest.param(name, "cuda", marks=pytest.mark.gpu)
            for name in ("rht32 sr", "rht64", "rht128", "eden rht128")
        ),
    ],
)
def test_rotated_amax(name, columns, place):
    signs = torch.randint(0, 2, (SPECS[name].hadamard,)) * 2 - 1
    for x in inputs(SPECS[name], place, columns):
        options = {"columns": columns, "signs": signs}
        got = AMAX(x.to(place), SPECS[name], implementation="triton_wide", **options)
        assert_bitwise_equal(got.cpu(), operand_amax(x, SPECS[name], **options))


@places
@pytest.mark.parametrize("name", [*SPECS, "16x16"])
def test_what_codes_stand_for(name, place):
    spec = (SPECS | {"16x16": spec_of("nvfp4", block=(16, 16))})[name]
    x = torch.cat([cases.make_input(kind, (3, 250), 1) for kind in ("wide", "gaussian", "huge")])
    codes = quantize(x, spec, implementation="reference", key=KEY)
    there = replace(
        codes, codes=codes.codes.to(place), scales=codes.scales.to(place), amax=codes.amax.to(place)
    )
    for dtype in (torch.float32, torch.bfloat16):
        got = dequantize(there, dtype, implementation="triton")
        assert_bitwise_equal(got.cpu(), codes.dequantize(dtype), f"{dtype}")
    if exact_in_bf16(spec):
        got = triton_decode.unscaled(there).cpu()
        cols = codes.shape[1]
        assert_bitwise_equal(got[:, :cols].contiguous(), codes.unscaled(), "unscaled")
        assert not got[:, cols:].any(), "padding"


@pytest.mark.gpu
@each_direction
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4 rht sr", "fp8", "eden rht128"])
def test_in_a_graph(name, columns):
    """Recorded once, replayed on other values: bytes are those of a call."""
    spec, x = SPECS[name], cases.make_input("gaussian", (256, 640), 1).cuda()
    key = torch.tensor(KEY, device="cuda")
    options = {"columns": columns, "key": key, "implementation": "triton_wide"}
    quantize(x, spec, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = quantize(x, spec, **options)
    x.copy_(cases.make_input("student_t3", (256, 640), 2))
    key.add_(1)
    graph.replay()
    want = quantize(x, spec, **options)
    assert_bitwise_equal(got.codes, want.codes)
    assert_bitwise_equal(got.scales, want.scales)


@pytest.mark.gpu
@each_direction
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4 rht", "fp8", "eden rht128"])
def test_real_size(name, columns):
    x = cases.make_input("student_t3", (4096, 2560), 9)
    compare(x, SPECS[name], torch.device("cuda"), columns=columns)
