# SPDX-License-Identifier: Apache-2.0
"""What may be wrong with shards and blends that a run reads: a named error, or the right data."""

import errno
import os

import numpy as np
import pytest

from fused_ops.errors import ConfigError
from pretrain.data import DataConfig, DataError, SourceConfig, TrainLoader, open_dataset
from pretrain.data.loader import BatchOptions
from pretrain.data.manifest import Manifest, load_manifest, save_manifest
from pretrain.data.writer import write_shard
from tests.pretrain.data.shard_folders import EOD, VOCAB, documents, write_folder
from tools import data, preprocess

SEQ = 16


def blend(folder, weights):
    sources = [SourceConfig(path=str(folder / name), weight=w) for name, w in weights.items()]
    return DataConfig(train=sources)


@pytest.fixture
def folders(tmp_path):
    for number, name in enumerate("ab"):
        write_folder(tmp_path / name, documents(40, seed=number))
    return tmp_path


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"a": 1.0, "b": -0.5}, r"finite and not negative; .*/b has -0.5: set it to 0 or more"),
        ({"a": 1.0, "b": float("nan")}, r"finite and not negative; .*/b has nan"),
        (
            {"a": 1.0, "b": 1e-9},
            r"at least 1/1048576 of .*/b has 1e-09 of 1.0\d*: raise",
        ),
        ({"a": 0.0, "b": 0.0}, "one weight at least must be positive"),
        ({"a": [(5, 1.0)], "b": 1.0}, r"list must start at sample 0 and ascend; .*/a"),
        ({"a": [(0, 1.0), (9, 2.0), (9, 3.0)], "b": 1.0}, "must start at sample 0 and ascend"),
        ({"a": [(0, 1.0), (9, 0.0)], "b": [(0, 1.0), (9, 0.0)]}, "at least must be positive"),
    ],
)
def test_weights_of_sources(folders, weights, words):
    with pytest.raises(ConfigError, match=words):
        open_dataset(blend(folders, weights), SEQ, seed=1)


def test_a_source_of_weight_zero_is_not_read(folders):
    zero = open_dataset(blend(folders, {"a": 0.0, "b": 2.0}), SEQ, seed=1)
    alone = open_dataset(DataConfig(train=str(folders / "b")), SEQ, seed=1)
    assert [zero.sample(i).tolist() for i in range(60)] == [
        alone.sample(i).tolist() for i in range(60)
    ]
    assert [row["samples"] for row in zero.consumed(60)] == [0, 60]


def test_tiny_and_huge_weights_stay_within_two_samples(folders):
    dataset = open_dataset(blend(folders, {"a": 1e-3, "b": 999e-3}), SEQ, seed=1)
    drawn = np.cumsum([dataset.place(i)[0] == 0 for i in range(5000)])
    ideal = np.arange(1, 5001) * dataset.weights[0] / 2**20
    assert dataset.weights == [1049, 1047527]
    assert np.abs(drawn - ideal).max() < 2


def test_a_shard_that_vanishes_while_a_run_reads(tmp_path, monkeypatch):
    """One that is open stays readable; one that must be opened is named with its file."""
    monkeypatch.setattr("pretrain.data.shards._MAX_OPEN", 1)
    write_folder(tmp_path, documents(200), num_shards=4)
    dataset = open_dataset(DataConfig(train=str(tmp_path)), SEQ, seed=1)
    whole = [dataset.sample(i).tolist() for i in range(100)]
    loader = TrainLoader(dataset, 4, 4, prefetch=True)
    loader.step(0)
    (tmp_path / "shard_00002.bin").rename(tmp_path / "gone")
    with pytest.raises(DataError, match=r"shard_00002.bin is missing \(the manifest says \d+ tok"):
        [loader.step(consumed) for consumed in range(4, 400, 4)]
    (tmp_path / "gone").rename(tmp_path / "shard_00002.bin")
    again = [loader.step(consumed)[0]["tokens"].tolist() for consumed in range(0, 100, 4)]
    assert [row for step in again for row in step] == [ids[:-1] for ids in whole]
    loader.close()


