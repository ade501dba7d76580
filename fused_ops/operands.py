# SPDX-License-Identifier: Apache-2.0
"""What a linear layer does with one operand: check, rotate, amax, quantize, save, observe.

`quantize_operand` is the way of one; `quantize_both` that of X or dY, which two GEMMs need along
different axes. What both leave to `fused_ops.quantize` is the arithmetic alone: the amax that ranks
share, the key of the dither, the signs and the place in the global tensor are found here.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from fused_ops.codecs import roundup
from fused_ops.formats import DecodedTensor, Operand, OperandSpec, QuantizedTensor
from fused_ops.keys import signs
from fused_ops.linear_call import LinearCall, Run, Runs
from fused_ops.quantize import (
    DelayedScaling,
    amax_pair,
    operand_amax,
    pair_reason,
    plain_amax,
    quantize,
    quantize_decoded,
    quantize_pair,
    quantize_rows_apart,
)
from fused_ops.quantize.hadamard import amax_from_plain
from fused_ops.recipe import is_quantized
from fused_ops.scaled_matmul import blackwell
from fused_ops.scaled_matmul.hopper import decoded_form
from fused_ops.triton_support import device_reason


def has_shared_amax(spec: OperandSpec) -> bool:
    """Whether codes depend on an amax that ranks with parts of the operand must share.

    That of power-of-two scales moves blocks into range: without it values would still be the same
    on all ranks, but not those that fall out of the range, nor the bytes.
    """
    return spec.needs_amax or spec.is_pow2


class Source:
    """A high-precision matrix that becomes operands: what they share is taken from it once.

    Args:
        tensor: the matrix.
        nonfinite: bool scalar on its device, raised when the plain amax is taken of Inf or NaN.
    """

    def __init__(self, tensor: Tensor, nonfinite: Tensor | None = None) -> None:
        self.tensor, self.nonfinite = tensor, nonfinite
        self._plain: Tensor | None = None
        self._rotated: dict[OperandSpec, Tensor] = {}
        self.is_checked = False

    @property
    def plain_amax(self) -> Tensor:
        """fp32 amax of the matrix as it is."""
        if self._plain is None:
            self._plain = plain_amax(self.tensor, self.nonfinite)
        return self._plain

    def prepare_pair(self, column: OperandSpec, signs: Tensor | None) -> None:
        """Takes the plain amax and that of the rotated columns, together."""
        if self._plain is None and column not in self._rotated:
            pair = amax_pair(self.tensor, column, signs, self.nonfinite)
            self._plain, self._rotated[column] = pair

    def amax(self, spec: OperandSpec, columns: bool, signs: Tensor | None) -> Tensor:
        """operand_amax of an operand; a new tensor, or one that must not be changed."""
        if columns and spec in self._rotated:
            return self._rotated[spec]
        if spec.takes_own_amax:
            return operand_amax(self.tensor, spec, columns=columns, signs=signs)
        return amax_from_plain(spec, self.plain_amax)


def as_source(call: LinearCall, x: Tensor | Source) -> Source:
    """x, or a new Source of it."""
    return x if isinstance(x, Source) else Source(x, call.nonfinite)


def amax_of(call: LinearCall, name: str, x: Tensor | Source, *, columns: bool = False) -> Tensor:
    """This rank's amax of an operand: fp32, after rotation where the operand is rotated."""
    source, spec = as_source(call, x), call.spec(name)
    if source.tensor.numel() == 0:
        rows = (source.tensor.shape[1 if columns else 0],) if spec.row_scaled else ()
        return torch.zeros(rows, dtype=torch.float32, device=source.tensor.device)
    sign = signs(spec, call.key, name.split(".")[0], source.tensor.device)
    return source.amax(spec, columns, sign)


def _reduced_amax(call: LinearCall, name: str, source: Source, columns: bool) -> Tensor:
    return call.comm.reduce_amax(name, amax_of(call, name, source, columns=columns))


def _reduced_amaxes(call: LinearCall, names: tuple[str, str], source: Source) -> list[Tensor]:
    """Those of a matrix by rows and by columns, in one exchange where the same ranks share them."""
    own = [amax_of(call, name, source, columns=bool(i)) for i, name in enumerate(names)]
    return call.comm.reduce_amaxes(names, own)


