# SPDX-License-Identifier: Apache-2.0
"""Randomness as a pure function: which dither and which Hadamard signs an operand gets.

There is no generator whose state moves on: with pipeline parallelism several micro-batches are in
flight, and a buffer of signs or seeds would be stale for some of them. The key of an operand is

    r = philox(counter=(layer_lo, layer_hi, step_lo, step_hi), key=(seed_lo, seed_hi))
    k = philox(counter=(micro_batch, expert, stream, r[2]),    key=(r[0], r[1]))
    key = (k[0], k[1])

with Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), 32-bit
words, and `stream` the number of the operand in STREAMS. The dither of one element is then a Philox
value of (key, global row, global column): see `fused_ops.quantize`.

Hadamard signs are the bits of all four words of k, whose `stream` is that of the GEMM: both
operands of one GEMM share a vector, or the rotation would not cancel, and each GEMM has its own.
They depend neither on the rank nor on the expert.
"""

import hashlib
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fused_ops.formats import OperandSpec
    from fused_ops.quantize.philox import Key

GEMMS = ("fprop", "dgrad", "wgrad")
OPERANDS = ("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x")
"""The two operands of each GEMM, the left one first."""
TRANSPOSED = ("dgrad.w", "wgrad.dy", "wgrad.x")
"""Operands that are made along the columns of their tensor."""
WEIGHT_OPERANDS = ("fprop.w", "dgrad.w")

# The numbers are part of the definition of a run: append, never reorder.
STREAMS = {
    name: number
    for number, name in enumerate((*OPERANDS, "fprop.signs", "dgrad.signs", "wgrad.signs"), start=1)
}

_MASK = 0xFFFFFFFF


