# SPDX-License-Identifier: Apache-2.0
"""What happens where torch.compile meets fused ops.

Quantizers and products become custom ops (`torch.ops.nibble`), which stay in the graph with the
shapes of their results. Whole layers, whose keys change every step and whose codes are kept in
Python, and the ops around products run as they are, between graphs (`dispatch.outside_graph`).
Nothing of this is passed through in eager mode: all it costs there is a call of
`torch.compiler.is_dynamo_compiling`.
"""

from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fused_ops.codecs import FP8_DTYPES, roundup
from fused_ops.dispatch import Choice
from fused_ops.formats import DecodedTensor, OperandSpec, QuantizedTensor

if TYPE_CHECKING:
    from fused_ops.quantize.philox import Key

_FIELDS = tuple(field.name for field in fields(OperandSpec))
_WORD = {"True": True, "False": False, "None": None}


def spec_text(spec: OperandSpec) -> str:
    """A spec as custom ops are given it: `format=nvfp4;element=e2m1;block=1x16;...`."""
    words = []
    for name in _FIELDS:
        value = getattr(spec, name)
        words.append(f"{name}={value[0]}x{value[1]}" if name == "block" and value else
                     f"{name}={value}")  # fmt: skip
    return ";".join(words)


@lru_cache(maxsize=1024)
def parse_spec(text: str) -> OperandSpec:
    """The inverse of spec_text."""
    values: dict[str, Any] = {}
    for word in text.split(";"):
        name, _, value = word.partition("=")
        values[name] = int(value) if name == "hadamard" else _WORD.get(value, value)
    return OperandSpec(**values)


def choice_text(implementation: Choice) -> str:
    """A choice of implementations as text: names with commas, empty for None."""
    if implementation is None:
        return ""
    return implementation if isinstance(implementation, str) else ",".join(implementation)


def parse_choice(text: str) -> Choice:
    """The inverse of choice_text."""
    return text.split(",") if text else None


def split_key(key: "Key | None") -> tuple[Tensor | None, list[int]]:
    """A key as a tensor, or as numbers: what changes is an argument, and never part of a graph."""
    if key is None:
        return None, []
    return (key, []) if isinstance(key, Tensor) else (None, [key[0], key[1]])


def join_key(tensor: Tensor | None, words: Sequence[int]) -> "Key | None":
    """The inverse of split_key."""
    if tensor is not None:
        return tensor
    return (int(words[0]), int(words[1])) if words else None


def result_shape(shape: Sequence[int], spec: OperandSpec, columns: bool) -> tuple[int, int]:
    """The `shape` of what quantize makes of a matrix of this shape."""
    rows, cols = (shape[1], shape[0]) if columns else (shape[0], shape[1])
    return rows, roundup(cols, spec.multiple) if spec.hadamard else cols


def has_counts(spec: OperandSpec) -> bool:
    """Whether results carry `out_of_range`."""
    return spec.is_pow2 or spec.format == "fp8_delayed"


def parts(operand: QuantizedTensor | DecodedTensor, taken: set[int]) -> list[Tensor]:
    """The tensors of an operand as custom ops must return them: contiguous, in their own memory.

    Args:
        taken: storages of the op's inputs and of other results; those of these parts are added.
    """
    if isinstance(operand, DecodedTensor):
        found = [operand.data, operand.amax]
    else:
        found = [operand.codes, operand.scales, operand.amax]
    if has_counts(operand.spec):
        assert operand.out_of_range is not None, operand.spec.label
        found.append(operand.out_of_range)
    result = [t.clone() if t.untyped_storage().data_ptr() in taken else t for t in found]
    taken |= storages(*result)
    return [t.contiguous() for t in result]


def storages(*tensors: Tensor | None) -> set[int]:
    """Where they lie."""
    return {t.untyped_storage().data_ptr() for t in tensors if t is not None}


def joined(
    tensors: Sequence[Tensor], spec: OperandSpec, form: str, shape: tuple[int, int]
) -> QuantizedTensor | DecodedTensor:
    """The inverse of parts."""
    counts = tensors[-1] if has_counts(spec) else None
    if form == "codes":
        return QuantizedTensor(tensors[0], tensors[1], tensors[2], shape, spec, counts)
    return DecodedTensor(tensors[0], tensors[1], shape, spec, counts)


def fake_parts(x: Tensor, spec: OperandSpec, form: str, rows: int, cols: int) -> list[Tensor]:
    """Empty tensors of the shapes and types of `parts` of a result [rows, cols], on x's device."""
    padded = roundup(cols, spec.multiple)
    amax = x.new_empty((rows,) if spec.row_scaled else (), dtype=torch.float32)
    counts = [x.new_empty((2,), dtype=torch.int32)] if has_counts(spec) else []
    if form != "codes":
        dtype = FP8_DTYPES["e4m3"] if form == "fp8" else torch.bfloat16
        return [x.new_empty((rows, padded), dtype=dtype), amax, *counts]
    width = padded // 2 if spec.is_fp4 else padded
    codes = x.new_empty((rows, width), dtype=torch.uint8)
    scale_shape, scale_dtype = (1, 1), torch.float32
    if spec.block is not None:
        scale_shape = (-(-rows // spec.block[0]), padded // spec.block[1])
        scale_dtype = torch.float32 if spec.format == "fp8_blockwise" else torch.uint8
    return [codes, x.new_empty(scale_shape, dtype=scale_dtype), amax, *counts]
