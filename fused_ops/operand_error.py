# SPDX-License-Identifier: Apache-2.0
"""How far an operand of a GEMM, and its product, are from the exact ones: sums on the device.

    x      the exact operand, after its rotation where it has one, in fp32
    q      what its codes decode to

Sums are fp64 vectors that may be added over micro-batches and ranks; `operand_figures` and
`product_figures` turn them into what is read. Nothing here waits for the device.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from fused_ops.codecs import pad_to
from fused_ops.formats import OperandSpec, QuantizedTensor
from fused_ops.quantize.hadamard import rotate
from fused_ops.scaled_matmul.reference import values

_VALUE_SUMS = (
    *("nonzero", "flushed", "saturated", "square", "error", "cross"),
    *("small_square", "small_cross"),
)
_BLOCK_SUMS = ("peak_square", "peak_cross", "blocks", "underflow")
RANGE_SUMS = ("counted", "above", "below")
OPERAND_SUMS = ("values", *_VALUE_SUMS, *_BLOCK_SUMS, *RANGE_SUMS)
PRODUCT_SUMS = ("count", "cross", "exact_square", "square", "zeros", "exact_zeros")

COLUMN_GROUP = 128
"""Columns that are looked at together: a multiple of every block and every rotation."""
ROW_GROUP = 16
_LARGEST = {"e2m1": 6.0, "e4m3": 448.0, "e5m2": 57344.0}
_SMALLEST = {"e2m1": 0.5, "e4m3": 2.0**-9, "e5m2": 2.0**-16}
# fp32 roundings between a value and the scale that was made for it.
_SLACK = 1.0 + 2.0**-20


@dataclass
class Sample:
    """Some rows and columns of an operand: whole blocks, spread evenly over it.

    plain: [rows, cols], not rotated, in the tensor's dtype.
    operand: the same part of the codes, or of a high-precision operand.
    signs: of the rotation; None is the fixed vector.
    """

    plain: Tensor
    operand: QuantizedTensor | Tensor
    signs: Tensor | None = None
    _decoded: Tensor | None = None

    @property
    def decoded(self) -> Tensor:
        """What the codes decode to, fp32; computed once, until `forget`."""
        assert isinstance(self.operand, QuantizedTensor), "codes decode"
        if self._decoded is None:
            self._decoded = self.operand.dequantize()[: self.plain.shape[0]]
        return self._decoded

    def forget(self) -> None:
        """Keeps the codes alone: they are a seventh of what they decode to."""
        self._decoded = None

    @property
    def exact(self) -> Tensor:
        """What was quantized: the plain values, rotated where the operand is (then bf16)."""
        spec = self.operand.spec if isinstance(self.operand, QuantizedTensor) else None
        if spec is None or not spec.hadamard:
            return self.plain
        return rotate(self.plain, spec.hadamard, self.signs)

    @property
    def is_quantized(self) -> bool:
        """Whether the operand is made of codes."""
        return isinstance(self.operand, QuantizedTensor)


def take_sample(
    tensor: Tensor,
    operand: QuantizedTensor | Tensor,
    *,
    columns: bool,
    signs: Tensor | None = None,
    limits: tuple[int, int] = (0, 0),
) -> Sample:
    """A part of an operand beside the same part of the tensor it was made of.

    Args:
        tensor: [a, b] high precision, not rotated.
        operand: of the tensor, or of its transpose if `columns`.
        signs: of the rotation; None is the fixed vector.
        limits: rows and columns (along the contraction) to take at most, in whole groups; 0: all.
    """
    plain = tensor.t() if columns else tensor
    tile = 1
    if isinstance(operand, QuantizedTensor) and operand.spec.block is not None:
        tile = operand.spec.block[0]
    rows = spread(plain.shape[0], limits[0], max(ROW_GROUP, tile), tensor.device)
    cols = spread(plain.shape[1], limits[1], COLUMN_GROUP, tensor.device)
    plain = _select(_select(plain, rows, 0), cols, 1)
    if not isinstance(operand, QuantizedTensor):
        return Sample(plain, _select(_select(operand, rows, 0), cols, 1))
    part = _part(operand, rows, cols, plain.shape)
    return Sample(pad_to(plain, plain.shape[0], part.shape[1]), part, signs)


@lru_cache(maxsize=1024)
def spread(size: int, limit: int, group: int, device: torch.device) -> Tensor | None:
    """Indices of groups spread evenly over [0, size), at most `limit`; None: take all of them.

    Not to be changed: the same tensor is given again.
    """
    if not limit or size <= max(limit, group):
        return None
    whole = size // group
    wanted = max(1, min(limit // group, whole))
    starts = torch.arange(wanted, device=device) * whole // wanted * group
    return (starts.unsqueeze(1) + torch.arange(group, device=device)).flatten()


def _select(x: Tensor, index: Tensor | None, axis: int) -> Tensor:
    return x if index is None else x.index_select(axis, index)


def _part(
    whole: QuantizedTensor, rows: Tensor | None, cols: Tensor | None, shape: Sequence[int]
) -> QuantizedTensor:
    """The chosen rows and columns of packed codes, which are whole blocks."""
    codes, scales, amax, block = whole.codes, whole.scales, whole.amax, whole.spec.block
    if rows is not None:
        codes = codes.index_select(0, rows)
        amax = amax.index_select(0, rows) if amax.dim() else amax
        if block is not None:
            scales = scales.index_select(0, rows[:: block[0]] // block[0])
    if cols is not None:
        packed = cols[::2] // 2 if whole.spec.is_fp4 else cols
        codes = codes.index_select(1, packed)
        if block is not None:
            scales = scales.index_select(1, cols[:: block[1]] // block[1])
    width = whole.shape[1] if cols is None else shape[1]
    return replace(whole, codes=codes, scales=scales, amax=amax, shape=(shape[0], width))


@dataclass(frozen=True)
class OperandErrors:
    """What the sums of a quantized sample are taken of. Those of one key are summed together.

    exact, decoded: [rows, cols]. scales: of the blocks, or of the tensor. factor: outside of them,
    a scalar or [rows, 1].
    """

    spec: OperandSpec
    exact: Tensor
    decoded: Tensor
    scales: Tensor
    factor: Tensor

    @property
    def key(self) -> Hashable:
        """Equal where `sums_together` takes them in one call."""
        shapes = self.exact.shape, self.scales.shape, self.factor.shape
        return self.spec.element, self.spec.block, self.exact.dtype, *shapes

    def outlives(self, tensor: Tensor) -> bool:
        """Whether it has no part of the tensor that the sample is of, which may change."""
        return self.exact.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def operand_errors(sample: Sample) -> OperandErrors:
    """Of a quantized sample."""
    part = sample.operand
    assert isinstance(part, QuantizedTensor), "sums are of quantized operands"
    if part.spec.block is None:
        factor = part.tensor_scale.reshape(1, 1).clone()
        return OperandErrors(part.spec, sample.exact, sample.decoded, factor, factor)
    # What may be the operand's own tensor is copied: it may hold something else later.
    factor = part.tensor_scale if part.spec.format == "nvfp4" else part.tensor_scale.clone()
    scales = part.scales.clone() if part.scales.dtype == torch.float32 else part.block_scales()
    return OperandErrors(part.spec, sample.exact, sample.decoded, scales, factor)


def operand_sums(sample: Sample) -> Tensor:
    """OPERAND_SUMS of a quantized sample, fp64; "above" and "below" are left at zero."""
    return sums_together([operand_errors(sample)])[0]


def sums_together(found: Sequence[OperandErrors]) -> Tensor:
    """[n, OPERAND_SUMS] of operands that have one key. Few launches: these sums are taken of every
    operand of every layer, and what they are of is small."""
    spec = found[0].spec
    x = torch.stack([each.exact for each in found]).float()
    q = torch.stack([each.decoded for each in found])
    scale, maxima = _scales(spec, found, x)
    live = scale > 0
    size, nonzero = x.abs(), x != 0
    element = str(spec.element)
    small = (size < 0.5 * _SMALLEST[element] * scale) & live
    cross, square = x * q, x.square()
    peaks, peak_x, peak_q = _peaks(spec, x, q)
    values = {
        "nonzero": nonzero,
        "flushed": nonzero & (q == 0),
        "saturated": (size > _LARGEST[element] * _SLACK * scale) & live,
        "square": square,
        "error": (q - x).square(),
        "cross": cross,
        "small_square": square * small,
        "small_cross": cross * small,
    }
    blocks = {
        "peak_square": peak_x.square(),
        "peak_cross": peak_x * peak_q,
        "blocks": peaks > 0,
        "underflow": (peaks > 0) & (maxima == 0),
    }
    sums = [
        torch.stack([terms[name] for name in names], 1).sum((2, 3), dtype=torch.float64)
        for names, terms in ((_VALUE_SUMS, values), (_BLOCK_SUMS, blocks))
    ]
    whole = torch.nn.functional.pad(torch.cat(sums, 1), (1, 0), value=float(x[0].numel()))
    return torch.nn.functional.pad(whole, (0, len(RANGE_SUMS)))


def _scales(spec: OperandSpec, found: Sequence[OperandErrors], x: Tensor) -> tuple[Tensor, Tensor]:
    """The factor between element and value: of each value [n, rows, cols], and of each block."""
    scales = torch.stack([each.scales for each in found])
    if spec.block is None:
        return scales.expand(x.shape), scales
    factors = torch.stack([each.factor for each in found]).view(len(found), -1, 1)
    tall, wide = spec.block
    full = scales.repeat_interleave(wide, 2)[..., : x.shape[2]]
    if tall > 1:
        full = full.repeat_interleave(tall, 1)
    return full[:, : x.shape[1]] * factors, scales


def _peaks(spec: OperandSpec, x: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each block's largest magnitude, the value that has it, and what that became."""
    count, rows, cols = x.shape
    tall, wide = spec.block or (rows, cols)
    high, across = -(-rows // tall), -(-cols // wide)

    def blocked(y: Tensor) -> Tensor:
        if (high * tall, across * wide) != (rows, cols):
            y = torch.nn.functional.pad(y, (0, across * wide - cols, 0, high * tall - rows))
        y = y.view(count, high, tall, across, wide)
        return y.transpose(2, 3).reshape(count, high, across, tall * wide)

    x, q = blocked(x), blocked(q)
    peaks, where = x.abs().max(-1, keepdim=True)
    return peaks.squeeze(-1), x.gather(-1, where).squeeze(-1), q.gather(-1, where).squeeze(-1)


def products(left: Sample, right: Sample, decode: str) -> tuple[Tensor, Tensor]:
    """(exact, as multiplied) products [left rows, right rows] of two samples, fp32.

    The exact one is of the plain values: a rotation that does not cancel is an error of the other.
    decode: "exact", or "fp8" as `fused_ops.scaled_matmul` has it.
    """
    width = max(left.plain.shape[1], right.plain.shape[1])
    a, b = (pad_to(s.plain, len(s.plain), width).float() for s in (left, right))
    c, d = _multiplied(left, decode), _multiplied(right, decode)
    return a @ b.t(), c @ d.t()


def _multiplied(sample: Sample, decode: str) -> Tensor:
    operand = sample.operand
    if isinstance(operand, Tensor):
        return operand.float()
    if decode == "exact" or operand.spec.format != "nvfp4" or operand.spec.is_pow2:
        return sample.decoded
    return values(operand, decode)[: operand.shape[0]] * operand.tensor_scale


def product_sums(exact: Tensor, product: Tensor) -> Tensor:
    """PRODUCT_SUMS of products [..., rows, cols], fp64 [..., PRODUCT_SUMS]."""
    terms = [exact * product, exact.square(), product.square(), product == 0, exact == 0]
    sums = torch.stack(terms, -3).sum((-2, -1), dtype=torch.float64)
    return torch.nn.functional.pad(sums, (1, 0), value=float(exact.shape[-2:].numel()))


def operand_figures(sums: Sequence[float]) -> dict[str, float]:
    """What the sums of an operand say; empty where nothing was quantized.

    snr_db: 10 log10 of the power of x over that of q - x.
    flushed: share of the values that are not zero whose decoded value is.
    saturated: share of all values beyond the largest element under their block's scale.
    underflow: share of the blocks that are not zero whose stored scale is.
    slope: sum(x q) / sum(x^2), 1 without bias; slope_max: of the largest value of each block;
        slope_small: of values below half the smallest element, which rounding to nearest always
        flushes (0) and stochastic rounding keeps in the mean (1).
    above, below: share of the values or blocks counted outside the range of a pow2 shift or of a
        delayed scale.
    """
    s: Mapping[str, float] = dict(zip(OPERAND_SUMS, sums))
    if not s["values"]:
        return {}
    power = _ratio(s["square"], s["error"])
    found = {
        # Inf in an operand makes the ratio 0 or NaN: then there is no such number.
        "snr_db": 10 * math.log10(power) if power else None,
        "flushed": _ratio(s["flushed"], s["nonzero"]),
        "saturated": _ratio(s["saturated"], s["values"]),
        "underflow": _ratio(s["underflow"], s["blocks"]),
        "slope": _ratio(s["cross"], s["square"]),
        "slope_max": _ratio(s["peak_cross"], s["peak_square"]),
        "slope_small": _ratio(s["small_cross"], s["small_square"]),
        "above": _ratio(s["above"], s["counted"]),
        "below": _ratio(s["below"], s["counted"]),
    }
    return {name: value for name, value in found.items() if value is not None}


def product_figures(sums: Sequence[float]) -> dict[str, float]:
    """cosine between exact and computed product; signed: <p - y, y> / <y, y>, 0 without bias;
    zeros and exact_zeros: share of exact zeros in the product as multiplied, and in the exact one.
    """
    s = dict(zip(PRODUCT_SUMS, sums))
    if not s["count"]:
        return {}
    found = {
        "cosine": _ratio(s["cross"], math.sqrt(s["exact_square"] * s["square"])),
        "signed": None,
        "zeros": _ratio(s["zeros"], s["count"]),
        "exact_zeros": _ratio(s["exact_zeros"], s["count"]),
    }
    if s["exact_square"]:
        found["signed"] = s["cross"] / s["exact_square"] - 1.0
    return {name: value for name, value in found.items() if value is not None}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
