# SPDX-License-Identifier: Apache-2.0
"""The plan of a conversion: which pieces become which, and the proof that it is complete."""

import fnmatch
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_ops.errors import ConfigError
from models.conversion.safetensors import TensorSpec
from models.hf_mapping.shapes import VOCABULARY, Sizes
from models.hf_mapping.table import Family, Link, Piece, links, made_twice
from models.pattern import Pattern

_SHOWN = 6
_HEAD = "lm_head.weight"
_PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class ProofError(ConfigError):
    """The two sides are not one model: a tensor is left over, missing, or of another shape."""


@dataclass(frozen=True)
class Plan:
    """Links in the order of the model, over the tensors of a checkpoint."""

    links: tuple[Link, ...]
    ours: Mapping[str, TensorSpec]
    sizes: Sizes
    ignored: tuple[str, ...]

    def theirs(self) -> dict[str, TensorSpec]:
        """Every tensor of the model folder: name, shape, dtype; from the rules alone."""
        found: dict[str, TensorSpec] = {}
        for link in self.links:
            empty = [
                torch.empty(self.spec(piece).shape, dtype=self.spec(piece).dtype, device="meta")
                for piece in link.ours
            ]
            for piece, tensor in zip(link.theirs, link.shape.to_theirs(empty, self.sizes)):
                shape = tuple(tensor.shape)
                if piece.index is not None:
                    shape = (self.ours[link.ours[0].name].shape[0], *shape)
                found[piece.name] = TensorSpec(shape, tensor.dtype)
        return found

    def spec(self, piece: Piece) -> TensorSpec:
        """Shape and dtype of a piece of the checkpoint."""
        spec = self.ours[piece.name]
        return spec if piece.index is None else TensorSpec(spec.shape[1:], spec.dtype)

    def problems(self, present: Collection[str]) -> list[str]:
        """Tensors of the folder that no rule uses, and tensors that a rule needs and are absent."""
        wanted = {piece.name for link in self.links for piece in link.theirs}
        extra = [
            name
            for name in present
            if name not in wanted and not any(fnmatch.fnmatch(name, p) for p in self.ignored)
        ]
        missing = sorted(wanted - set(present))
        return [
            *_listed(extra, "in the model folder and used by no rule"),
            *_listed(missing, "needed and not in the model folder"),
        ]


def _listed(names: Collection[str], what: str) -> list[str]:
    names = sorted(names)
    lines = [f"{name} is {what}" for name in names[:_SHOWN]]
    if len(names) > _SHOWN:
        lines.append(f"and {len(names) - _SHOWN} more are {what}")
    return lines


def make_plan(
    family: Family, pattern: Pattern, ours: Mapping[str, TensorSpec], sizes: Sizes
) -> Plan:
    """The plan for a model's tensors. ConfigError when the family's table leaves one out."""
    found, unmade = links(family, pattern, sizes.config.num_moe_experts or 0, ours)
    if unmade:
        raise ConfigError(
            _listed(unmade, f"a tensor of this model that the table of {family.name} does not make")
        )
    for side in ("ours", "theirs"):
        twice = made_twice(
            piece
            for link in found
            if side == "theirs" or not link.copy
            for piece in getattr(link, side)
        )
        assert not twice, f"the table of {family.name} makes {twice[:3]} twice"
    plan = Plan(tuple(found), ours, sizes, family.ignored)
    return with_tied_head(plan, [_HEAD]) if family.stores_tied_head else plan


def with_tied_head(plan: Plan, present: Collection[str]) -> Plan:
    """A tied head that is on disk all the same is a copy of the embedding, and must equal it."""
    if "output_layer.weight" in plan.ours or _HEAD not in present:
        return plan
    if any(piece.name == _HEAD for link in plan.links for piece in link.theirs):
        return plan
    embedding = (Piece("embedding.word_embeddings.weight"),)
    link = Link(embedding, (Piece(_HEAD),), VOCABULARY, copy=True)
    return Plan((*plan.links, link), plan.ours, plan.sizes, plan.ignored)


def to_ours(plan: Plan, link: Link, theirs: list[Tensor]) -> Iterator[tuple[Piece, Tensor]]:
    """The pieces of a checkpoint that a link makes, in the checkpoint's dtypes.

    ConfigError when the shapes are not those that the configuration says.
    """
    names = ", ".join(map(str, link.theirs))
    if other := [tensor.dtype for tensor in theirs if tensor.dtype not in _PLAIN]:
        raise ProofError(
            f"{names} must be of floating-point numbers of 16 bits or more, got {other[0]}: it is "
            "no weight, or one in codes"
        )
    try:
        made = link.shape.to_ours(theirs, plan.sizes)
    except (RuntimeError, ValueError, IndexError) as error:
        reason = str(error).splitlines()[0]
        raise ProofError(
            f"{names} of shape {[tuple(t.shape) for t in theirs]} does not fit config.json: "
            f"{reason}"
        ) from None
    for piece, tensor in zip(link.ours, made, strict=True):
        spec = plan.spec(piece)
        if tuple(tensor.shape) != spec.shape:
            raise ProofError(
                f"{names}: {tuple(tensor.shape)} for {piece}, which config.json says is "
                f"{spec.shape}"
            )
        yield piece, tensor.to(spec.dtype)
