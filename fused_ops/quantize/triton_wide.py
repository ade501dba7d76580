# SPDX-License-Identifier: Apache-2.0
"""MX, FP8 blocks, MS-EDEN, and NVFP4 rotated by more than 16, on NVIDIA GPUs through Triton.

Nothing here waits for the device, so that calls may be recorded in CUDA graphs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_ops.codecs import ELEMENT_MAX, pad_to, roundup
from fused_ops.formats import DecodedTensor, OperandSpec, QuantizedTensor
from fused_ops.quantize import triton_launch
from fused_ops.quantize.amax_op import AMAX
from fused_ops.quantize.hadamard import factors
from fused_ops.quantize.philox import Key
from fused_ops.quantize.triton_backend import FORMS, Output
from fused_ops.quantize.triton_launch import WIDE_TILE, key_words, sign_factors, signed
from fused_ops.triton_support import device_reason, launch

ELEMENTS = ("e2m1", "e4m3", "e5m2")
"""By the number that the kernel knows them by."""
KINDS = {"nvfp4": 0, "mxfp4": 1, "mxfp8": 1, "fp8_blockwise": 2}


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
    if spec.format not in KINDS:
        return f"formats {', '.join(KINDS)}; got {spec.format}"
    if form != "codes" and form not in spec.decoded_forms:
        return f"no form {form} of {spec.label!r}"
    if spec.format == "nvfp4" and (spec.is_pow2 or spec.choice or spec.block != (1, 16)):
        return f"nvfp4 in 1x16 blocks with e4m3 scales and no choice; got {spec.label!r}"
    if spec.rounding == "stochastic_exact":
        return "24 bits of dither are left to the reference"
    if spec.hadamard and spec.block and spec.hadamard % spec.block[1]:
        return f"rotations of whole blocks, got {spec.label!r}"
    if spec.hadamard and (spec.block is None or spec.block[0] > 1):
        return f"tiles without rotation, got {spec.label!r}"
    if spec.is_random and origin[1] % 16:
        return f"a column origin that is a multiple of 16, got {origin[1]}"
    return _input_reason(x)


def _input_reason(x: Tensor) -> str | None:
    if x.dtype not in triton_launch.INPUTS:
        return f"inputs are {', '.join(map(str, triton_launch.INPUTS))}, got {x.dtype}"
    if x.numel() == 0:
        return "the tensor is empty"
    return device_reason(x)


def amax_supports(
    x: Tensor, spec: OperandSpec, *, columns: bool = False, signs: Tensor | None = None
) -> str | None:
    """Why operand_amax cannot take x, or None: it is for rotations over 16."""
    if spec.hadamard <= 16 or spec.row_scaled or spec.is_pow2:
        return f"rotations of 32 to 128, one amax a tensor; got {spec.label!r}"
    return _input_reason(x)


def piece(spec: OperandSpec) -> int:
    """Values that a thread holds: whole blocks, and whole rotated groups."""
    assert spec.block is not None, f"{spec.label} has no blocks"
    return max(spec.block[1], spec.hadamard)


@dataclass(frozen=True)
class _How:
    """Arguments of quantize besides what is quantized; see there."""

    columns: bool
    signs: Tensor | None
    key: Key | None
    origin: tuple[int, int]
    form: str


def _source(x: Tensor, columns: bool, size: int) -> Tensor:
    """x as the kernels read it: contiguous, 16-byte aligned; along rows padded to whole pieces."""
    x = x.detach()
    if not columns:
        x = pad_to(x, x.shape[0], roundup(x.shape[1], size))
    x = x.contiguous()
    if x.data_ptr() % 16:
        x = x.clone()
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x.view(torch.int32)


def _geometry(x: Tensor, spec: OperandSpec, columns: bool) -> tuple[Tensor, tuple[int, ...], Any]:
    """The source, (lanes, blocks, depth, stride), and the constants and grid of a launch."""
    size = piece(spec)
    source = _source(x, columns, size)
    rows, cols = source.shape
    lanes, depth = (cols, rows) if columns else (rows, cols)
    blocks = -(-depth // size)
    tiles = spec.block is not None and spec.block[0] > 1
    flat = not columns and not tiles
    per = WIDE_TILE["lanes"]
    programs = -(-lanes * blocks // per) if flat else -(-lanes // per) * blocks
    constants = {
        "BF16": x.dtype == torch.bfloat16, "COLUMNS": columns, "ROTATION": spec.hadamard,
        "SIZE": size, "LANES": per, "FLAT": flat,
    }  # fmt: skip
    return source, (lanes, blocks, depth, cols), (constants, (programs,))


def _signs(spec: OperandSpec, signs: Tensor | None, device: torch.device) -> Tensor:
    if spec.hadamard > 16:
        return factors(spec.hadamard, signs, device)
    return sign_factors(signs if spec.hadamard else None, device)


def operand_amax(
    x: Tensor, spec: OperandSpec, *, columns: bool = False, signs: Tensor | None = None
) -> Tensor:
    """See fused_ops.quantize.api.operand_amax; after the rotation."""
    from fused_ops.quantize import triton_wide_kernels as kernels

    source, sizes, (constants, grid) = _geometry(x, spec, columns)
    out = torch.zeros((), dtype=torch.int32, device=x.device)
    launch(
        kernels.wide_amax, grid, source, _signs(spec, signs, x.device), out, *sizes,
        on=x.device, warps=WIDE_TILE["warps"], **constants,
    )  # fmt: skip
    return out.view(torch.float32)


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
    how = _How(columns, signs, key, origin, form)
    rows, cols = (x.shape[1], x.shape[0]) if columns else (x.shape[0], x.shape[1])
    if spec.format == "nvfp4":
        amax = AMAX(x, spec, columns=columns, signs=signs) if amax is None else amax
        padded = roundup(cols, spec.multiple)
        output = Output.new(spec, form, rows, padded if spec.hadamard else cols, amax, rows)
        _launch(x, spec, how, amax, output.main, output.scales)
        return output.result()
    assert spec.block is not None, spec.label
    shape = (rows, roundup(cols, spec.multiple) if spec.hadamard else cols)
    used = torch.ones((), device=x.device)
    if form != "codes":
        values = x.new_empty((rows, roundup(cols, spec.multiple)), dtype=torch.bfloat16)
        _launch(x, spec, how, used, values, used)
        return DecodedTensor(values, used, shape, spec)
    blocks = -(-cols // piece(spec)) * (piece(spec) // spec.block[1])
    width = blocks * spec.block[1]
    scale_type = torch.float32 if spec.format == "fp8_blockwise" else torch.uint8
    main = x.new_empty((rows, width // 2 if spec.is_fp4 else width), dtype=torch.uint8)
    scales = x.new_empty((-(-rows // spec.block[0]), blocks), dtype=scale_type)
    _launch(x, spec, how, used, main, scales)
    return QuantizedTensor(main, scales, used, shape, spec)


def _launch(
    x: Tensor,
    spec: OperandSpec,
    how: _How,
    amax: Tensor,
    main: Tensor,
    scales: Tensor,
) -> None:
    from fused_ops.quantize import triton_wide_kernels as kernels

    source, sizes, (constants, grid) = _geometry(x, spec, how.columns)
    key = how.key
    k0, k1 = (0, 0) if isinstance(key, Tensor) else key_words(key)
    element = str(spec.element)
    numerator = {"nvfp4": spec.numerator, "fp8_blockwise": ELEMENT_MAX[element]}.get(
        spec.format, torch.tensor(1.0 / ELEMENT_MAX[element]).item()
    )
    launch(
        kernels.quantize_wide, grid, source, _signs(spec, how.signs, x.device), amax,
        key if isinstance(key, Tensor) else amax, main.view(torch.uint8), scales, *sizes, k0, k1,
        signed(how.origin[0]), signed(how.origin[1] // 16), on=x.device, warps=WIDE_TILE["warps"],
        KIND=KINDS[spec.format], ELEMENT=ELEMENTS.index(element), NUMERATOR=numerator,
        CAP=torch.finfo(x.dtype).max, POW2=spec.scale == "pow2", EDEN=spec.rounding == "ms_eden",
        STOCHASTIC=spec.rounding == "stochastic", ROW_SCALED=spec.row_scaled,
        TILE=spec.block[0] if spec.block else 1, FORM=FORMS.index(how.form),
        SHIFT=spec.fp8_shift if how.form == "fp8" else 0, KEY_ON_DEVICE=isinstance(key, Tensor),
        **constants,
    )  # fmt: skip
