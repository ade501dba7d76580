# SPDX-License-Identifier: Apache-2.0
"""Samples that a run steps over: a batch is the next samples that are in none of some ranges."""

from collections.abc import Iterable


class Skips:
    """Ranges of samples, [first, last] each, that are not trained on. They may overlap."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self.ranges: list[tuple[int, int]] = []
        for first, last in sorted((int(first), int(last)) for first, last in ranges):
            if self.ranges and first <= self.ranges[-1][1] + 1:
                self.ranges[-1] = (self.ranges[-1][0], max(self.ranges[-1][1], last))
            else:
                self.ranges.append((first, last))

    def samples(self, consumed: int, count: int) -> list[int]:
        """The next `count` samples from position `consumed` on."""
        found: list[int] = []
        position = consumed
        for first, last in self.ranges:
            if last < position:
                continue
            take = min(count - len(found), max(0, first - position))
            found.extend(range(position, position + take))
            if len(found) == count:
                return found
            position = last + 1
        found.extend(range(position, position + count - len(found)))
        return found

    def after(self, consumed: int, count: int) -> int:
        """The position behind those samples."""
        if not count:
            return consumed
        position = consumed + count
        for first, last in self.ranges:
            if first >= position:
                break
            position += max(0, last + 1 - max(first, consumed))
        return position
