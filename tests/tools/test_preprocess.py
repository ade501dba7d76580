# SPDX-License-Identifier: Apache-2.0
"""Preprocessing: round trip, shuffled and held-out documents, resume, bad input."""

import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow
import pytest
import zstandard
from pyarrow import parquet
from tokenizers import Tokenizer

from pretrain.data.manifest import load_manifest
from pretrain.data.shards import ShardSet
from pretrain.data.tokenizer import load_encoder, slices
from tests.pretrain.data.shard_folders import documents
from tools import preprocess
from tools.quickstart_text import topics

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def texts():
    found = [text for _, text in topics()][:40] or ["word and word again\n" * 50] * 40
    return [text[:3000] + f"\n{number}\n" for number, text in enumerate(found)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_lines(folder / "in.jsonl", texts)
    assert run(folder / "in.jsonl", folder / "out", "train:400", "--valid-fraction", "0") == 0
    return folder / "out" / "tokenizer.json"


def write_lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def run(source, output, tokenizer, *more):
    inputs = [str(p) for p in (source if isinstance(source, list) else [source])]
    arguments = ["--input", *inputs, "--output", str(output), "--tokenizer", str(tokenizer)]
    return preprocess.main([*arguments, "--workers", "1", *more])


def read_documents(folder):
    """Documents of a folder as lists of ids, in the order of the stream."""
    manifest = load_manifest(folder)
    stream = ShardSet(folder, manifest).window(0, manifest.tokens)
    parts = np.split(stream, np.flatnonzero(stream == manifest.eod_id) + 1)
    assert parts[-1].size == 0
    return [part.tolist() for part in parts[:-1]]


def decode(output, split="train"):
    tokenizer = Tokenizer.from_file(str(output / "tokenizer.json"))
    return [
        tokenizer.decode(ids[:-1], skip_special_tokens=False)
        for ids in read_documents(output / split)
    ]


def tree(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }


def test_round_trip_shuffled_and_held_out(tmp_path, texts, tokenizer, capsys):
    write_lines(tmp_path / "in.jsonl", texts)
    assert run(tmp_path / "in.jsonl", tmp_path / "out", tokenizer, "--valid-fraction", "0.2") == 0
    train, valid = decode(tmp_path / "out"), decode(tmp_path / "out", "valid")
    assert sorted(train + valid) == sorted(texts)
    assert 1 <= len(valid) <= 20
    assert train != [text for text in texts if text in set(train)]
    manifest = load_manifest(tmp_path / "out" / "train")
    assert manifest.documents == len(train)
    assert manifest.vocab_size == 400
    assert manifest.eod_id == 0
    assert not (tmp_path / "out" / ".work").exists()
    # Run again: kept, and said so.
    capsys.readouterr()
    before = tree(tmp_path / "out")
    assert run(tmp_path / "in.jsonl", tmp_path / "out", tokenizer, "--valid-fraction", "0.2") == 0
    assert "kept" in capsys.readouterr().out
    assert tree(tmp_path / "out") == before
    # Other settings are not mixed in.
    assert run(tmp_path / "in.jsonl", tmp_path / "out", tokenizer) == 2
    assert "other inputs or settings" in capsys.readouterr().err


def test_workers_pieces_and_compression_do_not_change_the_shards(
    tmp_path, texts, tokenizer, monkeypatch
):
    write_lines(tmp_path / "in.jsonl", texts)
    content = (tmp_path / "in.jsonl").read_bytes()
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(content))
    half = len(content) // 2
    frames = [zstandard.compress(content[:half]), zstandard.compress(content[half:])]
    (tmp_path / "in.jsonl.zst").write_bytes(b"".join(frames))
    small = ["--shard-tokens", "9000", "--valid-fraction", "0.2"]
    run(tmp_path / "in.jsonl", tmp_path / "one", tokenizer, *small)
    run(tmp_path / "in.jsonl", tmp_path / "two", tokenizer, *small, "--workers", "2")
    with monkeypatch.context() as patch:
        patch.setattr("pretrain.data.encode._BATCH_RECORDS", 3)
        run(tmp_path / "in.jsonl", tmp_path / "three", tokenizer, *small, "--piece-tokens", "500")
    run(tmp_path / "in.jsonl.gz", tmp_path / "four", tokenizer, *small)
    run(tmp_path / "in.jsonl.zst", tmp_path / "five", tokenizer, *small)
    expected = tree(tmp_path / "one")
    assert len([name for name in expected if name.startswith("train/") and ".bin" in name]) > 2
    # Over several shards, too, each document is there once.
    found = decode(tmp_path / "one") + decode(tmp_path / "one", "valid")
    assert sorted(found) == sorted(texts)
    for other in ("two", "three", "four", "five"):
        assert tree(tmp_path / other) == expected