def quantize_operand(
    call: LinearCall,
    name: str,
    x: Tensor | Source,
    *,
    columns: bool = False,
    amax: Tensor | None = None,
    form: str = "codes",
) -> Operand:
    """The matrix x as the operand `name`: of x, or of its transpose if `columns`.

    Args:
        x: [rows, cols] fp32, bf16 or fp16: X [tokens, in], W [out, in] or dY [tokens, out].
        columns: True for the operands in `keys.TRANSPOSED`.
        amax: the reduced amax, if the caller has it already (experts reduce all of theirs at once).
        form: "codes", or what to decode them to: see `fused_ops.quantize.quantize_decoded`.

    Returns:
        [rows, cols], or [cols, rows] if `columns`; x itself, or a view, if it is not quantized.

    Raises:
        FloatingPointError: see `check_finite`.
    """
    source, spec = as_source(call, x), call.spec(name)
    x = source.tensor
    if not is_quantized(spec):
        return x.t() if columns else x
    check_finite(call, name, source)
    if call.row_block is not None and name == "fprop.x" and spec.is_pow2 and x.numel():
        sign = signs(spec, call.key, "fprop", x.device)
        return quantize_rows_apart(x, spec, signs=sign, implementation=call.implementation)
    if spec.format == "fp8_delayed":
        amax = _delayed_amax(call, name, x)
    elif amax is None and has_shared_amax(spec):
        amax = _reduced_amax(call, name, source, columns)
    if x.numel() == 0:
        return _empty(x.t() if columns else x, spec)
    options: dict[str, Any] = {
        "columns": columns,
        "amax": amax,
        "signs": signs(spec, call.key, name.split(".")[0], x.device),
        "implementation": call.implementation,
    }
    if spec.is_random:
        options["key"] = call.key.operand(name)
        origin = call.comm.origin(name)
        if isinstance(origin, Runs):
            return _quantize_runs(x, spec, origin, options)
        options["origin"] = origin[::-1] if columns else origin
    if form == "codes":
        return quantize(x, spec, **options)
    return quantize_decoded(x, spec, form, **options)


def quantize_both(
    call: LinearCall, names: tuple[str, str], source: Source, forms: tuple[str, str]
) -> tuple[Operand, Operand]:
    """One matrix as two operands: the first along its rows, the second the transpose.

    In one read of it where there is a kernel for that; the same values either way.

    Args:
        names: ("fprop.x", "wgrad.x") of X, or ("dgrad.dy", "wgrad.dy") of dY.
        source: of the matrix [rows, cols].
        forms: as in `quantize_operand`, of both.

    Returns:
        Operands [rows, cols] and [cols, rows].
    """
    row, column = call.spec(names[0]), call.spec(names[1])
    x = source.tensor
    # What fp8_delayed scales by is noted, and taken, operand by operand.
    delayed = "fp8_delayed" in (row.format, column.format)
    quantized = is_quantized(row) and is_quantized(column) and not delayed
    origin = call.comm.origin(names[0])
    if (
        not quantized
        or isinstance(origin, Runs)
        or call.comm.origin(names[1]) != origin
        or origin[0] % 16
        or origin[1] % 16
        or call.implementation is not None
        or pair_reason(x, row, column) is not None
    ):
        amaxes: list[Tensor | None] = [None, None]
        shared = quantized and has_shared_amax(row) and has_shared_amax(column)
        if shared and x.numel() and call.row_block is None:
            amaxes = [*_reduced_amaxes(call, names, source)]
        return (
            quantize_operand(call, names[0], source, form=forms[0], amax=amaxes[0]),
            quantize_operand(call, names[1], source, columns=True, form=forms[1], amax=amaxes[1]),
        )
    sign = signs(column, call.key, names[1].split(".")[0], x.device)
    source.prepare_pair(column, sign)
    check_finite(call, names[0], source)
    first, second = _reduced_amaxes(call, names, source)
    return quantize_pair(
        x,
        row,
        column,
        amaxes=(first, second),
        signs=sign,
        keys=(
            call.key.operand(names[0]) if row.is_random else None,
            call.key.operand(names[1]) if column.is_random else None,
        ),
        origin=origin,
        forms=forms,
    )


def operand_form(call: LinearCall, gemm: str, x: Tensor, rows: tuple[int, int]) -> str:
    """The form of the operands of a GEMM that are multiplied and not kept.

    Codes where an observer is set, or where there are no tensor cores.

    Args:
        gemm: "fprop", "dgrad" or "wgrad".
        x: what is quantized, for its dtype and device.
        rows: of both operands.
    """
    chosen = call.implementation is not None or call.row_block is not None
    if call.observer is not None or chosen or not x.is_cuda:
        return "codes"
    if device_reason(x) is not None or x.dtype not in (torch.bfloat16, torch.float32):
        return "codes"
    first, second = call.recipe.specs(gemm)
    if blackwell.multiplies(first, second, call.recipe.decode, x.device):
        return "codes"
    return decoded_form(first, second, rows, call.recipe.decode)


def _quantize_runs(
    x: Tensor, spec: OperandSpec, runs: Runs, options: dict[str, Any]
) -> QuantizedTensor:
    """Each piece of x with its own origin, put together again.

    Args:
        x: [rows, cols] in the tensor's own layout, which `runs` speaks of.
        options: the other arguments of `quantize`, `columns` and `amax` among them.
    """
    columns, amax = options["columns"], options.pop("amax")
    runs = runs.of_shape(*x.shape)
    _check_runs(x, spec, runs, columns)
    own = _amax_pieces(amax, spec, runs.columns if columns else runs.rows)
    bands = []
    for i, (band, (_, row)) in enumerate(zip(x.split([n for n, _ in runs.rows]), runs.rows)):
        parts = band.split([n for n, _ in runs.columns], 1)
        pieces = [
            quantize(
                part,
                spec,
                origin=(column, row) if columns else (row, column),
                amax=own[j if columns else i],
                **options,
            )
            for j, (part, (_, column)) in enumerate(zip(parts, runs.columns))
        ]
        bands.append(join(pieces, 0 if columns else 1))
    return join(bands, 1 if columns else 0)


