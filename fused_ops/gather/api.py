# SPDX-License-Identifier: Apache-2.0
"""Rows by number, and their sums: shapes, checks, choice."""

from typing import Any

import torch
from torch import Tensor

from fused_ops.dispatch import Choice, Implementation, Op, always
from fused_ops.gather import reference, triton_backend

SUM_ROWS = Op("sum_rows")
SUM_ROWS.register(Implementation("triton", triton_backend.sum_rows, triton_backend.supports))
SUM_ROWS.register(Implementation("reference", reference.sum_rows, always))


class Places:
    """Which row of [rows, features] each of n copies is of, and where the copies of each row lie.

    Args:
        row: int64 [n], the row of each copy.
        rows: how many there are.
    """

    def __init__(self, row: Tensor, rows: int) -> None:
        self.row, self.rows = row, rows
        ordered, self.order = row.sort(stable=True)
        numbers = torch.arange(rows + 1, device=row.device)
        self.starts = torch.searchsorted(ordered, numbers)
        """int64 [rows + 1]: copies order[starts[r] : starts[r + 1]] are of row r, ascending."""


def take_rows(x: Tensor, places: Places, *, implementation: Choice = None) -> Tensor:
    """Copies x[places.row] [n, features]; the gradient of a row is the sum over its copies.

    Args:
        x: [places.rows, features].
        implementation: of the sum: "triton", "reference", or None for the first that can.

    Raises:
        ValueError: x has another number of rows.
    """
    _check("x", x, places.rows)
    return _TakeRows.apply(x, places, implementation)


def sum_rows(y: Tensor, places: Places, *, implementation: Choice = None) -> Tensor:
    """[places.rows, features]: the sum of the copies of each row, zeros where there are none.

    Summed in FP32, in the order of the copies, and rounded once: a sum depends on no timing. (With
    atomic additions, as torch's scatter_add_ has them, BF16 sums are rounded after each term, in
    an order that changes from run to run.)

    Args:
        y: [n, features], the copies.

    Raises:
        ValueError: y is not one row for each copy.
    """
    _check("y", y, places.row.numel())
    return _SumRows.apply(y, places, implementation)


def _check(what: str, x: Tensor, rows: int) -> None:
    if x.dim() != 2 or x.shape[0] != rows:
        raise ValueError(
            f"{what} must be [{rows}, features] for these places, got {tuple(x.shape)}"
        )


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Places, implementation: Choice) -> Tensor:
        ctx.places, ctx.implementation = places, implementation
        return x.index_select(0, places.row)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return SUM_ROWS(dy, ctx.places, implementation=ctx.implementation), None, None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, places: Places, implementation: Choice) -> Tensor:
        ctx.places = places
        total: Tensor = SUM_ROWS(y, places, implementation=implementation)
        return total

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        return dx.index_select(0, ctx.places.row), None, None
