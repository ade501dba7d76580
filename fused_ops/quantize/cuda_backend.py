# SPDX-License-Identifier: Apache-2.0
"""Row and column NVFP4 from one read in CUDA C++, built with nvcc for what is wanted at first use.

Each pair of operands is a build of its own (some seconds), kept in torch's folder of extensions.
Without nvcc the Triton kernel of the same bytes is used, and the log says so once.
"""

import ctypes
import functools
import hashlib
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fused_ops.formats import DecodedTensor, OperandSpec, QuantizedTensor
from fused_ops.quantize import triton_backend
from fused_ops.quantize.philox import Key
from fused_ops.quantize.triton_backend import FORMS, Output
from fused_ops.quantize.triton_launch import sign_factors, words
from fused_ops.triton_support import raw_stream

SOURCE = Path(__file__).parent / "cuda" / "quantize_pair.cu"
TARGETS = ("sm_90", "sm_100", "sm_103")
FIXED_SIGNS_MASK = 0xD7E8
"""Bit i is set where FIXED_SIGNS[i] is -1."""

TILE = {"rows": 64, "stages": 1, "blocks": 4, "waves": 0}
"""How the source goes through a matrix where TILES says nothing; its head says what these are."""
TILES: dict[tuple[str, str, str], dict[str, int]] = {}
"""By kind_of: what measured best, `python -m tools.bench_ops --op pair --tiles`. A kind that is not
rounded stochastically is Triton's, whose bytes are the same, unless it is named here."""

_log = logging.getLogger(__name__)


def kind_of(row: OperandSpec, forms: tuple[str, str]) -> tuple[str, str, str]:
    """What tells pairs apart in TILES: of the row operand rounding, scales ("pow2" or "e4m3"), and
    form."""
    return row.rounding, "pow2" if row.is_pow2 else "e4m3", forms[0]


def find_nvcc() -> str | None:
    """The compiler's path, or None."""
    from torch.utils import cpp_extension

    home = cpp_extension.CUDA_HOME
    return shutil.which("nvcc") or (shutil.which(f"{home}/bin/nvcc") if home else None)


@functools.cache
def _missing() -> str | None:
    from torch.utils import cpp_extension

    if find_nvcc() is None:
        _log.info("nvcc is not installed: Triton quantizes instead, the same bytes")
        return "nvcc is not installed"
    if not cpp_extension.is_ninja_available():
        _log.info("ninja is not installed: Triton quantizes instead, the same bytes")
        return "ninja is not installed"
    return None


def pair_supports(
    x: Tensor, row: OperandSpec, column: OperandSpec, **_unused: object
) -> str | None:
    """Why quantize_pair cannot take x, or None."""
    reason = triton_backend.pair_supports(x, row, column)
    if reason is not None:
        return reason
    if row.choice == "4over6_mae" or column.choice == "4over6_mae":
        return "4over6 by squared errors only"
    if "ms_eden" in (row.rounding, column.rounding):
        return "rounding nearest or stochastic, got ms_eden"
    return _missing() or _target_reason(x.device)


@functools.cache
def _target_reason(device: torch.device) -> str | None:
    """Why the source is not built for a device: where it has not been compiled, nobody knows
    whether its conversions and its shared memory are there."""
    capability = torch.cuda.get_device_capability(device)
    target = f"sm_{capability[0]}{capability[1]}"
    if target in TARGETS:
        return None
    reason = f"the CUDA source is for {', '.join(TARGETS)}, the device is {target}"
    _log.info("%s: Triton quantizes instead, the same bytes", reason)
    return reason


def preferred(x: Tensor, row: OperandSpec, column: OperandSpec, **arguments: Any) -> str | None:
    """As pair_supports, for calls that name no implementation: where it measured faster, and
    where its bytes have been found to be Triton's."""
    forms = arguments.get("forms", ("codes", "codes"))
    if not (row.is_random and column.is_random) and kind_of(row, forms) not in TILES:
        return "Triton is faster where nothing is rounded stochastically (measured on an H200)"
    return pair_supports(x, row, column) or _difference(x, row, column, arguments)


_compared: dict[object, str | None] = {}
_SAMPLE = (1024, 8192)
"""What is compared of x at most: more than the tiles that a GPU has in work at once."""


def _difference(
    x: Tensor, row: OperandSpec, column: OperandSpec, arguments: dict[str, Any]
) -> str | None:
    """Why the bytes of a build are not trusted, or None: compared once in a process.

    The source is compiled on the user's machine, and leans on how tensor cores lay out and sum a
    fragment. Takes the first call's corner, and the same with rows that are far smaller. Where
    there is no memory for that, nothing is known of the build: a later call compares.
    """
    forms = arguments.get("forms", ("codes", "codes"))
    build = (row, column, forms, arguments.get("signs") is None, x.dtype, x.device)
    if build not in _compared:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return "a graph is being recorded, and the build has not been compared with Triton yet"
        corner = x[: _SAMPLE[0], : _SAMPLE[1]].contiguous()
        small = torch.arange(len(corner), device=x.device).remainder(3).eq(1)
        uneven = torch.where(small.view(-1, 1), corner * 2.0**-11, corner)
        reason = None
        try:
            for sample in (corner, uneven):
                built = quantize_pair(sample, row, column, **arguments)
                triton = triton_backend.quantize_pair(sample, row, column, **arguments)
                if not all(map(same_bytes, built, triton)):
                    reason = "the CUDA build gives other bytes than Triton on this machine"
        except torch.OutOfMemoryError:
            return "no memory was left to compare the build with Triton: a later call does"
        except (RuntimeError, OSError) as error:
            reason = f"the CUDA source could not be built: {str(error).strip().splitlines()[0]}"
        if reason is not None:
            _log.warning("%s: Triton quantizes instead; please report it", reason)
        _compared[build] = reason
    return _compared[build]