def _check_runs(x: Tensor, spec: OperandSpec, runs: Runs, columns: bool) -> None:
    tile = spec.block[0] if spec.block else 1
    for what, lengths, size, multiple in (
        ("rows", [n for n, _ in runs.rows], x.shape[0], spec.multiple if columns else tile),
        ("columns", [n for n, _ in runs.columns], x.shape[1], tile if columns else spec.multiple),
    ):
        if sum(lengths) != size or any(n % multiple for n in lengths[:-1]):
            raise ValueError(
                f"runs of {what} must add up to {size}, and all but the last be multiples of "
                f"{multiple} for {spec.label!r}, got {lengths}; change the sequence length or the "
                "way the layer is cut"
            )


def _amax_pieces(
    amax: Tensor | None, spec: OperandSpec, along: Sequence[Run]
) -> Sequence[Tensor | None]:
    """The amax of each run along the operand's rows; those of row-scaled operands are their own."""
    if amax is not None and spec.row_scaled:
        return amax.split([n for n, _ in along])
    return [amax] * len(along)


def join(parts: Sequence[QuantizedTensor], axis: int) -> QuantizedTensor:
    """Pieces of one operand beside (1) or below (0) each other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    counts = [part.out_of_range for part in parts if part.out_of_range is not None]
    rows, cols = first.shape
    total = sum(part.shape[axis] for part in parts)
    return replace(
        first,
        codes=torch.cat([part.codes for part in parts], axis),
        scales=torch.cat([p.scales for p in parts], axis) if first.spec.block else first.scales,
        amax=torch.cat([p.amax for p in parts]) if first.amax.dim() and axis == 0 else first.amax,
        shape=(rows, total) if axis else (total, cols),
        out_of_range=torch.stack(counts).sum(0, dtype=torch.int32) if counts else None,
    )


def _empty(x: Tensor, spec: OperandSpec) -> Tensor:
    """No tokens, no codes: zeros of the shape that a rotated operand would be padded to."""
    cols = roundup(x.shape[1], spec.multiple) if spec.hadamard else x.shape[1]
    return x.new_zeros(x.shape[0], cols)


def _delayed_amax(call: LinearCall, name: str, x: Tensor) -> Tensor:
    """The amax of earlier steps; this step's is noted. Its owner reduces and updates the state."""
    if call.delayed is None:
        raise ValueError(
            f"{call.name or 'a linear layer'}: {name} is fp8_delayed and needs a state that "
            "outlives the call, got delayed=None; pass the layer's own dict as LinearCall.delayed"
        )
    spec, slot = call.spec(name), f"{name}.{call.key.expert}"
    if slot not in call.delayed:
        call.delayed[slot] = DelayedScaling(str(spec.element), device=x.device)
    if x.numel() and call.note_amax:
        call.delayed[slot].observe(operand_amax(x, spec))
    return call.delayed[slot].amax


def check_finite(call: LinearCall, name: str, source: Source) -> None:
    """Raises the device flag, or FloatingPointError if the call wants it at once.

    A matrix that becomes several operands is checked only the first time.
    """
    if source.is_checked or (call.nonfinite is None and not call.check_finite):
        return
    source.is_checked = True
    x, amax = source.tensor, source.plain_amax  # taking it has raised the flag
    if call.check_finite and not bool(torch.isfinite(amax)):
        gemm, operand = name.split(".")
        raise FloatingPointError(
            f"{call.name or 'a linear layer'}: operand {operand} of {gemm} holds "
            f"{int((~torch.isfinite(x)).sum())} values of {x.numel()} that are Inf or NaN and "
            f"cannot become {call.spec(name).format} codes; look at the layer before it, or at "
            "the learning rate"
        )


def observe(call: LinearCall, name: str, tensor: Tensor, operand: Operand) -> None:
    """Shows an operand to the observer, if there is one; `tensor` is not transposed."""
    if call.observer is not None:
        gemm, which = name.split(".")
        call.observer.observe(gemm, which, tensor, operand, call)


def pack(operand: Operand) -> tuple[list[Tensor], QuantizedTensor | DecodedTensor | None]:
    """The tensors of an operand, for saving, and the rest of it."""
    if isinstance(operand, Tensor):
        return [operand], None
    return [getattr(operand, name) for name in _tensor_fields(operand)], operand


def unpack(tensors: Sequence[Tensor], rest: QuantizedTensor | DecodedTensor | None) -> Operand:
    """The inverse of pack."""
    if rest is None:
        return tensors[0]
    changes: dict[str, Any] = dict(zip(_tensor_fields(rest), tensors))
    return replace(rest, **changes)


def _tensor_fields(quantized: QuantizedTensor | DecodedTensor) -> list[str]:
    return [f.name for f in fields(quantized) if isinstance(getattr(quantized, f.name), Tensor)]
