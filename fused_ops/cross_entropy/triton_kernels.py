# SPDX-License-Identifier: Apache-2.0
"""Cross entropy in Triton: one read of the logits forward, one read and one write backward.

FP32 values live in registers only. A program takes a row of logits forward, and a piece of a row
backward. triton_backend.py calls these.
"""

# ruff: noqa: ANN001, ANN201 (the compiler traces types)
# mypy: ignore-errors

import triton
import triton.language as tl

TARGETS = ("sm_90", "sm_100", "sm_120")


@triton.jit
def cross_entropy_forward(
    logits_ptr, labels_ptr, peak_ptr, total_ptr, target_ptr, start, width,
    WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Per row: its largest logit, the sum of exp(logit - largest), and the label's logit.

    logits [rows, width]; labels int64 [rows], over the whole vocabulary, of which column 0 is
    entry `start`. The label's logit is 0 where it is not one of these columns.
    WHOLE: these are all columns; written are log(sum of exp(logit)) as peak, and the loss as
    target.
    """
    row = tl.program_id(0).to(tl.int64)
    line = logits_ptr + row * width
    peak = tl.full([], -float("inf"), tl.float32)
    totals = tl.full([BLOCK], 0.0, tl.float32)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(line + column, mask=column < width, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(peak, tl.max(x, axis=0))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        totals = totals * tl.exp(peak - base) + tl.exp(x - base)
        peak = higher
    total = tl.sum(totals, axis=0)
    column = tl.load(labels_ptr + row) - start
    held = (column >= 0) & (column < width)
    target = tl.load(line + tl.where(held, column, 0)).to(tl.float32)
    if WHOLE:
        log_total = tl.log(total)
        tl.store(target_ptr + row, log_total - tl.where(held, target - peak, 0.0))
        tl.store(peak_ptr + row, peak + log_total)
    else:
        tl.store(peak_ptr + row, peak)
        tl.store(total_ptr + row, total)
        tl.store(target_ptr + row, target)


@triton.jit
def cross_entropy_backward(
    logits_ptr, labels_ptr, log_norm_ptr, dy_ptr, out_ptr, start, width, BLOCK: tl.constexpr
):
    """(exp(logit - log_norm) - [column is the label]) * dy; out may be the logits.

    Grid: rows, pieces of a row.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(logits_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    share = tl.exp(x - tl.load(log_norm_ptr + row))
    share = tl.where(column == tl.load(labels_ptr + row) - start, share - 1.0, share)
    out = share * tl.load(dy_ptr + row)
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=inside)
