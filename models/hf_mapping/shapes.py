# SPDX-License-Identifier: Apache-2.0
"""Shape rules: how values move between the tensors of a checkpoint and those of a model folder.

Every rule is written twice, once a direction, and each is the other's inverse. `ours` are tensors
of a checkpoint (megatron-core's names), `theirs` of a folder that transformers reads.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    """What shape rules need to know of a model."""

    config: Any
    """megatron-core's TransformerConfig."""
    vocab_size: int
    padded_vocab_size: int

    @property
    def groups(self) -> int:
        """Key-value heads."""
        return self.config.num_query_groups or self.config.num_attention_heads


class Shape:
    """One tensor on either side, unchanged."""

    def to_ours(self, theirs: list[Tensor], sizes: Sizes) -> list[Tensor]:
        """Values as a checkpoint holds them."""
        return theirs

    def to_theirs(self, ours: list[Tensor], sizes: Sizes) -> list[Tensor]:
        """Values as a model folder holds them."""
        return ours


class Vocabulary(Shape):
    """Rows of an embedding or head: theirs has the vocabulary's, ours is padded with zeros."""

    def to_ours(self, theirs: list[Tensor], sizes: Sizes) -> list[Tensor]:
        """[vocabulary, hidden] -> [padded vocabulary, hidden]."""
        rows = sizes.padded_vocab_size - theirs[0].shape[0]
        if theirs[0].shape[0] != sizes.vocab_size:
            raise ValueError(f"{theirs[0].shape[0]} rows for a vocabulary of {sizes.vocab_size}")
        return [torch.nn.functional.pad(theirs[0], (0, 0, 0, rows))]

    def to_theirs(self, ours: list[Tensor], sizes: Sizes) -> list[Tensor]:
        """[padded vocabulary, hidden] -> [vocabulary, hidden]."""
        return [ours[0][: sizes.vocab_size]]


class QueryKeyValue(Shape):
    """Theirs: queries, keys, values. Ours: for each group its queries, its key, its value.

    Works on weights [rows, hidden] and biases [rows].
    """

    def to_ours(self, theirs: list[Tensor], sizes: Sizes) -> list[Tensor]:
        """q, k, v -> one tensor of all rows."""
        head, rest = sizes.config.kv_channels, theirs[0].shape[1:]
        parts = [t.reshape(sizes.groups, -1, head, *rest) for t in theirs]
        return [torch.cat(parts, 1).reshape(-1, *rest)]

    def to_theirs(self, ours: list[Tensor], sizes: Sizes) -> list[Tensor]:
        """One tensor of all rows -> q, k, v."""
        head, rest = sizes.config.kv_channels, ours[0].shape[1:]
        per_group = sizes.config.num_attention_heads // sizes.groups
        grouped = ours[0].reshape(sizes.groups, per_group + 2, head, *rest)
        parts = grouped.split([per_group, 1, 1], 1)
        return [part.reshape(-1, *rest) for part in parts]


class GateUp(Shape):
    """Theirs: gate and up, two tensors. Ours: one, the rows of gate first."""

    def to_ours(self, theirs: list[Tensor], sizes: Sizes) -> list[Tensor]:
        """gate, up -> [gate | up]."""
        return [torch.cat(theirs)]

    def to_theirs(self, ours: list[Tensor], sizes: Sizes) -> list[Tensor]:
        """[gate | up] -> gate, up."""
        return list(ours[0].chunk(2))


class Rows(Shape):
    """Theirs: one tensor. Ours: its rows by segment, each a tensor of its own (Mamba's in_proj)."""

    def __init__(self, segments: tuple[str, ...]) -> None:
        self.segments = segments

    def _lengths(self, sizes: Sizes) -> list[int]:
        config = sizes.config
        heads = config.mamba_num_heads
        if heads is None:
            heads = 2 * config.hidden_size // config.mamba_head_dim
        inner, state = (
            heads * config.mamba_head_dim,
            config.mamba_num_groups * config.mamba_state_dim,
        )
        lengths = {"z": inner, "x": inner, "B": state, "C": state, "dt": heads}
        return [lengths[name] for name in self.segments]

    def to_ours(self, theirs: list[Tensor], sizes: Sizes) -> list[Tensor]:
        """One tensor -> its segments."""
        return list(theirs[0].split(self._lengths(sizes)))

    def to_theirs(self, ours: list[Tensor], sizes: Sizes) -> list[Tensor]:
        """The segments -> one tensor."""
        return [torch.cat(ours)]


class Interleaved(Shape):
    """Theirs: rows (after `transposed`) gate 0, up 0, gate 1, up 1, ... Ours: gate, then up."""

    def __init__(self, *, transposed: bool) -> None:
        self.transposed = transposed

    def to_ours(self, theirs: list[Tensor], sizes: Sizes) -> list[Tensor]:
        """[in, 2 out] interleaved -> [2 out, in] in halves (biases: [2 out])."""
        rows = theirs[0].t() if self.transposed else theirs[0]
        return [torch.cat([rows[0::2], rows[1::2]])]

    def to_theirs(self, ours: list[Tensor], sizes: Sizes) -> list[Tensor]:
        """The inverse."""
        gate, up = ours[0].chunk(2)
        rows = torch.stack([gate, up], 1).flatten(0, 1)
        return [rows.t().contiguous() if self.transposed else rows]


class Transposed(Shape):
    """Theirs is [in, out]."""

    def to_ours(self, theirs: list[Tensor], sizes: Sizes) -> list[Tensor]:
        """[in, out] -> [out, in]."""
        return [theirs[0].t().contiguous()]

    def to_theirs(self, ours: list[Tensor], sizes: Sizes) -> list[Tensor]:
        """[out, in] -> [in, out]."""
        return [ours[0].t().contiguous()]


SAME, VOCABULARY, QKV, GATE_UP = Shape(), Vocabulary(), QueryKeyValue(), GateUp()
IN_PROJ, CONV = Rows(("z", "x", "B", "C", "dt")), Rows(("x", "B", "C"))
TRANSPOSED = Transposed()
INTERLEAVED, INTERLEAVED_BIAS = Interleaved(transposed=True), Interleaved(transposed=False)