def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Philox4x32-10 of 32-bit words, in Python integers (`quantize.philox` has it of tensors)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def stable_id(name: str) -> int:
    """A 64-bit number for a module name, the same in every process and Python version."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class StreamKey:
    """What the randomness of one linear layer call depends on.

    `seed`, `step` and `layer` are 64-bit, `micro_batch` (global number within the step) and
    `expert` (global number) 32-bit. `step` is the number of the optimizer step that is being
    computed. `table`, if given, keeps the keys of operands in device memory.
    """

    seed: int = 0
    step: int = 0
    micro_batch: int = 0
    layer: int = 0
    expert: int = 0
    table: "KeyTable | None" = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, bits in (
            ("seed", 64), ("step", 64), ("layer", 64), ("micro_batch", 32), ("expert", 32),
        ):  # fmt: skip
            value = getattr(self, name)
            if not 0 <= value < 1 << bits:
                raise ValueError(
                    f"a stream key's {name} must be in [0, 2^{bits}), got {value}; "
                    f"take it modulo 2^{bits}"
                )

    def words(self, name: str) -> tuple[int, int]:
        """The Philox key (two 32-bit words) of the operand `name`, one of STREAMS.

        Weight operands ignore `micro_batch`: their codes are kept for a whole step.
        """
        words = _derive(self.seed, self.step, *self._place(name))
        return words[0], words[1]

    def operand(self, name: str) -> "Key":
        """`words`, or where they are in `table`: int64 [2]."""
        if self.table is None:
            return self.words(name)
        return self.table.words(self, self._place(name))[:2]

    def _place(self, name: str) -> tuple[int, int, int, int]:
        micro_batch = 0 if name in WEIGHT_OPERANDS else self.micro_batch
        return micro_batch, self.layer, self.expert, STREAMS[name]

    def with_expert(self, number: int) -> "StreamKey":
        """The key of the expert `number` places after this one."""
        return replace(self, expert=self.expert + number)


@lru_cache(maxsize=65536)
def _derive(
    seed: int, step: int, micro_batch: int, layer: int, expert: int, stream: int
) -> tuple[int, int, int, int]:
    """Four words; the first two are the key of an operand, all are the signs of a GEMM."""
    r0, r1, r2 = layer_words(seed, step, layer)
    return philox4x32((micro_batch, expert, stream, r2), (r0, r1))


def layer_words(seed: int, step: int, layer: int) -> tuple[int, int, int]:
    """r of the definition above: what all keys of a layer in a step are derived from."""
    counter = (layer & _MASK, layer >> 32, step & _MASK, step >> 32)
    return philox4x32(counter, (seed & _MASK, seed >> 32))[:3]


class KeyTable:
    """Keys in device memory, for launches that are recorded once and replayed in other steps.

    Each operand of each micro-batch has a place of its own, found at its first use; `refresh`
    writes there what the keys are in another step.

    Args:
        device: where it lies.
        room: for how many operands; places are never moved, since recorded launches know them.
    """

    def __init__(self, device: torch.device | str, room: int = 1 << 16) -> None:
        self._words = torch.zeros(room, 4, dtype=torch.int64, device=device)
        self._places: dict[tuple[int, int, int, int], int] = {}

    def __len__(self) -> int:
        return len(self._places)

    def words(self, key: StreamKey, place: tuple[int, int, int, int]) -> Tensor:
        """int64 [4] on the device: what (micro-batch, layer, expert, stream) derives from.

        Raises:
            ValueError: no room is left.
        """
        number = self._places.get(place)
        if number is not None:
            return self._words[number]
        number = len(self._places)
        if number >= len(self._words):
            raise ValueError(
                f"a step draws for more than {len(self._words)} operands, which is the room of its "
                "key table; use fewer micro-batches a step, or no CUDA graph"
            )
        self._words[number].copy_(torch.tensor(_derive(key.seed, key.step, *place)))
        self._places[place] = number
        return self._words[number]

    def refresh(self, seed: int, step: int) -> None:
        """Writes the keys of all places as they are in this step; does not wait for the device."""
        if not self._places:
            return
        words = torch.tensor([_derive(seed, step, *place) for place in self._places])
        if self._words.is_cuda:
            words = words.pin_memory()
        self._words[: len(words)].copy_(words, non_blocking=True)


def sign_key(spec: "OperandSpec", key: StreamKey, gemm: str) -> tuple[int, ...]:
    """What the signs of `spec` in `gemm` are a function of; empty if they are fixed or unused."""
    place = _sign_place(spec, key, gemm)
    return _derive(key.seed, key.step, *place) if place else ()


def _sign_place(
    spec: "OperandSpec", key: StreamKey, gemm: str
) -> tuple[int, int, int, int] | tuple[()]:
    if not spec.hadamard or spec.signs == "fixed":
        return ()
    micro_batch = key.micro_batch if spec.signs == "micro_batch" else 0
    return micro_batch, key.layer, 0, STREAMS[f"{gemm}.signs"]


def signs(
    spec: "OperandSpec",
    key: StreamKey,
    gemm: str,
    device: torch.device | str | None = None,
) -> Tensor | None:
    """The sign vector for an operand of `gemm`: fp32 [spec.hadamard] of +-1, one of 128 bits each.

    Args:
        spec: the operand; its `hadamard` is the length and its `signs` the period.
        key: the call; "micro_batch" signs depend on seed, step, micro_batch and layer, "step"
            signs on seed, step and layer.
        gemm: "fprop", "dgrad" or "wgrad".
        device: where the vector is made (no copy from the host).

    Returns:
        None if the operand is not rotated or its signs are fixed: the quantizer then uses
        Transformer Engine's vector (FIXED_SIGNS, repeated for longer transforms).
    """
    place = _sign_place(spec, key, gemm)
    if not place:
        return None
    shifts = torch.arange(32, device=device, dtype=torch.int64)
    if key.table is None:
        words = _derive(key.seed, key.step, *place)
        bits = torch.cat([(shifts.new_full((1,), word) >> shifts) & 1 for word in words])
    else:
        bits = ((key.table.words(key, place)[:, None] >> shifts) & 1).reshape(-1)
    return (1 - 2 * bits[: spec.hadamard]).float()
