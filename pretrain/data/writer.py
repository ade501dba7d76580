# SPDX-License-Identifier: Apache-2.0
"""Writes shards byte for byte as megatron-core's IndexedDatasetBuilder does.

Each file is written under a temporary name and renamed when it is whole; a folder counts only once
its manifest is there. Beside each pair lies NAME.crc32: a uint32 per 64 KiB block of the .bin file,
so that a damaged byte is found with its place.
"""

import hashlib
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from pretrain.data.manifest import (
    ITEM_SIZES,
    DataError,
    ShardInfo,
    file_checksum,
    write_atomic,
)
from pretrain.data.shards import (
    INDEX_HEADER,
    INDEX_MAGIC,
    TYPE_CODES,
    ShardIndex,
    bin_path,
    check_sizes,
    idx_path,
    read_index,
)

CRC_BLOCK = 65_536

# megatron-core's limit for two-byte ids (DType.optimal_dtype).
_UINT16_LIMIT = 65_500


def token_dtype(vocab_size: int) -> str:
    """The type megatron-core gives ids of a vocabulary: uint16 or int32."""
    return "uint16" if vocab_size < _UINT16_LIMIT else "int32"


def index_bytes(lengths: np.ndarray, dtype: str) -> bytes:
    """The .idx file of documents of one sequence each; lengths int[documents] in tokens."""
    ends = np.cumsum(lengths, dtype=np.int64)
    header = INDEX_HEADER.pack(INDEX_MAGIC, 1, TYPE_CODES[dtype], lengths.size, lengths.size + 1)
    offsets = (ends - lengths) * ITEM_SIZES[dtype]
    marks = np.arange(lengths.size + 1, dtype=np.int64)
    return b"".join(
        (header, lengths.astype(np.int32).tobytes(), offsets.tobytes(), marks.tobytes())
    )


def write_shard(directory: Path, name: str, tokens: np.ndarray, lengths: np.ndarray) -> ShardInfo:
    """Writes NAME.bin, NAME.idx and NAME.crc32.

    Args:
        directory: existing folder.
        name: of the pair, without suffix.
        tokens: [tokens] documents one after the other, in the type of the file.
        lengths: int[documents] tokens of each document.
    """
    assert int(lengths.sum()) == tokens.size, "lengths must add up to the tokens"
    dtype, prefix = str(tokens.dtype), directory / name
    content = memoryview(np.ascontiguousarray(tokens)).cast("B")
    index = index_bytes(lengths, dtype)
    write_atomic(idx_path(prefix), index)
    write_atomic(crc_path(prefix), block_checksums(content).tobytes())
    temporary = bin_path(prefix).with_name(bin_path(prefix).name + ".tmp")
    with open(temporary, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, bin_path(prefix))
    return ShardInfo(
        name=name,
        tokens=tokens.size,
        documents=lengths.size,
        dtype=dtype,  # type: ignore[arg-type]
        bin_checksum="sha256:" + hashlib.sha256(content).hexdigest(),
        idx_checksum="sha256:" + hashlib.sha256(index).hexdigest(),
    )


def describe_folder(
    directory: Path, names: Iterable[str], vocab_size: int | None = None
) -> tuple[list[ShardInfo], int, int | None]:
    """Reads existing pairs completely.

    Returns (descriptions, highest id, the id that ends every document or None).
    Raises DataError with every damaged index, .bin file of another size and shard with an id that
    is negative or not below `vocab_size`.
    """
    infos, highest, ends, problems = [], 0, set[int](), list[str]()
    for name in names:
        try:
            info, index = _describe(directory, name)
        except DataError as error:
            problems += error.problems
            continue
        infos.append(info)
        if not index.tokens:
            continue
        path = bin_path(directory / name)
        tokens = np.memmap(path, dtype=index.dtype, mode="r")
        top = int(tokens.max())
        if int(tokens.min()) < 0 or (vocab_size is not None and top >= vocab_size):
            problems.append(_outside(path, tokens, vocab_size))
        highest = max(highest, top)
        stops = np.append(index.document_starts()[1:], index.tokens)
        # More than one last id says that documents end without an id of their own.
        ends |= set(np.unique(tokens[stops[stops > 0] - 1])[:2].tolist())
    if problems:
        raise DataError(problems)
    return infos, highest, ends.pop() if len(ends) == 1 else None


def _describe(directory: Path, name: str) -> tuple[ShardInfo, ShardIndex]:
    index = read_index(idx_path(directory / name))
    info = ShardInfo(
        name=name,
        tokens=index.tokens,
        documents=index.documents,
        dtype=index.dtype,  # type: ignore[arg-type]
        bin_checksum="",
        idx_checksum=file_checksum(idx_path(directory / name)),
    )
    check_sizes(directory / name, info)
    checksum = file_checksum(bin_path(directory / name))
    return info.model_copy(update={"bin_checksum": checksum}), index


def _outside(path: Path, tokens: np.ndarray, vocab_size: int | None) -> str:
    limit = np.iinfo(tokens.dtype).max if vocab_size is None else vocab_size - 1
    at = int(np.flatnonzero((tokens < 0) | (tokens > limit))[0])
    return (
        f"token ids must be in [0, {'...' if vocab_size is None else vocab_size}); {path}, byte "
        f"{at * tokens.itemsize}, has {int(tokens[at])}: the shard is damaged, of another "
        "tokenizer or of another type"
    )


def crc_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.crc32")


def block_checksums(content: memoryview) -> np.ndarray:
    """uint32[blocks]: CRC-32 of each 64 KiB of `content`."""
    sums = [zlib.crc32(content[at : at + CRC_BLOCK]) for at in range(0, len(content), CRC_BLOCK)]
    return np.array(sums, dtype="<u4")
