# SPDX-License-Identifier: Apache-2.0
"""Preprocessing: which files are read, and manifests for shards that exist."""

import json
import os

import numpy as np
import pytest

from pretrain.data.manifest import load_manifest
from pretrain.data.writer import write_shard
from tools import preprocess


@pytest.fixture
def written(tmp_path):
    """A JSON lines file of 40 documents, and the folder that it was made into."""
    lines = [json.dumps({"text": f"document {number} of some words"}) for number in range(40)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    assert run([tmp_path / "in.jsonl"], tmp_path / "made", "train:400") == 0
    return tmp_path


def run(inputs, output, tokenizer):
    arguments = ["--input", *map(str, inputs), "--output", str(output)]
    arguments += ["--tokenizer", str(tokenizer), "--workers", "1", "--valid-fraction", "0"]
    return preprocess.main(arguments)


def test_files_of_a_folder_that_are_not_read_are_counted(written, capsys):
    (written / "in").mkdir()
    (written / "in.jsonl").rename(written / "in" / "a.jsonl")
    for name in ("page.html", "other.html", "b.parquet.gz", "LICENSE"):
        (written / "in" / name).write_bytes(b"x")
    assert run([written / "in"], written / "out", written / "made" / "tokenizer.json") == 0
    out = capsys.readouterr().out
    assert "2 files *.html of another kind, skipped" in out
    assert load_manifest(written / "out" / "train").counts == {
        "files * of another kind, skipped": 1,
        "files *.gz of another kind, skipped": 1,
        "files *.html of another kind, skipped": 2,
    }


def test_a_file_that_is_named_twice_is_refused(written, capsys):
    inputs = [written / "in.jsonl", written / "*.jsonl"]
    assert run(inputs, written / "out", written / "made" / "tokenizer.json") == 2
    assert f"{written / 'in.jsonl'} is named twice" in capsys.readouterr().err


def test_index_describes_existing_shards(written, capsys):
    folder, tokenizer = written / "made" / "train", written / "made" / "tokenizer.json"
    before = load_manifest(folder)
    (folder / "manifest.json").unlink()
    assert preprocess.main(["index", str(folder), "--tokenizer", str(tokenizer)]) == 0
    assert load_manifest(folder).shards == before.shards
    assert load_manifest(folder).fingerprint() == before.fingerprint()
    assert preprocess.main(["index", str(folder)]) == 0
    found = load_manifest(folder)
    assert found.eod_id == 0
    assert found.vocab_size <= 400
    assert preprocess.main(["index", str(folder), "--vocab-size", "10"]) == 2
    assert f"must be in [0, 10); {folder / 'shard_00000.bin'}, byte " in capsys.readouterr().err
    os.truncate(folder / "shard_00000.bin", 1000)
    assert preprocess.main(["index", str(folder)]) == 2
    assert "ends at byte 1000" in capsys.readouterr().err
    assert preprocess.main(["index", str(written / "in.jsonl")]) == 2


def test_index_names_everything_that_is_wrong(tmp_path, capsys):
    """All shards at once: half a pair, ids that are negative, above the vocabulary."""
    write_shard(tmp_path, "a", np.array([5, 1, -3, 0], np.int32), np.array([4]))
    write_shard(tmp_path, "b", np.array([1, 70, 0], np.int32), np.array([3]))
    write_shard(tmp_path, "c", np.array([1, 2, 0], np.int32), np.array([3]))
    (tmp_path / "c.idx").unlink()
    assert preprocess.main(["index", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / 'a.bin'}, byte 8, has -3" in error
    assert f"{tmp_path / 'c.idx'}: No such file" in error
    assert error.count("error:") == 2
    assert preprocess.main(["index", str(tmp_path), "--vocab-size", "70"]) == 2
    error = capsys.readouterr().err
    assert f"in [0, 70); {tmp_path / 'b.bin'}, byte 4, has 70" in error
    assert error.count("error:") == 3
    assert not (tmp_path / "manifest.json").exists()
