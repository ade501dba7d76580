# SPDX-License-Identifier: Apache-2.0
"""Figures of a folder of shards, and of a blend of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pretrain.data.manifest import load_manifest
from pretrain.data.shards import ShardSet, idx_path, read_index

_TOKENS_AT_ONCE = 1 << 22
_BAR = 40


def token_counts(directory: str | Path) -> np.ndarray:
    """int64[vocab_size]: how often each id occurs."""
    shards = ShardSet(directory, load_manifest(directory))
    counts = np.zeros(shards.manifest.vocab_size, dtype=np.int64)
    for start in range(0, shards.tokens, _TOKENS_AT_ONCE):
        block = shards.window(start, min(_TOKENS_AT_ONCE, shards.tokens - start))
        counts += np.bincount(block, minlength=counts.size)
    return counts


def unigram_entropy(directory: str | Path) -> float:
    """Entropy of the folder's token frequencies, in nats per token.

    The lowest loss that a model without context can reach on these tokens; divide by log(2) for
    bits.
    """
    counts = token_counts(directory)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def bits(nats: float) -> float:
    """Nats to bits."""
    return nats / math.log(2)


@dataclass(frozen=True)
class Lengths:
    """How long the documents of a folder are, in tokens with their end.

    Attributes:
        documents: int64[bins] documents of 0, 1, 2 to 3, 4 to 7, ... tokens.
        tokens: int64[bins] tokens in those.
        shortest, longest: of all.
    """

    documents: np.ndarray
    tokens: np.ndarray
    shortest: int
    longest: int

    def labels(self) -> list[str]:
        """What each bin holds."""
        found = ["0", "1"]
        found += [f"{1 << k}-{(2 << k) - 1}" for k in range(1, self.documents.size - 1)]
        return found[: self.documents.size]

    def first(self) -> int:
        """The first bin that holds a document."""
        return int(np.argmax(self.documents > 0))


def document_lengths(directory: str | Path) -> Lengths:
    """Lengths of all documents, from the indexes alone; one index is in memory at a time."""
    documents, tokens = np.zeros(64, np.int64), np.zeros(64, np.int64)
    shortest, longest = np.iinfo(np.int64).max, 0
    for info in load_manifest(directory).shards:
        index = read_index(idx_path(Path(directory) / info.name))
        lengths = np.diff(index.document_starts(), append=index.tokens)
        if not lengths.size:
            continue
        # 0 -> bin 0, 1 -> 1, 2 to 3 -> 2, ...: exact for every length below 2**53.
        bins = np.frexp(lengths.astype(np.float64))[1]
        documents += np.bincount(bins, minlength=64)
        tokens += np.bincount(bins, weights=lengths, minlength=64).astype(np.int64)
        shortest, longest = min(shortest, int(lengths.min())), max(longest, int(lengths.max()))
    size = max(2, int(np.flatnonzero(documents).max(initial=0)) + 1)
    return Lengths(documents[:size], tokens[:size], min(shortest, longest), longest)


def length_lines(lengths: Lengths) -> list[str]:
    """The histogram as text: a bar of documents for each bin, and its share of the tokens."""
    rows, total = list(zip(lengths.labels(), lengths.documents, lengths.tokens)), lengths.tokens
    scale = _BAR / max(1, int(lengths.documents.max()))
    return [
        f"{label:>17} {int(documents):>12} {'#' * math.ceil(documents * scale):<{_BAR}} "
        f"{tokens / max(1, int(total.sum())):6.1%} of the tokens"
        for label, documents, tokens in rows[lengths.first() :]
    ]


def draw_lengths(named: Sequence[tuple[str, Lengths]], path: Path) -> None:
    """Writes the histograms as a picture, a row a folder: documents, and tokens, by length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(named), 2, figsize=(11, 3.2 * len(named)), squeeze=False)
    for row, (name, lengths) in zip(axes, named):
        labels, first = lengths.labels(), lengths.first()
        for axis, values, what in zip(row, (lengths.documents, lengths.tokens), _AXES):
            places = np.arange(first, len(labels))
            axis.bar(places, values[first:], width=0.9, color="#4477aa")
            axis.set_xticks(places, labels[first:], rotation=60, ha="right", fontsize=7)
            axis.set_title(f"{name}: {what} by document length", fontsize=9)
            axis.set_ylabel(what)
        row[0].set_xlabel(f"tokens; {lengths.shortest} to {lengths.longest}", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


_AXES = ("documents", "tokens")
