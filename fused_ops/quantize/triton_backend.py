# SPDX-License-Identifier: Apache-2.0
"""NVFP4 on NVIDIA GPUs through Triton: which calls it takes, and how kernels are launched.

Triton is imported at the first call. Nothing here waits for the device, so that calls may be
recorded in CUDA graphs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_ops.codecs import roundup
from fused_ops.formats import DecodedTensor, OperandSpec, QuantizedTensor
from fused_ops.quantize import triton_amax
from fused_ops.quantize.philox import Key
from fused_ops.quantize.triton_amax import amax_supports
from fused_ops.quantize.triton_launch import (
    COLUMN_TILE,
    PAIR_TILE,
    REQUANTIZE_TILE,
    ROW_TILE,
    ROW_TILE_2D,
    key_words,
    sign_factors,
    signed,
    words,
)
from fused_ops.triton_support import device_reason, launch


def supports(
    x: Tensor,
    spec: OperandSpec,
    *,
    columns: bool = False,
    amax: Tensor | None = None,
    signs: Tensor | None = None,
    key: Key | None = None,
    origin: tuple[int, int] = (0, 0),
    form: str = "codes",
) -> str | None:
    """None, or why not."""
    if spec.format != "nvfp4":
        return f"format nvfp4 only, got {spec.format}"
    if spec.rounding not in ROUNDINGS:
        return f"rounding {', '.join(ROUNDINGS)}; got {spec.rounding}"
    if spec.block == (16, 16) and (spec.hadamard or spec.choice):
        return f"16x16 tiles without rotation or choice, got {spec.label!r}"
    if origin[1] % 16:
        return f"a column origin that is a multiple of 16, got {origin[1]}"
    return amax_supports(x, spec, columns=columns, signs=signs)


FORMS = ("codes", "fp8", "bf16")
"""What a quantizer writes, by the number that the kernels know it by."""
ROUNDINGS = ("nearest", "stochastic", "ms_eden")
"""How it rounds, likewise."""
CHOICES = {None: 0, "4over6_mae": 2, "ms_eden": 3}
"""How a block's scale is chosen, likewise; all others are 1."""


