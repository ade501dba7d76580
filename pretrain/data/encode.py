# SPDX-License-Identifier: Apache-2.0
"""Turns input files into encoded documents, in input order, with parallel workers."""

import hashlib
import multiprocessing
import os
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from pretrain.data.documents import InputFile, Record, records, text_of, token_blocks
from pretrain.data.manifest import DataError
from pretrain.data.pieces import Documents
from pretrain.data.tokenizer import TextEncoder, load_encoder

# A worker's task: records of about this many bytes.
_BATCH_BYTES = 1 << 20
_BATCH_RECORDS = 4096

_RAN_OVER = "documents that ran over into the next token array"
_UNFINISHED = "token arrays whose last document had no end, ended"


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """How text becomes ids; sent to every worker."""

    tokenizer: Path
    eod_id: int | None
    text_key: str = "text"
    dtype: str = "int32"


_encoder: TextEncoder | None = None
_options: EncodeOptions | None = None


def _start_worker(options: EncodeOptions) -> None:
    global _encoder, _options
    # Workers are processes; threads inside them would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder, _options = load_encoder(options.tokenizer, options.eod_id), options


def _end_with_parent() -> None:
    """A killed parent closes no queue: without this its workers would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a worker has a parent"
    parent.join()
    os._exit(1)


def _encode_task(batch: list[Record]) -> Documents:
    assert _encoder is not None, "a worker starts with _start_worker"
    assert _options is not None, "a worker starts with _start_worker"
    return encode_records(batch, _encoder, _options)


def encode_records(batch: list[Record], encoder: TextEncoder, options: EncodeOptions) -> Documents:
    """Encodes records; empty ones are counted, each document ends with the encoder's eod id."""
    counts: Counter[str] = Counter()
    pieces, hashes = [], []
    end = np.array([encoder.eod_id], dtype=np.int32)
    for record in batch:
        text = text_of(record, options.text_key, counts)
        if text is None:
            continue
        ids = encoder.encode(text)
        if (ids == encoder.eod_id).any():
            raise DataError(
                "a document must not contain the end-of-document id itself; "
                f"{record.place()} encodes to {encoder.eod_id}: choose another --eod-id"
            )
        pieces.append(np.concatenate((ids, end)))
        hashes.append(_hash(text.encode()))
    return _documents(pieces, hashes, len(batch), counts, options.dtype)


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _documents(
    pieces: list[np.ndarray], hashes: list[int], records_: int, counts: Counter[str], dtype: str
) -> Documents:
    return Documents(
        tokens=np.concatenate(pieces or [np.zeros(0, np.int32)]).astype(dtype),
        lengths=np.array([piece.size for piece in pieces], dtype=np.int64),
        hashes=np.array(hashes, dtype=np.uint64),
        records=records_,
        counts=counts,
    )


def token_documents(
    files: list[InputFile], encoder: TextEncoder, dtype: str, progress: list[int]
) -> Iterator[Documents]:
    """Documents of token arrays; one that has no end in its file goes on in the next one."""
    rest: list[np.ndarray] = []
    for number, file in enumerate(files):
        counts: Counter[str] = Counter()
        for block in token_blocks(file, encoder.vocab_size, progress):
            ends = np.flatnonzero(block == encoder.eod_id) + 1
            if not ends.size:
                rest.append(block.astype(np.int32))
                continue
            *bodies, tail = np.split(block.astype(np.int32), ends)
            bodies[0] = np.concatenate([*rest, bodies[0]])
            rest = [tail] if tail.size else []
            yield _from_arrays(bodies, counts, dtype)
            counts = Counter()
        last = number == len(files) - 1
        if rest:
            counts[_UNFINISHED if last else _RAN_OVER] += 1
        bodies = []
        if rest and last:
            bodies = [np.concatenate([*rest, np.array([encoder.eod_id], dtype=np.int32)])]
        if counts:
            yield _from_arrays(bodies, counts, dtype)


def _from_arrays(bodies: list[np.ndarray], counts: Counter[str], dtype: str) -> Documents:
    # A document of an end alone is empty.
    kept = [body for body in bodies if body.size > 1]
    if len(kept) < len(bodies):
        counts["empty documents, skipped"] += len(bodies) - len(kept)
    hashes = [_hash(body.tobytes()) for body in kept]
    return _documents(kept, hashes, 1, counts, dtype)


def _batches(source: Iterable[Record]) -> Iterator[list[Record]]:
    batch: list[Record] = []
    size = 0
    for record in source:
        batch.append(record)
        size += len(record.content)
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_RECORDS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode_inputs(
    files: list[InputFile],
    options: EncodeOptions,
    workers: int,
    skip_records: int,
    progress: list[int],
) -> Iterator[Documents]:
    """All documents of `files` after the first `skip_records` records, in input order.

    Text files come first, then token arrays. At most two tasks a worker are in flight.
    """
    text_files = [file for file in files if file.kind != "tokens"]
    array_files = [file for file in files if file.kind == "tokens"]
    encoder = load_encoder(options.tokenizer, options.eod_id)
    source = (record for file in text_files for record in records(file, progress, options.text_key))
    skipped = sum(1 for _ in islice(source, skip_records))
    if workers <= 1:
        for batch in _batches(source):
            yield encode_records(batch, encoder, options)
    else:
        yield from _in_parallel(_batches(source), options, workers)
    # Each Documents of a token array counts as one record.
    arrays = token_documents(array_files, encoder, options.dtype, progress)
    yield from islice(arrays, skip_records - skipped, None)


def _in_parallel(
    batches: Iterator[list[Record]], options: EncodeOptions, workers: int
) -> Iterator[Documents]:
    context = multiprocessing.get_context("spawn")
    waiting: deque[Future[Documents]] = deque()
    pool = ProcessPoolExecutor(workers, context, _start_worker, (options,))
    try:
        for batch in batches:
            waiting.append(pool.submit(_encode_task, batch))
            if len(waiting) >= 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise DataError(
            "workers must live to the end; one was killed, often for lack of memory: run the same "
            "command again with fewer --workers, finished pieces are kept"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
