# SPDX-License-Identifier: Apache-2.0
"""Operands of all groups of rows (experts) at once, on NVIDIA GPUs through Triton.

Each group is a matrix of its own: the bytes are those of `quantize` of its rows alone.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_ops.codecs import ELEMENT_MAX, FP8_DTYPES
from fused_ops.formats import OperandSpec, QuantizedTensor
from fused_ops.groups import Groups
from fused_ops.quantize import triton_backend
from fused_ops.quantize.triton_backend import Output
from fused_ops.quantize.triton_launch import COLUMN_TILE, PAIR_TILE, sign_factors, signed, words
from fused_ops.triton_support import launch

HEIGHT = 64
"""Rows of a tile: four blocks, as in the kernels."""
CAST_COLUMNS = 128


@dataclass
class GroupedOperand:
    """One operand of the products of all groups.

    data: [rows, k], or as a column operand [k, 16 blocks] (see `Groups`): packed codes or FP8 bytes
        (form "codes"), or what tensor cores multiply ("bf16", "fp8").
    scales: block scales of NVFP4 codes; None elsewhere.
    factor: fp32 [groups], what alpha takes of it: the amax (NVFP4), or the decode factor (FP8).
    """

    data: Tensor
    scales: Tensor | None
    factor: Tensor
    spec: OperandSpec
    form: str

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        tensors = [t for t in (self.data, self.scales, self.factor) if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)

    def matrix(self, form: str) -> tuple[Tensor, int]:
        """As tensor cores multiply it, and the power of two that alpha owes it.

        form: "bf16" or "fp8" of an operand that is codes; another has its own.
        """
        if self.form != "codes":
            return self.data, self.spec.fp8_shift if self.form == "fp8" else 0
        if self.spec.format != "nvfp4":
            return self.data.view(FP8_DTYPES[str(self.spec.element)]), 0
        assert self.scales is not None, "codes have block scales"
        rows, cols = self.data.shape[0], 2 * self.data.shape[1]
        codes = QuantizedTensor(self.data, self.scales, self.factor, (rows, cols), self.spec)
        shift = self.spec.fp8_shift if form == "fp8" else 0
        return triton_backend.decode(codes, e4m3=form == "fp8", shift=shift), shift

    def transposed(self, form: str) -> tuple[Tensor, int]:
        """As `matrix`, of a row operand's transpose [k, rows]; codes in 16x16 tiles.

        In bf16 its columns are contiguous, in fp8 its rows.
        """
        assert self.form == "codes", "tiles are kept as codes"
        assert self.scales is not None, "codes have block scales"
        shape = (self.data.shape[0], 2 * self.data.shape[1])
        codes = QuantizedTensor(self.data, self.scales, self.factor, shape, self.spec)
        shift = self.spec.fp8_shift if form == "fp8" else 0
        return triton_backend.decode_columns(codes, form), shift


@dataclass(frozen=True)
class Request:
    """What one operand is to be.

    amax: fp32 [groups]. keys: int32 [groups, 2], the words of each group's key, if it is random.
    origin: global (row, column) of the first element of a group's operand, the column a multiple
    of 16.
    """

    spec: OperandSpec
    form: str
    amax: Tensor
    keys: Tensor | None = None
    origin: tuple[int, int] = (0, 0)

    def output(self, rows: int, cols: int) -> Output:
        """Where it is written."""
        spec, device, blocks = self.spec, self.amax.device, cols // 16
        if self.form == "codes":
            high = -(-rows // 16) if spec.block == (16, 16) else rows
            main = torch.empty((rows, 8 * blocks), dtype=torch.uint8, device=device)
            scales = torch.empty((high, blocks), dtype=torch.uint8, device=device)
        else:
            dtype = torch.float8_e4m3fn if self.form == "fp8" else torch.bfloat16
            main = torch.empty((rows, cols), dtype=dtype, device=device)
            scales = main.view(torch.uint8)  # not written
        counts = None
        used = self.amax.contiguous()
        if spec.is_pow2:
            counts = torch.zeros((len(used), 2), dtype=torch.int32, device=device)
            used = torch.empty_like(used)
        amax = self.amax.contiguous()
        return Output(spec, self.form, (rows, cols), amax, main, scales, used, counts)


def amaxes(
    x: Tensor,
    groups: Groups,
    *,
    rotated: bool = False,
    signs: Tensor | None = None,
    flag: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """fp32 [groups]: amax of each group of rows, and (rotated) of its columns after a rotation.

    Args:
        x: bf16 [at least groups.rows, cols], cols a multiple of 16.
        flag: bool scalar, raised by Inf and NaN in any group.
    """
    from fused_ops.quantize import triton_grouped_kernels as kernels

    out = torch.zeros((2, len(groups)), dtype=torch.int32, device=x.device)
    if groups.rows:
        source, size = words(x[: groups.rows], True), COLUMN_TILE["words"]
        grid = (groups.tile_counts[HEIGHT], -(-source.shape[1] // size))
        launch(
            kernels.grouped_amax, grid, source, sign_factors(signs, x.device), groups.place,
            groups.tiles(HEIGHT), out[0], out[1],
            out if flag is None else flag.view(torch.uint8), x.shape[1], on=x.device,
            warps=COLUMN_TILE["warps"], ROTATED=rotated, FLAG=flag is not None, WORDS=size,
        )  # fmt: skip
    plain, turned = out.view(torch.float32).unbind(0)
    return plain, turned


def quantize(
    x: Tensor,
    groups: Groups,
    row: Request | None,
    column: Request | None,
    signs: Tensor | None = None,
) -> tuple[GroupedOperand | None, GroupedOperand | None]:
    """NVFP4 of each group of rows of x, and of its transpose, x read from memory once.

    Args:
        x: bf16 [at least groups.rows, cols], cols a multiple of 16.
        signs: of the column operand's rotation.
    """
    from fused_ops.quantize import triton_grouped_kernels as kernels

    cols = x.shape[1]
    wanted = [
        None if request is None else request.output(*shape)
        for request, shape in ((row, (groups.rows, cols)), (column, (cols, 16 * groups.blocks)))
    ]
    some = next(output for output in wanted if output is not None)
    if groups.rows:
        source, size = words(x[: groups.rows], True), PAIR_TILE["words"]
        tile = some.spec.block == (16, 16)
        options: dict[str, Any] = {"ROW": row is not None, "COLUMN": column is not None}
        options |= {"TILE": tile, "C_HADAMARD": column is not None and column.spec.hadamard == 16}
        for prefix, output in zip("RC", wanted):
            constants = (some if output is None else output).constants()
            options |= {f"{prefix}_{name}": value for name, value in constants.items()}
        launch(
            kernels.grouped_quantize,
            (groups.tile_counts[HEIGHT], -(-source.shape[1] // size)),
            source, sign_factors(signs, x.device), groups.place, groups.tiles(HEIGHT),
            *_pointers(row, wanted[0] or some), *_pointers(column, wanted[1] or some),
            cols, groups.blocks, *_origin(row), *_origin(column), on=x.device,
            warps=PAIR_TILE["warps"], WORDS=size, ROWS=PAIR_TILE["rows"], **options,
        )  # fmt: skip
    made = [None if output is None else _operand(output) for output in wanted]
    return made[0], made[1]


def _pointers(request: Request | None, output: Output) -> tuple[Tensor, ...]:
    """What the kernel takes of one operand: amax, keys, main, scales, used, counts."""
    keys = None if request is None else request.keys
    return output.amax, output.amax if keys is None else keys, *output.pointers()


def _origin(request: Request | None) -> tuple[int, int]:
    if request is None:
        return 0, 0
    return signed(request.origin[0]), signed(request.origin[1] // 16)


def _operand(output: Output) -> GroupedOperand:
    scales = output.scales if output.form == "codes" else None
    return GroupedOperand(output.main, scales, output.used, output.spec, output.form)


def requantize(source: GroupedOperand, groups: Groups, request: Request) -> GroupedOperand:
    """requantize_columns of each group: NVFP4 codes of rows -> of the decoded transpose.

    Groups have whole blocks of 16 rows.
    """
    from fused_ops.quantize import triton_grouped_kernels as kernels

    assert source.scales is not None, "made from codes"
    codes, spec = source.data.view(torch.int32), source.spec
    output = request.output(8 * codes.shape[1], groups.rows)
    options = output.constants()
    del options["STOCHASTIC"]
    size = COLUMN_TILE["words"]
    launch(
        kernels.grouped_requantize,
        (groups.tile_counts[HEIGHT], -(-codes.shape[1] // size)),
        codes, source.scales, source.factor, output.amax, *output.pointers(), groups.place,
        groups.tiles(HEIGHT), codes.shape[1], groups.blocks, on=codes.device,
        warps=COLUMN_TILE["warps"], Q_NUMERATOR=spec.numerator, Q_TILE=spec.block == (16, 16),
        WORDS=size, **options,
    )  # fmt: skip
    return _operand(output)


def cast_fp8(
    x: Tensor, groups: Groups, spec: OperandSpec, amax: Tensor, *, row: bool, column: bool
) -> tuple[GroupedOperand | None, GroupedOperand | None]:
    """FP8 with one scale a group: of rows as they are, and in the column layout; x read once.

    x: bf16 [at least groups.rows, cols].
    """
    from fused_ops.quantize import triton_grouped_kernels as kernels

    cols, device = x.shape[1], x.device
    shapes = ((groups.rows, cols), (cols, 16 * groups.blocks))
    made = [
        torch.empty(shape if wanted else (0,), dtype=torch.uint8, device=device)
        for shape, wanted in zip(shapes, (row, column))
    ]
    scale = torch.empty(len(groups), dtype=torch.float32, device=device)
    if groups.rows:
        x = words(x[: groups.rows], True).view(torch.bfloat16)
        launch(
            kernels.grouped_cast_fp8, (groups.tile_counts[HEIGHT], -(-cols // CAST_COLUMNS)),
            x, amax.contiguous(), *made, scale, groups.place, groups.tiles(HEIGHT),
            cols, 16 * groups.blocks, on=device, warps=8, E5M2=spec.element == "e5m2",
            LARGEST=ELEMENT_MAX[str(spec.element)], POW2=spec.scale == "pow2",
            ROW=row, COLUMN=column, COLS=CAST_COLUMNS,
        )  # fmt: skip
    operands = [
        GroupedOperand(data, None, scale, spec, "codes") if wanted else None
        for data, wanted in zip(made, (row, column))
    ]
    return operands[0], operands[1]
