# SPDX-License-Identifier: Apache-2.0
"""What layers keep of the tokens that a sequence has had: keys and values, and Mamba's states.

megatron-core passes one object through the stack to attention and to the Mamba mixer, as it does
with document boundaries (`models.documents`). Here it is a `CacheStep`: the new tokens of several
sequences, one after the other as [tokens, 1, hidden], without padding between them. So an amax or
a router sees true tokens only, whatever the lengths of the sequences.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

StateShape = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Group:
    """Sequences of a step that are equally long, and computed together."""

    slots: tuple[int, ...]
    """Their places in the cache."""
    past: int
    """Tokens that each of them had."""
    new: int
    """Tokens that each of them gets."""
    rows: Tensor
    """int64 [new, sequences]: where in the step those tokens are."""

    @property
    def end(self) -> int:
        """Tokens that each of them has with the new ones."""
        return self.past + self.new


class Cache:
    """The state of up to `slots` sequences in every layer, made as layers first ask for it.

    Keys and values are [tokens, slots, groups, d], with room that doubles when it is used up. Those
    of latent attention are kept as all heads see them, not compressed; those of windows are kept
    whole too. Mamba keeps the inputs of its convolution and an FP32 state.
    """

    def __init__(self, slots: int, device: torch.device | str = "cpu") -> None:
        self.lengths = [0] * slots
        self.device = torch.device(device)
        self._keys: dict[int, tuple[Tensor, Tensor]] = {}
        self._states: dict[int, tuple[Tensor, Tensor]] = {}

    def clear(self, slots: Iterable[int] | None = None) -> None:
        """Forget the sequences in these slots; None: in all."""
        for slot in range(len(self.lengths)) if slots is None else slots:
            self.lengths[slot] = 0

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        held = [*self._keys.values(), *self._states.values()]
        return sum(t.numel() * t.element_size() for pair in held for t in pair)

    def extend(
        self, layer: int, group: Group, key: Tensor, value: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor, int]:
        """Put new keys and values of a group away; all that the new tokens can see.

        Args:
            layer: its number.
            key, value: [new, sequences, groups, d].
            window: how many tokens before itself a token sees; None for all.

        Returns:
            Keys and values [seen, sequences, groups, d], and the position of the first.
        """
        stored = self._room(layer, group.end, key, value)
        first = 0 if window is None else max(0, group.past - window)
        slots = _consecutive(group.slots)
        seen = []
        for kept, new in zip(stored, (key, value)):
            kept[group.past : group.end, slots] = new
            seen.append(kept[first : group.end, slots])
        return seen[0], seen[1], first

    def _room(self, layer: int, tokens: int, *like: Tensor) -> tuple[Tensor, Tensor]:
        found = self._keys.get(layer)
        have = 0 if found is None else found[0].shape[0]
        if tokens > have:
            shape = (max(tokens, 2 * have), len(self.lengths))
            made = [t.new_zeros(*shape, *t.shape[2:]) for t in like]
            for old, new in zip(found or (), made):
                new[:have] = old
            found = self._keys[layer] = (made[0], made[1])
        assert found is not None
        return found

    def states(
        self, layer: int, group: Group, conv: StateShape, ssm: StateShape
    ) -> tuple[Tensor, Tensor]:
        """A Mamba layer's two states [sequences, ...] of a group; zeros before the first token."""
        if layer not in self._states:
            count, device = len(self.lengths), self.device
            made = [torch.zeros(count, *s, dtype=t, device=device) for s, t in (conv, ssm)]
            self._states[layer] = (made[0], made[1])
        kept = self._states[layer]
        if group.past == 0:
            return tuple(torch.zeros_like(t[list(group.slots)]) for t in kept)  # type: ignore[return-value]
        return kept[0][list(group.slots)], kept[1][list(group.slots)]

    def set_states(self, layer: int, group: Group, conv: Tensor, ssm: Tensor) -> None:
        """Put the two states after a group's new tokens away."""
        for kept, new in zip(self._states[layer], (conv, ssm)):
            kept[list(group.slots)] = new


class CacheStep(PackedSeqParams):
    """The new tokens of some sequences of a cache, for one pass through the model.

    Args:
        cache: keeps what they had before.
        slots: the sequences, each once.
        counts: new tokens of each, at least one.
        alone: compute each sequence by itself, so that none depends on the others.
    """

    def __init__(
        self, cache: Cache, slots: Sequence[int], counts: Sequence[int], *, alone: bool = False
    ) -> None:
        assert len(set(slots)) == len(slots) == len(counts), "a slot is named once, with a count"
        assert min(counts) >= 1, "a sequence without new tokens takes no part"
        # Rotary angles are made for so many positions.
        longest = max(cache.lengths[slot] + count for slot, count in zip(slots, counts))
        super().__init__(qkv_format="sbhd", max_seqlen_q=longest, max_seqlen_kv=longest)
        self.cache, self.longest = cache, longest
        self.slots, self.counts = tuple(slots), tuple(counts)
        starts, total = [], 0
        for count in counts:
            starts.append(total)
            total += count
        places = [
            torch.arange(cache.lengths[slot], cache.lengths[slot] + count)
            for slot, count in zip(slots, counts)
        ]
        self.positions = torch.cat(places).to(cache.device)
        """int64 [tokens]: the place of each token in its sequence."""
        self.groups = self._grouped(starts, alone)

    def _grouped(self, starts: Sequence[int], alone: bool) -> list[Group]:
        found: dict[Any, list[int]] = {}
        for index, (slot, count) in enumerate(zip(self.slots, self.counts)):
            key = index if alone else (self.cache.lengths[slot], count)
            found.setdefault(key, []).append(index)
        groups = []
        for members in found.values():
            new = self.counts[members[0]]
            first = torch.tensor([starts[m] for m in members])
            rows = (torch.arange(new).unsqueeze(1) + first).to(self.cache.device)
            slots = tuple(self.slots[m] for m in members)
            groups.append(Group(slots, self.cache.lengths[slots[0]], new, rows))
        return groups

    def finish(self) -> None:
        """After the pass: the new tokens are old ones."""
        for slot, count in zip(self.slots, self.counts):
            self.cache.lengths[slot] += count

    def angles_of(self, rotary: Any) -> "RotaryAt":
        """megatron-core's rotary embedding, for the positions of these tokens."""
        return RotaryAt(rotary, self)


class RotaryAt:
    """A rotary embedding of megatron-core that gives the angles of a step's tokens.

    With YaRN it gives a pair, whose second value, a factor, has no positions.
    """

    def __init__(self, rotary: Any, step: CacheStep) -> None:
        self._rotary, self._step = rotary, step

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        """Positions for which angles are made: a power of two, for megatron-core keeps each."""
        return 1 << (self._step.longest - 1).bit_length()

    def __call__(self, length: int, **kwargs: Any) -> Any:
        """fp32 [tokens, 1, 1, rotary], and YaRN's factor where there is one."""
        made = self._rotary(length, **kwargs)
        if isinstance(made, tuple):
            return made[0][self._step.positions], *made[1:]
        return made[self._step.positions]


def _consecutive(slots: tuple[int, ...]) -> slice | list[int]:
    """A slice where it says the same: it copies nothing."""
    first, last = slots[0], slots[-1]
    if slots == tuple(range(first, last + 1)):
        return slice(first, last + 1)
    return list(slots)
