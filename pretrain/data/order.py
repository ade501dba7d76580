# SPDX-License-Identifier: Apache-2.0
"""Which window of a token stream the i-th sample of a source is: arithmetic, no index.

The stream of T tokens is read as a ring and cut into N = T // seq_length windows of
seq_length + 1 tokens, each sharing one token with the next. Every epoch turns the ring by another
amount (so the cuts fall elsewhere, and differ for seq_length epochs in a row) and visits its N
windows once, in an order that has two levels:

- consecutive windows form chunks, and a keyed permutation orders the chunks;
- each group of consecutive chunks in that order is read together, and a second keyed permutation
  orders the samples within the group.

So a reader works on `chunks_per_group` places at a time, and position i costs the same for every i.
The N modulo chunk size windows that fill no chunk come with the epoch's last group.
The permutations are Feistel networks with cycle walking (Black and Rogaway, "Ciphers with
Arbitrary Finite Domains", CT-RSA 2002).
"""

import hashlib
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np

# Part of every fingerprint: raise it when the order of samples changes.
ORDER_VERSION = 1

_ROUNDS = 8
_MASK64 = (1 << 64) - 1


def derive_key(*parts: int | str) -> int:
    """64-bit key that depends on every part and on their order."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mix64(value: np.ndarray) -> np.ndarray:
    """uint64 -> uint64, the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@dataclass(frozen=True)
class Permutation:
    """A keyed permutation of [0, size), computed per element."""

    size: int
    key: int

    def __call__(self, index: np.ndarray) -> np.ndarray:
        """int64[n] in [0, size) -> int64[n] in [0, size)."""
        if self.size <= 1:
            return np.zeros_like(index)
        value = self._encrypt(index.astype(np.uint64))
        outside = np.flatnonzero(value >= np.uint64(self.size))
        while outside.size:
            value[outside] = self._encrypt(value[outside])
            outside = outside[value[outside] >= np.uint64(self.size)]
        return value.astype(np.int64)

    def _encrypt(self, value: np.ndarray) -> np.ndarray:
        bits = max(2, (self.size - 1).bit_length())
        low_bits = bits // 2
        low_mask = np.uint64((1 << low_bits) - 1)
        high_mask = np.uint64((1 << (bits - low_bits)) - 1)
        low, high = value & low_mask, value >> np.uint64(low_bits)
        for number in range(_ROUNDS):
            round_key = np.uint64((self.key + number * 0x9E3779B97F4A7C15) & _MASK64)
            if number % 2:
                low = low ^ (mix64(high ^ round_key) & low_mask)
            else:
                high = high ^ (mix64(low ^ round_key) & high_mask)
        return (high << np.uint64(low_bits)) | low


class Order(Protocol):
    """Sample number of a source -> first token of its window."""

    @property
    def tokens(self) -> int:
        """Tokens of the source's stream."""

    @property
    def geometry(self) -> tuple[int, int, int]:
        """seq_length, chunk_tokens, chunks_per_group."""

    @property
    def samples_per_epoch(self) -> int:
        """Windows of a whole epoch."""

    def starts(self, index: np.ndarray) -> np.ndarray:
        """int64[n] sample numbers from 0 -> int64[n] first tokens in [0, tokens)."""

    def epochs(self, index: int) -> float:
        """Passes over the source that the first `index` samples are."""

    def remaining(self, index: int) -> "Remaining":
        """What the epoch of sample `index` still holds."""


@dataclass(frozen=True)
class Remaining:
    """The windows of an epoch from some sample on.

    epoch: its number. groups: in the order in which they are read, the stretches of the stream
    that each group of samples covers: int64[k, 2] first token and tokens.
    """

    epoch: int
    groups: list[np.ndarray]

    @property
    def tokens(self) -> int:
        """Tokens of all stretches."""
        return sum(int(group[:, 1].sum()) for group in self.groups)


def stretches(windows: np.ndarray, seq_length: int) -> np.ndarray:
    """int64[n] numbers of windows -> int64[k, 2]: first token and tokens where they adjoin."""
    ordered = np.sort(windows)
    breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
    first = np.concatenate((ordered[:1], ordered[breaks]))
    last = np.concatenate((ordered[breaks - 1], ordered[-1:]))
    return np.stack((first, last - first + 1), axis=1) * seq_length


