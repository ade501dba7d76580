# SPDX-License-Identifier: Apache-2.0
"""How far an operand of a GEMM, and its product, are from the exact ones: sums on the device.

    x      the exact operand, after its rotation where it has one, in fp32
    q      what its codes decode to

Sums are fp64 vectors that may be added over micro-batches and ranks; `operand_figures` and
`product_figures` turn them into what is read. Nothing here waits for the device.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import cast

import torch
from torch import Tensor

from fused_ops.codecs import pad_to, per_row, roundup
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
    is_copy: whether nothing of it changes with the tensor or the operand, so that it may wait.
    counted: of the whole operand, what its `out_of_range` is of: blocks (pow2) or values.
    """

    plain: Tensor
    operand: QuantizedTensor | Tensor
    signs: Tensor | None = None
    is_copy: bool = False
    counted: int = 0

    @property
    def exact(self) -> Tensor:
        """What was quantized: the plain values, rotated where the operand is (then bf16)."""
        return _exact([self])[0]

    @property
    def is_quantized(self) -> bool:
        """Whether the operand is made of codes."""
        return isinstance(self.operand, QuantizedTensor)

    @property
    def key(self) -> Hashable:
        """Equal where `sums_together` and `products_together` take samples in one call."""
        operand, plain = self.operand, (self.plain.shape, self.plain.dtype)
        if isinstance(operand, Tensor):
            return *plain, operand.shape, operand.dtype
        parts = operand.codes.shape, operand.scales.shape, operand.amax.shape
        ranges = self.counted if operand.out_of_range is not None else None
        return *plain, operand.spec, *parts, self.signs is None, ranges


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
    rows = partial(spread, plain.shape[0], limits[0], max(ROW_GROUP, tile), tensor.device)
    cols = partial(spread, plain.shape[1], limits[1], COLUMN_GROUP, tensor.device)
    is_copy = rows() is not None or cols() is not None
    plain = _select(plain, rows(), cols())
    if not isinstance(operand, QuantizedTensor):
        return Sample(plain, _select(operand, rows(), cols()), is_copy=is_copy)
    part = _part(operand, rows, cols, plain.shape, is_copy)
    counted = operand.scales if operand.spec.is_pow2 else operand.codes
    plain = pad_to(plain, plain.shape[0], part.shape[1])
    return Sample(plain, part, signs, is_copy, counted.numel())


