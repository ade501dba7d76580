# SPDX-License-Identifier: Apache-2.0
"""Shards: megatron-core's bytes, the stream, and what is damaged."""

import os

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from pretrain.data.manifest import DataError, load_manifest, save_manifest
from pretrain.data.shards import ShardSet, read_index
from pretrain.data.stats import bits, token_counts, unigram_entropy
from pretrain.data.writer import describe_folder, index_bytes, token_dtype
from tests.pretrain.data.shard_folders import documents, write_folder


def megatron_pair(folder, texts, dtype=np.uint16, name="theirs"):
    builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=dtype)
    for text in texts:
        builder.add_document(torch.from_numpy(text), [len(text)])
    builder.finalize(str(folder / f"{name}.idx"))


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_files_are_those_of_megatron_core(tmp_path, dtype):
    texts = documents(50)
    write_folder(tmp_path, texts, num_shards=1, dtype=dtype)
    megatron_pair(tmp_path, texts, np.dtype(dtype).type)
    for suffix in (".bin", ".idx"):
        ours, theirs = tmp_path / f"shard_00000{suffix}", tmp_path / f"theirs{suffix}"
        assert ours.read_bytes() == theirs.read_bytes()
    reader = IndexedDataset(str(tmp_path / "shard_00000"))
    assert all((reader[i] == texts[i]).all() for i in range(50))


def test_token_types_are_megatron_cores():
    from megatron.core.datasets.indexed_dataset import DType

    for vocab_size in (256, 65_499, 65_500, 65_536, 200_000):
        assert token_dtype(vocab_size) == DType.optimal_dtype(vocab_size).__name__


def test_windows_run_over_shards_and_around_the_ring(tmp_path):
    texts = documents(40)
    manifest = write_folder(tmp_path, texts)
    stream = np.concatenate(texts)
    shards = ShardSet(tmp_path, manifest)
    assert shards.tokens == stream.size == manifest.tokens
    ring = np.concatenate([stream, stream])
    for start in range(0, stream.size, 7):
        assert (shards.window(start, 150) == ring[start : start + 150]).all()
    assert (shards.window(0, stream.size) == stream).all()


def test_document_starts_of_a_window(tmp_path):
    texts = documents(40)
    shards = ShardSet(tmp_path, write_folder(tmp_path, texts))
    begins = np.cumsum([0] + [text.size for text in texts[:-1]])
    around = np.concatenate([begins, begins + shards.tokens])
    for start in range(0, shards.tokens, 11):
        inside = around[(around >= start) & (around < start + 150)] - start
        assert shards.document_starts(start, 150).tolist() == inside.tolist()


def test_documents_of_several_sequences_are_read(tmp_path):
    """Indexes of other tools may split a document into sentences, or leave one empty."""
    builder = IndexedDatasetBuilder(str(tmp_path / "pair.bin"), dtype=np.int32)
    builder.add_document(torch.arange(1, 10), [4, 5])
    builder.add_document(torch.arange(0), [])
    builder.add_document(torch.arange(10, 13), [3])
    builder.finalize(str(tmp_path / "pair.idx"))
    index = read_index(tmp_path / "pair.idx")
    assert (index.tokens, index.documents) == (12, 3)
    assert [int(s) for s in index.document_starts()] == [0, 9, 9]
    infos, highest, end = describe_folder(tmp_path, ["pair"])
    assert (infos[0].tokens, highest, end) == (12, 12, None)


def test_more_shards_than_may_stay_open(tmp_path, monkeypatch):
    monkeypatch.setattr("pretrain.data.shards._MAX_OPEN", 2)
    texts = documents(40)
    shards = ShardSet(tmp_path, write_folder(tmp_path, texts, num_shards=10))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert (shards.window(0, shards.tokens) == np.concatenate(texts)).all()
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def damaged(tmp_path, damage):
    texts = documents(40)
    manifest = write_folder(tmp_path, texts)
    damage(tmp_path)
    with pytest.raises(DataError) as caught:
        read_everything(tmp_path, manifest.tokens)
    return str(caught.value)


def read_everything(folder, tokens):
    shards = ShardSet(folder, load_manifest(folder))
    shards.document_starts(0, tokens)
    shards.window(0, tokens)


def cut(path, size):
    os.truncate(path, size)


