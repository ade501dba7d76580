# SPDX-License-Identifier: Apache-2.0
"""Verification finds each kind of damage and names file and place."""

import os

import numpy as np
import pytest

from pretrain.data.manifest import save_manifest
from tests.pretrain.data.shard_folders import documents, write_folder
from tools import data


def overwrite(path, at, content):
    with open(path, "r+b") as stream:
        stream.seek(at)
        stream.write(content)


def flip(path, at):
    overwrite(path, at, bytes([path.read_bytes()[at] ^ 1]))


def verified(folder, capsys):
    status = data.main(["verify", str(folder)])
    return status, capsys.readouterr().out


@pytest.fixture
def folder(tmp_path):
    # More than two blocks of checksums in the last shard.
    write_folder(tmp_path / "train", documents(3000, longest=60), num_shards=2)
    return tmp_path / "train"


def test_whole_folders_have_no_finding(folder, capsys):
    status, out = verified(folder, capsys)
    assert (status, out.splitlines()[-1]) == (0, f"{folder}: no findings")
    assert verified(folder.parent, capsys)[0] == 0


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: flip(d / "shard_00001.bin", 70_000), "bytes 65536 to "),
        (lambda d: overwrite(d / "shard_00001.bin", 70_000, b"\xff\xff"), "byte 70000: id 65535"),
        (lambda d: os.truncate(d / "shard_00000.bin", 5000), "ends at byte 5000"),
        (lambda d: os.truncate(d / "shard_00000.idx", 500), "shard_00000.idx ends at byte 500"),
        (lambda d: overwrite(d / "shard_00000.idx", 500, b"\x01"), "shard_00000.idx: its checksum"),
        (lambda d: (d / "shard_00001.bin").unlink(), "shard_00001.bin is missing"),
        (lambda d: (d / "shard_00002.bin").write_bytes(b"xx"), "does not name it"),
        (lambda d: (d / "shard_00002.bin.tmp").write_bytes(b"xx"), "interrupted write"),
        (lambda d: (d / "manifest.json").write_text("{"), "whole and of version 1"),
        (lambda d: (d.parent / "tokenizer.json").write_text("{}"), "no findings"),
    ],
)
def test_damage_is_found(folder, capsys, damage, words):
    damage(folder)
    status, out = verified(folder, capsys)
    assert words in out
    assert status == (0 if words == "no findings" else 1)


def test_a_stale_manifest_is_told_from_damage(folder, capsys):
    manifest = data.load_manifest(folder)
    other = manifest.shards[0].model_copy(update={"bin_checksum": "sha256:0"})
    changed = manifest.model_copy(update={"shards": [other, manifest.shards[1]]})
    save_manifest(folder, changed.model_copy(update={"tokenizer_fingerprint": "sha256:1"}))
    (folder.parent / "tokenizer.json").write_text("{}")
    _, out = verified(folder, capsys)
    assert "shard_00000.bin: whole by shard_00000.crc32" in out
    assert "must be the one the shards were made with, sha256:1" in out
    assert "3 findings" not in out
    assert "2 findings" in out


def test_empty_and_endless_documents_are_found(tmp_path, capsys):
    texts = [np.array([5, 6, 0]), np.array([0]), np.array([7, 8]), np.array([9, 0])]
    write_folder(tmp_path, texts, num_shards=1)
    status, out = verified(tmp_path, capsys)
    assert status == 1
    assert "byte 6: document 1 is empty (1 such documents)" in out
    assert "byte 10: document 2 does not end with id 0 (1 such documents)" in out


def test_stats(tmp_path, capsys):
    write_folder(tmp_path, [np.array([1, 1, 2, 0])] * 2, num_shards=2)
    assert data.main(["stats", str(tmp_path)]) == 0
    assert "8 tokens, 2 documents, 2 shards" in (out := capsys.readouterr().out)
    assert "(1.5000 bits)" in out
    assert data.main(["stats", str(tmp_path / "none")]) == 2
