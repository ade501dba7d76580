# SPDX-License-Identifier: Apache-2.0
"""NVFP4 on NVIDIA GPUs through Triton: which calls it takes, and how kernels are launched.

Triton is imported at the first call. Nothing here waits for the device, so that calls may be
recorded in CUDA graphs.
"""

from typing import Any

import torch
from torch import Tensor

from fused_ops.codecs import pad_to, roundup
from fused_ops.formats import OperandSpec, QuantizedTensor
from fused_ops.quantize.hadamard import FIXED_SIGNS
from fused_ops.quantize.philox import Key
from fused_ops.triton_support import device_reason

ROW_TILE = {"rows": 4, "groups": 64, "warps": 4}
"""Blocks of a program: rows x groups of 16 columns. Measured on an H200; so are the others."""
ROW_TILE_2D = {"rows": 16, "groups": 16, "warps": 4}
COLUMN_TILE = {"blocks": 4, "words": 32, "warps": 4}
AMAX_TILE = {"size": 2048, "iters": 8, "warps": 8}

INPUTS: tuple[torch.dtype, ...] = (torch.bfloat16,)
"""Types of inputs that are taken. The kernels read fp32 too, which has a test, not yet a run."""

_SIGNS: dict[torch.device, Tensor] = {}


def amax_supports(
    x: Tensor, spec: OperandSpec, *, columns: bool = False, signs: Tensor | None = None
) -> str | None:
    """None, or why not."""
    if x.dtype not in INPUTS:
        return f"inputs are {', '.join(map(str, INPUTS))}, got {x.dtype}"
    if x.numel() == 0:
        return "the tensor is empty"
    if spec.hadamard not in (0, 16):
        return f"rotations of 16 only, got {spec.hadamard}"
    if spec.row_scaled:
        return "one amax a row is left to the reference"
    return device_reason(x)


def supports(
    x: Tensor,
    spec: OperandSpec,
    *,
    columns: bool = False,
    amax: Tensor | None = None,
    signs: Tensor | None = None,
    key: Key | None = None,
    origin: tuple[int, int] = (0, 0),
) -> str | None:
    """None, or why not."""
    if spec.format != "nvfp4":
        return f"format nvfp4 only, got {spec.format}"
    if spec.rounding not in ("nearest", "stochastic"):
        return f"rounding nearest or stochastic, got {spec.rounding}"
    if spec.block == (16, 16) and (spec.hadamard or spec.choice):
        return f"16x16 tiles without rotation or choice, got {spec.label!r}"
    if origin[1] % 16:
        return f"a column origin that is a multiple of 16, got {origin[1]}"
    return amax_supports(x, spec, columns=columns, signs=signs)


def _words(x: Tensor, columns: bool) -> Tensor:
    """x as contiguous int32 words [rows, words], padded to whole blocks (columns: whole words)."""
    x = x.detach()
    x = pad_to(x, x.shape[0], roundup(x.shape[1], 2 if columns else 16)).contiguous()
    if x.data_ptr() % 16:
        x = x.clone()
    return x.view(torch.int32)


def _sign_factors(signs: Tensor | None, device: torch.device) -> Tensor:
    """fp32 [16] of +-1/4."""
    if signs is not None:
        if signs.shape != (16,):
            raise ValueError(
                f"a Hadamard rotation of 16 needs 16 signs; got shape {tuple(signs.shape)}"
            )
        return signs.to(device=device, dtype=torch.float32) * 0.25
    if device not in _SIGNS:
        _SIGNS[device] = torch.tensor(FIXED_SIGNS, dtype=torch.float32, device=device) * 0.25
    return _SIGNS[device]