@pytest.mark.parametrize("stage", ["pieces", "shards", "manifest"])
def test_killed_and_started_again_gives_the_same_shards(
    tmp_path, texts, tokenizer, stage, monkeypatch, capsys
):
    """The process stops between a temporary file and its rename; nothing half is taken."""
    write_lines(tmp_path / "in.jsonl", texts)
    more = ["--shard-tokens", "9000", "--piece-tokens", "1", "--valid-fraction", "0.2"]
    monkeypatch.setattr("pretrain.data.encode._BATCH_RECORDS", 7)
    run(tmp_path / "in.jsonl", tmp_path / "whole", tokenizer, *more)
    ending = {"pieces": "000002.json", "shards": "shard_00001.bin", "manifest": "manifest.json"}
    replace = os.replace

    def killed(source, target):
        if str(target).endswith(ending[stage]):
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr("os.replace", killed)
    assert run(tmp_path / "in.jsonl", tmp_path / "cut", tokenizer, *more) == 130
    assert not (tmp_path / "cut" / "train" / "manifest.json").exists()
    monkeypatch.setattr("os.replace", replace)
    capsys.readouterr()
    assert run(tmp_path / "in.jsonl", tmp_path / "cut", tokenizer, *more) == 0
    assert "goes on after" in capsys.readouterr().out
    assert tree(tmp_path / "cut") == tree(tmp_path / "whole")


@pytest.mark.slow
def test_a_real_kill_with_workers(tmp_path, texts, tokenizer):
    write_lines(tmp_path / "in.jsonl", [text + str(i) for i in range(60) for text in texts])
    command = [sys.executable, "-m", "tools.preprocess", "--input", str(tmp_path / "in.jsonl")]
    command += ["--tokenizer", str(tokenizer), "--piece-tokens", "100000", "--workers", "2"]
    child = subprocess.Popen([*command, "--output", str(tmp_path / "cut")], cwd=ROOT)
    deadline = time.time() + 100
    while not list((tmp_path / "cut").glob(".work/piece_000002.json")) and time.time() < deadline:
        time.sleep(0.05)
    workers = psutil.Process(child.pid).children(recursive=True)
    child.send_signal(signal.SIGKILL)
    child.wait(30)
    assert workers, "two workers were asked for"
    assert not psutil.wait_procs(workers, timeout=120)[1], "workers outlive their parent"
    for output in ("cut", "whole"):
        arguments = [*command, "--output", str(tmp_path / output)]
        subprocess.run(arguments, cwd=ROOT, check=True, timeout=400)
    assert tree(tmp_path / "cut") == tree(tmp_path / "whole")


def test_token_arrays(tmp_path, tokenizer, capsys):
    """Documents run over into the next array; the last one is ended; counts say so."""
    texts_ = documents(50, vocab=400)
    stream = np.concatenate(texts_).astype(np.uint16)
    np.save(tmp_path / "a.npy", stream[:501])
    packed = zstandard.compress((tmp_path / "a.npy").read_bytes())
    (tmp_path / "a.npy.zst").write_bytes(packed)
    (tmp_path / "a.npy").unlink()
    np.save(tmp_path / "b.npy", stream[501:-1].astype(np.int64))
    inputs = [tmp_path / "a.npy.zst", tmp_path / "b.npy"]
    assert run(inputs, tmp_path / "out", tokenizer, "--valid-fraction", "0") == 0
    found = read_documents(tmp_path / "out" / "train")
    assert sorted(found) == sorted(text.tolist() for text in texts_)
    out = capsys.readouterr().out
    assert "1 documents that ran over into the next token array" in out
    assert "1 token arrays whose last document had no end, ended" in out