@dataclass(frozen=True, kw_only=True)
class SourceOrder:
    """The order of a source that is read from its beginning with windows of one length."""

    tokens: int
    seq_length: int
    key: int
    chunk_tokens: int = 2_097_152
    chunks_per_group: int = 64

    def __post_init__(self) -> None:
        if self.tokens < self.seq_length + 1:
            raise ValueError(
                "a source must hold at least one window of seq_length + 1 = "
                f"{self.seq_length + 1} tokens; it holds {self.tokens}: "
                "shorten model.seq_length or add data"
            )

    @property
    def samples_per_epoch(self) -> int:
        return self.tokens // self.seq_length

    @property
    def geometry(self) -> tuple[int, int, int]:
        return self.seq_length, self.chunk_tokens, self.chunks_per_group

    def epochs(self, index: int) -> float:
        """Passes over the source that the first `index` samples are."""
        return index / self.samples_per_epoch

    @property
    def chunk_windows(self) -> int:
        return max(1, self.chunk_tokens // self.seq_length)

    def starts(self, index: np.ndarray) -> np.ndarray:
        """int64[n] sample numbers from 0 -> int64[n] first tokens in [0, tokens).

        A window that runs over the end of the stream continues at token 0.
        """
        num_windows = self.samples_per_epoch
        group_windows = self.chunk_windows * self.chunks_per_group
        epoch, position = index // num_windows, index % num_windows
        group = position // group_windows
        result = np.empty_like(index)
        groups_per_epoch = num_windows // group_windows + 1
        for label in np.unique(epoch * groups_per_epoch + group):
            epoch_number, group_number = divmod(int(label), groups_per_epoch)
            members = np.flatnonzero((epoch == epoch_number) & (group == group_number))
            result[members] = self._group_starts(epoch_number, group_number, position[members])
        return result

    def _group_starts(self, epoch: int, group: int, position: np.ndarray) -> np.ndarray:
        num_windows, chunk_windows = self.samples_per_epoch, self.chunk_windows
        first = group * chunk_windows * self.chunks_per_group
        size = min(chunk_windows * self.chunks_per_group, num_windows - first)
        within = Permutation(size, derive_key(self.key, "samples", epoch, group))
        slot_position = first + within(position - first)
        slot, offset = slot_position // chunk_windows, slot_position % chunk_windows
        num_chunks = num_windows // chunk_windows
        chunks = Permutation(num_chunks, derive_key(self.key, "chunks", epoch))
        whole = slot < num_chunks
        chunk = slot.copy()
        if num_chunks:
            chunk[whole] = chunks(slot[whole])
        window = chunk * chunk_windows + offset
        start = self.turn(epoch) + window * self.seq_length
        return cast(np.ndarray, start % self.tokens)

    def remaining(self, index: int) -> Remaining:
        """What the epoch of sample `index` still holds; nothing where an epoch starts there."""
        num_windows, size = self.samples_per_epoch, self.chunk_windows
        epoch, position = divmod(index, num_windows)
        if position == 0:
            return Remaining(epoch - 1, [])
        turn = self.turn(epoch)
        group = position // (size * self.chunks_per_group)
        end = min((group + 1) * size * self.chunks_per_group, num_windows)
        rest = self.starts(index - position + np.arange(position, end))
        windows = (rest - turn) % self.tokens // self.seq_length
        groups = [stretches(windows, self.seq_length)]
        num_chunks = num_windows // size
        slots = np.arange(-(-end // size), -(-num_windows // size), dtype=np.int64)
        chunks = slots.copy()
        whole = slots < num_chunks
        if whole.any():
            order = Permutation(num_chunks, derive_key(self.key, "chunks", epoch))
            chunks[whole] = order(slots[whole])
        lengths = np.minimum(size, num_windows - chunks * size)
        runs = np.stack((chunks * size, lengths), axis=1) * self.seq_length
        for first in range(0, slots.size, self.chunks_per_group):
            groups.append(runs[first : first + self.chunks_per_group])
        for runs in groups:
            runs[:, 0] = (runs[:, 0] + turn) % self.tokens
        return Remaining(epoch, groups)

    def turn(self, epoch: int) -> int:
        """Token at which the epoch's first window starts."""
        cuts = Permutation(self.seq_length, derive_key(self.key, "cut"))
        cut = int(cuts(np.array([epoch % self.seq_length], dtype=np.int64))[0])
        turned = derive_key(self.key, "turn", epoch) % self.samples_per_epoch
        return (turned * self.seq_length + cut) % self.tokens
