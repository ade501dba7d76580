# SPDX-License-Identifier: Apache-2.0
"""What a run reads from which sample on, when its blend or its sequence length changes midway.

A run that never changed has one segment. `data.on_change: continue` adds one where it is resumed
with other sources, weights or window lengths: each source goes on where it was, a new one starts at
its beginning. The segments are part of the state of the data, and rebuild its order.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from pretrain.data.blend import Blend
from pretrain.data.order import Order, SourceOrder, derive_key
from pretrain.data.tail import TailOrder


class SourceState(BaseModel):
    """One source of a segment, by its content; the path is for messages and for `tools.data`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    fingerprint: str
    tokens: int


class Segment(BaseModel):
    """What decides the samples from `first_sample` on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    first_sample: int
    seq_length: int
    chunk_tokens: int
    chunks_per_group: int
    seed: int
    sources: list[SourceState]
    phases: list[tuple[int, list[int]]]
    """(sample of the run, weights in 2**-20) at each change of weights."""

    def names(self) -> list[tuple[str, int]]:
        """(fingerprint, how many equal ones come before) of each source: what it is known by."""
        seen: Counter[str] = Counter()
        found = []
        for source in self.sources:
            found.append((source.fingerprint, seen[source.fingerprint]))
            seen[source.fingerprint] += 1
        return found

    def blend(self) -> Blend:
        """The mixtures of this segment, counted from its first sample."""
        started = [phase for phase in self.phases if phase[0] <= self.first_sample][-1]
        later = [phase for phase in self.phases if phase[0] > self.first_sample]
        return Blend([(0, started[1]), *((at - self.first_sample, w) for at, w in later)])

    def same_as(self, other: "Segment") -> bool:
        """Whether both read the same, but for where they start and where folders lie."""
        ours, theirs = (
            segment.model_dump(exclude={"first_sample", "sources", "phases"})
            for segment in (self, other)
        )
        started = max(self.first_sample, other.first_sample)
        blends = [segment.model_copy(update={"first_sample": started}) for segment in (self, other)]
        phases = [
            (blend.blend().phases[0][1].resolved, [p for p in blend.phases if p[0] > started])
            for blend in blends
        ]
        return ours == theirs and self.names() == other.names() and phases[0] == phases[1]


@dataclass
class Reading:
    """How far a source is read: its order, and samples of it that are consumed."""

    order: Order
    index: int
    source: SourceState

    @property
    def started(self) -> bool:
        """Whether a sample of it was read."""
        return self.index > 0 or isinstance(self.order, TailOrder)


def follow(segments: list[Segment]) -> tuple[list[Reading], dict[tuple[str, int], Reading]]:
    """Orders of the last segment's sources where it starts, and every source that was ever read.

    Raises ValueError when a source holds less than a window.
    """
    known: dict[tuple[str, int], Reading] = {}
    readings: list[Reading] = []
    for number, segment in enumerate(segments):
        names = segment.names()
        readings = []
        for name, source in zip(names, segment.sources):
            readings.append(_reading(known.get(name), segment, name, source))
        known |= dict(zip(names, readings))
        if number + 1 < len(segments):
            length = segments[number + 1].first_sample - segment.first_sample
            for reading, count in zip(readings, segment.blend().counts(length).tolist()):
                reading.index += count
    return readings, known


def _reading(
    before: Reading | None, segment: Segment, name: tuple[str, int], source: SourceState
) -> Reading:
    order = SourceOrder(
        tokens=source.tokens,
        seq_length=segment.seq_length,
        # Equal folders named twice are two sources with two orders.
        key=derive_key(segment.seed, *name),
        chunk_tokens=segment.chunk_tokens,
        chunks_per_group=segment.chunks_per_group,
    )
    if before is None or not before.started:
        return Reading(order, 0, source)
    if before.order.geometry == order.geometry:
        return Reading(before.order, before.index, source)
    return Reading(TailOrder(before.order, before.index, order), 0, source)


def notes(segments: list[Segment]) -> list[str]:
    """What the last change does to each source: what is seen twice, and what never."""
    earlier, last = segments[:-1], segments[-1]
    ended = earlier[-1].model_copy(update={"first_sample": last.first_sample})
    _, old = follow([*earlier, ended])
    readings, _ = follow(segments)
    found = [
        f"the data changes at sample {last.first_sample}"
        + _changed("sequence length", earlier[-1].seq_length, last.seq_length)
    ]
    paths = {reading.source.path: reading for reading in old.values()}
    for name, reading in zip(last.names(), readings):
        before = old.get(name)
        if before is not None and before.started:
            found.append(_kept(reading, before))
        else:
            found.append(_new(reading, paths.get(reading.source.path)))
    gone = [reading for name, reading in old.items() if name not in last.names()]
    return found + [_gone(reading) for reading in gone]


def _changed(what: str, before: int, after: int) -> str:
    return "" if before == after else f"; {what} {before} -> {after}"


def _read_tokens(reading: Reading) -> str:
    tokens = round(reading.order.epochs(reading.index) * reading.order.tokens)
    return f"{reading.order.epochs(reading.index):.4f} epochs (about {tokens} tokens)"


def _kept(reading: Reading, before: Reading) -> str:
    never = 0
    if isinstance(reading.order, TailOrder) and reading.order.geometry != before.order.geometry:
        never = reading.order.never_tokens
    return (
        f"{reading.source.path}: goes on after {_read_tokens(before)}; of this epoch 0 tokens are "
        f"seen twice and {never} never"
    )


def _new(reading: Reading, same_path: Reading | None) -> str:
    if same_path is None or not same_path.started:
        return f"{reading.source.path}: is new and starts at its beginning"
    return (
        f"{reading.source.path}: holds other data than before and starts at its beginning; what "
        f"it still has of the {_read_tokens(same_path)} that were read is seen twice"
    )


def _gone(reading: Reading) -> str:
    epochs = reading.order.epochs(reading.index)
    left = round((-epochs % 1) * reading.order.tokens)
    return (
        f"{reading.source.path}: is no longer read, after {_read_tokens(reading)}; "
        f"about {left} tokens of this epoch are never seen"
    )


def parse_segments(state: dict[str, Any] | None) -> list[Segment]:
    """The segments of a saved state; none of one that was saved without."""
    return [Segment.model_validate(segment) for segment in (state or {}).get("segments", [])]