def test_bad_text_is_right_or_counted(tmp_path, tokenizer, capsys):
    """CRLF and NUL stay, the name of the end token stays text; bad UTF-8 and empties count."""
    kept = ["line\r\nline\r\n", "nul \x00 byte", "says <|endoftext|> itself", " ", "caf\xe9 \u4e2d"]
    lines = [json.dumps({"text": text}).encode() for text in kept]
    lines += [b'{"text": ""}', b"", b'{"text": "bad \xff byte"}', b'{"text": "lone \\ud800"}']
    (tmp_path / "in.jsonl").write_bytes(b"\r\n".join(lines))
    (tmp_path / "empty.jsonl").write_bytes(b"")
    (tmp_path / "plain.txt").write_bytes(b"\xef\xbb\xbfa text\r\nfile")
    names = ["in.jsonl", "empty.jsonl", "plain.txt"]
    inputs = [tmp_path / name for name in names]
    assert run(inputs, tmp_path / "out", tokenizer, "--valid-fraction", "0") == 0
    expected = [*kept, "bad \ufffd byte", "lone ?", "a text\r\nfile"]
    assert sorted(decode(tmp_path / "out")) == sorted(expected)
    counts = load_manifest(tmp_path / "out" / "train").counts
    assert counts == {
        "documents with invalid UTF-8, repaired": 1,
        "documents with lone surrogates, repaired": 1,
        "empty documents, skipped": 1,
        "empty files, skipped": 1,
        "empty lines, skipped": 1,
    }
    out = capsys.readouterr().out
    assert all(f"{count} {name}" in out for name, count in counts.items())


def test_slices_do_not_change_the_ids(texts, tokenizer):
    encoder = load_encoder(tokenizer)
    assert encoder.sliced
    text = "".join(texts)[:20_000] + "   many   spaces  \n\n and\t tabs 1 2 333 x_y " * 50
    whole = encoder.tokenizer.encode(text, add_special_tokens=False).ids
    pieces = list(slices(text, 300))
    assert len(pieces) > 20
    assert "".join(pieces) == text
    ids = [encoder.tokenizer.encode(piece, add_special_tokens=False).ids for piece in pieces]
    assert [i for piece in ids for i in piece] == whole
    run_without_space = "".join(slices("x" * 5000, 300))
    assert run_without_space == "x" * 5000


def test_training_on_a_line_of_one_character_ends(tmp_path):
    """A trainer takes the square of a word's length: minutes for this one without a bound."""
    write_lines(tmp_path / "in.jsonl", ["x" * 1_000_000, "words and words"])
    began = time.process_time()
    assert run(tmp_path / "in.jsonl", tmp_path / "out", "train:300", "--valid-fraction", "0") == 0
    assert time.process_time() - began < 60
    assert sorted(map(len, decode(tmp_path / "out"))) == [15, 1_000_000]


