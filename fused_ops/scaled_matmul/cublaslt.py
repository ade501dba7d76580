# SPDX-License-Identifier: Apache-2.0
"""cuBLASLt through ctypes: a . b^T with alpha read from device memory, and C added with beta 1;
also of codes with a scale for each block, where the tensor cores take them (Blackwell).

torch offers neither: `addmm` takes alpha from the host, `scaled_mm` has no C. The library is the
one that torch loaded. Source: the cuBLAS manual, section cuBLASLt.
"""

import ctypes
import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_ops.triton_support import raw_stream

_DATA_TYPES = {
    torch.float32: 0,
    torch.float16: 2,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
    torch.float8_e5m2: 29,
    torch.float4_e2m1fn_x2: 33,
}
_COMPUTE_32F = 68
_POINTER_MODE, _TRANSA, _TRANSB, _FAST_ACCUM = 2, 3, 4, 25
_A_SCALE_POINTER, _B_SCALE_POINTER, _A_SCALE_MODE, _B_SCALE_MODE = 17, 18, 31, 32
_POINTER_MODE_DEVICE = 1
VEC16_UE4M3, VEC32_UE8M0 = 1, 2
"""Kinds of block scales: an E4M3 byte for 16 values, an E8M0 byte for 32."""
_MAX_WORKSPACE_BYTES = 1
_WORKSPACE = 32 << 20
_LIBRARIES = ("libcublasLt.so.13", "libcublasLt.so.12")


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@functools.cache
def library() -> Any:
    """The loaded library, or None where there is none."""
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _call(name: str, *args: Any) -> None:
    status = getattr(library(), name)(*args)
    if status != 0:
        raise RuntimeError(f"{name} failed with cuBLAS status {status}")


@functools.cache
def _handle(device: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _call("cublasLtCreate", ctypes.byref(handle))
    return handle


@functools.cache
def _matmul() -> Any:
    """cublasLtMatmul, which takes addresses as numbers."""
    function = library().cublasLtMatmul
    function.argtypes = [ctypes.c_void_p] * 14 + [ctypes.c_size_t, ctypes.c_void_p]
    return function


@dataclass(frozen=True)
class _Constants:
    """Workspace, and 0 and 1 in fp32, of a stream, with their addresses."""

    tensors: tuple[Tensor, Tensor]
    workspace: int
    zero: int
    one: int


@functools.cache
def _constants(device: int, stream: int) -> _Constants:
    place = torch.device("cuda", device)
    workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=place)
    numbers = torch.arange(2, dtype=torch.float32, device=place)
    address = numbers.data_ptr()
    return _Constants((workspace, numbers), workspace.data_ptr(), address, address + 4)


def _layout(dtype: torch.dtype, rows: int, cols: int, leading: int) -> ctypes.c_void_p:
    layout = ctypes.c_void_p()
    _call(
        "cublasLtMatrixLayoutCreate", ctypes.byref(layout), _DATA_TYPES[dtype],
        ctypes.c_uint64(rows), ctypes.c_uint64(cols), ctypes.c_int64(leading),
    )  # fmt: skip
    return layout


def _set(operation: ctypes.c_void_p, attribute: int, value: Any) -> None:
    _call(
        "cublasLtMatmulDescSetAttribute", operation, attribute, ctypes.byref(value),
        ctypes.c_size_t(ctypes.sizeof(value)),
    )  # fmt: skip


def _describe(
    transpose_first: bool, transpose_second: bool, scale_mode: int | None = None
) -> ctypes.c_void_p:
    """Operation: fp32 sums, alpha and beta on the device."""
    operation = ctypes.c_void_p()
    _call("cublasLtMatmulDescCreate", ctypes.byref(operation), _COMPUTE_32F, 0)
    _set(operation, _POINTER_MODE, ctypes.c_int32(_POINTER_MODE_DEVICE))
    _set(operation, _TRANSA, ctypes.c_int32(transpose_first))
    _set(operation, _TRANSB, ctypes.c_int32(transpose_second))
    # Every partial sum in fp32: the fast kind keeps 14 bits of FP8 products.
    _set(operation, _FAST_ACCUM, ctypes.c_int8(0))
    if scale_mode is not None:
        _set(operation, _A_SCALE_MODE, ctypes.c_int32(scale_mode))
        _set(operation, _B_SCALE_MODE, ctypes.c_int32(scale_mode))
    return operation


