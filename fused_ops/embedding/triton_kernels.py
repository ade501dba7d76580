# SPDX-License-Identifier: Apache-2.0
"""The gradient of an embedding in Triton: sums over equal ids, added to the rows they name.

Written for NVIDIA's Hopper and later; triton_backend.py calls it.
"""

# ruff: noqa: ANN001, ANN201 (the compiler traces types)
# mypy: ignore-errors

import triton
import triton.language as tl

TARGETS = ("sm_90", "sm_100", "sm_120")


@triton.jit
def add_rows(
    ids_ptr, order_ptr, dy_ptr, sum_ptr, tokens, features, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """sum[id] += the rows of dy of that id.

    ids: int64 [tokens], sorted; order: int64 [tokens], the row of dy of each. Negative ids are left
    out. Grid: tokens, pieces of features; the program of an id's first token does the work, ROWS
    rows at a time.
    """
    first = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = column < features
    name = tl.load(ids_ptr + first)
    before = tl.load(ids_ptr + first - 1, mask=first > 0, other=-1)
    if (name >= 0) & (before != name):
        total = tl.full([BLOCK], 0.0, tl.float32)
        position = first
        more = True
        while more:
            place = position + tl.arange(0, ROWS)
            inside = place < tokens
            same = tl.load(ids_ptr + place, mask=inside, other=-1) == name
            row = tl.load(order_ptr + place, mask=same, other=0)
            dy = tl.load(
                dy_ptr + row[:, None] * features + column[None, :],
                mask=same[:, None] & within[None, :],
                other=0.0,
            )
            total += tl.sum(dy.to(tl.float32), axis=0)
            position += ROWS
            more = tl.load(ids_ptr + position, mask=position < tokens, other=-1) == name
        target = sum_ptr + name * features + column
        tl.store(target, tl.load(target, mask=within, other=0.0) + total, mask=within)