def overwrite(path, at, content):
    with open(path, "r+b") as stream:
        stream.seek(at)
        stream.write(content)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: (d / "shard_00001.bin").unlink(), ["shard_00001.bin is missing"]),
        (lambda d: (d / "shard_00001.idx").unlink(), ["shard_00001.idx is missing"]),
        (lambda d: cut(d / "shard_00002.bin", 100), ["shard_00002.bin ends at byte 100"]),
        (lambda d: cut(d / "shard_00001.idx", 20), ["shard_00001.idx ends at byte 20", "header"]),
        (lambda d: cut(d / "shard_00001.idx", 99), ["shard_00001.idx ends at byte 99", "was cut"]),
        (lambda d: overwrite(d / "shard_00000.idx", 0, b"X"), ["shard_00000.idx, byte 0"]),
        (lambda d: overwrite(d / "shard_00000.idx", 17, b"\x07"), ["byte 17, has 7"]),
        (lambda d: overwrite(d / "shard_00000.idx", 17, b"\x04"), ["sequences must lie"]),
        (lambda d: overwrite(d / "shard_00000.idx", 34, b"\xff\xff\xff\xff"), ["byte 34"]),
        (lambda d: overwrite(d / "shard_00000.idx", 34, b"\xff\xff\x00\x00"), ["starts at byte"]),
        (lambda d: overwrite(d / "shard_00001.bin", 10, b"\xff\xff"), ["byte 10, has 65535"]),
        (lambda d: (d / "manifest.json").unlink(), ["has shards but no manifest"]),
        (lambda d: cut(d / "manifest.json", 300), ["manifest.json", "whole and of version 1"]),
        (lambda d: cut(d / "manifest.json", 0), ["manifest.json", "whole and of version 1"]),
    ],
)
def test_damage_is_named_with_file_and_place(tmp_path, damage, words):
    message = damaged(tmp_path, damage)
    for word in words:
        assert word.replace("starts at byte", "is said to start at byte") in message


def test_negative_ids_are_found(tmp_path):
    texts = documents(10)
    manifest = write_folder(tmp_path, texts, num_shards=1, dtype="int32")
    overwrite(tmp_path / "shard_00000.bin", 8, b"\xfe\xff\xff\xff")
    with pytest.raises(DataError, match=r"byte 8, has -2"):
        ShardSet(tmp_path, manifest).window(0, 5)


def test_a_shard_cut_while_it_is_used(tmp_path):
    shards = ShardSet(tmp_path, write_folder(tmp_path, documents(40)))
    shards.window(0, 10)
    cut(tmp_path / "shard_00000.bin", 50)
    with pytest.raises(DataError, match=r"shard_00000.bin now ends at byte 50"):
        shards.window(0, 100)


def test_a_stale_manifest_is_found(tmp_path):
    manifest = write_folder(tmp_path, documents(40))
    first = manifest.shards[0].model_copy(update={"documents": 3})
    save_manifest(tmp_path, manifest.model_copy(update={"shards": [first, *manifest.shards[1:]]}))
    with pytest.raises(DataError, match="manifest is stale"):
        ShardSet(tmp_path, load_manifest(tmp_path)).document_starts(0, 10)


def test_an_index_with_other_documents_is_found(tmp_path):
    """As many tokens and documents as before: its checksum alone tells."""
    manifest = write_folder(tmp_path, documents(40), num_shards=1)
    index = read_index(tmp_path / "shard_00000.idx")
    moved = index.lengths.astype(np.int64)
    moved[:2] += (1, -1)
    assert moved.min() > 0
    (tmp_path / "shard_00000.idx").write_bytes(index_bytes(moved, index.dtype))
    shards = ShardSet(tmp_path, manifest)
    with pytest.raises(DataError, match=r"shard_00000.idx: its checksum is not the manifest's"):
        shards.document_starts(0, 10)


def test_a_missing_folder_and_a_parent_folder_are_explained(tmp_path):
    with pytest.raises(DataError, match=r"there is no .*/nowhere"):
        load_manifest(tmp_path / "nowhere")
    write_folder(tmp_path / "train", documents(5))
    with pytest.raises(DataError, match=r"train does: name that"):
        load_manifest(tmp_path)


def test_unigram_entropy(tmp_path):
    texts = [np.array([1, 1, 2, 0]), np.array([1, 1, 2, 0])]
    write_folder(tmp_path, texts, num_shards=2)
    assert token_counts(tmp_path)[:4].tolist() == [2, 4, 2, 0]
    assert bits(unigram_entropy(tmp_path)) == pytest.approx(1.5, abs=1e-12)
