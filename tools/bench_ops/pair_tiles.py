# SPDX-License-Identifier: Apache-2.0
"""Every tile of the CUDA quantizer of both operands: `--op pair --tiles`.

All builds are made at once, by as many compilers as there are processors. A build is timed if all
bytes of the first matrix are Triton's; the fastest of each kind is printed for cuda_backend.TILES.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import torch

from fused_ops.quantize import amax_pair, cuda_backend, triton_backend
from tools.bench_ops.quantizers import (
    FORM_BYTES,
    KEY,
    PAIRS,
    copy_bandwidth,
    median_us,
    row,
)

PAIR_TILES = [
    {"rows": rows, "stages": stages, "blocks": blocks, "waves": waves}
    for rows, stages, blocks, waves in (
        (64, 2, 4, 1), (64, 1, 4, 1), (64, 1, 4, 0), (64, 2, 4, 3), (64, 2, 3, 1), (64, 1, 5, 1),
        (32, 2, 8, 1), (32, 2, 6, 1), (128, 2, 2, 1), (128, 1, 2, 1),
    )
]  # fmt: skip
"""See cuda_backend.TILE."""

Built = dict[tuple[int, int], Future[Any]]


def _arguments(x: torch.Tensor, number: int) -> tuple[tuple[Any, Any], dict[str, Any]]:
    _, row_spec, column, forms = PAIRS[number]
    key = torch.tensor(KEY, device=x.device)
    keys = (key, key + 1) if row_spec.is_random else (None, None)
    return (row_spec, column), {"amaxes": amax_pair(x, column), "keys": keys, "forms": forms}


def _tiled(number: int, tile: dict[str, int], x: torch.Tensor) -> Callable[[], tuple[Any, ...]]:
    """A call of the pair with this tile in its kind's place in TILES."""
    specs, arguments = _arguments(x, number)
    kind = cuda_backend.kind_of(specs[0], arguments["forms"])

    def run() -> tuple[Any, ...]:
        with patch.dict(cuda_backend.TILES, {kind: tile}):
            return cuda_backend.quantize_pair(x, *specs, **arguments)

    return run


def _build_all(pool: ThreadPoolExecutor) -> Built:
    capability = torch.cuda.get_device_capability()
    built: Built = {}
    for number, (_, row_spec, column, forms) in enumerate(PAIRS):
        for index, tile in enumerate(PAIR_TILES):
            macros = cuda_backend.pair_macros(row_spec, column, forms, True, tile)
            built[number, index] = pool.submit(cuda_backend.library, macros, capability)
    return built


def _sound(x: torch.Tensor, number: int, built: Built) -> list[int]:
    """The numbers of the tiles whose builds give Triton's bytes; says what the others do."""
    specs, arguments = _arguments(x, number)
    want = triton_backend.quantize_pair(x, *specs, **arguments)
    found = []
    for index, tile in enumerate(PAIR_TILES):
        try:
            built[number, index].result()
            got = _tiled(number, tile, x)()
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(f"{PAIRS[number][0]}, {tile}: {str(error).strip().splitlines()[0]}", flush=True)
            continue
        if all(map(cuda_backend.same_bytes, got, want)):
            found.append(index)
        else:
            print(f"{PAIRS[number][0]}, {tile}: other bytes than Triton's, not timed", flush=True)
    return found


def bench_pair_tiles(rows: int, cols: list[int]) -> None:
    """Times of every sound build on [rows, cols] bf16 matrices, and the best tile of each kind."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = _build_all(pool)
        first = torch.randn(rows, cols[0], device="cuda").bfloat16()
        sound = [_sound(first, number, built) for number in range(len(PAIRS))]
    times: dict[tuple[int, int], list[float]] = {}
    for width in cols:
        x = torch.randn(rows, width, device="cuda").bfloat16()
        copy = copy_bandwidth(x)
        print(f"\n{rows} x {width}: copy {copy:.2f} TB/s")
        for number, (name, _, _, forms) in enumerate(PAIRS):
            moved = x.numel() * (2 + sum(FORM_BYTES[form] for form in forms))
            print(name)
            for index in sound[number]:
                tile = PAIR_TILES[index]
                time = median_us(_tiled(number, tile, x))
                times.setdefault((number, index), []).append(time / x.numel())
                row("  " + " ".join(f"{n} {key}" for key, n in tile.items()), moved, time, copy)
    print("\nbest, for TILES in fused_ops/quantize/cuda_backend.py:")
    for number, (_, row_spec, _, forms) in enumerate(PAIRS):
        if sound[number]:
            best = min(sound[number], key=lambda index: sum(times[number, index]))
            print(f"    {cuda_backend.kind_of(row_spec, forms)}: {PAIR_TILES[best]},")
