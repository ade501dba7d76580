# SPDX-License-Identifier: Apache-2.0
"""A source whose windows change their length in the middle of an epoch: nothing twice."""

from itertools import pairwise

import numpy as np

from pretrain.data.order import (
    Order,
    Permutation,
    Remaining,
    SourceOrder,
    derive_key,
    stretches,
)


class TailOrder:
    """First what is left of the epoch of another order, in windows of the new length; then epochs.

    The stretches that the earlier order has not read are cut into new windows, group by group in
    its order; the windows of a group are shuffled. What does not fill a window is not read in this
    epoch. The following epochs are a SourceOrder's.

    Args:
        earlier: the order so far.
        index: samples of it that were read.
        then: the order of whole epochs with the new windows.
    """

    def __init__(self, earlier: Order, index: int, then: SourceOrder) -> None:
        self.earlier, self.index, self.then = earlier, index, then
        left = earlier.remaining(index)
        self.epoch = left.epoch
        groups = [(runs[:, 0], runs[:, 1] // then.seq_length) for runs in left.groups]
        groups = [(starts, sizes) for starts, sizes in groups if sizes.sum()]
        empty = np.zeros(0, dtype=np.int64)
        self._starts = np.concatenate([starts for starts, _ in groups] or [empty])
        sizes = np.concatenate([sizes for _, sizes in groups] or [empty])
        self._run_ends = np.cumsum(sizes)
        self._run_firsts = self._run_ends - sizes
        counts = np.array([int(sizes.sum()) for _, sizes in groups], dtype=np.int64)
        self._group_ends = np.cumsum(counts)
        self._group_firsts = self._group_ends - counts
        self._group_runs = np.cumsum([0] + [starts.size for starts, _ in groups])
        self.tail_samples = int(counts.sum())
        self.never_tokens = left.tokens - self.tail_samples * then.seq_length

    @property
    def tokens(self) -> int:
        return self.then.tokens

    @property
    def geometry(self) -> tuple[int, int, int]:
        return self.then.geometry

    @property
    def samples_per_epoch(self) -> int:
        return self.then.samples_per_epoch

    def starts(self, index: np.ndarray) -> np.ndarray:
        """int64[n] sample numbers from 0 -> int64[n] first tokens in [0, tokens)."""
        result = np.empty_like(index)
        late = index >= self.tail_samples
        if late.any():
            result[late] = self.then.starts(self._later(index[late]))
        early = np.flatnonzero(~late)
        group = np.searchsorted(self._group_ends, index[early], side="right")
        for number in np.unique(group):
            members = early[group == number]
            result[members] = self._window_starts(self._windows(int(number), index[members]))
        return result

    def _later(self, index: np.ndarray) -> np.ndarray:
        return index - self.tail_samples + (self.epoch + 1) * self.samples_per_epoch

    def _windows(self, group: int, index: np.ndarray) -> np.ndarray:
        """Samples of a group -> windows of the tail, counted along its stretches."""
        first = int(self._group_firsts[group])
        size = int(self._group_ends[group]) - first
        key = derive_key(self.then.key, "tail", self.epoch, self.index, self.then.seq_length, group)
        return first + Permutation(size, key)(index - first)

    def _window_starts(self, window: np.ndarray) -> np.ndarray:
        run = np.searchsorted(self._run_ends, window, side="right")
        offset = (window - self._run_firsts[run]) * self.then.seq_length
        found: np.ndarray = (self._starts[run] + offset) % self.tokens
        return found

    def epochs(self, index: int) -> float:
        """Passes over the source that the samples before this order and `index` of it are."""
        if index >= self.tail_samples:
            return self.epoch + 1 + (index - self.tail_samples) / self.samples_per_epoch
        before = self.earlier.epochs(self.index)
        return before + (self.epoch + 1 - before) * index / self.tail_samples

    def remaining(self, index: int) -> Remaining:
        """What the epoch of sample `index` still holds; nothing where an epoch starts there."""
        if index >= self.tail_samples:
            return self.then.remaining(int(self._later(np.array(index))))
        group = int(np.searchsorted(self._group_ends, index, side="right"))
        rest = self._windows(group, np.arange(index, int(self._group_ends[group])))
        seq_length, groups = self.then.seq_length, []
        # Neighbours within one stretch adjoin; those of two stretches need not.
        run = np.searchsorted(self._run_ends, rest, side="right")
        found = []
        for number in np.unique(run):
            pieces = stretches(rest[run == number] - self._run_firsts[number], seq_length)
            pieces[:, 0] = (pieces[:, 0] + self._starts[number]) % self.tokens
            found.append(pieces)
        groups.append(np.concatenate(found))
        sizes = (self._run_ends - self._run_firsts) * seq_length
        for low, high in pairwise(self._group_runs[group + 1 :].tolist()):
            groups.append(np.stack((self._starts[low:high], sizes[low:high]), axis=1))
        return Remaining(self.epoch, groups)