def same_bytes(
    left: QuantizedTensor | DecodedTensor, right: QuantizedTensor | DecodedTensor
) -> bool:
    """Whether two operands hold the same data, or codes and scales."""
    if isinstance(left, DecodedTensor) and isinstance(right, DecodedTensor):
        return torch.equal(left.data.view(torch.uint8), right.data.view(torch.uint8))
    assert isinstance(left, QuantizedTensor)
    assert isinstance(right, QuantizedTensor)
    return torch.equal(left.codes, right.codes) and torch.equal(left.scales, right.scales)


def pair_macros(
    row: OperandSpec,
    column: OperandSpec,
    forms: tuple[str, str],
    fixed_signs: bool,
    tile: dict[str, int] | None = None,
) -> tuple[str, ...]:
    """The compiler's definitions for a pair of operands, by the tile (or that of TILES); see the
    source."""
    tile = tile or TILES.get(kind_of(row, forms), TILE)
    return _macros(row, column, forms, fixed_signs, tuple(tile.items()))


@functools.cache  # asked at every launch
def _macros(
    row: OperandSpec,
    column: OperandSpec,
    forms: tuple[str, str],
    fixed_signs: bool,
    tile: tuple[tuple[str, int], ...],
) -> tuple[str, ...]:
    found = [f"-DTILE_{name.upper()}={value}" for name, value in tile]
    for side, spec, form in (("R", row, forms[0]), ("C", column, forms[1])):
        found += [
            f"-D{side}_POW2={str(spec.is_pow2).lower()}",
            f"-D{side}_SR={str(spec.rounding == 'stochastic').lower()}",
            f"-D{side}_CHOICE={int(spec.choice is not None)}",
            f"-D{side}_NUMERATOR={spec.numerator}f",
            f"-D{side}_FORM={FORMS.index(form)}",
            f"-D{side}_SHIFT={spec.fp8_shift if form == 'fp8' else 0}",
        ]
    return (
        *found,
        f"-DC_HADAMARD={str(column.hadamard == 16).lower()}",
        f"-DC_SIGNS={FIXED_SIGNS_MASK if fixed_signs else -1}",
    )


def nvcc_flags(target: str, macros: Sequence[str]) -> list[str]:
    """How the source is compiled for one of TARGETS."""
    number = target.removeprefix("sm_")
    return ["-O3", "-fmad=false", f"-gencode=arch=compute_{number}a,code=sm_{number}a", *macros]


@functools.cache
def library(macros: tuple[str, ...], capability: tuple[int, int]) -> Any:
    """The launcher of one pair, built if it is not in the folder of extensions."""
    from torch.utils import cpp_extension

    target = f"sm_{capability[0]}{capability[1]}"
    text = " ".join((*macros, target, torch.version.cuda or "")).encode()
    text += b"".join(path.read_bytes() for path in sorted(SOURCE.parent.glob("*.cu*")))
    name = f"nibble_quantize_pair_{hashlib.blake2b(text, digest_size=8).hexdigest()}"
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
    folder = Path(root) / name
    folder.mkdir(parents=True, exist_ok=True)
    cpp_extension.load(
        name,
        [str(SOURCE)],
        extra_cuda_cflags=nvcc_flags(target, macros),
        build_directory=str(folder),
        is_python_module=False,
        with_cuda=True,
    )
    run = ctypes.CDLL(str(folder / f"{name}.so")).nibble_quantize_pair
    run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return run


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
    """See fused_ops.quantize.api.quantize_pair."""
    rows, cols = x.shape
    first = Output.new(row, forms[0], rows, cols, amaxes[0], rows)
    second = Output.new(column, forms[1], cols, rows, amaxes[1], cols)
    macros = pair_macros(row, column, forms, signs is None)
    _launch(x, macros, sign_factors(signs, x.device), first, second, keys, origin)
    return first.result(), second.result()


def _launch(
    x: Tensor,
    macros: tuple[str, ...],
    signs: Tensor,
    first: Output,
    second: Output,
    keys: tuple[Key | None, Key | None],
    origin: tuple[int, int],
) -> None:
    source = words(x, True)
    addresses: list[int | None] = [source.data_ptr(), signs.data_ptr()]
    numbers = [x.shape[0], x.shape[1], *origin]
    for output, key in zip((first, second), keys):
        addresses += [t.data_ptr() for t in (output.amax, *output.pointers())]
        on_device = isinstance(key, Tensor)
        addresses.append(key.data_ptr() if isinstance(key, Tensor) else None)
        numbers += [0, 0] if key is None or on_device else [int(key[0]), int(key[1])]
    pointers = (ctypes.c_void_p * 14)(*addresses)
    values = (ctypes.c_int64 * 8)(*numbers)
    run = library(macros, torch.cuda.get_device_capability(x.device))
    with torch.cuda.device(x.device):
        status = run(ctypes.c_void_p(raw_stream(x.device)), pointers, values)
    if status != 0:
        raise RuntimeError(f"the quantizer could not be launched: CUDA error {status}")