@lru_cache(maxsize=4096)
def spread(size: int, limit: int, group: int, device: torch.device, each: int = 1) -> Tensor | None:
    """Indices of groups spread evenly over [0, size), at most `limit`; None: take all of them.

    each: values that one index stands for, as a block's scale does; divides `group`. Not to be
    changed: the same tensor is given again.
    """
    if not limit or size <= max(limit, group):
        return None
    whole = size // group
    wanted = max(1, min(limit // group, whole))
    starts = torch.arange(wanted, device=device) * whole // wanted * group
    return (starts.unsqueeze(1) + torch.arange(0, group, each, device=device)).flatten() // each


def _select(x: Tensor, rows: Tensor | None, cols: Tensor | None) -> Tensor:
    if rows is not None and cols is not None:
        return x[rows.unsqueeze(1), cols]
    if rows is not None:
        return x.index_select(0, rows)
    return x if cols is None else x.index_select(1, cols)


def _part(
    whole: QuantizedTensor,
    rows: Callable[..., Tensor | None],
    cols: Callable[..., Tensor | None],
    shape: Sequence[int],
    is_copy: bool,
) -> QuantizedTensor:
    """The chosen rows and columns of packed codes, which are whole blocks."""
    codes = _select(whole.codes, rows(), cols(each=2 if whole.spec.is_fp4 else 1))
    scales, amax, out_of_range = whole.scales, whole.amax, whole.out_of_range
    if whole.spec.block is not None:
        tall, wide = whole.spec.block
        scales = _select(scales, rows(each=tall), cols(each=wide))
    elif is_copy:
        scales = scales.clone()  # a delayed scale becomes another
    if amax.dim() and rows() is not None:
        amax = _select(amax, rows(), None)
    elif is_copy:
        amax = amax.clone()
    if out_of_range is not None and is_copy:
        out_of_range = out_of_range.clone()
    width = whole.shape[1] if cols() is None else shape[1]
    return replace(
        whole,
        codes=codes,
        scales=scales,
        amax=amax,
        shape=(shape[0], width),
        out_of_range=out_of_range,
    )


def _exact(samples: Sequence[Sample]) -> Tensor:
    """[n, rows, cols]: what was quantized, of samples of one key."""
    operand = samples[0].operand
    size = operand.spec.hadamard if isinstance(operand, QuantizedTensor) else None
    if not size:
        return torch.stack([sample.plain for sample in samples])
    if any(sample.signs is not None for sample in samples):
        return torch.stack([rotate(sample.plain, size, sample.signs) for sample in samples])
    plain = torch.cat([sample.plain for sample in samples])
    return rotate(plain, size).unflatten(0, (len(samples), -1))


def _below_one_another(samples: Sequence[Sample]) -> QuantizedTensor:
    """The codes and block scales of samples of one key as one operand, each in rows of its own up
    to whole tiles; its amax is the first's."""
    parts = [sample.operand for sample in samples if isinstance(sample.operand, QuantizedTensor)]
    first = parts[0]
    rows = roundup(first.shape[0], first.spec.block[0]) if first.spec.block else first.shape[0]
    return replace(
        first,
        codes=torch.cat([pad_to(part.codes, rows, part.codes.shape[1]) for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        shape=(rows * len(parts), first.shape[1]),
    )


def _one_by_one(values: Tensor, samples: Sequence[Sample]) -> Tensor:
    """[n, rows, cols] of what `_below_one_another` has as one."""
    return values.unflatten(0, (len(samples), -1))[:, : samples[0].operand.shape[0]]


def _tensor_scales(samples: Sequence[Sample]) -> Tensor:
    """[n, 1 or rows, 1]: the factors outside of the blocks' scales."""
    parts = [sample.operand for sample in samples if isinstance(sample.operand, QuantizedTensor)]
    if parts[0].spec.format == "nvfp4":
        amax = torch.stack([part.amax for part in parts]).flatten()
        return replace(parts[0], amax=amax).tensor_scale.view(len(parts), -1, 1)
    return torch.stack([part.tensor_scale for part in parts]).view(len(parts), -1, 1)


def operand_sums(sample: Sample) -> Tensor:
    """OPERAND_SUMS of a quantized sample, fp64; those of RANGE_SUMS are of the whole operand."""
    return sums_together([sample])[0]


def sums_together(samples: Sequence[Sample]) -> Tensor:
    """[n, OPERAND_SUMS] of quantized samples of one key. Few launches: these sums are taken of
    every operand of every layer, and what they are of is small."""
    whole, factors = _below_one_another(samples), _tensor_scales(samples)
    spec, count = whole.spec, len(samples)
    x = _exact(samples).float()
    of_blocks = whole.block_scales()
    q = _one_by_one(replace(whole, scales=of_blocks).unscaled(torch.float32), samples) * factors
    maxima = of_blocks.unflatten(0, (count, -1))
    if spec.block is None:
        scale = factors.expand(x.shape)
    else:
        wide = per_row(of_blocks, spec.block, whole.shape[0]).repeat_interleave(spec.block[1], 1)
        scale = _one_by_one(wide[:, : x.shape[2]], samples) * factors
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
    every = torch.nn.functional.pad(torch.cat(sums, 1), (1, 0), value=float(x[0].numel()))
    if whole.out_of_range is None:
        return torch.nn.functional.pad(every, (0, len(RANGE_SUMS)))
    return torch.cat([every, _ranges(samples)], 1)


def _ranges(samples: Sequence[Sample]) -> Tensor:
    """[n, RANGE_SUMS] of samples whose operands have such counts."""
    found = [
        sample.operand.out_of_range.reshape(-1)[:2]
        for sample in samples
        if isinstance(sample.operand, QuantizedTensor) and sample.operand.out_of_range is not None
    ]
    return torch.nn.functional.pad(torch.stack(found).double(), (1, 0), value=samples[0].counted)


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
    exact, computed = products_together([(left, right)], decode)
    return exact[0], computed[0]


def products_together(pairs: Sequence[tuple[Sample, Sample]], decode: str) -> tuple[Tensor, Tensor]:
    """`products` of pairs whose left samples have one key, and whose right ones have one."""
    sides = list(zip(*pairs))
    width = max(sample.plain.shape[1] for sample in pairs[0])
    exact = [
        torch.stack([pad_to(s.plain, len(s.plain), width) for s in side]).float() for side in sides
    ]
    computed = [_multiplied(side, decode) for side in sides]
    return exact[0] @ exact[1].mT, computed[0] @ computed[1].mT


def _multiplied(samples: Sequence[Sample], decode: str) -> Tensor:
    """[n, rows, cols] of samples of one key, fp32."""
    if not samples[0].is_quantized:
        return torch.stack([cast(Tensor, sample.operand) for sample in samples]).float()
    whole = _below_one_another(samples)
    found = values(whole, "exact" if whole.spec.is_pow2 else decode)
    return _one_by_one(found, samples) * _tensor_scales(samples)


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
