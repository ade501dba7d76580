# SPDX-License-Identifier: Apache-2.0
"""Amaxes that skip rotations: the reference's bytes, on a CPU by the interpreter and on a GPU."""

import importlib

import pytest
import torch

from fused_ops import cases
from fused_ops.formats import OperandSpec
from fused_ops.groups import Groups
from fused_ops.quantize import operand_amax, triton_amax, triton_grouped
from fused_ops.quantize.hadamard import FIXED_SIGNS, rotate
from fused_ops.quantize.triton_launch import ROTATED_AMAX_TILE
from fused_ops.testing import assert_bitwise_equal
from tests.fused_ops.ptx import emulate

ROTATED = OperandSpec(format="nvfp4", hadamard=16)
SMALL = {"blocks": 2, "words": 64, "tiles": 2, "warps": 2}
TILES = [
    ROTATED_AMAX_TILE,
    {"blocks": 1, "words": 64, "tiles": 3, "warps": 1},
    {"blocks": 4, "words": 32, "tiles": 2, "warps": 4},
]
ON_CPU = ("gaussian", "relu_squared", "wide", "zeros", "tiny", "denormal", "huge")
MODULE = "fused_ops.quantize.triton_amax_kernels"


@pytest.fixture(params=["interpreted", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    if request.param == "interpreted":
        emulate(monkeypatch)
        return "cpu"
    return request.param


def check(x, device, what="", **options):
    """Both amaxes of x and of its rotated columns, and the flag, against the reference."""
    plain = torch.zeros((), dtype=torch.int32, device=device)
    flag = torch.zeros((), dtype=torch.bool, device=device)
    got = triton_amax.rotated_amax(x.to(device), None, False, plain, flag, **options)
    want, own = operand_amax(x, ROTATED, columns=True), x.abs().amax().float()
    assert bool(flag) is (not bool(torch.isfinite(own)))
    for name, a, b in (("rotated", got, want), ("plain", plain.view(torch.float32), own)):
        if torch.isnan(b):
            assert torch.isnan(a.cpu()), f"{what} {name}"
        else:
            assert_bitwise_equal(a.cpu(), b, f"{what} {name}")
    return want


def test_every_kind_of_data(device):
    """The interpreter is slow: it sees some."""
    if device == "cpu":
        for kind in ON_CPU:
            check(cases.make_input(kind, (40, 66), 1), device, kind, tile=SMALL)
        return
    for kind in cases.KINDS:
        for seed in range(20):
            check(cases.make_input(kind, (80, 272), seed), device, kind)


def test_ugly_shapes(device):
    if device == "cpu":
        for shape, tile in zip(((1, 1), (17, 66), (130, 34)), TILES):
            check(cases.make_input("student_t3", shape, 3), device, str(shape), tile=tile)
        return
    for tile in TILES:
        for shape in [*cases.SHAPES, (330, 66)]:
            check(cases.make_input("student_t3", shape, 3), device, str(shape), tile=tile)


def aligned(magnitudes, output=5):
    """A column whose rotated value `output` is the sum of the magnitudes / 4."""
    parity = [bin(i & output).count("1") % 2 for i in range(16)]
    signs = torch.tensor([s * (-1) ** p for s, p in zip(FIXED_SIGNS, parity)])
    return (magnitudes * signs).bfloat16()


@pytest.mark.parametrize("scale", [1.0, 2.0**-126, 2.0**-133, 2.0**100, 2.0**127])
def test_bounds_that_are_reached_and_sums_that_round(scale, device):
    """Largest values are whole sums of magnitudes, rounded up or down at every addition."""
    if device == "cpu" and scale not in (1.0, 2.0**-126):
        pytest.skip("the interpreter is slow: one usual scale and one of subnormal numbers")
    generator, columns = torch.Generator().manual_seed(1), []
    for _ in range(64):
        exponents = torch.randint(-26, 1, (16,), generator=generator)
        mantissas = torch.randint(128, 256, (16,), generator=generator) / 128
        columns.append(aligned(torch.sort(mantissas * 2.0**exponents, descending=True)[0]))
    x = (torch.stack(columns, 1).double() * scale).bfloat16()
    below = torch.cat(x.split(8, 1), 0)  # columns of equal bounds below each other
    check(below, device, f"scale {scale}", tile=SMALL | {"words": 4, "blocks": 1, "tiles": 8})
    if device != "cpu":
        for block in x.split(4, 1):  # each has a maximum of its own
            check(block, device, f"scale {scale}")


def test_sums_round_above_the_exact_bound(device):
    """15 additions of a little more than half a step: fp32 sums exceed the sum of magnitudes."""
    x = torch.full((16,), 2.0**-24 * (1 + 2.0**-6))
    x[0] = 1.0
    column = aligned(x)[:, None]
    exact = column.double().abs().sum() / 4
    sums = (column.t().float() @ torch.eye(16)).abs()  # the elements, in fp32
    total = sums[0, 0]
    for value in sums[0, 1:]:
        total = total + value
    assert total / 4 > exact
    for other in (0.25, 0.2490234375):
        both = torch.zeros(32, 2, dtype=torch.bfloat16)
        both[16:, :1] = column
        both[0, 0] = 4 * other  # known before: just below, or what the column rounds to
        assert float(check(both, device, tile=SMALL)) == 0.25


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_not_finite(value, device):
    x = cases.make_input("gaussian", (64, 34), 6)
    x[17, 33] = value
    x[18, 33] = 1e3
    assert not bool(torch.isfinite(check(x, device, str(value), tile=SMALL)))
    found = triton_amax.rotated_amax(x.to(device), None, True, tile=SMALL)
    blocks = rotate(x.t().contiguous(), 16).float().view(34, -1, 16).abs().amax(-1)
    finite = torch.where(torch.isfinite(blocks), blocks, 0.0).amax()
    assert_bitwise_equal(found.cpu(), finite, "finite blocks")
    huge = torch.full((16, 2), 3e38).bfloat16()  # finite, and its sums are not
    check(huge, device, "overflow", tile=SMALL)


def test_signs_of_the_caller(device):
    x = cases.make_input("wide", (32, 96), 2)
    signs = torch.randint(0, 2, (16,), generator=torch.Generator().manual_seed(3)) * 2 - 1
    got = triton_amax.rotated_amax(x.to(device), signs.to(device), tile=SMALL)
    assert_bitwise_equal(got.cpu(), operand_amax(x, ROTATED, columns=True, signs=signs))


def test_groups_have_their_own(device):
    counts = [40, 0, 1, 100]
    x = cases.make_input("student_t3", (sum(counts), 48), 4)
    groups = Groups(counts, torch.device(device))
    plain, rotated = triton_grouped.amaxes(x.to(device), groups, rotated=True)
    for number, part in enumerate(x.split(counts)):
        own = part.abs().amax().float() if len(part) else torch.zeros(())
        turned = operand_amax(part, ROTATED, columns=True) if len(part) else torch.zeros(())
        assert_bitwise_equal(plain[number].cpu(), own, f"group {number}")
        assert_bitwise_equal(rotated[number].cpu(), turned, f"group {number} rotated")


def test_blocks_that_cannot_raise_the_amax_are_not_rotated(monkeypatch):
    emulate(monkeypatch)
    kernels, count = importlib.import_module(MODULE), []
    rotated = kernels.rotate
    monkeypatch.setattr(kernels, "rotate", lambda *a: count.append(1) or rotated(*a))
    x = cases.make_input("gaussian", (16 * 8, 64), 1)
    x[0, 0] = 100
    check(x, "cpu")
    assert len(count) == 1, "of 16 halves of tiles"
    x[16 * 5, 1] = 101
    check(x, "cpu")
    assert len(count) == 3


@pytest.mark.gpu
def test_real_sizes_repeat_and_never_wait():
    for kind in ("gaussian", "student_t3", "outlier_columns", "ties"):
        x = cases.make_input(kind, (4096, 5120), 8)
        check(x, "cuda", kind)
        on_gpu = x.cuda()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = [triton_amax.amax_pair(on_gpu, ROTATED) for _ in range(5)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for pair in found[1:]:
            assert_bitwise_equal(pair[0], found[0][0], kind)
            assert_bitwise_equal(pair[1], found[0][1], kind)