def _signed(word: int) -> int:
    """An unsigned 32-bit word as the signed number with its bits."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word


def matrix_amax(x: Tensor) -> Tensor:
    """fp32 amax of a matrix, NaN if it has one; one read."""
    from fused_ops.quantize import triton_kernels as kernels

    x = x.detach()
    if not x.is_contiguous() and x.t().is_contiguous():
        x = x.t()
    flat = x.reshape(-1)
    if flat.numel() % 2 or flat.data_ptr() % 16:
        flat = torch.nn.functional.pad(flat, (0, flat.numel() % 2)).clone()
    words = flat.view(torch.int32)
    out = torch.zeros((), dtype=torch.int32, device=x.device)
    size, iters = AMAX_TILE["size"], AMAX_TILE["iters"]
    grid = (-(-words.numel() // (size * iters)),)
    with torch.cuda.device(x.device):
        kernels.amax_flat[grid](
            words, out, words.numel(), x.dtype == torch.bfloat16, size, iters,
            num_warps=AMAX_TILE["warps"],
        )  # fmt: skip
    return out.view(torch.float32)


def _block_amax(
    x: Tensor, spec: OperandSpec, columns: bool, signs: Tensor | None, finite: bool
) -> Tensor:
    """Amax over blocks: after the rotation, or (finite) without blocks that hold Inf or NaN."""
    from fused_ops.quantize import triton_kernels as kernels

    words = _words(x, columns)
    bf16 = x.dtype == torch.bfloat16
    per_word = 2 if bf16 else 1
    rows, cols = words.shape[0], words.shape[1] * per_word
    out = torch.zeros((), dtype=torch.int32, device=x.device)
    factors = _sign_factors(signs, x.device)
    rotated = spec.hadamard == 16
    with torch.cuda.device(x.device):
        if columns:
            tile = COLUMN_TILE
            grid = (
                -(-rows // (16 * tile["blocks"])), -(-words.shape[1] // tile["words"]),
            )  # fmt: skip
            kernels.amax_columns[grid](
                words, factors, out, rows, cols, -(-rows // 16), bf16, rotated, finite,
                rows % 16 == 0,
                tile["blocks"], tile["words"],
                num_warps=tile["warps"], enable_fp_fusion=False,
            )  # fmt: skip
        else:
            tile = ROW_TILE
            grid = (-(-rows // tile["rows"]), -(-cols // (16 * tile["groups"])))
            kernels.amax_rows[grid](
                words, factors, out, rows, cols // 16, cols, bf16, rotated, finite,
                tile["rows"], tile["groups"],
                num_warps=tile["warps"], enable_fp_fusion=False,
            )  # fmt: skip
    return out.view(torch.float32)


def operand_amax(
    x: Tensor, spec: OperandSpec, *, columns: bool = False, signs: Tensor | None = None
) -> Tensor:
    """See fused_ops.quantize.api.operand_amax."""
    if spec.hadamard:
        return _block_amax(x, spec, columns, signs, finite=False)
    return matrix_amax(x)


def quantize(
    x: Tensor,
    spec: OperandSpec,
    *,
    columns: bool = False,
    amax: Tensor | None = None,
    signs: Tensor | None = None,
    key: Key | None = None,
    origin: tuple[int, int] = (0, 0),
) -> QuantizedTensor:
    """See fused_ops.quantize.api.quantize, which checks the arguments."""
    if amax is None and spec.is_pow2:
        amax = _block_amax(x, spec, columns, signs, finite=True)
    elif amax is None:
        amax = operand_amax(x, spec, columns=columns, signs=signs)
    rows, cols = (x.shape[1], x.shape[0]) if columns else (x.shape[0], x.shape[1])
    blocks = roundup(cols, 16) // 16
    tile = spec.block == (16, 16)
    # Columns come in words of two: room for one more than there may be.
    room = roundup(rows, 2) if columns else rows
    codes = torch.empty((room, 8 * blocks), dtype=torch.uint8, device=x.device)
    scale_rows = -(-rows // 16) if tile else room
    scales = torch.empty((scale_rows, blocks), dtype=torch.uint8, device=x.device)
    counts = torch.zeros(2, dtype=torch.int32, device=x.device) if spec.is_pow2 else None
    used = torch.empty((), dtype=torch.float32, device=x.device) if spec.is_pow2 else amax
    _launch(x, spec, columns, amax, signs, key, origin, (codes, scales, used, counts))
    shape = (rows, 16 * blocks if spec.hadamard else cols)
    scales = scales if tile else scales[:rows]
    return QuantizedTensor(codes[:rows], scales, used, shape, spec, counts)


def _launch(
    x: Tensor,
    spec: OperandSpec,
    columns: bool,
    amax: Tensor,
    signs: Tensor | None,
    key: Key | None,
    origin: tuple[int, int],
    outputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
) -> None:
    from fused_ops.quantize import triton_kernels as kernels

    words = _words(x, columns)
    codes, scales, used, counts = outputs
    bf16 = x.dtype == torch.bfloat16
    per_word = 2 if bf16 else 1
    rows, cols = words.shape[0], words.shape[1] * per_word
    on_device = isinstance(key, Tensor)
    k0, k1 = (0, 0) if key is None or on_device else (_signed(int(key[0])), _signed(int(key[1])))
    pointers = (
        words, amax, _sign_factors(signs, x.device), key if on_device else amax,
        codes.view(torch.int64), scales, used, amax if counts is None else counts,
    )  # fmt: skip
    place = (k0, k1, _signed(origin[0]), _signed(origin[1] // 16))
    options: dict[str, Any] = {
        "BF16": bf16,
        "POW2": spec.is_pow2,
        "STOCHASTIC": spec.rounding == "stochastic",
        "CHOICE": {None: 0, "4over6_mae": 2}.get(spec.choice, 1),
        "NUMERATOR": spec.numerator,
        "HADAMARD": spec.hadamard == 16,
        "TILE": spec.block == (16, 16),
        "KEY_ON_DEVICE": on_device,
        "enable_fp_fusion": False,
    }
    with torch.cuda.device(x.device):
        if columns:
            t = COLUMN_TILE
            grid = (-(-rows // (16 * t["blocks"])), -(-words.shape[1] // t["words"]))
            kernels.quantize_columns[grid](
                *pointers, rows, cols, -(-rows // 16), *place, EVEN=rows % 16 == 0,
                BLOCKS=t["blocks"], WORDS=t["words"], num_warps=t["warps"], **options,
            )  # fmt: skip
        else:
            t = ROW_TILE_2D if options["TILE"] else ROW_TILE
            grid = (-(-rows // t["rows"]), -(-cols // (16 * t["groups"])))
            kernels.quantize_rows[grid](
                *pointers, rows, cols // 16, cols, *place,
                ROWS=t["rows"], GROUPS=t["groups"], num_warps=t["warps"], **options,
            )  # fmt: skip


def decode(operand: QuantizedTensor, *, e4m3: bool = False, shift: int = 0) -> Tensor:
    """NVFP4 codes -> code * block scale: bf16 [rows, padded cols], exact; or, times 2**-shift,
    rounded to E4M3 (float8_e4m3fn)."""
    from fused_ops.quantize import triton_kernels as kernels

    rows, blocks = operand.codes.shape[0], operand.codes.shape[1] // 8
    dtype = torch.float8_e4m3fn if e4m3 else torch.bfloat16
    out = torch.empty((rows, 16 * blocks), dtype=dtype, device=operand.codes.device)
    tile = operand.spec.block == (16, 16)
    size = 256
    with torch.cuda.device(out.device):
        words = operand.codes.contiguous().view(torch.int64 if e4m3 else torch.int32)
        kernels.decode_blocks[(-(-words.numel() // size),)](
            words, operand.scales.contiguous(),
            out.view(torch.uint8), rows, blocks, e4m3, shift, tile, size,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
