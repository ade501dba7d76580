# SPDX-License-Identifier: Apache-2.0
"""From documents in input order to shards in shuffled order, with bounded memory.

Documents arrive once, in the order of the input, and are spilled in pieces that are sorted by a
random key of the document. Shard k of S then takes the documents whose keys fall in the k-th of S
equal ranges: one contiguous stretch of every piece. A document's key and split depend on its
content and its number in the input, so the shards do not depend on the number of workers, on where
the pieces were cut, or on how often the work was interrupted.
"""

import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.data.manifest import ShardInfo, write_atomic
from pretrain.data.order import derive_key, mix64
from pretrain.data.writer import write_shard

SPLITS = ("train", "valid")

_VALID_SALT = np.uint64(derive_key("held-out documents"))
_ORDER_SALT = np.uint64(derive_key("order of documents"))


@dataclass
class Documents:
    """Encoded documents, each ending with the end-of-document id.

    tokens: [sum(lengths)]; lengths: int64[n]; hashes: uint64[n] of the contents.
    records: input records that they came from; counts: what was skipped or repaired.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    hashes: np.ndarray
    records: int
    counts: Counter[str] = field(default_factory=Counter)


class PieceStore:
    """Finished pieces in a work folder; survives a kill between any two of its writes."""

    def __init__(self, folder: Path, dtype: str, valid_fraction: float, piece_tokens: int) -> None:
        self.folder, self.dtype = folder, np.dtype(dtype)
        self.valid_fraction, self.piece_tokens = valid_fraction, piece_tokens
        self.pieces: list[dict[str, Any]] = []
        self._pending: list[Documents] = []
        self._pending_tokens = 0
        folder.mkdir(parents=True, exist_ok=True)
        while (path := self._path(len(self.pieces), "json")).exists():
            self.pieces.append(json.loads(path.read_text()))

    @property
    def records(self) -> int:
        """Input records that the finished pieces hold."""
        return sum(piece["records"] for piece in self.pieces)

    @property
    def counts(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for piece in self.pieces:
            total.update(piece["counts"])
        return total

    def tokens(self, split: str) -> int:
        return sum(piece[split]["tokens"] for piece in self.pieces)

    def documents(self, split: str) -> int:
        return sum(piece[split]["documents"] for piece in self.pieces)

    def add(self, documents: Documents) -> None:
        """Takes documents in input order; writes a piece when enough have come."""
        self._pending.append(documents)
        self._pending_tokens += documents.tokens.size
        if self._pending_tokens >= self.piece_tokens:
            self.flush()

    def flush(self) -> None:
        """Writes what is pending as a piece."""
        if not self._pending:
            return
        number = len(self.pieces)
        first = sum(
            piece["train"]["documents"] + piece["valid"]["documents"] for piece in self.pieces
        )
        tokens = np.concatenate([d.tokens for d in self._pending])
        lengths = np.concatenate([d.lengths for d in self._pending])
        hashes = np.concatenate([d.hashes for d in self._pending])
        counts: Counter[str] = Counter()
        for documents in self._pending:
            counts.update(documents.counts)
        ordinal = np.arange(first, first + lengths.size, dtype=np.uint64)
        keys = mix64(mix64(hashes ^ _ORDER_SALT) + ordinal * np.uint64(0x9E3779B97F4A7C15))
        held_out = self._held_out(hashes)
        record: dict[str, Any] = {
            "records": sum(d.records for d in self._pending),
            "counts": dict(counts),
        }
        for split, members in zip(SPLITS, (np.flatnonzero(~held_out), np.flatnonzero(held_out))):
            members = members[np.argsort(keys[members], kind="stable")]
            chosen = gather(tokens, lengths, members)
            self._save(number, f"{split}.tokens", chosen.astype(self.dtype))
            self._save(number, f"{split}.lengths", lengths[members].astype(np.int64))
            self._save(number, f"{split}.keys", keys[members])
            record[split] = {"tokens": int(chosen.size), "documents": int(members.size)}
        # The record makes the piece count: written last.
        write_atomic(self._path(number, "json"), json.dumps(record).encode())
        self.pieces.append(record)
        self._pending, self._pending_tokens = [], 0

    def _held_out(self, hashes: np.ndarray) -> np.ndarray:
        if self.valid_fraction == 0:
            return np.zeros(hashes.size, dtype=bool)
        limit = np.uint64(min(int(self.valid_fraction * 2.0**64), 2**64 - 1))
        return mix64(hashes ^ _VALID_SALT) < limit

    def _save(self, number: int, name: str, array: np.ndarray) -> None:
        with open(self._path(number, name), "wb") as stream:
            stream.write(memoryview(np.ascontiguousarray(array)).cast("B"))
            stream.flush()
            os.fsync(stream.fileno())

    def _load(self, number: int, name: str, dtype: np.dtype) -> np.ndarray:
        path = self._path(number, name)
        if path.stat().st_size == 0:
            return np.zeros(0, dtype=dtype)
        return np.memmap(path, dtype=dtype, mode="r")

    def _path(self, number: int, name: str) -> Path:
        return self.folder / f"piece_{number:06d}.{name}"

    def shard(self, split: str, number: int, num_shards: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, lengths) of shard `number`, its documents in the order of their keys."""
        bounds = [number * 2**64 // num_shards, (number + 1) * 2**64 // num_shards]
        tokens, lengths, keys = [], [], []
        for piece in range(len(self.pieces)):
            piece_keys = self._load(piece, f"{split}.keys", np.dtype(np.uint64))
            low = int(np.searchsorted(piece_keys, np.uint64(bounds[0])))
            high = (
                piece_keys.size
                if bounds[1] == 2**64
                else int(np.searchsorted(piece_keys, np.uint64(bounds[1])))
            )
            piece_lengths = self._load(piece, f"{split}.lengths", np.dtype(np.int64))
            first = int(piece_lengths[:low].sum())
            taken = np.array(piece_lengths[low:high])
            piece_tokens = self._load(piece, f"{split}.tokens", self.dtype)
            tokens.append(np.array(piece_tokens[first : first + int(taken.sum())]))
            lengths.append(taken)
            keys.append(np.array(piece_keys[low:high]))
        order = np.argsort(np.concatenate(keys), kind="stable")
        all_lengths = np.concatenate(lengths)
        return gather(np.concatenate(tokens), all_lengths, order), all_lengths[order]

    def write_shards(self, split: str, folder: Path, shard_tokens: int) -> list[ShardInfo]:
        """Writes the shards of a split; those finished before are kept."""
        folder.mkdir(parents=True, exist_ok=True)
        num_shards = max(1, -(-self.tokens(split) // shard_tokens))
        infos = []
        for number in range(num_shards):
            done = self.folder / f"{split}_{number:05d}.json"
            if done.exists():
                infos.append(ShardInfo.model_validate_json(done.read_bytes()))
                continue
            tokens, lengths = self.shard(split, number, num_shards)
            infos.append(write_shard(folder, f"shard_{number:05d}", tokens, lengths))
            write_atomic(done, infos[-1].model_dump_json().encode())
        return infos


def gather(tokens: np.ndarray, lengths: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Concatenates documents `order` of a concatenation of documents with `lengths`."""
    ends = np.cumsum(lengths)
    starts = (ends - lengths)[order].tolist()
    stops = ends[order].tolist()
    parts = [tokens[start:stop] for start, stop in zip(starts, stops)]
    return np.concatenate(parts) if parts else tokens[:0]
