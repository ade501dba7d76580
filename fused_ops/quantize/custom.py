# SPDX-License-Identifier: Apache-2.0
"""The quantizers as custom ops: torch.ops.nibble.quantize, quantize_pair, ...

`fused_ops.quantize.api` calls them while torch.compile traces, and only then. They run what the api
runs in eager mode, so that bytes are the same. No gradient flows through them: a layer's gradient
is defined by `fused_ops.linear`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_ops.compiling import (
    choice_text,
    fake_parts,
    has_counts,
    join_key,
    joined,
    parse_choice,
    parse_spec,
    parts,
    result_shape,
    spec_text,
    split_key,
    storages,
)
from fused_ops.dispatch import Choice
from fused_ops.formats import OperandSpec, QuantizedTensor
from fused_ops.quantize.implementations import AMAX, PAIR, QUANTIZE, REQUANTIZE


@torch.library.custom_op("nibble::operand_amax", mutates_args=())
def _operand_amax(
    x: Tensor, spec: str, columns: bool, signs: Tensor | None, implementation: str
) -> Tensor:
    choice = parse_choice(implementation)
    found: Tensor = AMAX(x, parse_spec(spec), columns=columns, signs=signs, implementation=choice)
    return found.clone() if storages(found) & storages(x) else found


@_operand_amax.register_fake
def _(x: Tensor, spec: str, columns: bool, signs: Tensor | None, implementation: str) -> Tensor:
    rows = x.shape[1] if columns else x.shape[0]
    shape = (rows,) if parse_spec(spec).row_scaled else ()
    return x.new_empty(shape, dtype=torch.float32)


def operand_amax(
    x: Tensor, spec: OperandSpec, columns: bool = False, signs: Tensor | None = None
) -> Tensor:
    """As AMAX of `fused_ops.quantize.implementations`, in a graph."""
    return torch.ops.nibble.operand_amax(x, spec_text(spec), columns, signs, "")


@torch.library.custom_op("nibble::quantize", mutates_args=())
def _quantize(
    x: Tensor,
    what: str,
    amax: Tensor | None,
    signs: Tensor | None,
    key: Tensor | None,
    numbers: Sequence[int],
) -> list[Tensor]:
    """what: SPEC|form|rows or columns|implementation; numbers: the origin, and a key of numbers."""
    spec, form, along, implementation = what.split("|")
    row, column, *words = (int(n) for n in numbers)
    result = QUANTIZE(
        x, parse_spec(spec), columns=along == "columns", amax=amax, signs=signs,
        key=join_key(key, words), origin=(row, column), form=form,
        implementation=parse_choice(implementation),
    )  # fmt: skip
    return parts(result, storages(x, amax, signs, key))


@_quantize.register_fake
def _(x: Tensor, what: str, *rest: Any) -> list[Tensor]:
    text, form, along, _ = what.split("|")
    spec = parse_spec(text)
    return fake_parts(x, spec, form, *result_shape(x.shape, spec, along == "columns"))


def quantize(
    x: Tensor,
    spec: OperandSpec,
    *,
    form: str = "codes",
    amax: Tensor | None = None,
    implementation: Choice = None,
    **arguments: Any,
) -> Any:
    """As QUANTIZE of `fused_ops.quantize.implementations`, in a graph."""
    columns = arguments.get("columns", False)
    along = "columns" if columns else "rows"
    what = f"{spec_text(spec)}|{form}|{along}|{choice_text(implementation)}"
    key, words = split_key(arguments.get("key"))
    numbers = [*arguments.get("origin", (0, 0)), *words]
    found = torch.ops.nibble.quantize(x, what, amax, arguments.get("signs"), key, numbers)
    return joined(found, spec, form, result_shape(x.shape, spec, columns))


@torch.library.custom_op("nibble::quantize_pair", mutates_args=())
def _quantize_pair(
    x: Tensor,
    what: str,
    amaxes: Sequence[Tensor],
    signs: Tensor | None,
    row_key: Tensor | None,
    column_key: Tensor | None,
    numbers: Sequence[int],
) -> list[Tensor]:
    """what: SPEC|SPEC|form|form|implementation; numbers: the origin, and keys of numbers or 0."""
    *specs, row_form, column_form, implementation = what.split("|")
    row, column, *words = (int(n) for n in numbers)
    results = PAIR(
        x, parse_spec(specs[0]), parse_spec(specs[1]), amaxes=(amaxes[0], amaxes[1]), signs=signs,
        keys=(join_key(row_key, words[:2]), join_key(column_key, words[2:])),
        origin=(row, column), forms=(row_form, column_form),
        implementation=parse_choice(implementation),
    )  # fmt: skip
    taken = storages(x, *amaxes, signs, row_key, column_key)
    return [part for result in results for part in parts(result, taken)]


@_quantize_pair.register_fake
def _(x: Tensor, what: str, *rest: Any) -> list[Tensor]:
    words, found = what.split("|"), []
    for text, form, columns in zip(words[:2], words[2:4], (False, True)):
        spec = parse_spec(text)
        found += fake_parts(x, spec, form, *result_shape(x.shape, spec, columns))
    return found


def quantize_pair(
    x: Tensor,
    row: OperandSpec,
    column: OperandSpec,
    *,
    amaxes: tuple[Tensor, Tensor],
    forms: tuple[str, str] = ("codes", "codes"),
    implementation: Choice = None,
    **arguments: Any,
) -> tuple[Any, Any]:
    """As PAIR of `fused_ops.quantize.implementations`, in a graph."""
    what = "|".join((spec_text(row), spec_text(column), *forms, choice_text(implementation)))
    keys = [split_key(key) for key in arguments.get("keys", (None, None))]
    numbers = [*arguments.get("origin", (0, 0))]
    for _, words in keys:
        numbers += words or [0, 0]
    found = torch.ops.nibble.quantize_pair(
        x, what, list(amaxes), arguments.get("signs"), keys[0][0], keys[1][0], numbers
    )
    own = (3 if forms[0] == "codes" else 2) + has_counts(row)
    return (
        joined(found[:own], row, forms[0], result_shape(x.shape, row, False)),
        joined(found[own:], column, forms[1], result_shape(x.shape, column, True)),
    )


@torch.library.custom_op("nibble::requantize_columns", mutates_args=())
def _requantize_columns(
    source: Sequence[Tensor],
    source_spec: str,
    shape: Sequence[int],
    spec: str,
    amax: Tensor,
    form: str,
    implementation: str,
) -> list[Tensor]:
    whole = joined(source, parse_spec(source_spec), "codes", (int(shape[0]), int(shape[1])))
    result = REQUANTIZE(
        whole, parse_spec(spec), amax, form=form, implementation=parse_choice(implementation)
    )
    return parts(result, storages(*source, amax))


@_requantize_columns.register_fake
def _(
    source: Sequence[Tensor],
    source_spec: str,
    shape: Sequence[int],
    spec: str,
    amax: Tensor,
    form: str,
    implementation: str,
) -> list[Tensor]:
    parsed = parse_spec(spec)
    return fake_parts(source[0], parsed, form, *result_shape(shape, parsed, True))


def requantize_columns(
    source: QuantizedTensor, spec: OperandSpec, amax: Tensor, *, form: str, implementation: Choice
) -> Any:
    """As REQUANTIZE of `fused_ops.quantize.implementations`, in a graph."""
    tensors = [source.codes, source.scales, source.amax]
    if source.out_of_range is not None:
        tensors.append(source.out_of_range)
    rows, cols = source.shape
    found = torch.ops.nibble.requantize_columns(
        tensors, spec_text(source.spec), [rows, cols], spec_text(spec), amax, form,
        choice_text(implementation),
    )  # fmt: skip
    return joined(found, spec, form, result_shape(source.shape, spec, True))