LONG_LINES = """
import json, sys, time
from pathlib import Path
from tools import preprocess
began = time.process_time()
assert preprocess.main(sys.argv[1:]) == 0
# Not getrusage: its peak counts the process that started this one.
lines = Path("/proc/self/status").read_text().splitlines()
used = next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))
print(json.dumps([time.process_time() - began, used]))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_line_of_50_mb(tmp_path, tokenizer):
    """In time and memory that grow with the line, also while a tokenizer is trained on it."""
    text = "some words, and more words. " * 1_900_000
    texts_ = [text, "x" * 3_000_000]
    write_lines(tmp_path / "in.jsonl", texts_)
    for name, spec in (("given", str(tokenizer)), ("trained", "train:400")):
        arguments = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / name)]
        arguments += ["--tokenizer", spec, "--workers", "1", "--valid-fraction", "0"]
        done = subprocess.run(
            [sys.executable, "-c", LONG_LINES, *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=400,
            check=True,
        )
        seconds, megabytes = json.loads(done.stdout.splitlines()[-1])
        assert seconds < 200
        assert megabytes < 1500
        # Not `==` on the texts in an assertion: explaining a difference of 50 MB never ends.
        digests = {hashlib.sha256(text.encode()).digest() for text in texts_}
        assert set(document_digests(tmp_path / name)) == digests


def document_digests(output):
    """SHA-256 of the text of every document, decoded a million ids at a time (ASCII text)."""
    tokenizer = Tokenizer.from_file(str(output / "tokenizer.json"))
    manifest = load_manifest(output / "train")
    stream = ShardSet(output / "train", manifest).window(0, manifest.tokens)
    for part in np.split(stream, np.flatnonzero(stream == manifest.eod_id) + 1)[:-1]:
        digest = hashlib.sha256()
        for at in range(0, part.size - 1, 1_000_000):
            ids = part[at : min(at + 1_000_000, part.size - 1)].tolist()
            digest.update(tokenizer.decode(ids, skip_special_tokens=False).encode())
        yield digest.digest()


def write_parquet(path, column):
    table = pyarrow.table({"id": list(range(len(column))), "text": column})
    parquet.write_table(table, path, row_group_size=7)


def test_parquet_gives_the_shards_of_json_lines(tmp_path, texts, tokenizer, monkeypatch):
    write_lines(tmp_path / "in.jsonl", texts)
    write_parquet(tmp_path / "in.parquet", texts)
    write_parquet(tmp_path / "packed.parquet", pyarrow.array(texts).dictionary_encode())
    run(tmp_path / "in.jsonl", tmp_path / "one", tokenizer, "--valid-fraction", "0.2")
    for name in ("in", "packed"):
        with monkeypatch.context() as patch:
            patch.setattr("pretrain.data.parquet._ROWS", 5)
            more = ["--valid-fraction", "0.2"]
            assert run(tmp_path / f"{name}.parquet", tmp_path / name, tokenizer, *more) == 0
        assert tree(tmp_path / name) == tree(tmp_path / "one")


def test_parquet_counts_what_is_empty_or_repaired(tmp_path, tokenizer):
    # A writer that does not check its strings leaves bytes that are not UTF-8.
    raw = pyarrow.array([b"kept", b"", None, b"bad \xff byte"], pyarrow.binary())
    broken = pyarrow.StringArray.from_buffers(len(raw), *raw.buffers()[1:], raw.buffers()[0])
    write_parquet(tmp_path / "in.parquet", broken)
    more = ["--valid-fraction", "0"]
    assert run(tmp_path / "in.parquet", tmp_path / "out", tokenizer, *more) == 0
    assert sorted(decode(tmp_path / "out")) == ["bad \ufffd byte", "kept"]
    counts = load_manifest(tmp_path / "out" / "train").counts
    assert counts == {
        "documents with invalid UTF-8, repaired": 1,
        "empty documents, skipped": 2,
    }


def test_parquet_without_its_column_or_package_is_named(tmp_path, tokenizer, capsys, monkeypatch):
    write_parquet(tmp_path / "in.parquet", [1, 2, 3])
    source, output = tmp_path / "in.parquet", tmp_path / "out"
    assert run(source, output, tokenizer) == 2
    assert "has text of type int64: name another column" in capsys.readouterr().err
    assert run(source, output, tokenizer, "--text-key", "body") == 2
    assert "must have a column 'body'" in (error := capsys.readouterr().err)
    assert "has id, text" in error
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert run(source, output, tokenizer) == 2
    assert "pip install pyarrow" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("in.pdf", b"x", "an input must be one of"),
        ("in.parquet", b"x", "readable to its end"),
        ("in.parquet.gz", b"x", "an input must be one of"),
        ("in.jsonl", b'{"text": "a"}\nnot json\n', "in.jsonl, line 2"),
        ("in.jsonl", b'{"content": "a"}\n', "has content: name another key with --text-key"),
        ("in.jsonl", b"[1]\n", "string 'text'"),
        ("in.jsonl", b'{"text": ""}\n', "hold none (1 empty documents, skipped)"),
        ("in.jsonl", b"", "at least one document"),
        (
            "in.jsonl.gz",
            gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-9],
            "readable to its end",
        ),
        ("in.jsonl.zst", zstandard.compress(b'{"text": "a"}\n' * 99)[:-5], "zstd frame is cut"),
        ("in.jsonl.zst", b"not zstd at all", "readable to its end"),
        ("in.npy", b"\x93NUMPY", "one-dimensional .npy"),
        ("in.npy.gz", b"not gzip", "in.npy.gz: Not a gzipped file"),
        ("in.npy.zst", b"not zstd at all", "in.npy.zst: zstd decompressor error"),
        ("in.jsonl.gz", gzip.compress(b"", mtime=0)[:10] + b"\xff" * 50, "readable to its end"),
        (
            "in.jsonl",
            b'{"text": "a", "deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
            "in.jsonl, line 1: ",
        ),
    ],
)
def test_bad_inputs_are_named(tmp_path, tokenizer, capsys, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert run(tmp_path / name, tmp_path / "out", tokenizer) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "out" / "train" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([1, 2, 400, 0]), "position 2, has 400"),
        (np.array([1, -2, 0]), "position 1, has -2"),
        (np.zeros((2, 2), np.int32), "shape (2, 2)"),
        (np.zeros(3), "type float64"),
    ],
)
def test_bad_token_arrays_are_named(tmp_path, tokenizer, capsys, array, message):
    np.save(tmp_path / "in.npy", array)
    assert run(tmp_path / "in.npy", tmp_path / "out", tokenizer) == 2
    assert message in capsys.readouterr().err


def test_a_cut_token_array_is_named(tmp_path, tokenizer, capsys):
    np.save(tmp_path / "in.npy", np.ones(100, np.uint16))
    os.truncate(tmp_path / "in.npy", 128 + 60)
    assert run(tmp_path / "in.npy", tmp_path / "out", tokenizer) == 2
    assert "ends at id 30" in capsys.readouterr().err


def test_options_and_tokenizers_are_checked(tmp_path, texts, capsys):
    write_lines(tmp_path / "in.jsonl", texts)
    source, output = tmp_path / "in.jsonl", tmp_path / "out"
    assert run(source, output, "train:many", "--valid-fraction", "2", "--shard-tokens", "0") == 2
    assert capsys.readouterr().err.count("error:") == 3
    assert run(source, output, "train:100") == 2
    assert "must be at least 257" in capsys.readouterr().err
    assert run(source, output, tmp_path / "none.json") == 2
    assert "there is no" in capsys.readouterr().err
    (tmp_path / "broken.json").write_text("{")
    assert run(source, output, tmp_path / "broken.json") == 2
    assert "must be a tokenizer.json" in capsys.readouterr().err
    assert run(tmp_path / "nothing.jsonl", output, "train:300") == 2
    assert "there is no" in capsys.readouterr().err
    assert run(source, output, "train:300", "--valid-fraction", "0.00001") == 2
    assert "leaves none for valid" in capsys.readouterr().err
    # A setting that was wrong may be mended in place.
    assert run(source, output, "train:300", "--valid-fraction", "0") == 0


def test_a_tokenizer_without_an_end_needs_one_named(tmp_path, texts, tokenizer, capsys):
    content = tokenizer.read_text().replace("<|endoftext|>", "<|begin|>")
    (tmp_path / "other.json").write_text(content)
    write_lines(tmp_path / "in.jsonl", texts)
    arguments = (tmp_path / "in.jsonl", tmp_path / "out", tmp_path / "other.json")
    assert run(*arguments) == 2
    assert "name its id with --eod-id" in capsys.readouterr().err
    assert run(*arguments, "--eod-id", "400") == 2
    assert "in [0, 400); got 400" in capsys.readouterr().err
    assert run(*arguments, "--eod-id", "0", "--valid-fraction", "0") == 0
    assert sorted(decode(tmp_path / "out")) == sorted(texts)


def test_tools_do_not_load_torch():
    """Workers start fast and preprocessing needs no engine."""
    code = "import sys, tools.preprocess; print({'torch', 'megatron'} & set(sys.modules))"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert found.stdout.strip() == "set()", found.stderr
