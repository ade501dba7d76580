# SPDX-License-Identifier: Apache-2.0
"""quantize() and the amax it may be given: signatures and checks.

A caller whose tensor is cut over ranks takes `operand_amax` of its part, reduces it, and hands it
to `quantize`; in a single process `quantize` takes it itself. The definition whose bytes all back
ends equal is `reference.py`.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fused_ops.dispatch import Choice, refuse
from fused_ops.formats import DecodedTensor, OperandSpec, QuantizedTensor
from fused_ops.quantize import custom, triton_amax, triton_backend, triton_fp8
from fused_ops.quantize.hadamard import amax_from_plain
from fused_ops.quantize.implementations import AMAX, DEQUANTIZE, PAIR, QUANTIZE, REQUANTIZE
from fused_ops.quantize.philox import Key
from fused_ops.quantize.reference_pow2 import OWN_AMAX, in_own_range

PLAIN = OperandSpec()
"""Of amaxes that are taken of a matrix as it is."""


def operand_amax(
    x: Tensor,
    spec: OperandSpec,
    *,
    columns: bool = False,
    signs: Tensor | None = None,
) -> Tensor:
    """Amax that quantize() would take by itself, so that a caller can reduce it over ranks first.

    Taken after the rotation and its rounding to bf16 where the spec has one. For rotated pow2
    operands it is a bound that needs no rotation, the amax of x times `hadamard.amax_bound`: it
    moves at most two of the 15 binades of the range of a rotation of 16 above every block, and no
    value depends on it while none lies below that range (`out_of_range` counts). Zero padding
    never changes an amax; rows that are padding by meaning, such as those of experts, are the
    caller's to cut.

    Args:
        x: [rows, cols] fp32, bf16 or fp16.
        columns, signs: as in `quantize`.
    Returns:
        fp32: scalar, or [result rows] if spec.row_scaled. NaN stays NaN.
    """
    _check(x, spec)
    return _amax(x, spec, columns, signs)


def _amax(
    x: Tensor, spec: OperandSpec, columns: bool = False, signs: Tensor | None = None
) -> Tensor:
    if is_dynamo_compiling():
        return custom.operand_amax(x, spec, columns, signs)
    found: Tensor = AMAX(x, spec, columns=columns, signs=signs)
    return found


def quantize(
    x: Tensor,
    spec: OperandSpec,
    *,
    columns: bool = False,
    amax: Tensor | None = None,
    signs: Tensor | None = None,
    key: Key | None = None,
    origin: tuple[int, int] = (0, 0),
    implementation: Choice = None,
) -> QuantizedTensor:
    """Quantize one operand of a GEMM, as `spec` says.

    Args:
        x: [rows, cols] fp32, bf16 or fp16. Nothing looks for Inf and NaN here: the
            flag of `plain_amax` does. They decode to NaN or Inf, never to a plausible number,
            except in FP8, whose casts saturate Inf.
        columns: False: blocks and contraction run along cols. True: quantizes x.T, result
            [cols, rows], blocks and rotation along x's rows.
        amax: fp32 scalar ([result rows] if row_scaled) shared with other shards; None: x's own.
            pow2 takes its shift from it, and it may be stale. fp8_delayed must be given one.
        signs: [spec.hadamard] of +-1; None is the fixed vector.
        key: Philox key (k0, k1), needed by random rounding. The dither of an element depends on
            key, global row and global column alone.
        origin: global (row, column) of the result's first element, the column a multiple of 16.
        implementation: force one by name; it never falls back.
    Returns:
        Codes of [rows, cols], or of [cols, rows] if `columns`; see QuantizedTensor.
    Raises:
        ConfigError (a ValueError): wrong shape or dtype, missing key or amax, no implementation.
    """
    arguments: dict[str, Any] = {"columns": columns, "signs": signs, "key": key, "origin": origin}
    amax = _checked_amax(x, spec, columns, amax, key)
    if is_dynamo_compiling():
        return custom.quantize(x, spec, amax=amax, implementation=implementation, **arguments)
    return QUANTIZE(x, spec, amax=amax, implementation=implementation, **arguments)


def quantize_rows_apart(
    x: Tensor, spec: OperandSpec, *, signs: Tensor | None = None, implementation: Choice = None
) -> QuantizedTensor:
    """A pow2 operand with a shift for each row: `amax` of the result is fp32 [rows].

    With one shift for the matrix, what else is in the batch decides how blocks below its range are
    rounded. Arguments are quantize's; nothing is random, since dither depends on the row.
    """
    assert spec.is_pow2, f"{spec.label} has no shift"
    assert not spec.is_random, f"{spec.label} draws"
    moved, amax = in_own_range(x, spec)
    own = moved.new_full((), OWN_AMAX)
    codes = quantize(moved, spec, amax=own, signs=signs, implementation=implementation)
    return replace(codes, amax=amax)


def quantize_decoded(
    x: Tensor, spec: OperandSpec, form: str, *, implementation: Choice = None, **arguments: Any
) -> DecodedTensor:
    """quantize(x, spec, ...).decoded(form), without writing the codes.

    For an operand that is multiplied and not kept. Arguments and errors are quantize's.
    """
    if form not in spec.decoded_forms:
        refuse(
            f"{spec.label!r} has the decoded forms {spec.decoded_forms}; got {form!r}: "
            "use quantize()"
        )
    amax, columns = arguments.pop("amax", None), arguments.get("columns", False)
    amax = _checked_amax(x, spec, columns, amax, arguments.get("key"))
    if is_dynamo_compiling():
        return custom.quantize(
            x, spec, amax=amax, form=form, implementation=implementation, **arguments
        )
    return QUANTIZE(x, spec, amax=amax, form=form, implementation=implementation, **arguments)


def _checked_amax(
    x: Tensor, spec: OperandSpec, columns: bool, amax: Tensor | None, key: Key | None
) -> Tensor | None:
    """The amax as implementations take it, once what is given has been found to fit."""
    _check(x, spec)
    if spec.is_high_precision:
        refuse(f"format {spec.format} is not quantized: use x.to() instead of quantize()")
    if spec.is_random and key is None:
        refuse(f"rounding {spec.rounding} needs random numbers: pass key=(k0, k1)")
    if spec.format == "fp8_delayed" and amax is None:
        refuse("fp8_delayed scales by earlier steps: pass amax=DelayedScaling(...).amax")
    if amax is None:
        return None
    rows = x.shape[1] if columns else x.shape[0]
    return amax.to(device=x.device, dtype=torch.float32).reshape((rows,) if spec.row_scaled else ())


def quantize_pair(
    x: Tensor,
    row: OperandSpec,
    column: OperandSpec,
    *,
    amaxes: tuple[Tensor, Tensor],
    implementation: Choice = None,
    **arguments: Any,
) -> tuple[Any, Any]:
    """quantize(x, row) and quantize(x, column, columns=True), x read from memory once.

    Args:
        x: [rows, cols]; `pair_reason` says whether there is a kernel for it.
        amaxes: of both operands, fp32 scalars.
        arguments: signs, of the column operand's rotation; keys and forms, of both operands;
            origin, global (row, column) of x[0, 0], multiples of 16.
    Returns:
        Operands [rows, cols] and [cols, rows], QuantizedTensor or DecodedTensor as `forms` say.
    """
    if is_dynamo_compiling():
        return custom.quantize_pair(
            x, row, column, amaxes=amaxes, implementation=implementation, **arguments
        )
    return PAIR(x, row, column, amaxes=amaxes, implementation=implementation, **arguments)


def pair_reason(x: Tensor, row: OperandSpec, column: OperandSpec) -> str | None:
    """Why quantize_pair has no kernel that reads x once, or None."""
    if row.format in triton_fp8.FORMATS:
        return triton_fp8.pair_supports(x, row, column)
    return triton_backend.pair_supports(x, row, column)


def plain_amax(x: Tensor, flag: Tensor | None = None) -> Tensor:
    """fp32 amax of a matrix as it is; flag (bool scalar), if given, is raised by Inf and NaN."""
    if not is_dynamo_compiling() and triton_amax.amax_supports(x, PLAIN) is None:
        return triton_amax.matrix_amax(x, flag)
    amax = _amax(x, PLAIN)
    if flag is not None:
        flag.logical_or_(~torch.isfinite(amax))
    return amax


def amax_pair(
    x: Tensor, column: OperandSpec, signs: Tensor | None = None, flag: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """plain_amax(x, flag), and operand_amax(x, column, columns=True); one read if a kernel can."""
    if not column.takes_own_amax:
        plain = plain_amax(x, flag)
        return plain, amax_from_plain(column, plain)
    if not is_dynamo_compiling() and triton_amax.amax_supports(x, column) is None:
        return triton_amax.amax_pair(x, column, signs, flag)
    return plain_amax(x, flag), _amax(x, column, True, signs)


def requantize_columns(
    source: QuantizedTensor,
    spec: OperandSpec,
    amax: Tensor,
    *,
    form: str = "codes",
    implementation: Choice = None,
) -> QuantizedTensor | DecodedTensor:
    """quantize(source.dequantize(), spec, columns=True, amax=amax): dgrad's weight from fprop's.

    Args:
        source: codes [rows, cols].
        amax: fp32 scalar, of the decoded values.
        form: "codes", or one of DECODED_FORMS: see `quantize_decoded`.
    Returns:
        [cols, rows], a QuantizedTensor or a DecodedTensor as `form` says.
    """
    if is_dynamo_compiling():
        return custom.requantize_columns(
            source, spec, amax, form=form, implementation=implementation
        )
    made: QuantizedTensor | DecodedTensor = REQUANTIZE(
        source, spec, amax, form=form, implementation=implementation
    )
    return made


def dequantize(
    source: QuantizedTensor,
    dtype: torch.dtype = torch.float32,
    *,
    implementation: Choice = None,
) -> Tensor:
    """source.dequantize(dtype): decoded [rows, cols], by a kernel where there is one."""
    if is_dynamo_compiling():
        return source.dequantize(dtype)
    decoded: Tensor = DEQUANTIZE(source, dtype, implementation=implementation)
    return decoded


def quantize_stale(
    x: Tensor, spec: OperandSpec, amax: Tensor, *, margin: int = 2, **options: object
) -> tuple[QuantizedTensor, bool]:
    """Quantize to pow2 scales with the amax of an earlier step; redo it where that does not fit.

    Saves the pass over x that finds its amax. `margin` binades are kept free above; if any block
    falls outside the range, the tensor is quantized again with its own amax (and what is still
    outside then spans more than 15 binades, and stays counted in `out_of_range`).

    Args:
        x, spec: as in `quantize`; spec must have pow2 scales.
        amax: fp32 scalar of an earlier step.
        options: further arguments of `quantize`.
    Returns:
        The result, and whether it was redone. Reads a device flag: one synchronization.
    """
    if not spec.is_pow2:
        refuse(
            f"only nvfp4 with pow2 scales can use a stale amax; got {spec.label!r}: use quantize()"
        )
    first = quantize(x, spec, amax=amax * 2.0**margin, **options)  # type: ignore[arg-type]
    assert first.out_of_range is not None
    if not bool(first.out_of_range.any()):
        return first, False
    return quantize(x, spec, **options), True  # type: ignore[arg-type]


def _check(x: Tensor, spec: OperandSpec) -> None:
    if x.dim() != 2 or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        refuse(
            f"{spec.format} operands are matrices of fp32, bf16 or fp16; got shape "
            f"{tuple(x.shape)}, {x.dtype}: reshape to [rows, cols] and convert"
        )
