# SPDX-License-Identifier: Apache-2.0
"""What is timed of the quantizers: `python -m tools.bench_ops --op quantize|amax|pair`.

Each kernel's bytes are compared with the reference's before it is timed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fused_ops.formats import DecodedTensor, OperandSpec
from fused_ops.quantize import (
    amax_pair,
    cuda_backend,
    operand_amax,
    quantize,
    quantize_pair,
    triton_amax,
    triton_backend,
)
from fused_ops.quantize.triton_launch import ROTATED_AMAX_TILE
from fused_ops.testing import assert_bitwise_equal

KEY = (0x12345678, 0x9ABCDEF0)
CHECK = (256, 512)


def _nvfp4(**options: object) -> OperandSpec:
    return OperandSpec(format="nvfp4", **options)  # type: ignore[arg-type]


SPECS = [
    _nvfp4(),
    _nvfp4(rounding="stochastic"),
    _nvfp4(hadamard=16),
    _nvfp4(hadamard=16, rounding="stochastic"),
    _nvfp4(choice="4over6_mse"),
    _nvfp4(block=(16, 16)),
    _nvfp4(scale="pow2"),
    _nvfp4(scale="pow2", rounding="stochastic"),
    _nvfp4(scale="pow2", hadamard=16, rounding="stochastic"),
    _nvfp4(scale="pow2", choice="better_of_two"),
    _nvfp4(scale="pow2", hadamard=16, choice="better_of_two"),
]

_SR = {"rounding": "stochastic"}
PAIRS: list[tuple[str, OperandSpec, OperandSpec, tuple[str, str]]] = [
    (
        "nvfp4_fast dy, stochastic to e4m3, both",
        _nvfp4(scale="pow2", **_SR), _nvfp4(scale="pow2", hadamard=16, **_SR), ("fp8", "fp8"),
    ),
    (
        "nvfp4 dy, stochastic to bf16, both",
        _nvfp4(**_SR), _nvfp4(hadamard=16, **_SR), ("bf16", "bf16"),
    ),
    (
        "pow2 codes, stochastic, both",
        _nvfp4(scale="pow2", **_SR), _nvfp4(scale="pow2", hadamard=16, **_SR), ("codes", "codes"),
    ),
    (
        "e4m3-scaled codes, stochastic, both",
        _nvfp4(**_SR), _nvfp4(hadamard=16, **_SR), ("codes", "codes"),
    ),
    ("nvfp4 x, nearest to bf16 and codes", _nvfp4(), _nvfp4(hadamard=16), ("bf16", "codes")),
    (
        "nvfp4_fast x, 4over6 to e4m3, better of two codes",
        _nvfp4(choice="4over6_mse"), _nvfp4(scale="pow2", choice="better_of_two", hadamard=16),
        ("fp8", "codes"),
    ),
]  # fmt: skip
"""Row operand, rotated column operand and their forms, as recipes want them in one read."""

AMAX_TILES = [
    ROTATED_AMAX_TILE,
    {"blocks": 1, "words": 32, "tiles": 4, "warps": 1},
    {"blocks": 1, "words": 32, "tiles": 8, "warps": 1},
    {"blocks": 1, "words": 32, "tiles": 16, "warps": 1},
    {"blocks": 1, "words": 64, "tiles": 8, "warps": 2},
    {"blocks": 1, "words": 128, "tiles": 4, "warps": 1},
    {"blocks": 1, "words": 128, "tiles": 8, "warps": 4},
    {"blocks": 4, "words": 32, "tiles": 4, "warps": 4},
]
"""Tiles of the amax in one read, the one in use first."""

FORM_BYTES = {"codes": 0.5 + 1 / 16, "fp8": 1.0, "bf16": 2.0}
"""Bytes that one element of an operand takes."""


def median_us(run: Callable[[], object]) -> float:
    """Median microseconds of a call replayed in a CUDA graph: what the device needs alone."""
    from triton.testing import do_bench_cudagraph

    run()
    with torch.cuda.stream(torch.cuda.Stream()):
        return 1e3 * float(do_bench_cudagraph(run, rep=40, return_mode="median"))


def copy_bandwidth(x: Tensor) -> float:
    """TB/s of a device copy of x, bytes read and written."""
    y = torch.empty_like(x)
    return 2 * x.numel() * x.element_size() / median_us(lambda: y.copy_(x)) / 1e6


def row(name: str, moved: float, microseconds: float, copy: float) -> None:
    """One line: bytes that must move, the time, and the rate over that of a copy."""
    rate = moved / microseconds / 1e6
    print(
        f"{name:52} {microseconds:8.1f} us {rate:6.2f} TB/s {rate / copy:6.3f} of copy", flush=True
    )


def check_quantizer(spec: OperandSpec, columns: bool) -> None:
    """The bytes of the kernel are those of the reference on a CPU."""
    x, key = torch.randn(CHECK).bfloat16(), torch.tensor(KEY)
    want = quantize(x, spec, columns=columns, key=key, implementation="reference")
    got = quantize(x.cuda(), spec, columns=columns, key=key.cuda(), implementation="triton")
    assert_bitwise_equal(got.codes.cpu(), want.codes, f"{spec.label} codes")
    assert_bitwise_equal(got.scales.cpu(), want.scales, f"{spec.label} scales")


def _matrix(rows: int, cols: int) -> tuple[Tensor, float]:
    """A random bf16 matrix, and the rate of copying it, printed."""
    x = torch.randn(rows, cols, device="cuda").bfloat16()
    copy = copy_bandwidth(x)
    print(f"\n{rows} x {cols}: copy {copy:.2f} TB/s")
    return x, copy


def bench_quantize(rows: int, cols: int) -> None:
    """All quantizers and amaxes on one [rows, cols] bf16 matrix."""
    x, copy = _matrix(rows, cols)
    amax = operand_amax(x, _nvfp4())
    assert_bitwise_equal(amax, x.abs().amax().float(), "amax")
    row("amax", 2 * x.numel(), median_us(lambda: operand_amax(x, _nvfp4())), copy)
    time_amaxes(x, copy, AMAX_TILES[:1])
    moved = x.numel() * (2 + FORM_BYTES["codes"])
    key = torch.tensor(KEY, device="cuda")
    for spec in SPECS:
        for columns in (False, True):
            check_quantizer(spec, columns)
            run = partial(
                quantize, x, spec, columns=columns, amax=amax, key=key, implementation="triton"
            )
            time = median_us(run)
            row(f"{'columns' if columns else 'rows'} {spec.label}", moved, time, copy)
    time_pairs(x, copy)
    packed = quantize(x, _nvfp4(), amax=amax)
    time = median_us(lambda: triton_backend.decode(packed))
    row("decode to bf16", x.numel() * (2.5 + 1 / 16), time, copy)
    time = median_us(lambda: triton_backend.decode(packed, e4m3=True, shift=3))
    row("decode to e4m3", x.numel() * (1.5 + 1 / 16), time, copy)


def bench_amax(rows: int, cols: int) -> None:
    """Amax of a matrix and of its rotated columns in one read, by every tile."""
    time_amaxes(*_matrix(rows, cols), AMAX_TILES)


def _rotated(x: Tensor, tile: dict[str, int], flag: Tensor) -> tuple[Tensor, Tensor]:
    plain = torch.zeros((), dtype=torch.int32, device=x.device)
    turned = triton_amax.rotated_amax(x, None, False, plain, flag, tile)
    return plain.view(torch.float32), turned


def time_amaxes(x: Tensor, copy: float, tiles: list[dict[str, int]]) -> None:
    """Lines for the rotated columns alone, both in one read, and both by other tiles."""
    spec, flag = _nvfp4(hadamard=16), torch.zeros((), dtype=torch.bool, device="cuda")
    want = x.abs().amax().float(), operand_amax(x.cpu(), spec, columns=True).cuda()
    for tile in tiles:
        for name, got, expected in zip(("amax", "rotated"), _rotated(x, tile, flag), want):
            assert_bitwise_equal(got, expected, f"{name} {tile}")
    size = 2 * x.numel()
    alone = partial(operand_amax, x, spec, columns=True)
    row("amax of columns, hadamard 16", size, median_us(alone), copy)
    both = partial(amax_pair, x, spec, None, flag)
    row("amax of both in one read", size, median_us(both), copy)
    for tile in tiles[1:]:
        name = "both, " + " ".join(f"{value} {key}" for key, value in tile.items())
        row(name, size, median_us(partial(_rotated, x, tile, flag)), copy)


def _check_pair(
    row_spec: OperandSpec, column: OperandSpec, forms: tuple[str, str], implementation: str
) -> None:
    """Every byte of the kernel is the reference's on a CPU."""
    x = torch.randn(CHECK).bfloat16()
    x[:32] *= torch.exp2(torch.randn(32, CHECK[1]) * 8).bfloat16()
    results = []
    for device, name in (("cuda", implementation), ("cpu", "reference")):
        there = x.to(device)
        results.append(_pair(there, row_spec, column, forms, name)())
    for got, want in zip(*results):
        parts = [("amax", got.amax, want.amax)]
        if isinstance(got, DecodedTensor):
            parts.append(("data", got.data.view(torch.uint8), want.data.view(torch.uint8)))
        else:
            parts += [("codes", got.codes, want.codes), ("scales", got.scales, want.scales)]
        for name, left, right in parts:
            assert_bitwise_equal(left.cpu(), right, f"{got.spec.label} {implementation} {name}")


