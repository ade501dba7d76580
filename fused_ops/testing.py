# SPDX-License-Identifier: Apache-2.0
"""Comparisons shared by tests, benchmarks and tools: bytes exactly, sums by a table.

Codes, scales and amaxes are compared bit for bit. Only sums, whose order implementations choose,
have a tolerance, and each tolerance says where it comes from.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Tolerance:
    """Largest allowed max |actual - expected| / max |expected|, and why."""

    relative: float
    reason: str


TOLERANCES = {
    "exact": Tolerance(0.0, "no sum is involved, or all partial sums are exact"),
    "fp32_sum": Tolerance(1e-6, "fp32 sums of up to some thousand terms in two orders"),
    "fp32_approximate": Tolerance(
        1e-5, "exp, rsqrt and division of GPUs are right to some units in the last place of fp32"
    ),
    "bf16_output": Tolerance(
        2.0**-7,
        "both sides are rounded to bf16, by half an ulp at most each: sums that fall to two sides "
        "of a tie come out one ulp apart, 2^-7 of a value whose mantissa is 1",
    ),
    "fp16_output": Tolerance(2.0**-10, "the same of fp16"),
    "fp8_core_sum": Tolerance(1e-4, "Hopper FP8 cores, split accumulation, measured on an H200"),
    "fp8_core_full": Tolerance(
        2.0**-9,
        "all four significant bits of E4M3 in use, of which the cores' alignment of products drops "
        "more: on an H200, K 512, 2.4e-4 for Gaussian and 8.1e-4 for Student t(3) data; the bound "
        "is half an ulp of BF16, so that the error never exceeds the rounding of a BF16 output",
    ),
    "bf16_core_sum": Tolerance(
        5e-6, "Hopper BF16 cores align products too: 2.5e-6 measured over 16 binades, doubled"
    ),
    "hadamard_bf16": Tolerance(1e-2, "two operands rounded to bf16 after their rotation"),
}


def bit_view(x: Tensor) -> Tensor:
    """The bits of a tensor as integers of its width."""
    x = x.detach().contiguous()
    return x.view(torch.uint8) if x.dtype == torch.bool else x.view(_INTEGERS[x.element_size()])


def count_different(actual: Tensor, expected: Tensor) -> int:
    """Number of elements whose bits differ; all of them if the shapes do."""
    if actual.shape != expected.shape or actual.element_size() != expected.element_size():
        return max(actual.numel(), expected.numel())
    return int((bit_view(actual) != bit_view(expected)).sum())


def assert_bitwise_equal(actual: Tensor, expected: Tensor, what: str = "tensors") -> None:
    """Every bit equal (so NaN equals the same NaN, and -0 is not 0).

    Raises:
        AssertionError: with the count, the first coordinate, and both bytes and values there.
    """
    for name in ("shape", "dtype"):
        left, right = getattr(actual, name), getattr(expected, name)
        assert left == right, f"{what}: {name} {left} is not {right}"
    different = bit_view(actual) != bit_view(expected)
    count = int(different.sum())
    if count == 0:
        return
    place = tuple(int(i) for i in different.nonzero()[0])
    sides = [(int(bit_view(t)[place].item()), t[place].float().item()) for t in (actual, expected)]
    width = 2 * actual.element_size()
    mask = (1 << 4 * width) - 1
    (bits_a, value_a), (bits_e, value_e) = sides
    raise AssertionError(
        f"{what}: {count} of {actual.numel()} differ, first at {place}: "
        f"0x{bits_a & mask:0{width}x} ({value_a!r}) is not "
        f"0x{bits_e & mask:0{width}x} ({value_e!r})"
    )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """max |actual - expected| / max |expected| in fp64; 0 where both are all zero."""
    difference = (actual.double() - expected.double()).abs()
    scale = float(expected.double().abs().max()) if expected.numel() else 0.0
    worst = float(difference.max()) if difference.numel() else 0.0
    return worst / scale if scale else worst


def assert_close(actual: Tensor, expected: Tensor, tolerance: str, what: str = "tensors") -> None:
    """Relative error within TOLERANCES[tolerance].

    Raises:
        AssertionError: with the error, the bound and the reason for the bound.
    """
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape} is not {expected.shape}"
    rule = TOLERANCES[tolerance]
    error = relative_error(actual, expected)
    assert error <= rule.relative, (
        f"{what}: relative error {error:.3e} is above {rule.relative:.1e} ({rule.reason})"
    )


def relative_mse(actual: Tensor, expected: Tensor) -> float:
    """Sum of squared errors over sum of squares, in fp64."""
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).square().sum() / expected.square().sum())


def slope(actual: Tensor, expected: Tensor) -> float:
    """Regression slope through the origin of `actual` on `expected`: 1 is unbiased, in fp64."""
    actual, expected = actual.double(), expected.double()
    return float((actual * expected).sum() / expected.square().sum())


def slope_at_block_maxima(actual: Tensor, expected: Tensor, block: int = 16) -> float:
    """`slope` over the largest element of each block of consecutive columns."""
    x = expected.double().reshape(-1, block)
    place = x.abs().argmax(dim=1, keepdim=True)
    return slope(actual.double().reshape(-1, block).gather(1, place), x.gather(1, place))
