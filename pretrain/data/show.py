# SPDX-License-Identifier: Apache-2.0
"""What a step of a run reads: samples, the documents in them, and their text, by rank."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fused_ops.errors import ConfigError
from pretrain.data.batch_sizes import BatchSizes, check_batch_sizes
from pretrain.data.dataset import Dataset
from pretrain.data.manifest import load_manifest
from pretrain.data.shards import ShardSet
from pretrain.data.skips import Skips
from pretrain.data.store import is_url, local_path
from pretrain.data.tokenizer import TOKENIZER_NAME, TextEncoder, check_tokenizer, load_encoder

# Characters of a document's text that a line shows.
_SHOWN = 200


@dataclass(frozen=True)
class Piece:
    """The part of one document that a sample reads."""

    shard: str
    document: int
    """Number of the document in its shard."""
    first: int
    """First token in the document."""
    tokens: int
    """How many of them the sample reads, as inputs."""
    length: int
    """Tokens of the whole document."""
    ids: list[int]
    text: str | None


@dataclass(frozen=True)
class Shown:
    """One sample of a step."""

    rank: int
    """Data-parallel rank that reads it."""
    micro_batch: int
    """Number of its micro-batch in the global batch."""
    sample: int
    source: str
    start: int
    """First token in the source's stream."""
    documents: list[Piece]

    @property
    def ids(self) -> list[int]:
        """The inputs of the sample."""
        return [i for piece in self.documents for i in piece.ids]


@dataclass(frozen=True)
class Step:
    """Where a step stands in a run."""

    number: int
    samples: list[int]
    """Of all ranks, in the order of micro-batches."""


def find_step(
    number: int, sizes: BatchSizes, skipped: list[tuple[int, int]], run_dir: Path
) -> Step:
    """Step `number` (from 1), by the run's own record where it has one.

    `skipped`: the ranges of samples that the run steps over, but for those of rollbacks that only
    its record knows. Raises ConfigError for a number below 1.
    """
    if number < 1:
        raise ConfigError(f"--step counts from 1; got {number}")
    rows = _rows(run_dir / "metrics.jsonl")
    # The last row of a step counts.
    consumed = {0: 0} | {r["step"]: r["samples"] for r in rows if "samples" in r and "loss" in r}
    rolled_back = [r["samples"] for r in rows if r.get("event") == "rollback" and "samples" in r]
    skips = Skips([*skipped, *rolled_back])
    if number - 1 in consumed and number in consumed:
        before, after = consumed[number - 1], consumed[number]
        if after - before == sizes.at(before):
            # What is left out since then was read by a step as long as its batch.
            return Step(number, list(range(before, after)))
        left_out = {
            sample
            for first, last in skips.ranges
            for sample in range(max(first, before), min(last + 1, after))
        }
        return Step(number, [s for s in range(before, after) if s not in left_out])
    known = max(step for step in consumed if step < number)
    before = consumed[known]
    if known == 0 and not skips.ranges:
        before = sizes.consumed_after(number - 1)
    else:
        for _ in range(number - 1 - known):
            before = skips.after(before, sizes.at(before))
    return Step(number, skips.samples(before, sizes.at(before)))


def _rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a run's metrics; none of a run that has not started."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def show_step(
    dataset: Dataset,
    step: Step,
    micro_batch_size: int,
    dp_size: int,
    tokenizer: Path | None = None,
) -> Iterator[Shown]:
    """The samples of a step, in the order of micro-batches.

    Args:
        dataset: of the segment that the step is in.
        dp_size: data-parallel ranks.
        tokenizer: file that decodes the ids; None looks beside each source.
    """
    check_batch_sizes(len(step.samples), micro_batch_size, dp_size)
    encoders = [_encoder(str(shards.directory), tokenizer) for shards in dataset.shards]
    for number, sample in enumerate(step.samples):
        source, start = dataset.place(sample)
        micro_batch = number // micro_batch_size
        yield Shown(
            rank=micro_batch % dp_size,
            micro_batch=micro_batch,
            sample=sample,
            source=str(dataset.shards[source].directory),
            start=start,
            documents=list(
                _documents(dataset.shards[source], start, dataset.seq_length, encoders[source])
            ),
        )


def _documents(
    shards: ShardSet, start: int, count: int, encoder: TextEncoder | None
) -> Iterator[Piece]:
    """The parts of documents that tokens [start, start + count) of a source's stream are."""
    for number, first, taken in shards.parts(start, count):
        shard = shards.shard(number)
        tokens, starts = shard.read(first, taken), shard.document_starts()
        bounds = np.append(starts, shard.info.tokens)
        low = int(np.searchsorted(starts, first, side="right")) - 1
        for document in range(low, int(np.searchsorted(starts, first + taken))):
            begin, end = int(bounds[document]), int(bounds[document + 1])
            at, stop = max(begin, first), min(end, first + taken)
            if stop <= at:  # an empty document
                continue
            ids = tokens[at - first : stop - first].tolist()
            yield Piece(
                shard=shard.info.name,
                document=document,
                first=at - begin,
                tokens=stop - at,
                length=end - begin,
                ids=ids,
                text=None if encoder is None else encoder.tokenizer.decode(ids),
            )


def _encoder(folder: str, tokenizer: Path | None) -> TextEncoder | None:
    """The tokenizer that is named, or the one beside a local folder; None where there is none."""
    if tokenizer is not None:
        return load_encoder(tokenizer, eod_id=0)
    if is_url(folder):
        return None
    for place in (local_path(folder), local_path(folder).parent):
        if (place / TOKENIZER_NAME).exists():
            check_tokenizer(place / TOKENIZER_NAME, load_manifest(folder))
            return load_encoder(place / TOKENIZER_NAME, eod_id=0)
    return None


def as_lines(shown: Shown) -> Iterator[str]:
    """A sample for a reader."""
    yield (
        f"rank {shown.rank}, micro-batch {shown.micro_batch}, sample {shown.sample}: "
        f"{shown.source}, tokens {shown.start} to {shown.start + len(shown.ids) - 1}"
    )
    for piece in shown.documents:
        text = f"ids {piece.ids}" if piece.text is None else repr(piece.text)
        text = text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"
        last = piece.first + piece.tokens - 1
        yield (
            f"  {piece.shard} document {piece.document}, tokens {piece.first} to {last} of "
            f"{piece.length}: {text}"
        )


def as_json(shown: Shown) -> str:
    """A sample for a program: one JSON object."""
    return json.dumps({**asdict(shown), "ids": shown.ids})