def _pair(
    x: Tensor,
    row_spec: OperandSpec,
    column: OperandSpec,
    forms: tuple[str, str],
    implementation: str,
) -> Callable[[], tuple[Any, Any]]:
    """The call that makes both operands of x."""
    key = torch.tensor(KEY, device=x.device)
    keys = (key, key + 1) if row_spec.is_random else (None, None)
    options: dict[str, Any] = {"amaxes": amax_pair(x, column), "keys": keys, "forms": forms}
    return partial(quantize_pair, x, row_spec, column, implementation=implementation, **options)


def bench_pair(rows: int, cols: int) -> None:
    """Row and rotated column operands of one [rows, cols] bf16 matrix, read once."""
    time_pairs(*_matrix(rows, cols))


def time_pairs(x: Tensor, copy: float) -> None:
    """A line for each pair of operands, by Triton and by CUDA C++."""
    for name, row_spec, column, forms in PAIRS:
        for implementation in ("triton", "cuda"):
            if implementation == "cuda":
                reason = cuda_backend.pair_supports(x, row_spec, column)
                if reason is not None:
                    print(f"{name}: cuda: left out, {reason}", flush=True)
                    continue
            _check_pair(row_spec, column, forms, implementation)
            moved = x.numel() * (2 + sum(FORM_BYTES[form] for form in forms))
            time = median_us(_pair(x, row_spec, column, forms, implementation))
            row(f"{name}: {implementation}", moved, time, copy)
