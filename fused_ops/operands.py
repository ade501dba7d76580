# SPDX-License-Identifier: Apache-2.0
"""What a linear layer does with one operand: check, rotate, amax, quantize, keep, observe."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from fused_ops.formats import OperandSpec, QuantizedTensor
from fused_ops.keys import sign_key, signs
from fused_ops.linear_call import LinearCall, Operand, Run, Runs
from fused_ops.quantize import DelayedScaling, nonfinite_flag, operand_amax, quantize
from fused_ops.recipe import is_quantized
from fused_ops.weight_codes import WeightCodes


def has_shared_amax(spec: OperandSpec) -> bool:
    """Whether codes depend on an amax that ranks with parts of the operand must share.

    That of power-of-two scales moves blocks into range: without it values would still be the same
    on all ranks, but not those that fall out of the range, nor the bytes.
    """
    return spec.needs_amax or spec.is_pow2


def amax_of(call: LinearCall, name: str, x: Tensor, *, columns: bool = False) -> Tensor:
    """This rank's amax of an operand: fp32, after rotation where the operand is rotated."""
    spec = call.spec(name)
    if x.numel() == 0:
        rows = (x.shape[1 if columns else 0],) if spec.row_scaled else ()
        return torch.zeros(rows, dtype=torch.float32, device=x.device)
    sign = signs(spec, call.key, name.split(".")[0], x.device)
    return operand_amax(x, spec, columns=columns, signs=sign)


def quantize_operand(
    call: LinearCall, name: str, x: Tensor, *, columns: bool = False, amax: Tensor | None = None
) -> Operand:
    """x [rows, cols] as the operand `name`: codes of x, or of its transpose if `columns`.

    Args:
        amax: the reduced amax, if the caller has it already (experts reduce all of theirs at once).
    """
    spec = call.spec(name)
    if not is_quantized(spec):
        return x.t() if columns else x
    check_finite(call, name, x)
    if spec.format == "fp8_delayed":
        amax = _delayed_amax(call, name, x)
    elif amax is None and has_shared_amax(spec):
        amax = call.comm.reduce_amax(name, amax_of(call, name, x, columns=columns))
    if x.numel() == 0:
        return _empty(x.t() if columns else x, spec)
    options: dict[str, Any] = {
        "columns": columns,
        "amax": amax,
        "signs": signs(spec, call.key, name.split(".")[0], x.device),
        "implementation": call.implementation,
    }
    if not spec.is_random:
        return quantize(x, spec, **options)
    options["key"] = call.key.operand(name)
    origin = call.comm.origin(name)
    if isinstance(origin, Runs):
        return _quantize_runs(x, spec, origin, options)
    return quantize(x, spec, origin=origin[::-1] if columns else origin, **options)


def _quantize_runs(
    x: Tensor, spec: OperandSpec, runs: Runs, options: dict[str, Any]
) -> QuantizedTensor:
    """Each piece of x with its own origin, put together again."""
    columns, amax = options["columns"], options.pop("amax")
    # A single run is as long as the tensor: experts have their own numbers of rows.
    rows = runs.rows if len(runs.rows) > 1 else ((x.shape[0], runs.rows[0][1]),)
    cols = runs.columns if len(runs.columns) > 1 else ((x.shape[1], runs.columns[0][1]),)
    runs = Runs(rows=rows, columns=cols)
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
        bands.append(_join(pieces, 0 if columns else 1))
    return _join(bands, 1 if columns else 0)


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


def _join(parts: Sequence[QuantizedTensor], axis: int) -> QuantizedTensor:
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
        scales=torch.cat([part.scales for part in parts], axis),
        amax=torch.cat([p.amax for p in parts]) if first.amax.dim() and axis == 0 else first.amax,
        shape=(rows, total) if axis else (total, cols),
        out_of_range=torch.stack(counts).sum(0, dtype=torch.int32) if counts else None,
    )


