# SPDX-License-Identifier: Apache-2.0
"""The product as custom ops: torch.ops.nibble.scaled_matmul, and scaled_matmul_into for sums.

`fused_ops.scaled_matmul.api` calls them while torch.compile traces, and only then. An operand
travels as its tensors and a text that says what they are: `tensor`, `codes:SPEC` or `decoded:SPEC`.
`what` is both texts, decode and implementation, between bars; `sizes` are M, N and K. No gradient
flows through them: asking for one is an error of torch's.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_ops.compiling import choice_text, joined, parse_choice, parse_spec, spec_text
from fused_ops.dispatch import Choice
from fused_ops.formats import Operand, QuantizedTensor
from fused_ops.scaled_matmul.implementations import SCALED_MATMUL


def _taken_apart(operand: Operand) -> tuple[list[Tensor], str]:
    if isinstance(operand, Tensor):
        return [operand], "tensor"
    if isinstance(operand, QuantizedTensor):
        main, kind = [operand.codes, operand.scales], "codes"
    else:
        main, kind = [operand.data], "decoded"
    counts = [] if operand.out_of_range is None else [operand.out_of_range]
    return [*main, operand.amax, *counts], f"{kind}:{spec_text(operand.spec)}"


def _put_together(tensors: Sequence[Tensor], kind: str, rows: int, cols: int) -> Operand:
    if kind == "tensor":
        return tensors[0]
    form, _, text = kind.partition(":")
    return joined(tensors, parse_spec(text), form, (rows, cols))


def _product(
    a: Sequence[Tensor], b: Sequence[Tensor], what: str, sizes: Sequence[int], **options: Any
) -> Tensor:
    left, right, decode, implementation = what.split("|")
    m, n, k = (int(size) for size in sizes)
    result: Tensor = SCALED_MATMUL(
        _put_together(a, left, m, k), _put_together(b, right, n, k), decode=decode,
        implementation=parse_choice(implementation), **options,
    )  # fmt: skip
    return result


@torch.library.custom_op("nibble::scaled_matmul", mutates_args=())
def _scaled_matmul(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    what: str,
    sizes: Sequence[int],
    out_dtype: torch.dtype,
    bias: Tensor | None,
) -> Tensor:
    return _product(a, b, what, sizes, out_dtype=out_dtype, accumulate=None, bias=bias)


@_scaled_matmul.register_fake
def _(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    what: str,
    sizes: Sequence[int],
    out_dtype: torch.dtype,
    bias: Tensor | None,
) -> Tensor:
    return a[0].new_empty((sizes[0], sizes[1]), dtype=out_dtype)


@torch.library.custom_op("nibble::scaled_matmul_into", mutates_args=("accumulate",))
def _scaled_matmul_into(
    accumulate: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    what: str,
    sizes: Sequence[int],
    beta: int = 1,
) -> None:
    options = {"out_dtype": torch.float32, "accumulate": accumulate, "beta": beta, "bias": None}
    _product(a, b, what, sizes, **options)


@_scaled_matmul_into.register_fake
def _(accumulate: Tensor, *rest: Any) -> None:
    return None


def scaled_matmul(
    a: Operand,
    b: Operand,
    *,
    out_dtype: torch.dtype,
    accumulate: Tensor | None,
    beta: int,
    bias: Tensor | None,
    decode: str,
    implementation: Choice,
) -> Tensor:
    """As SCALED_MATMUL of `fused_ops.scaled_matmul.implementations`, in a graph."""
    (left, left_kind), (right, right_kind) = _taken_apart(a), _taken_apart(b)
    what = "|".join((left_kind, right_kind, decode, choice_text(implementation)))
    sizes = [a.shape[0], b.shape[0], a.shape[1]]
    if accumulate is not None:
        torch.ops.nibble.scaled_matmul_into(accumulate, left, right, what, sizes, beta)
        return accumulate
    return torch.ops.nibble.scaled_matmul(left, right, what, sizes, out_dtype, bias)
