# SPDX-License-Identifier: Apache-2.0
"""Which weights of a model leave in 4 or 8 bits, and their codes: the trainer's own.

A weight's codes are those of the operand W of its forward GEMM, made from the whole BF16 weight
with one amax, as every layout of a run makes them (`amax_scope: layout_invariant`) whose cuts lie
between blocks; where rows are cut elsewhere they are made rank by rank (`cuts`). Weights that
share a linear layer here (queries, keys and values; gate and up) are quantized together and cut
afterwards, so that what an inference engine fuses again has one tensor scale by construction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fused_ops.formats import OperandSpec, QuantizedTensor
from fused_ops.quantize import operand_amax, quantize
from fused_ops.recipe import GemmRecipe
from models.conversion.cuts import Cut
from models.conversion.plan import Plan
from models.hf_mapping.shapes import Interleaved, Transposed
from models.hf_mapping.table import Link

FORMATS = ("nvfp4", "mxfp8", "fp8")
_OPERANDS = {"nvfp4": ("nvfp4",), "mxfp8": ("mxfp8",), "fp8": ("fp8_tensorwise",)}
# Formats whose codes are not written as they are: what is written instead.
_INSTEAD = {
    "fp8_delayed": OperandSpec(format="fp8_tensorwise"),
    "fp8_blockwise": OperandSpec(format="fp8_tensorwise"),
}
# Inference engines fuse these two, and here each has an amax of its own.
_APART = ("linear_q_down_proj", "linear_kv_down_proj")


@dataclass
class Choice:
    """What is quantized."""

    specs: dict[Link, OperandSpec] = field(default_factory=dict)
    """By link of the plan, how its weight is quantized."""
    gemms: dict[Link, str] = field(default_factory=dict)
    """By link of the plan, the global name of its linear layer."""
    cuts: dict[Link, Cut] = field(default_factory=dict)
    """By link of the plan, how the run's ranks cut its weight, where that shows in the codes."""
    again: set[str] = field(default_factory=set)
    """Linear layers whose codes are not those that the run multiplies with; `notes` say why."""
    notes: list[str] = field(default_factory=list)


def gemm_of(key: str) -> str | None:
    """The global name of the linear layer that a tensor of a checkpoint is the weight of."""
    base, found, _ = key.partition(".weight")
    if not found:
        return None
    if base.startswith("decoder."):
        return base.removeprefix("decoder.")
    return base.replace("mtp.layers.", "mtp.", 1).replace("mtp_model_layer.", "")


@dataclass(frozen=True)
class Origin:
    """What decides a run's codes besides its recipes."""

    scope: str = "layout_invariant"
    """`precision.amax_scope`."""
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """By global name, how ranks cut the weights."""
    others: str | None = None
    """Who made them, where that was not this project: `precision.backend`."""


def choose(plan: Plan, recipes: Mapping[str, GemmRecipe], wanted: str, origin: Origin) -> Choice:
    """The links whose weights leave in the format `wanted`; all others stay as they are.

    Args:
        recipes: of every linear layer, by global name.
        origin: of the run's codes.
    """
    choice, high, again = Choice(), dict[str, list[str]](), dict[str, list[str]]()
    for link in plan.links:
        name = gemm_of(link.ours[0].name)
        if name is None or name not in recipes or link.copy:
            continue
        spec, changed = _writable(recipes[name].fprop_w, wanted)
        if spec is None:
            if changed:
                high.setdefault(changed, []).append(name)
            continue
        if problem := _unwritable(link, plan, spec):
            high.setdefault(problem, []).append(name)
            continue
        cut = origin.cuts.get(name)
        changed = changed or _other_codes(origin, cut, spec, plan.spec(link.ours[0]).shape[-1])
        if changed:
            again.setdefault(changed, []).append(name)
            choice.again.add(name)
        elif cut is not None and cut.shards(spec) is not None:
            choice.cuts[link] = cut
        choice.specs[link], choice.gemms[link] = spec, name
    for what, reasons in (("stay high", high), ("are quantized again", again)):
        for reason, names in reasons.items():
            unique = list(dict.fromkeys(names))
            more = f" and {len(unique) - 3} more" if len(unique) > 3 else ""
            choice.notes.append(f"{', '.join(unique[:3])}{more} {what}: {reason}")
    return choice


def _other_codes(origin: Origin, cut: Cut | None, spec: OperandSpec, columns: int) -> str:
    """Why a weight's codes in the files are not the run's; empty where they are."""
    if origin.others is not None:
        return f"{origin.others} made the run's codes"
    if origin.scope == "shard":
        return "the run took amaxes over local shards"
    return (cut.problem(spec, columns) if cut is not None else None) or ""


