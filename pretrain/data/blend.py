# SPDX-License-Identifier: Apache-2.0
"""Which source the n-th sample of a run comes from: a tree of two-way splits, no table.

Weights are resolved to 2**-20. The sources are leaves of a Huffman tree over those weights, and
each inner node sends its m-th sample left exactly when round(m * left / total) grows there, so of
the first m samples of a node the left child gets round(m * left / total). A leaf's count at a
prefix of n samples then departs from n * weight by less than

    1/2 * (1 + w/parent + w/grandparent + ...) < 2,

because in a Huffman tree a node has less than half the weight of its grandparent. Position n costs
the depth of the tree (at most about 30), whatever n is; nothing is replayed.

Where weights change, what each source is behind or ahead of its share by then is carried over: the
nodes of the new tree make up for it with their next samples, so that departures do not add up over
a curriculum of many changes. The bound above then holds again once they have.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from fused_ops.errors import ConfigError

RESOLUTION = 1 << 20

# 2 * n * RESOLUTION must stay below 2**63.
_MAX_SAMPLES = 1 << 41


def resolve_weights(weights: list[float], names: list[str] | None = None) -> list[int]:
    """Relative weights -> integers with the sum 2**20 (largest remainders).

    A weight of 0 stays 0: the source is never drawn. Raises ConfigError for negative or non-finite
    weights, for a positive weight that resolves to 0, and when no weight is positive.
    """
    names = names or [f"source {number}" for number in range(len(weights))]
    problems = [
        f"a weight must be finite and not negative; {name} has {weight}: set it to 0 or more"
        for name, weight in zip(names, weights)
        if not (np.isfinite(weight) and weight >= 0)
    ]
    if problems:
        raise ConfigError(problems)
    total = float(sum(weights))
    if total <= 0:
        raise ConfigError(f"one weight at least must be positive; got {weights}")
    exact = [weight / total * RESOLUTION for weight in weights]
    resolved = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda k: resolved[k] - exact[k])
    for position in by_remainder[: RESOLUTION - sum(resolved)]:
        resolved[position] += 1
    problems = [
        f"a weight must be at least 1/{RESOLUTION} of the sum of weights; {name} has "
        f"{weight} of {total}: raise it, or set it to 0 to leave the source out"
        for name, weight, units in zip(names, weights, resolved)
        if weight > 0 and units == 0
    ]
    if problems:
        raise ConfigError(problems)
    return resolved


@dataclass(frozen=True)
class _Node:
    weight: int
    left: "_Node | int"
    right: "_Node | int"
    left_weight: int
    ahead: int = 0
    """What the left child is owed at the start, in samples times 2 * weight."""

    def left_count(self, count: np.ndarray) -> np.ndarray:
        """Samples of the left child among the node's first `count`: rounded half up."""
        wanted = (2 * count * self.left_weight + self.weight + self.ahead) // (2 * self.weight)
        return np.clip(wanted, 0, count) if self.ahead else wanted


def _huffman(weights: list[int], owed: list[int]) -> "_Node | int":
    heap: list[tuple[int, int, _Node | int, int]] = [
        (weight, number, number, owed[number]) for number, weight in enumerate(weights) if weight
    ]
    heapq.heapify(heap)
    order = len(weights)
    while len(heap) > 1:
        weight, _, left, due = heapq.heappop(heap)
        other, _, right, also = heapq.heappop(heap)
        total = weight + other
        ahead = 2 * (due * total - (due + also) * weight) // RESOLUTION
        node = _Node(total, left, right, weight, ahead)
        heapq.heappush(heap, (total, order, node, due + also))
        order += 1
    return heap[0][2]


class Mixture:
    """Fixed integer weights (sum 2**20): the source of position n and its number there.

    `owed`: by how much each source is behind its share at the start, in 2**-20 of a sample.
    """

    def __init__(self, resolved: list[int], owed: list[int] | None = None) -> None:
        assert sum(resolved) == RESOLUTION, f"weights must add up to {RESOLUTION}: {resolved}"
        self.resolved = resolved
        self._root = _huffman(resolved, owed or [0] * len(resolved))

    def locate(self, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64[n] -> (source int64[n], number of earlier samples of that source int64[n])."""
        source, index = np.empty_like(position), np.empty_like(position)
        todo: list[tuple[_Node | int, np.ndarray, np.ndarray]] = [
            (self._root, np.arange(position.size), position)
        ]
        while todo:
            node, slots, local = todo.pop()
            if isinstance(node, int):
                source[slots], index[slots] = node, local
                continue
            before = node.left_count(local)
            goes_left = node.left_count(local + 1) > before
            todo.append((node.left, slots[goes_left], before[goes_left]))
            todo.append((node.right, slots[~goes_left], (local - before)[~goes_left]))
        return source, index

    def counts(self, prefix: int) -> np.ndarray:
        """int64[sources]: samples of each source among the first `prefix`."""
        result = np.zeros(len(self.resolved), dtype=np.int64)
        todo: list[tuple[_Node | int, np.ndarray]] = [(self._root, np.array(prefix))]
        while todo:
            node, count = todo.pop()
            if isinstance(node, int):
                result[node] = count
                continue
            left = node.left_count(count)
            todo += [(node.left, left), (node.right, count - left)]
        return result


class Blend:
    """A curriculum of mixtures: each holds from a given sample on.

    Args:
        phases: (first sample, resolved weights), in ascending order from sample 0.
    """

    def __init__(self, phases: list[tuple[int, list[int]]]) -> None:
        firsts = [first for first, _ in phases]
        if firsts != sorted(set(firsts)) or firsts[0] != 0:
            raise ConfigError(
                "the phases of a blend must start at sample 0 and then ascend; "
                f"got first samples {firsts}"
            )
        self.phases: list[tuple[int, Mixture]] = []
        self._firsts = np.array(firsts, dtype=np.int64)
        self._bases = [np.zeros(len(phases[0][1]), dtype=np.int64)]
        owed = [0] * len(phases[0][1])
        for (first, resolved), following in zip(phases, [*firsts[1:], None]):
            mixture = Mixture(resolved, owed)
            self.phases.append((first, mixture))
            if following is not None:
                length = following - first
                counts = mixture.counts(length)
                self._bases.append(self._bases[-1] + counts)
                owed = [
                    due + length * weight - count * RESOLUTION
                    for due, weight, count in zip(owed, resolved, counts.tolist())
                ]

    def locate(self, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64[n] samples of the run -> (source int64[n], sample of that source int64[n])."""
        assert position.size == 0 or int(position.max()) < _MAX_SAMPLES, "sample beyond 2**41"
        source, index = np.empty_like(position), np.empty_like(position)
        phase = np.searchsorted(self._firsts, position, side="right") - 1
        for number in np.unique(phase):
            first, mixture = self.phases[number]
            members = np.flatnonzero(phase == number)
            where, local = mixture.locate(position[members] - first)
            source[members], index[members] = where, local + self._bases[number][where]
        return source, index

    def counts(self, prefix: int) -> np.ndarray:
        """int64[sources]: samples of each source among the first `prefix` of the run."""
        number = int(np.searchsorted(self._firsts, prefix, side="right")) - 1
        first, mixture = self.phases[number]
        return self._bases[number] + mixture.counts(prefix - first)
