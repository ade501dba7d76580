# SPDX-License-Identifier: Apache-2.0
"""Products of all experts at once: ragged rows (fprop, dgrad), or a ragged contraction (wgrad).

Sums are fp32 (FP8: split accumulations, never fast ones), alpha of each group is applied to them in
fp32, from device memory.
"""

from dataclasses import dataclass
from itertools import accumulate as accumulate_sizes
from typing import Any

import torch
from torch import Tensor

from fused_ops.codecs import pad_to
from fused_ops.dispatch import Choice, Implementation, Op, always
from fused_ops.groups import HEIGHTS, Groups
from fused_ops.scaled_matmul import cublaslt
from fused_ops.triton_support import device_reason, launch

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Alpha:
    """(a[e] * b[e]) * factor, each operation one fp32 rounding. a, b: fp32 [groups]."""

    a: Tensor
    b: Tensor
    factor: float

    def values(self) -> Tensor:
        """fp32 [groups]."""
        return self.a * self.b * self.factor


@dataclass(frozen=True)
class Tile:
    """A launch configuration: sides of a tile of the output, products at a time, and how it loads.

    described: through tensor descriptors (TMA), else by pointers.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    described: bool = True


TILES = {
    ("rows", "bf16"): Tile(128, 256, 64, 8, 3),
    ("rows", "fp8"): Tile(128, 128, 128, 4, 3),
    ("inner", "bf16"): Tile(128, 256, 64, 8, 3),
    ("inner", "fp8"): Tile(128, 256, 128, 8, 3),
}
SMALL_TILE = Tile(128, 128, 64, 8, 3)
"""For devices with less than 160 KiB of shared memory a multiprocessor."""


def rows_matmul(
    a: Tensor,
    b: Tensor,
    groups: Groups,
    *,
    rows: int,
    dtype: torch.dtype,
    alpha: Alpha | None = None,
    implementation: Choice = None,
    **options: Any,
) -> Tensor:
    """[rows, n]: rows of group e are alpha_e a[rows of e] . b[e]^T, those behind the last are zero.

    Args:
        a: [at least groups.rows, k], bf16 or FP8, rows contiguous.
        b: [groups, n, k], bf16 or E4M3; the last axis or the one before it is contiguous.
        rows, dtype: of the result, bf16 or fp32.
        options: of one implementation (`tile` of "triton").
    """
    options |= {"rows": rows, "dtype": dtype, "alpha": alpha}
    out: Tensor = ROWS(a, b, groups, implementation=implementation, **options)
    if rows > groups.rows:
        out[groups.rows :].zero_()
    return out


def inner_matmul(
    a: Tensor,
    b: Tensor,
    groups: Groups,
    *,
    out: Tensor,
    padded: bool,
    accumulate: bool,
    alpha: Alpha | None = None,
    implementation: Choice = None,
    **options: Any,
) -> Tensor:
    """out[e] = alpha_e a[:, tokens of e] . b[:, tokens of e]^T, or added to it (`accumulate`).

    Args:
        a: [m, tokens], b: [n, tokens], bf16 or FP8.
        padded: whether tokens lie in the column layout of `Groups`; then rows are contiguous, else
            both are transposes of contiguous matrices.
        out: contiguous [groups, m, n]; fp32 if `accumulate`. Groups without tokens give zeros.
    """
    return INNER(
        a, b, groups, out=out, padded=padded, accumulate=accumulate, alpha=alpha,
        implementation=implementation, **options,
    )  # fmt: skip


def _reason(a: Tensor, b: Tensor) -> str | None:
    for operand in (a, b):
        reason = device_reason(operand)
        if reason is not None:
            return reason
        if operand.data_ptr() % 16:
            return "operands begin at multiples of 16 bytes"
    if a.dtype in FP8:
        if b.dtype != torch.float8_e4m3fn:
            return f"FP8 is multiplied by E4M3, got {b.dtype}"
    elif not a.dtype == b.dtype == torch.bfloat16:
        return f"bf16 or FP8 operands, got {a.dtype} and {b.dtype}"
    return None


def _sizes_reason(*sizes: int) -> str | None:
    return f"sizes that are multiples of 16, got {sizes}" if any(n % 16 for n in sizes) else None


def _triton_rows_reason(a: Tensor, b: Tensor, groups: Groups, **_unused: object) -> str | None:
    if a.stride(1) != 1 or 1 not in b.stride()[1:]:
        return f"rows of a, and rows or columns of b, are contiguous; got strides {b.stride()}"
    if b.stride(2) != 1 and b.dtype in FP8:
        return "FP8 is multiplied along contiguous rows"
    return _sizes_reason(b.shape[1], b.shape[2]) or _reason(a, b)


def _split(dtype: torch.dtype) -> int:
    """Products that FP8 cores sum by themselves; at most the k of a tile."""
    return 128 if dtype in FP8 else 0


def _tile(kind: str, dtype: torch.dtype, device: torch.device) -> Tile:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        if properties.shared_memory_per_multiprocessor < 160 << 10:
            return SMALL_TILE
    return TILES[kind, "fp8" if dtype in FP8 else "bf16"]


def _scales(alpha: Alpha | None, other: Tensor) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """The pointers of alpha, and the constants that go with them."""
    if alpha is None:
        return (other, other), {"SCALED": False, "FACTOR": 1.0}
    return (alpha.a, alpha.b), {"SCALED": True, "FACTOR": alpha.factor}


def _allocate(described: bool) -> None:
    """Descriptors live in memory that Triton asks for: in this thread, so at every launch."""
    if described:
        import triton

        triton.set_allocator(_scratch)


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _launch_options(tile: Tile, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "SPLIT": min(_split(dtype), tile.k), "DESCRIBED": tile.described,
        "M": tile.m, "N": tile.n, "K": tile.k, "num_stages": tile.stages,
    }  # fmt: skip


def _triton_rows(
    a: Tensor, b: Tensor, groups: Groups, *, rows: int, dtype: torch.dtype, alpha: Alpha | None,
    tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    from fused_ops.scaled_matmul import triton_grouped_kernels as kernels

    out = torch.empty((rows, b.shape[1]), dtype=dtype, device=a.device)
    if groups.rows == 0:
        return out
    tile = _tile("rows", a.dtype, a.device) if tile is None else tile
    by_k, (n, k) = b.stride(2) == 1, b.shape[1:]
    scales, constants = _scales(alpha, groups.place)
    grid = (groups.tile_counts[tile.m] * -(-n // tile.n),)
    _allocate(tile.described)
    launch(
        kernels.grouped_rows, grid, a, b, out, *scales, groups.place, groups.tiles(tile.m),
        n, k, a.stride(0), b.stride(1 if by_k else 2), b.stride(0), on=a.device, warps=tile.warps,
        B_BY_K=by_k, EVEN_K=k % tile.k == 0, LEVEL=3 + HEIGHTS.index(tile.m),
        **constants, **_launch_options(tile, a.dtype),
    )  # fmt: skip
    return out


def _triton_inner_reason(
    a: Tensor, b: Tensor, groups: Groups, *, out: Tensor, padded: bool, **_unused: object
) -> str | None:
    if not out.is_contiguous():
        return "out is not contiguous"
    axis = 1 if padded else 0
    if a.stride(axis) != 1 or b.stride(axis) != 1:
        return f"strides that fit padded={padded}, got {a.stride()} and {b.stride()}"
    if a.dtype in FP8 and not padded:
        return "FP8 is multiplied along contiguous rows"
    return _sizes_reason(a.shape[0], b.shape[0]) or _reason(a, b)


def _triton_inner(
    a: Tensor, b: Tensor, groups: Groups, *, out: Tensor, padded: bool, accumulate: bool,
    alpha: Alpha | None, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    from fused_ops.scaled_matmul import triton_grouped_kernels as kernels

    tile = _tile("inner", a.dtype, a.device) if tile is None else tile
    m, n, axis = a.shape[0], b.shape[0], 0 if padded else 1
    scales, constants = _scales(alpha, groups.place)
    grid = (len(groups) * -(-m // tile.m) * -(-n // tile.n),)
    _allocate(tile.described)
    launch(
        kernels.grouped_inner, grid, a, b, out, *scales, groups.place,
        m, n, a.stride(axis), b.stride(axis), on=a.device, warps=tile.warps,
        BY_K=padded, ACCUMULATE=accumulate, **constants, **_launch_options(tile, a.dtype),
    )  # fmt: skip
    return out


def _cublaslt_inner_reason(
    a: Tensor, b: Tensor, groups: Groups, *, out: Tensor, padded: bool, **unused: object
) -> str | None:
    if cublaslt.library() is None:
        return "cuBLASLt was not found"
    if out.data_ptr() % 16:
        return "out begins at a multiple of 16 bytes"
    return _triton_inner_reason(a, b, groups, out=out, padded=padded, **unused)


def _cublaslt_inner(
    a: Tensor, b: Tensor, groups: Groups, *, out: Tensor, padded: bool, accumulate: bool,
    alpha: Alpha | None,
) -> Tensor:  # fmt: skip
    """One launch a group: their sizes are those that the host knows."""
    pieces = [(part.start, part.stop - part.start) for part in _pieces(groups, padded)]
    factors = None if alpha is None else alpha.values().contiguous()
    cublaslt.matmul_pieces(a, b, pieces, factors, out=out, accumulate=accumulate)
    if not accumulate:
        for e, (_, columns) in enumerate(pieces):
            if not columns:
                out[e].zero_()
    return out


def _torch_reason(
    a: Tensor, b: Tensor, groups: Groups, *, dtype: torch.dtype, alpha: Alpha | None, **_: object
) -> str | None:
    if alpha is not None or dtype != torch.bfloat16 or a.dtype != torch.bfloat16:
        return "torch's grouped product takes bf16 without scales, into bf16"
    return _triton_rows_reason(a, b, groups)


def _torch_rows(
    a: Tensor, b: Tensor, groups: Groups, *, rows: int, dtype: torch.dtype, alpha: Alpha | None
) -> Tensor:
    if groups.rows == 0:
        return torch.zeros((rows, b.shape[1]), dtype=dtype, device=a.device)
    out = torch._grouped_mm(a, b.transpose(1, 2), offs=groups.ends)
    return out if len(a) == rows else pad_to(out, rows, b.shape[1])


def _pieces(groups: Groups, padded: bool) -> list[slice]:
    """Where the tokens of each group lie: one after the other, or (padded) in the column layout."""
    sizes = [16 * -(-n // 16) for n in groups.counts] if padded else list(groups.counts)
    ends = list(accumulate_sizes(sizes))
    return [slice(end - n, end) for end, n in zip(ends, sizes)]


def _reference_rows(
    a: Tensor, b: Tensor, groups: Groups, *, rows: int, dtype: torch.dtype, alpha: Alpha | None
) -> Tensor:
    out = torch.empty((rows, b.shape[1]), dtype=dtype, device=a.device)
    for e, own in enumerate(_pieces(groups, False)):
        total = a[own].float() @ b[e].float().t()
        out[own] = total if alpha is None else total * alpha.values()[e]
    return out


def _reference_inner(
    a: Tensor, b: Tensor, groups: Groups, *, out: Tensor, padded: bool, accumulate: bool,
    alpha: Alpha | None,
) -> Tensor:  # fmt: skip
    for e, tokens in enumerate(_pieces(groups, padded)):
        if not groups.counts[e]:
            if not accumulate:
                out[e] = 0
            continue
        total = a[:, tokens].float() @ b[:, tokens].float().t()
        total = total if alpha is None else total * alpha.values()[e]
        out[e] = out[e] + total if accumulate else total
    return out


ROWS = Op("grouped_rows_matmul")
ROWS.register(Implementation("torch", _torch_rows, _torch_reason))
ROWS.register(Implementation("triton", _triton_rows, _triton_rows_reason))
ROWS.register(Implementation("reference", _reference_rows, always))
INNER = Op("grouped_inner_matmul")
INNER.register(Implementation("triton", _triton_inner, _triton_inner_reason))
INNER.register(Implementation("cublaslt", _cublaslt_inner, _cublaslt_inner_reason))
INNER.register(Implementation("reference", _reference_inner, always))