def test_a_shard_that_vanishes_as_it_is_opened(tmp_path, monkeypatch):
    write_folder(tmp_path, documents(60), num_shards=1)
    dataset = open_dataset(DataConfig(train=str(tmp_path)), SEQ, seed=1)
    real_open = os.open

    def lose_and_open(path, flags):
        os.unlink(path)
        return real_open(path, flags)

    monkeypatch.setattr(os, "open", lose_and_open)
    with pytest.raises(DataError, match=r"shard_00000.bin is missing \(the manifest says \d+ tok"):
        dataset.sample(0)


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_shard_that_cannot_be_read(tmp_path, monkeypatch, call):
    write_folder(tmp_path, documents(60), num_shards=1)
    dataset = open_dataset(DataConfig(train=str(tmp_path)), SEQ, seed=1)

    def fail(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(DataError, match=r"must be readable; .*shard_00000.bin: Input/output error"):
        dataset.sample(0)


def test_an_open_shard_that_is_deleted_gives_the_right_data(tmp_path):
    write_folder(tmp_path, documents(60), num_shards=1)
    dataset = open_dataset(DataConfig(train=str(tmp_path)), SEQ, seed=1)
    expected = dataset.sample(7).tolist()
    (tmp_path / "shard_00000.bin").unlink()
    assert dataset.sample(7).tolist() == expected


def test_an_index_that_goes_past_the_end_of_its_bin(tmp_path, capsys):
    texts = documents(40)
    manifest = write_folder(tmp_path, texts, num_shards=1)
    longer = write_folder(tmp_path / "longer", [*texts, *texts], num_shards=1)
    assert longer.tokens == 2 * manifest.tokens
    os.replace(tmp_path / "longer" / "shard_00000.idx", tmp_path / "shard_00000.idx")
    said = rf"shard_00000.idx has \('uint16', {longer.tokens}, 80\), the manifest says"
    options = DataConfig(train=str(tmp_path), isolate_documents=True)
    loader = TrainLoader(open_dataset(options, SEQ, 1), 4, 4, options=BatchOptions.of(options))
    with pytest.raises(DataError, match=said):
        loader.step(0)
    assert data.main(["verify", str(tmp_path)]) == 1
    assert f"{longer.tokens}, 80), the manifest says" in capsys.readouterr().out
    assert preprocess.main(["index", str(tmp_path)]) == 2
    assert f"must hold {2 * longer.tokens} bytes" in capsys.readouterr().err


def test_sources_of_two_tokenizers(folders):
    for name in "ab":
        manifest = load_manifest(folders / name)
        changed = manifest.model_copy(update={"tokenizer_fingerprint": f"sha256:{name}"})
        save_manifest(folders / name, changed)
    with pytest.raises(DataError, match=r"one tokenizer; .*/b is of sha256:b, others of sha256:a"):
        open_dataset(blend(folders, {"a": 1.0, "b": 1.0}), SEQ, seed=1)


def test_an_empty_corpus(tmp_path):
    info = write_shard(tmp_path, "shard_00000", np.zeros(0, np.uint16), np.zeros(0, np.int64))
    for shards in ([], [info]):
        empty = Manifest(tokenizer_fingerprint=None, vocab_size=VOCAB, eod_id=EOD, shards=shards)
        save_manifest(tmp_path, empty)
        with pytest.raises(DataError, match=r"must hold at least one token; .*manifest.json"):
            open_dataset(DataConfig(train=str(tmp_path)), SEQ, seed=1)


def test_an_empty_shard_among_others_is_passed_over(tmp_path):
    texts = documents(40)
    manifest = write_folder(tmp_path, texts, num_shards=2)
    info = write_shard(tmp_path, "shard_empty", np.zeros(0, np.uint16), np.zeros(0, np.int64))
    shards = [manifest.shards[0], info, manifest.shards[1], info]
    save_manifest(tmp_path, manifest.model_copy(update={"shards": shards}))
    dataset = open_dataset(DataConfig(train=str(tmp_path)), SEQ, seed=1)
    stream = np.concatenate(texts)
    assert (dataset.shards[0].window(0, stream.size) == stream).all()
    assert dataset.shards[0].document_starts(0, stream.size).size == len(texts)
    assert all(dataset.sample(i).size == SEQ + 1 for i in range(200))


def test_documents_longer_and_shorter_than_a_sample(tmp_path):
    """A document of 300 tokens over 18 windows, then documents of one token and their end."""
    texts = [np.append(np.arange(1, 300), EOD), *[np.array([7, EOD])] * 40]
    write_folder(tmp_path, texts, num_shards=2)
    options = DataConfig(train=str(tmp_path), isolate_documents=True, reset_position_ids=True)
    dataset = open_dataset(options, SEQ, seed=1)
    loader = TrainLoader(dataset, 1, 1, options=BatchOptions.of(options))
    for consumed in range(2 * dataset.orders[0].samples_per_epoch):
        (batch,) = loader.step(consumed)
        ids, bounds = batch["tokens"][0].tolist(), batch["cu_seqlens"].tolist()
        starts = [0] + [i + 1 for i, token in enumerate(ids[:-1]) if token == EOD]
        # The ring's end joins the last document's end to the first document's beginning.
        assert bounds == [*starts, SEQ]
        assert batch["position_ids"][0].tolist() == [
            i - max(s for s in starts if s <= i) for i in range(SEQ)
        ]