def _point_at_scales(operation: ctypes.c_void_p, first: int, second: int) -> None:
    _set(operation, _A_SCALE_POINTER, ctypes.c_void_p(first))
    _set(operation, _B_SCALE_POINTER, ctypes.c_void_p(second))


@functools.cache
def _plan(
    device: int,
    shape: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    by_columns: tuple[bool, bool],
    leading: tuple[int, int],
    scale_mode: int | None = None,
) -> tuple[Any, ...]:
    """Descriptors and algorithm of one shape, in cuBLASLt's column order: out^T = b a^T.

    by_columns: whether a and b lie in memory as their transposes; leading: elements from a row of
    what lies there to the next; scale_mode: of blocks of both, which a launch points at.
    """
    m, n, k = shape
    operation = _describe(not by_columns[1], by_columns[0], scale_mode)
    if scale_mode is not None:  # some address, for algorithms to be found; a launch has its own
        _point_at_scales(operation, *[_constants(device, 0).workspace] * 2)
    (rows, cols) = (n, k) if by_columns[1] else (k, n)
    first = _layout(dtypes[1], rows, cols, leading[1])
    (rows, cols) = (m, k) if by_columns[0] else (k, m)
    second = _layout(dtypes[0], rows, cols, leading[0])
    out = _layout(dtypes[2], n, m, n)
    preference = ctypes.c_void_p()
    _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
    size = ctypes.c_uint64(_WORKSPACE)
    _call(
        "cublasLtMatmulPreferenceSetAttribute", preference, _MAX_WORKSPACE_BYTES,
        ctypes.byref(size), ctypes.c_size_t(8),
    )  # fmt: skip
    result, found = _Heuristic(), ctypes.c_int()
    _call(
        "cublasLtMatmulAlgoGetHeuristic", _handle(device), operation, first, second, out, out,
        preference, 1, ctypes.byref(result), ctypes.byref(found),
    )  # fmt: skip
    _call("cublasLtMatmulPreferenceDestroy", preference)
    if not found.value:
        raise RuntimeError(f"cuBLASLt has no algorithm for {shape} of {dtypes}")
    return operation, first, second, out, result


