# SPDX-License-Identifier: Apache-2.0
"""The CUDA quantizer's rotation: bytes of sums in order, where tensor cores give others."""

import pytest
import torch

from fused_ops import cases
from fused_ops.formats import OperandSpec
from fused_ops.quantize import quantize, quantize_pair
from fused_ops.quantize.hadamard import rotate, rotation
from fused_ops.testing import assert_bitwise_equal

KEYS = ((0xDEADBEEF, 0x01234567), (0x89ABCDEF, 0x76543210))


def pair(**options):
    spec = {"format": "nvfp4", "rounding": "stochastic"} | options
    return OperandSpec(**spec), OperandSpec(**spec, hadamard=16)


def check(x, row, column, what, *, columns=None, signs=None):
    """Codes and scales of both operands; columns: those whose codes are compared."""
    amaxes = [torch.tensor(float(x.float().nan_to_num(0, 0, 0).abs().max())) * m for m in (1, 4)]
    options = {"keys": KEYS, "amaxes": tuple(a.cuda() for a in amaxes), "signs": signs}
    got = quantize_pair(x.cuda(), row, column, implementation="cuda", **options)
    arguments = {"columns": True, "amax": amaxes[1], "key": KEYS[1], "signs": signs}
    want = (
        quantize(x, row, amax=amaxes[0], key=KEYS[0], implementation="reference"),
        quantize(x, column, implementation="reference", **arguments),
    )
    for name, a, b in zip(("row", "column"), got, want):
        keep = slice(None) if columns is None or name == "row" else columns
        if columns is None or name == "column":
            assert_bitwise_equal(a.codes.cpu()[keep], b.codes[keep], f"{what} {name} codes")
            assert_bitwise_equal(a.scales.cpu()[keep], b.scales[keep], f"{what} {name} scales")


def near_ties(rows, cols, seed):
    """Columns whose rotated values lie halfway between two bf16 numbers but for small elements.

    Each of these is below half of what fp32 holds of a sum: added to it one by one they are lost,
    added to each other first they decide. In half of the columns they come first.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(low, high, count):
        shape = (rows // 16, count, cols)
        signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        return torch.randint(low, high, shape, generator=generator) * signs

    half = torch.full((rows // 16, 1, cols), 0.5)
    x = torch.cat([random(128, 256, 1), half, random(128, 256, 14) * 2.0**-25], 1)
    x[:, :, ::2] = x[:, :, ::2].flip(1)
    return x.reshape(rows, cols).bfloat16()


def mixed(share, other, seed):
    """Gaussian, and a share of the columns of every 16 rows from `other`."""
    x = cases.make_input("gaussian", tuple(other.shape), seed)
    chosen = torch.rand(other.shape[0] // 16, other.shape[1]) < share
    return torch.where(chosen.repeat_interleave(16, 0), other, x)


def order_matters(x):
    """Rotated values that another order of the sums rounds otherwise."""
    turned = rotate(x.t().contiguous(), 16)
    backwards = torch.arange(15, -1, -1)
    groups = x.t().reshape(-1, 16).float()
    matrix = rotation(16, None, "cpu")
    sums = torch.zeros_like(groups)
    for i in backwards.tolist():
        sums = sums + groups[:, i : i + 1] * matrix[i]
    return int((sums.bfloat16().view(turned.shape) != turned).sum())


def test_the_inputs_are_such_that_the_order_matters():
    assert order_matters(near_ties(64, 512, 0)) > 64 * 512 // 8
    assert order_matters(cases.make_input("gaussian", (256, 512), 0)) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"scale": "pow2"}, {}], ids=["pow2", "e4m3"])
def test_sums_whose_order_matters(options):
    row, column = pair(**options)
    for seed in range(8):
        check(near_ties(256, 1024, seed), row, column, f"near ties {seed}")
    for share in (0.005, 0.02, 0.05, 0.1, 0.3, 1.0):
        for seed in range(3):
            wide = cases.make_input("wide", (256, 640), seed)
            check(mixed(share, wide, seed), row, column, f"{share} wide {seed}")
            check(mixed(share, near_ties(256, 640, seed), seed), row, column, f"{share} ties")
    for exponent in (-133, -120, -104, -90, 90, 112, 116, 120):
        scale = torch.tensor(2.0, dtype=torch.float64) ** exponent
        for x in (cases.make_input("gaussian", (128, 256), 5), near_ties(128, 256, 9) / 65536):
            scaled = (x.double() * scale).clamp(-3e38, 3e38).bfloat16()
            check(scaled, row, column, f"times 2**{exponent}")


@pytest.mark.gpu
def test_signs_of_the_caller():
    row, column = pair(scale="pow2")
    signs = torch.randint(0, 2, (16,), generator=torch.Generator().manual_seed(3)) * 2 - 1
    for x in (near_ties(128, 256, 1), cases.make_input("student_t3", (80, 272), 1)):
        check(x, row, column, "signs", signs=signs)
        check(x, row, column, "all negative", signs=-torch.ones_like(signs))


@pytest.mark.gpu
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3.3e38])
def test_broken_columns_leave_the_others_alone(value):
    row, column = pair(scale="pow2")
    x = cases.make_input("student_t3", (96, 272), 6)
    x[17, 33] = value
    x[20, 33] = -value
    good = torch.tensor([c for c in range(272) if c != 33])
    check(x, row, column, str(value), columns=good)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gaussian", "student_t3", "relu_squared", "channel_scaled"])
def test_real_sizes(kind):
    for options in ({"scale": "pow2"}, {}):
        x = cases.make_input(kind, (2048, 2560), 3)
        check(x, *pair(**options), kind)