def _empty(x: Tensor, spec: OperandSpec) -> Tensor:
    """No tokens, no codes: zeros of the shape that a rotated operand would be padded to."""
    cols = x.shape[1] if not spec.hadamard else -(-x.shape[1] // spec.multiple) * spec.multiple
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


def check_finite(call: LinearCall, name: str, x: Tensor) -> None:
    """Raises the device flag, or FloatingPointError if the call wants it at once."""
    if call.nonfinite is None and not call.check_finite:
        return
    flag = nonfinite_flag(x)
    if call.nonfinite is not None:
        call.nonfinite.logical_or_(flag)
    if call.check_finite and bool(flag):
        gemm, operand = name.split(".")
        raise FloatingPointError(
            f"{call.name or 'a linear layer'}: operand {operand} of {gemm} holds "
            f"{int((~torch.isfinite(x)).sum())} values of {x.numel()} that are Inf or NaN and "
            f"cannot become {call.spec(name).format} codes; look at the layer before it, or at "
            "the learning rate"
        )


def weight_operand(call: LinearCall, name: str, weight: Tensor, expert: int = 0) -> Operand:
    """The weight [out, in] as the operand "fprop.w", or transposed as "dgrad.w".

    The codes are kept in `call.weight_codes` while the weight does not change.
    """
    spec = call.spec(name)
    if is_quantized(spec):
        return _weight_codes(call, name, weight, expert)
    if spec.source == "forward":
        weight = _weight_codes(call, "fprop.w", weight, expert).dequantize(weight.dtype)
    return weight if name == "fprop.w" else weight.t()


def _weight_codes(call: LinearCall, name: str, weight: Tensor, expert: int) -> QuantizedTensor:
    spec, gemm = call.spec(name), name.split(".")[0]
    # What codes depend on besides the weight; those of dgrad may be made from the forward's.
    dither = call.key.operand(name) if spec.is_random else ()
    variant = (spec, sign_key(spec, call.key, gemm), dither, call.spec("fprop.w"))
    kept = call.weight_codes if call.weight_codes is not None else WeightCodes()

    def build() -> QuantizedTensor:
        return _build(call, name, weight.detach(), expert)

    return kept.get((name, expert), weight, call.weights_epoch, variant, build)


def _build(call: LinearCall, name: str, weight: Tensor, expert: int) -> QuantizedTensor:
    forward, own = call.spec("fprop.w"), call.spec(name)
    source, columns = weight, name == "dgrad.w"
    if columns and own == forward and is_symmetric(own):
        return _weight_codes(call, "fprop.w", weight, expert).transposed()
    if own.source == "forward":
        source = _weight_codes(call, "fprop.w", weight, expert).dequantize()
    operand = quantize_operand(call, name, source, columns=columns)
    assert isinstance(operand, QuantizedTensor), f"{name}: an empty weight {tuple(weight.shape)}"
    return operand


def is_symmetric(spec: OperandSpec) -> bool:
    """Whether the codes of the transpose are the transposed codes."""
    square = spec.block is None or spec.block[0] == spec.block[1]
    return square and not (spec.hadamard or spec.is_random or spec.row_scaled)


def observe(call: LinearCall, name: str, tensor: Tensor, operand: Operand) -> None:
    """Shows an operand to the observer, if there is one."""
    if call.observer is not None:
        gemm, which = name.split(".")
        call.observer.observe(gemm, which, tensor, operand)


def pack(operand: Operand) -> tuple[list[Tensor], QuantizedTensor | None]:
    """The tensors of an operand, for saving, and the rest of it."""
    if isinstance(operand, Tensor):
        return [operand], None
    return [getattr(operand, name) for name in _tensor_fields(operand)], operand


def unpack(tensors: Sequence[Tensor], rest: QuantizedTensor | None) -> Operand:
    """The inverse of pack."""
    if rest is None:
        return tensors[0]
    changes: dict[str, Any] = dict(zip(_tensor_fields(rest), tensors))
    return replace(rest, **changes)


def _tensor_fields(quantized: QuantizedTensor) -> list[str]:
    return [f.name for f in fields(quantized) if isinstance(getattr(quantized, f.name), Tensor)]