def _writable(spec: OperandSpec, wanted: str) -> tuple[OperandSpec | None, str]:
    """(the spec to write, why it is not the trainer's own), or (None, why not at all)."""
    changed = ""
    if wanted == "fp8" and spec.format in _INSTEAD:
        changed = f"{spec.format} scales have no place in the files, one scale a tensor has"
        spec = _INSTEAD[spec.format]
    if spec.format not in _OPERANDS[wanted]:
        return None, ""
    if spec.hadamard:
        return None, "their codes are of the rotated weight"
    if spec.element not in ("e2m1", "e4m3"):
        return None, f"files have no place for {spec.element}"
    if spec.row_scaled:
        return replace(spec, row_scaled=False), "one amax a row has no place in the files"
    if spec.is_random:
        return replace(spec, rounding="nearest"), f"training rounds them {spec.rounding}"
    return spec, changed


def _unwritable(link: Link, plan: Plan, spec: OperandSpec) -> str | None:
    name, columns = link.ours[0].name, plan.spec(link.ours[0]).shape[-1]
    if isinstance(link.shape, Interleaved | Transposed):
        return "the family stores them transposed"
    if spec.block is not None and columns % spec.block[1]:
        return f"their inputs are no multiple of {spec.block[1]}"
    if name.split(".weight")[0].endswith(_APART):
        return "inference engines fuse them with a layer that has another amax"
    return None


@dataclass(frozen=True)
class Packed:
    """One weight of the model folder in codes."""

    codes: Tensor
    """uint8: NVFP4 [out, in / 2], others [out, in]."""
    scales: Tensor
    """uint8 [out, blocks], or fp32 [1, 1] for one scale a tensor."""
    factor: Tensor
    """fp32 scalar outside the block scales; 1 where there is none."""
    spec: OperandSpec
    shape: tuple[int, int]

    def values(self) -> Tensor:
        """fp32 [out, in], as the trainer decodes them."""
        whole = QuantizedTensor(
            codes=self.codes,
            scales=self.scales,
            amax=self.factor * self.spec.numerator,
            shape=self.shape,
            spec=_row_blocks(self.spec),
        )
        factor = self.scales.view(()) if self.spec.block is None else self.factor
        return whole.unscaled(torch.float32) * factor


def _row_blocks(spec: OperandSpec) -> OperandSpec:
    """The spec of codes whose tiles' scales were repeated for every row."""
    if spec.block is None or spec.block[0] == 1:
        return spec
    return replace(spec, block=(1, spec.block[1]))


def _quantized(
    ours: Sequence[Tensor], spec: OperandSpec, cut: Cut | None
) -> tuple[list[QuantizedTensor], Tensor | None]:
    """The weight of one GEMM in codes, as each rank makes them; and where its rows are then."""
    weight = torch.cat(list(ours))
    shards = None if cut is None else cut.shards(spec)
    if shards is None:
        return [quantize(weight, spec)], None
    amax = operand_amax(weight, spec)
    parts = [quantize(weight[rows].contiguous(), spec, amax=amax) for rows in shards]
    return parts, torch.cat(shards).argsort()


def _rows(parts: Sequence[Tensor], order: Tensor | None) -> Tensor:
    whole = torch.cat(list(parts))
    return whole if order is None else whole[order]


def quantize_link(
    plan: Plan, link: Link, ours: Sequence[Tensor], spec: OperandSpec, cut: Cut | None = None
) -> list[Packed]:
    """The weights of the model folder that a link makes, in codes.

    Args:
        ours: pieces of the checkpoint; together the weight [out, in] of one GEMM.
        cut: how the run's ranks cut it; None where that does not show.
    """
    lengths = [len(tensor) for tensor in ours]
    parts, order = _quantized(ours, spec, cut)
    factor = parts[0].tensor_scale if spec.format == "nvfp4" else torch.ones(())
    if spec.format == "nvfp4" and not bool(factor > 0):
        factor = torch.ones(())  # a weight of zeros
    columns = parts[0].shape[1]
    codes = _cut(plan, link, _rows([part.codes for part in parts], order), lengths)
    if spec.block is None:
        scales = [parts[0].scales] * len(codes)
    else:
        rows = _rows([part.row_scales() for part in parts], order)
        scales = _cut(plan, link, rows, lengths)
    return [
        Packed(c.contiguous(), s.contiguous(), factor, spec, (len(c), columns))
        for c, s in zip(codes, scales)
    ]


def _cut(plan: Plan, link: Link, rows: Tensor, lengths: list[int]) -> list[Tensor]:
    """Rows of the GEMM's weight as the rows of the folder's weights."""
    return link.shape.to_theirs(list(rows.split(lengths)), plan.sizes)


def dequantized_ours(
    ours: Sequence[Tensor], spec: OperandSpec, cut: Cut | None = None
) -> list[Tensor]:
    """The values that the trainer multiplies with, fp32, piece by piece of the checkpoint."""
    parts, order = _quantized(ours, spec, cut)
    if not all(bool(part.amax.isfinite().all()) for part in parts):
        raise FloatingPointError("a weight that holds Inf or NaN cannot be quantized")
    whole = _rows([part.dequantize() for part in parts], order)
    return list(whole.split([len(tensor) for tensor in ours]))