def aligned(x: Tensor) -> Tensor:
    """x, contiguous and from a multiple of 16 bytes on: the library reads so many at once."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def matmul(
    a: Tensor, b: Tensor, alpha: Tensor | None, *, out: Tensor, accumulate: bool = False
) -> Tensor:
    """out = alpha a . b^T, or out += alpha a . b^T, summed in fp32.

    Args:
        a: [M, K], b: [N, K]: bf16, fp16 or FP8, contiguous, or (not FP8) contiguous transposes;
            rows in memory are multiples of 16 bytes.
        alpha: fp32 scalar on the device; None is 1.
        out: contiguous [M, N], bf16, fp16 or fp32.

    All begin at multiples of 16 bytes, which the library's algorithms take for granted.
    """
    device = a.device.index
    if torch.cuda.current_device() != device:
        with torch.cuda.device(device):
            return matmul(a, b, alpha, out=out, accumulate=accumulate)
    m, n, k = a.shape[0], b.shape[0], a.shape[1]
    by_columns = (not a.is_contiguous(), not b.is_contiguous())
    leading = (m if by_columns[0] else k, n if by_columns[1] else k)
    plan = _plan(device, (m, n, k), (a.dtype, b.dtype, out.dtype), by_columns, leading)
    factor = None if alpha is None else alpha.data_ptr()
    _launch(
        device, raw_stream(a.device), plan, a.data_ptr(), b.data_ptr(), factor, out.data_ptr(),
        accumulate,
    )  # fmt: skip
    return out


def block_scaled_matmul(
    a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], alpha: Tensor | None, *, scale_mode: int,
    out: Tensor, accumulate: bool = False,
) -> Tensor:  # fmt: skip
    """`matmul` of codes that the tensor cores multiply by the scales of their blocks.

    Args:
        a: [M, K], b: [N, K]: contiguous, FP8, or two 4-bit codes a byte ([M, K / 2],
            float4_e2m1fn_x2); rows are multiples of 16 bytes.
        scales: of both, uint8, as `fused_ops.codecs.swizzle_scales` lays them.
        scale_mode: VEC16_UE4M3 or VEC32_UE8M0.
        alpha, out, accumulate: see `matmul`.
    """
    device = a.device.index
    if torch.cuda.current_device() != device:
        with torch.cuda.device(device):
            return block_scaled_matmul(
                a, b, scales, alpha, scale_mode=scale_mode, out=out, accumulate=accumulate
            )
    per_byte = 2 if a.dtype == torch.float4_e2m1fn_x2 else 1
    m, n, k = a.shape[0], b.shape[0], a.shape[1] * per_byte
    dtypes = (a.dtype, b.dtype, out.dtype)
    plan = _plan(device, (m, n, k), dtypes, (False, False), (k, k), scale_mode)
    factor = None if alpha is None else alpha.data_ptr()
    with _SCALES:  # the addresses are a part of the plan, which another thread may want as well
        _point_at_scales(plan[0], scales[1].data_ptr(), scales[0].data_ptr())
        _launch(
            device, raw_stream(a.device), plan, a.data_ptr(), b.data_ptr(), factor,
            out.data_ptr(), accumulate,
        )  # fmt: skip
    return out


_SCALES = threading.Lock()


def _launch(
    device: int, stream: int, plan: tuple[Any, ...], a: int, b: int, alpha: int | None, out: int,
    accumulate: bool,
) -> None:  # fmt: skip
    """The product of a plan, of operands at these addresses."""
    operation, first, second, layout, result = plan
    kept = _constants(device, stream)
    status = _matmul()(
        _handle(device), operation, kept.one if alpha is None else alpha,
        b, first, a, second, kept.one if accumulate else kept.zero,
        out, layout, out, layout, ctypes.byref(result), kept.workspace, _WORKSPACE, stream,
    )  # fmt: skip
    if status != 0:
        raise RuntimeError(f"cublasLtMatmul failed with cuBLAS status {status}")


def matmul_pieces(
    a: Tensor, b: Tensor, pieces: Sequence[tuple[int, int]], alpha: Tensor | None, *, out: Tensor,
    accumulate: bool,
) -> None:  # fmt: skip
    """out[e] = alpha[e] a[:, piece e] . b[:, piece e]^T, or added to it: one product a piece.

    Args:
        a: [M, K], b: [N, K]: rows or columns contiguous, alike; pieces of rows begin at multiples
            of 16 bytes.
        pieces: first column and columns of each; one without columns is left out.
        alpha: contiguous fp32 [pieces], or None for 1.
        out: contiguous [pieces, M, N].
    """
    device = a.device.index
    if torch.cuda.current_device() != device:
        with torch.cuda.device(device):
            return matmul_pieces(a, b, pieces, alpha, out=out, accumulate=accumulate)
    stream, (m, n) = raw_stream(a.device), out.shape[1:]
    by_columns = a.stride(1) != 1
    axis = 1 if by_columns else 0
    leading, dtypes = (a.stride(axis), b.stride(axis)), (a.dtype, b.dtype, out.dtype)
    # Bytes from one column of a piece to the next.
    step_a, step_b = (x.stride(1) * x.element_size() for x in (a, b))
    left, right, target = a.data_ptr(), b.data_ptr(), out.data_ptr()
    size = m * n * out.element_size()
    factor = None if alpha is None else alpha.data_ptr()
    for e, (first, columns) in enumerate(pieces):
        if columns:
            plan = _plan(device, (m, n, columns), dtypes, (by_columns,) * 2, leading)
            _launch(
                device, stream, plan, left + first * step_a, right + first * step_b,
                None if factor is None else factor + 4 * e, target + e * size, accumulate,
            )  # fmt: skip
    return None
