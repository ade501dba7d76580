# SPDX-License-Identifier: Apache-2.0
"""Sums by place that are made of many small ones, in few launches.

A monitored step sees hundreds of operands, and its time is that of launches where they are small:
what is alike waits until there is enough of it, and places are filled when the table is read.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence

import torch
from torch import Tensor


class Batches[T]:
    """Gives things of one key to `take`, several in one call.

    together: size of things of one key that is worth a call, which takes them all.
    most: size of all that waits, whatever the key; beyond it what has waited longest is taken.
    """

    def __init__(self, take: Callable[[list[T]], None], together: int, most: int) -> None:
        self._take, self._together, self._most = take, together, most
        self._waiting: dict[Hashable, list[tuple[T, int]]] = {}
        self._held = 0

    def add(self, key: Hashable, thing: T, size: int) -> None:
        """Where `key` is None the thing may not wait."""
        if key is None:
            self._take([thing])
            return
        waiting = self._waiting.setdefault(key, [])
        waiting.append((thing, size))
        self._held += size
        if sum(each for _, each in waiting) >= self._together:
            self._release(key)
        while self._held > self._most:
            self._release(next(iter(self._waiting)))

    def _release(self, key: Hashable) -> None:
        things, sizes = zip(*self._waiting.pop(key))
        self._held -= sum(sizes)
        self._take(list(things))

    def finish(self) -> None:
        """Gives what waits."""
        for key in list(self._waiting):
            self._release(key)


class Table:
    """fp64 [*places, width]: vectors put together by place, always in the order they came.

    combine: of what a place holds and what comes, both [n, width].
    """

    def __init__(
        self,
        shape: Sequence[int],
        device: torch.device,
        combine: Callable[[Tensor, Tensor], Tensor] = torch.add,
    ) -> None:
        self.shape, self._combine = tuple(shape), combine
        self._flat = torch.zeros(self.shape, dtype=torch.float64, device=device).flatten(0, -2)
        self._places: list[int] = []
        self._vectors: list[Tensor] = []

    def add(self, places: Sequence[tuple[int, ...]], vectors: Tensor) -> None:
        """`vectors`: [n, width], of so many places."""
        for place in places:
            number = 0
            for index, size in zip(place, self.shape):
                number = number * size + index
            self._places.append(number)
        self._vectors.append(vectors)

    def total(self) -> Tensor:
        """[*places, width]; the table's own memory."""
        if self._vectors:
            vectors, device = torch.cat(self._vectors).double(), self._flat.device
            for numbers, places in _rounds(self._places):
                at = torch.tensor(places, device=device)
                own = vectors[torch.tensor(numbers, device=device)]
                self._flat[at] = self._combine(self._flat[at], own)
            self._places, self._vectors = [], []
        return self._flat.view(self.shape)


def _rounds(places: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """(numbers, places), no place twice in one round: sums do not depend on the device's order."""
    seen: dict[int, int] = {}
    rounds: list[tuple[list[int], list[int]]] = []
    for number, place in enumerate(places):
        times = seen[place] = seen.get(place, -1) + 1
        if times == len(rounds):
            rounds.append(([], []))
        rounds[times][0].append(number)
        rounds[times][1].append(place)
    yield from rounds
