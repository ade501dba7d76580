# SPDX-License-Identifier: Apache-2.0
"""Everything that is wrong with a folder of shards, each finding with its file and place."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from fused_ops.errors import ConfigError
from pretrain.data.manifest import MANIFEST_NAME, Manifest, ShardInfo, file_checksum, load_manifest
from pretrain.data.shards import (
    ShardIndex,
    bin_path,
    check_index_against,
    check_sizes,
    idx_path,
    read_index,
)
from pretrain.data.tokenizer import TOKENIZER_NAME, check_tokenizer
from pretrain.data.writer import CRC_BLOCK, block_checksums, crc_path


def folders(directory: Path) -> list[Path]:
    """The folder itself, or its parts (train, valid) that have manifests."""
    if (directory / MANIFEST_NAME).exists():
        return [directory]
    found = [path.parent for path in sorted(directory.glob(f"*/{MANIFEST_NAME}"))]
    return found or [directory]


def findings(folder: Path) -> Iterator[str]:
    """Everything that is wrong with a folder of shards, each with file and place."""
    try:
        manifest = load_manifest(folder)
    except ConfigError as error:
        yield from error.problems
        return
    for tokenizer in (folder / TOKENIZER_NAME, folder.parent / TOKENIZER_NAME):
        if tokenizer.exists():
            yield from _problems(check_tokenizer, tokenizer, manifest)
            break
    for info in tqdm(manifest.shards, unit="shard", desc=f"verify {folder}"):
        yield from _shard_findings(folder / info.name, info, manifest)
    yield from _strangers(folder, manifest)


def _problems(check: Callable[..., object], *arguments: object) -> Iterator[str]:
    try:
        check(*arguments)
    except ConfigError as error:
        yield from error.problems


def _shard_findings(prefix: Path, info: ShardInfo, manifest: Manifest) -> Iterator[str]:
    sizes = list(_problems(check_sizes, prefix, info))
    yield from sizes
    if not idx_path(prefix).exists() or not bin_path(prefix).exists():
        return
    if file_checksum(idx_path(prefix)) != info.idx_checksum:
        yield f"{idx_path(prefix)}: its checksum is not the manifest's"
    if file_checksum(bin_path(prefix)) != info.bin_checksum:
        yield from _damaged_blocks(prefix)
    if sizes:
        return
    try:
        index = read_index(idx_path(prefix))
        check_index_against(str(idx_path(prefix)), index, info)
    except ConfigError as error:
        yield from error.problems
        return
    yield from _token_findings(prefix, index, manifest)


def _damaged_blocks(prefix: Path) -> Iterator[str]:
    """Where a .bin file departs from its block checksums."""
    path, sums = bin_path(prefix), crc_path(prefix)
    if not sums.exists():
        yield f"{path}: its checksum is not the manifest's ({sums.name} would tell the place)"
        return
    content = np.fromfile(path, dtype=np.uint8)
    found, said = block_checksums(memoryview(content)), np.fromfile(sums, dtype="<u4")
    common = min(found.size, said.size)
    wrong = np.flatnonzero(found[:common] != said[:common])
    for block in wrong[:5]:
        first = int(block) * CRC_BLOCK
        last = min(first + CRC_BLOCK, path.stat().st_size)
        yield f"{path}: bytes {first} to {last - 1} are not those that were written"
    if wrong.size > 5:
        yield f"{path}: {wrong.size - 5} more damaged blocks of {CRC_BLOCK} bytes"
    if not wrong.size and found.size == said.size:
        yield f"{path}: whole by {sums.name}, its checksum is not the manifest's: stale manifest"


def _token_findings(prefix: Path, index: ShardIndex, manifest: Manifest) -> Iterator[str]:
    if not index.tokens:
        yield f"{bin_path(prefix)}: holds no token"
        return
    tokens = np.memmap(bin_path(prefix), dtype=index.dtype, mode="r")
    wrong = np.flatnonzero((tokens < 0) | (tokens >= manifest.vocab_size))
    if wrong.size:
        at = int(wrong[0])
        yield (
            f"{bin_path(prefix)}, byte {at * tokens.itemsize}: id {int(tokens[at])} is outside the "
            f"vocabulary of {manifest.vocab_size} ({wrong.size} such ids)"
        )
    starts = index.document_starts()
    stops = np.append(starts[1:], index.tokens)
    if manifest.eod_id is None:
        empty = np.flatnonzero(stops == starts)
    else:
        empty = np.flatnonzero(stops - starts <= 1)
        filled = np.flatnonzero(stops > starts)
        endless = filled[tokens[stops[filled] - 1] != manifest.eod_id]
        if endless.size:
            at = int(stops[endless[0]] - 1) * tokens.itemsize
            yield (
                f"{bin_path(prefix)}, byte {at}: document {int(endless[0])} does not end with id "
                f"{manifest.eod_id} ({endless.size} such documents)"
            )
    if empty.size:
        at = int(starts[empty[0]]) * tokens.itemsize
        yield (
            f"{bin_path(prefix)}, byte {at}: document {int(empty[0])} is empty "
            f"({empty.size} such documents)"
        )


def _strangers(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Shards and unfinished files that the manifest does not name."""
    named = {str(folder / info.name) for info in manifest.shards}
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".bin", ".idx") and str(path.with_suffix("")) not in named:
            yield f"{path}: the manifest does not name it: stale manifest"
        elif path.suffix == ".tmp":
            yield f"{path}: left by an interrupted write"