@dataclass
class Output:
    """Where a quantizer writes one operand."""

    spec: OperandSpec
    form: str
    shape: tuple[int, int]
    amax: Tensor
    main: Tensor
    """Codes, or values, with room for one row more than there may be."""
    scales: Tensor
    used: Tensor
    counts: Tensor | None

    @classmethod
    def new(
        cls, spec: OperandSpec, form: str, rows: int, cols: int, amax: Tensor, room: int
    ) -> "Output":
        """For a result [rows, cols]; `room` rows are allocated."""
        device, blocks = amax.device, roundup(cols, 16) // 16
        if form == "codes":
            scale_rows = -(-rows // 16) if spec.block == (16, 16) else room
            main = torch.empty((room, 8 * blocks), dtype=torch.uint8, device=device)
            scales = torch.empty((scale_rows, blocks), dtype=torch.uint8, device=device)
        else:
            dtype = torch.float8_e4m3fn if form == "fp8" else torch.bfloat16
            main = torch.empty((room, 16 * blocks), dtype=dtype, device=device)
            scales = main.view(torch.uint8)  # not written
        counts = torch.zeros(2, dtype=torch.int32, device=device) if spec.is_pow2 else None
        used = torch.empty((), dtype=torch.float32, device=device) if spec.is_pow2 else amax
        shape = (rows, 16 * blocks if spec.hadamard else cols)
        return cls(spec, form, shape, amax, main, scales, used, counts)

    def pointers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What a kernel takes: main, scales, used, counts."""
        counts = self.amax if self.counts is None else self.counts
        return self.main.view(torch.int64), self.scales, self.used, counts

    def constants(self) -> dict[str, Any]:
        """The compile-time arguments that describe it."""
        spec = self.spec
        return {
            "POW2": spec.is_pow2,
            "STOCHASTIC": ROUNDINGS.index(spec.rounding),
            "CHOICE": CHOICES.get("ms_eden" if spec.rounding == "ms_eden" else spec.choice, 1),
            "NUMERATOR": spec.numerator,
            "FORM": FORMS.index(self.form),
            "SHIFT": spec.fp8_shift if self.form == "fp8" else 0,
        }

    def result(self) -> QuantizedTensor | DecodedTensor:
        """The operand, once a kernel has been launched."""
        rows = self.shape[0]
        if self.form != "codes":
            return DecodedTensor(self.main[:rows], self.used, self.shape, self.spec, self.counts)
        scales = self.scales if self.spec.block == (16, 16) else self.scales[:rows]
        return QuantizedTensor(
            self.main[:rows], scales, self.used, self.shape, self.spec, self.counts
        )


def quantize(
    x: Tensor,
    spec: OperandSpec,
    *,
    columns: bool = False,
    amax: Tensor | None = None,
    signs: Tensor | None = None,
    key: Key | None = None,
    origin: tuple[int, int] = (0, 0),
    form: str = "codes",
) -> QuantizedTensor | DecodedTensor:
    """See fused_ops.quantize.api.quantize, which checks the arguments."""
    if amax is None and spec.is_pow2:
        amax = triton_amax.block_amax(x, spec, columns, signs, finite=True)
    elif amax is None:
        amax = triton_amax.operand_amax(x, spec, columns=columns, signs=signs)
    rows, cols = (x.shape[1], x.shape[0]) if columns else (x.shape[0], x.shape[1])
    # Columns come in words of two: room for one more than there may be.
    output = Output.new(spec, form, rows, cols, amax, roundup(rows, 2) if columns else rows)
    _launch(x, columns, signs, key, origin, output)
    return output.result()


def _launch(
    x: Tensor,
    columns: bool,
    signs: Tensor | None,
    key: Key | None,
    origin: tuple[int, int],
    output: Output,
) -> None:
    from fused_ops.quantize import triton_kernels as kernels

    source, spec, amax = words(x, columns), output.spec, output.amax
    bf16 = x.dtype == torch.bfloat16
    per_word = 2 if bf16 else 1
    rows, cols = source.shape[0], source.shape[1] * per_word
    on_device = isinstance(key, Tensor)
    k0, k1 = (0, 0) if on_device else key_words(key)
    pointers = (
        source, amax, sign_factors(signs, x.device), key if on_device else amax,
        *output.pointers(),
    )  # fmt: skip
    place = (k0, k1, signed(origin[0]), signed(origin[1] // 16))
    options: dict[str, Any] = output.constants() | {
        "BF16": bf16,
        "HADAMARD": spec.hadamard == 16,
        "TILE": spec.block == (16, 16),
        "KEY_ON_DEVICE": on_device,
    }
    if columns:
        t = COLUMN_TILE
        grid = (-(-rows // (16 * t["blocks"])), -(-source.shape[1] // t["words"]))
        launch(
            kernels.quantize_columns, grid, *pointers, rows, cols, -(-rows // 16), *place,
            on=x.device, warps=t["warps"], EVEN=rows % 16 == 0,
            BLOCKS=t["blocks"], WORDS=t["words"], **options,
        )  # fmt: skip
        return
    t = ROW_TILE_2D if options["TILE"] else ROW_TILE
    grid = (-(-rows // t["rows"]), -(-cols // (16 * t["groups"])))
    launch(
        kernels.quantize_rows, grid, *pointers, rows, cols // 16, cols, *place,
        on=x.device, warps=t["warps"], ROWS=t["rows"], GROUPS=t["groups"], **options,
    )  # fmt: skip


def pair_supports(
    x: Tensor, row: OperandSpec, column: OperandSpec, **_unused: object
) -> str | None:
    """Why quantize_pair cannot take x, or None."""
    for spec in (row, column):
        reason = supports(x, spec)
        if reason is not None:
            return reason
        if spec.block != (1, 16):
            return f"blocks of 1x16, got {spec.label!r}"
    if row.hadamard:
        return "the row operand is not rotated"
    if x.dtype != torch.bfloat16 or x.shape[0] % 16 or x.shape[1] % 16:
        return f"bf16 with sizes that are multiples of 16, got {x.dtype} {tuple(x.shape)}"
    return None


def quantize_pair(
    x: Tensor,
    row: OperandSpec,
    column: OperandSpec,
    *,
    amaxes: tuple[Tensor, Tensor],
    signs: Tensor | None = None,
    keys: tuple[Key | None, Key | None] = (None, None),
    origin: tuple[int, int] = (0, 0),
    forms: tuple[str, str] = ("codes", "codes"),
) -> tuple[QuantizedTensor | DecodedTensor, QuantizedTensor | DecodedTensor]:
    """quantize(x, row) and quantize(x, column, columns=True), reading x from memory once.

    origin is the global place of x[0, 0], multiples of 16.
    """
    from fused_ops.quantize import triton_kernels as kernels

    source = words(x, True)
    rows, cols = x.shape
    first = Output.new(row, forms[0], rows, cols, amaxes[0], rows)
    second = Output.new(column, forms[1], cols, rows, amaxes[1], cols)
    options = {f"R_{name}": value for name, value in first.constants().items()}
    options |= {f"C_{name}": value for name, value in second.constants().items()}
    on_device = [isinstance(key, Tensor) for key in keys]
    places = [key if isinstance(key, Tensor) else amax for key, amax in zip(keys, amaxes)]
    numbers = [w for k in keys for w in key_words(None if isinstance(k, Tensor) else k)]
    tile = PAIR_TILE
    grid = (-(-rows // (16 * tile["blocks"])), -(-source.shape[1] // tile["words"]))
    launch(
        kernels.quantize_pair, grid, source, sign_factors(signs, x.device),
        first.amax, *first.pointers(), places[0], second.amax, *second.pointers(), places[1],
        rows, cols, rows // 16, *numbers, signed(origin[0]), signed(origin[1]),
        on=x.device, warps=tile["warps"], C_HADAMARD=column.hadamard == 16,
        R_KEY_ON_DEVICE=on_device[0], C_KEY_ON_DEVICE=on_device[1],
        BLOCKS=tile["blocks"], WORDS=tile["words"], ROWS=tile["rows"], **options,
    )  # fmt: skip
    return first.result(), second.result()


def requantize_supports(source: QuantizedTensor, spec: OperandSpec) -> str | None:
    """Why requantize_columns cannot take these, or None."""
    if source.spec.format != "nvfp4" or source.spec.row_scaled or source.spec.hadamard:
        return f"a source of nvfp4 with one amax, not rotated; got {source.spec.label!r}"
    if spec.hadamard or spec.is_random or spec.block != (1, 16):
        return f"1x16 blocks, nearest, not rotated; got {spec.label!r}"
    if source.shape[0] % 16 or source.shape[1] % 16:
        return f"sizes that are multiples of 16, got {source.shape}"
    if spec.format != "nvfp4" or spec.row_scaled:
        return f"nvfp4 with one amax, got {spec.label!r}"
    return device_reason(source.codes)


def requantize_columns(
    source: QuantizedTensor, spec: OperandSpec, amax: Tensor, *, form: str = "codes"
) -> QuantizedTensor | DecodedTensor:
    """quantize(source.dequantize(), spec, columns=True, amax=amax), reading codes alone."""
    from fused_ops.quantize import triton_kernels as kernels

    rows, cols = source.shape
    output = Output.new(spec, form, cols, rows, amax, cols)
    options = output.constants()
    del options["STOCHASTIC"]
    codes, tile = source.codes.contiguous().view(torch.int32), REQUANTIZE_TILE
    grid = (-(-rows // (16 * tile["blocks"])), -(-codes.shape[1] // tile["words"]))
    launch(
        kernels.requantize_columns, grid, codes, source.scales.contiguous(), source.amax, amax,
        *output.pointers(), rows, codes.shape[1], rows // 16, on=codes.device, warps=tile["warps"],
        Q_NUMERATOR=source.spec.numerator, Q_TILE=source.spec.block == (16, 16), EVEN=True,
        BLOCKS=tile["blocks"], WORDS=tile["words"], **options,
    )  # fmt: skip
    return output.result()


def decode(operand: QuantizedTensor, *, e4m3: bool = False, shift: int = 0) -> Tensor:
    """NVFP4 codes -> code * block scale: bf16 [rows, padded cols], exact; or, times 2**-shift,
    rounded to E4M3 (float8_e4m3fn)."""
    from fused_ops.quantize import triton_kernels as kernels

    rows, blocks = operand.codes.shape[0], operand.codes.shape[1] // 8
    dtype = torch.float8_e4m3fn if e4m3 else torch.bfloat16
    out = torch.empty((rows, 16 * blocks), dtype=dtype, device=operand.codes.device)
    tile = operand.spec.block == (16, 16)
    size = 256
    packed = operand.codes.contiguous().view(torch.int64 if e4m3 else torch.int32)
    launch(
        kernels.decode_blocks, (-(-packed.numel() // size),), packed, operand.scales.contiguous(),
        out.view(torch.uint8), rows, blocks, e4m3, shift, tile, size, on=out.device, warps=4,
    )  # fmt: skip
    return out


def decode_columns(operand: QuantizedTensor, form: str) -> Tensor:
    """NVFP4 codes in 16x16 tiles -> the transpose of code * block scale, without codes of it.

    Args:
        operand: [rows, cols], both multiples of 16.
        form: "bf16": decoded as it lies, [cols, rows] with contiguous columns; "fp8": contiguous
            rows of E4M3, times 2**-shift of its spec.
    """
    from fused_ops.quantize import triton_kernels as kernels

    if form == "bf16":
        return decode(operand).t()
    rows, cols = operand.shape
    out = torch.empty((cols, rows), dtype=torch.float8_e4m3fn, device=operand.codes.device)
    codes, tile = operand.codes.contiguous().view(torch.int32), REQUANTIZE_TILE
    grid = (-(-rows // (16 * tile["blocks"])), -(-codes.shape[1] // tile["words"]))
    launch(
        kernels.decode_columns, grid, codes, operand.scales.contiguous(), out.view(torch.int64),
        rows, codes.shape[1], rows // 16, on=out.device, warps=tile["warps"],
        SHIFT=operand.spec.fp8_shift, BLOCKS=tile["blocks"], WORDS=tile["words"],
    )  # fmt: skip
    return out
