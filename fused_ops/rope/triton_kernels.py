# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding in Triton: one read and one write, forward and backward.

One kernel: between a tensor of heads [s, b, groups * (QUERIES + 2), d] and its three parts, each
with strides of its own. The plain rotation is the case of query heads alone. triton_backend.py
calls it.
"""

# ruff: noqa: ANN001, ANN201, ANN202, RUF005 (the compiler traces types; tuples are its own)
# mypy: ignore-errors

import triton
import triton.language as tl

TARGETS = ("sm_90", "sm_100", "sm_120")


@triton.jit
def _load(pointers, mask):
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(pointers, value, mask):
    tl.store(pointers, value.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def _gather(places, masks, shift: tl.constexpr):
    """The sum of three loads, of which at most one is inside."""
    total = _load(places[0] + shift, masks[0])
    for i in tl.static_range(1, len(places)):
        total += _load(places[i] + shift, masks[i])
    return total


@triton.jit
def _scatter(places, masks, value, shift: tl.constexpr):
    for i in tl.static_range(0, len(places)):
        _store(places[i] + shift, value, masks[i])


@triton.jit
def rotate_heads(
    mixed_ptr, query_ptr, key_ptr, value_ptr, cos_ptr, sin_ptr, batch, heads, mixed_s, mixed_b,
    query_s, query_b, query_h, key_s, key_b, key_h, value_s, value_b, value_h,
    QUERIES: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, PARTS: tl.constexpr,
    BACKWARD: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """mixed -> parts, or (BACKWARD) gradients of parts -> that of mixed, rotated back.

    `*_s`, `*_b`, `*_h`: elements from a token, sample or head to the next; heads of mixed are DIM
    apart. cos, sin: fp32 [s, HALF]. HALF: pairs that are rotated; 0 for none. PARTS: 1 for queries
    alone (QUERIES of one group are then all heads), else 3. BLOCK, REST: powers of two that hold
    HALF and the features that are not rotated.
    Grid: s * b, heads / HEADS.
    """
    s = (tl.program_id(0) // batch).to(tl.int64)
    b = (tl.program_id(0) % batch).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    inside = head < heads
    mixed = mixed_ptr + s * mixed_s + b * mixed_b + head * DIM
    turned = inside
    if PARTS == 1:
        places = (query_ptr + s * query_s + b * query_b + head * query_h,)
        masks = (inside,)
    else:
        group = head // (QUERIES + 2)
        part = head % (QUERIES + 2)
        turned = part <= QUERIES
        places = (
            query_ptr + s * query_s + b * query_b + (group * QUERIES + part) * query_h,
            key_ptr + s * key_s + b * key_b + group * key_h,
            value_ptr + s * value_s + b * value_b + group * value_h,
        )
        masks = (inside & (part < QUERIES), inside & (part == QUERIES), inside & (part > QUERIES))
    if HALF > 0:
        column = tl.arange(0, BLOCK)[None, :]
        within = column < HALF
        cos = tl.load(cos_ptr + s * HALF + column, mask=within, other=0.0)
        sin = tl.load(sin_ptr + s * HALF + column, mask=within, other=0.0)
        cos = tl.where(turned, cos, 1.0)
        sin = tl.where(turned, sin, 0.0)
        _move(mixed, places, masks, inside, column, within, cos, sin, HALF, BACKWARD)
    if DIM > 2 * HALF:
        column = 2 * HALF + tl.arange(0, REST)[None, :]
        within = column < DIM
        _copy(mixed, places, masks, inside, column, within, BACKWARD)


@triton.jit
def _shifted(places, masks, column, within):
    moved = ()
    limited = ()
    for i in tl.static_range(0, len(places)):
        moved = moved + (places[i] + column,)
        limited = limited + (masks[i] & within,)
    return moved, limited


@triton.jit
def _move(
    mixed, places, masks, inside, column, within, cos, sin,
    HALF: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    places, masks = _shifted(places, masks, column, within)
    if BACKWARD:
        a = _gather(places, masks, 0)
        b = _gather(places, masks, HALF)
        _store(mixed + column, a * cos + b * sin, inside & within)
        _store(mixed + column + HALF, b * cos - a * sin, inside & within)
    else:
        a = _load(mixed + column, inside & within)
        b = _load(mixed + column + HALF, inside & within)
        _scatter(places, masks, a * cos - b * sin, 0)
        _scatter(places, masks, b * cos + a * sin, HALF)


@triton.jit
def _copy(mixed, places, masks, inside, column, within, BACKWARD: tl.constexpr):
    places, masks = _shifted(places, masks, column, within)
    if BACKWARD:
        _store(mixed + column, _gather(places, masks, 0), inside & within)
    else:
        _scatter(places, masks, _load(mixed + column, inside & within), 0)
