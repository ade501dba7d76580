# SPDX-License-Identifier: Apache-2.0
"""Sums of rows in Triton. Written for NVIDIA's Hopper and later; triton_backend.py calls it."""

# ruff: noqa: ANN001, ANN201 (the compiler traces types)
# mypy: ignore-errors

import triton
import triton.language as tl

TARGETS = ("sm_90", "sm_100", "sm_120")


@triton.jit
def sum_rows(y_ptr, order_ptr, starts_ptr, out_ptr, features, BLOCK: tl.constexpr):
    """out[r] = sum of y[order[i]] over starts[r] <= i < starts[r + 1], in fp32, ascending.

    order, starts: int64. Grid: rows, pieces of features.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = column < features
    total = tl.full([BLOCK], 0.0, tl.float32)
    for place in range(tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)):
        source = tl.load(order_ptr + place)
        y = tl.load(y_ptr + source * features + column, mask=within, other=0.0)
        total += y.to(tl.float32)
    tl.store(out_ptr + row * features + column, total.to(out_ptr.dtype.element_ty), mask=within)
