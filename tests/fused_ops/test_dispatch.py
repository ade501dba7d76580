# SPDX-License-Identifier: Apache-2.0
"""Choice of implementations, and the comparisons that tests rely on."""

import pytest
import torch

from fused_ops.dispatch import Implementation, Op, UnsupportedError, always
from fused_ops.testing import TOLERANCES, assert_bitwise_equal, assert_close, count_different


@pytest.fixture
def op():
    op = Op("square")
    op.register(Implementation("reference", lambda x: ("reference", x * x), always))
    small = Implementation(
        "small",
        lambda x: ("small", x * x),
        lambda x: None if x < 10 else f"x must be below 10, got {x}",
    )
    op.register(small, first=True)
    return op


def test_the_first_that_supports_the_call_runs(op):
    assert op.names == ["small", "reference"]
    assert op(3) == ("small", 9)
    assert op(30) == ("reference", 900)


def test_a_forced_implementation_never_falls_back(op):
    assert op(3, implementation="reference") == ("reference", 9)
    with pytest.raises(UnsupportedError, match="square, small: x must be below 10, got 30"):
        op(30, implementation="small")


def test_all_reasons_are_shown(op):
    with pytest.raises(UnsupportedError) as error:
        op(30, implementation=["small", "smal"])
    assert len(error.value.problems) == 2
    assert "choose small" in error.value.problems[1]
    with pytest.raises(UnsupportedError, match="no implementation is allowed"):
        op(3, implementation=[])


def test_bitwise_comparison_reports_count_place_bytes_and_values():
    a = torch.tensor([[1.0, 2.0], [0.0, 4.0]])
    b = torch.tensor([[1.0, 2.0], [-0.0, 5.0]])
    with pytest.raises(AssertionError) as error:
        assert_bitwise_equal(a, b, "weights")
    text = str(error.value)
    assert "weights: 2 of 4 differ, first at (1, 0)" in text
    assert "0x00000000 (0.0) is not 0x80000000 (-0.0)" in text
    nan = torch.tensor([float("nan")])
    assert_bitwise_equal(nan, nan.clone())
    assert count_different(a, b) == 2
    assert count_different(a, b[:1]) == 4
    with pytest.raises(AssertionError, match="dtype"):
        assert_bitwise_equal(a, a.double())


def test_tolerances_bound_the_relative_error_and_say_why():
    x = torch.tensor([1.0, 100.0])
    assert_close(x + torch.tensor([5e-5, 0.0]), x, "fp32_sum")
    with pytest.raises(AssertionError, match="fp32 sums"):
        assert_close(x + torch.tensor([5e-4, 0.0]), x, "fp32_sum")
    with pytest.raises(AssertionError):
        assert_close(torch.full((2,), float("nan")), x, "fp32_sum")
    assert all(t.reason for t in TOLERANCES.values())
