# SPDX-License-Identifier: Apache-2.0
"""Verification finds each kind of damage and names file and place."""

import os
import re

import numpy as np
import pytest
import yaml

from pretrain.data.manifest import load_manifest, save_manifest
from pretrain.data.measure import synthetic_folder
from pretrain.data.stats import document_lengths, length_lines
from tests.pretrain.data.shard_folders import documents, write_folder
from tests.toy import toy_config
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
    manifest = load_manifest(folder)
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
    picture = tmp_path / "lengths.png"
    assert data.main(["stats", str(tmp_path), "--picture", str(picture)]) == 0
    assert "8 tokens, 2 documents, 2 shards" in (out := capsys.readouterr().out)
    assert "(1.5000 bits)" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert data.main(["stats", str(tmp_path / "none")]) == 2
    assert data.main(["stats", "s3://bucket/folder"]) == 2
    assert "reads folders of this machine; got s3://bucket/folder" in capsys.readouterr().err


def test_lengths_are_counted_in_powers_of_two(tmp_path, capsys):
    sizes = [2, 3, 4, 7, 8, 8, 1000]
    write_folder(tmp_path, [np.append(np.ones(n - 1, int), 0) for n in sizes], num_shards=2)
    found = document_lengths(tmp_path)
    said = dict(zip(found.labels(), zip(found.documents.tolist(), found.tokens.tolist())))
    assert {label: pair for label, pair in said.items() if pair[0]} == {
        "2-3": (2, 5),
        "4-7": (2, 11),
        "8-15": (2, 16),
        "512-1023": (1, 1000),
    }
    assert (found.shortest, found.longest) == (2, 1000)
    lines = length_lines(found)
    assert lines[0].split()[:3] == ["2-3", "2", "#" * 40]
    assert lines[-1].split()[:3] == ["512-1023", "1", "#" * 20]
    assert "96.9% of the tokens" in lines[-1]


def test_stats_of_a_run_file_show_its_blend(tmp_path, capsys):
    for number, name in enumerate("ab"):
        write_folder(tmp_path / name, documents(60, seed=number))
    sources = [
        {"path": str(tmp_path / "a"), "weight": [[0, 3.0], [20, 1.0]]},
        {"path": str(tmp_path / "b"), "weight": 1.0},
    ]
    run = toy_config(tmp_path, data={"train": sources, "valid": None})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    command = ["stats", str(tmp_path / "run.yaml"), "train.steps=5"]
    assert data.main(command) == 0
    out = capsys.readouterr().out
    assert "40 samples of 32 tokens in 5 steps" in out
    assert "from sample 0\n  0.750000 (786432/1048576)" in out
    assert "from sample 20\n  0.500000 (524288/1048576)" in out
    assert f"25 samples, {25 / (manifest_tokens(tmp_path / 'a') // 32):.4f} epochs of" in out


def manifest_tokens(folder):
    return load_manifest(folder).tokens


def test_bench_measures_both_on_the_same_files(tmp_path, capsys):
    folder = synthetic_folder(tmp_path, 200_000)
    command = ["bench", str(folder), "--seq-length", "512", "--tokens", "32768", "--rounds", "2"]
    assert data.main(command) == 0
    out = capsys.readouterr().out
    found = re.findall(r"([\d.]+) M tokens/s, .* ([\d.]+) M tokens/s, ratio ([\d.]+)", out)
    assert len(found) == 2
    for ours, theirs, ratio in ([float(value) for value in row] for row in found):
        assert ours > 0
        assert ratio == pytest.approx(ours / theirs, rel=0.05)


def test_starts_are_measured_and_drawn(tmp_path, capsys):
    picture = tmp_path / "starts.png"
    command = ["bench", "--start", "--documents", "6400", "--shards", "300", "--seq-length", "64"]
    assert data.main([*command, "--picture", str(picture)]) == 0
    out = capsys.readouterr().out
    assert out.count("megatron-core:") == 7
    assert out.count("nibble:") == 10
    assert "6400 documents" in out
    assert "30.0 G tokens" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_words_that_are_no_settings_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        data.main(["show", "run.yaml", "--step", "3", "--stepp"])
    assert caught.value.code == 2
    with pytest.raises(SystemExit):
        data.main(["verify", str(tmp_path), "run.name=x"])
    assert "unrecognized arguments: run.name=x" in capsys.readouterr().err
