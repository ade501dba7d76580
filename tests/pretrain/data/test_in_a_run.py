# SPDX-License-Identifier: Apache-2.0
"""In whole runs: what `tools.data show` says is what the model is given; data that changes."""

import json
import shutil

import numpy as np
import pytest
import yaml

import pretrain.data
import pretrain.train_step
import pretrain.trainer
from pretrain.__main__ import main
from pretrain.data import DataConfig, open_dataset
from pretrain.data.shards import read_index
from pretrain.data.writer import index_bytes
from tests.toy import SEQ_LENGTH, VOCAB, make_toy, toy_config
from tools import data, preprocess

SIZES = [4, 4, 8, 8]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of four steps whose batch grows, and the inputs of every step, as they were used."""
    folder = tmp_path_factory.mktemp("run")
    sections = {
        "train": {
            "steps": 4,
            "global_batch_size": 8,
            "step_batch_size_schedule": [[0, 4], [5, 8]],
            "micro_batch_size": 2,
            "eval_batches": 1,
            "dtype": "fp32",
        },
        "checkpoint": {"interval": 2, "keep_last": 0},
    }
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(toy_config(make_toy(folder), "*-", **sections)))
    with pytest.MonkeyPatch.context() as patch:
        seen = hooked(patch)
        order = first_reads(patch)
        assert main([str(config)]) == 0
    # The first step is read while the model is made, and only once.
    assert [what for what in order if what in ("prepare 0", "engine")] == ["prepare 0", "engine"]
    assert order.count("read 0") == 1
    return folder, config, seen


def first_reads(patch):
    """What is done in what order: the first step prepared, the engine made, steps read."""
    order, loader = [], pretrain.data.TrainLoader
    prepare, make, build = loader.prepare, loader._make, pretrain.trainer.build_engine

    def noted(text, call):
        def called(*arguments):
            order.append(text if text == "engine" else f"{text} {arguments[1]}")
            return call(*arguments)

        return called

    patch.setattr(loader, "prepare", noted("prepare", prepare))
    patch.setattr(loader, "_make", noted("read", make))
    patch.setattr("pretrain.trainer.build_engine", noted("engine", build))
    return order


def hooked(patch):
    """{step: inputs of its micro-batches in order}, taken where a micro-batch enters the model."""
    seen, prepare, train_step = {}, pretrain.train_step.prepare, pretrain.train_step.train_step

    def counted(engine, batches, *rest):
        seen[len(seen) + 1] = []
        return train_step(engine, batches, *rest)

    def kept(engine, batch):
        prepared = prepare(engine, batch)
        if engine.chunks[0].training:
            seen[max(seen)].append((prepared["index"], prepared["tokens"].tolist()))
        return prepared

    patch.setattr("pretrain.trainer.train_step", counted)
    patch.setattr(pretrain.train_step, "prepare", kept)
    return seen


def rows(folder, kind="loss"):
    lines = (folder / "runs" / "toy" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if kind in row]


def test_the_batch_grows_at_its_sample(trained):
    folder, _, seen = trained
    inputs = {
        step: [t for _, tokens in sorted(found) for t in tokens] for step, found in seen.items()
    }
    assert [len(inputs[step]) for step in range(1, 5)] == SIZES
    assert [row["samples"] for row in rows(folder)] == [4, 8, 16, 24]
    assert [row["tokens"] for row in rows(folder)] == [n * SEQ_LENGTH for n in (4, 8, 16, 24)]
    dataset = open_dataset(DataConfig(train=str(folder / "train")), SEQ_LENGTH, seed=7)
    expected = [dataset.sample(i)[:-1].tolist() for i in range(24)]
    assert [t for step in range(1, 5) for t in inputs[step]] == expected


def test_show_is_what_the_run_was_given(trained, capsys):
    folder, config, seen = trained
    shards = open_dataset(DataConfig(train=str(folder / "train")), SEQ_LENGTH, seed=7).shards[0]
    for step in range(1, 5):
        assert data.main(["show", str(config), "--step", str(step), "--json"]) == 0
        shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [s["ids"] for s in shown] == [t for _, tokens in sorted(seen[step]) for t in tokens]
        assert [s["micro_batch"] for s in shown] == [i // 2 for i in range(SIZES[step - 1])]
        for sample in shown:
            starts = shards.shard(0).document_starts()
            for piece in sample["documents"]:
                at = starts[piece["document"]] + piece["first"]
                assert shards.window(at, piece["tokens"]).tolist() == piece["ids"]


def test_show_divides_a_step_over_ranks_and_prints_it(trained, capsys):
    _, config, seen = trained
    command = ["show", str(config), "--step", "4", "--ranks", "2", "--rank", "1"]
    assert data.main([*command, "--json", "run.name=toy"]) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    mine = [tokens for index, tokens in sorted(seen[4]) if index % 2]
    assert [s["ids"] for s in shown] == [t for tokens in mine for t in tokens]
    assert data.main(command) == 0
    out = capsys.readouterr().out
    assert "step 4 reads samples 16 to 23: 2 data-parallel ranks, micro-batches of 2" in out
    assert "rank 1, micro-batch 1, sample 18: " in out
    assert "shard-000 document " in out
    assert data.main([*command[:4], "--ranks", "3"]) == 2
    assert "got 8; the nearest valid sizes are 6 and 12" in capsys.readouterr().err
    assert data.main(["show", str(config), "--step", "0"]) == 2
    assert "--step counts from 1; got 0" in capsys.readouterr().err


def test_show_steps_over_what_the_run_stepped_over(tmp_path, capsys, monkeypatch):
    """Left out from the start, set midway, and still to come; with the ids of the run."""
    config = tmp_path / "run.yaml"
    sections = {
        "train": {"steps": 3, "global_batch_size": 4, "micro_batch_size": 2, "dtype": "fp32"},
        "data": {"valid": None, "skip_samples": [[2, 4]]},
        "checkpoint": {"interval": 3},
    }
    config.write_text(yaml.safe_dump(toy_config(make_toy(tmp_path), "*-", **sections)))
    seen = hooked(monkeypatch)
    assert main([str(config)]) == 0
    # Samples 0, 1 and 5 to 14 are read; what is left out later was read by step 3.
    later = [str(config), "data.skip_samples=[[2,4],[12,13],[16,17],[21,21]]", "train.steps=5"]
    assert main(later) == 0
    capsys.readouterr()
    samples = [[0, 1, 5, 6], [7, 8, 9, 10], [11, 12, 13, 14], [15, 18, 19, 20], [22, 23, 24, 25]]
    for step, expected in enumerate(samples, 1):
        assert data.main(["show", *later, "--step", str(step), "--json"]) == 0
        shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [s["sample"] for s in shown] == expected
        assert [s["ids"] for s in shown] == [t for _, tokens in sorted(seen[step]) for t in tokens]
    assert data.main(["show", *later, "--step", "7"]) == 0
    assert "step 7 reads samples 30 to 33: " in capsys.readouterr().out
    assert data.main(["show", *later, "--step", "1"]) == 0
    assert "samples 0 to 6 without 3 that are stepped over" in capsys.readouterr().out
    # Before the run has started, and with a rollback that no checkpoint knows yet.
    shutil.rmtree(tmp_path / "runs")
    assert data.main(["show", *later, "--step", "5"]) == 0
    assert "step 5 reads samples 24 to 27: " in capsys.readouterr().out
    (tmp_path / "runs" / "toy").mkdir(parents=True)
    rows = [
        {"step": 1, "loss": 1.0, "samples": 7},
        {"step": 1, "event": "rollback", "samples": [7, 10]},
        {"step": 2, "loss": 1.0, "samples": 15},
    ]
    record = tmp_path / "runs" / "toy" / "metrics.jsonl"
    record.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert data.main(["show", *later[:1], "--step", "2", "--json"]) == 0
    shown = [json.loads(line)["sample"] for line in capsys.readouterr().out.splitlines()]
    assert shown == [11, 12, 13, 14]


def test_another_sequence_length_is_refused_or_goes_on(trained, capfd, caplog, monkeypatch):
    folder, config, _ = trained
    longer = [str(config), "model.seq_length=64", "train.steps=6"]
    assert main(longer) == 2
    said = capfd.readouterr().err
    assert "model.seq_length: 32 in the checkpoint, 64 now" in said
    assert "set data.on_change=continue" in said
    seen = hooked(monkeypatch)
    assert main([*longer, "data.on_change=continue"]) == 0
    said = capfd.readouterr().err + caplog.text
    assert "the data changes at sample 24; sequence length 32 -> 64" in said
    assert "of this epoch 0 tokens are seen twice and" in said
    fresh = open_dataset(DataConfig(train=str(folder / "train")), SEQ_LENGTH, seed=7)
    plan = DataConfig(train=str(folder / "train"), on_change="continue")
    went_on = open_dataset(plan, 64, seed=7, state=fresh.state_dict(24))
    expected = [went_on.sample(i)[:-1].tolist() for i in range(24, 40)]
    assert [t for step in (1, 2) for _, ts in sorted(seen[step]) for t in ts] == expected
    # Its inputs are none of those that were read before.
    before = {t % fresh.shards[0].tokens for t in read_by(fresh, range(24))}
    assert not before & {t % fresh.shards[0].tokens for t in read_by(went_on, range(24, 40))}
    # Both sides of the change can be shown.
    for step, length in ((4, 32), (5, 64)):
        command = ["show", str(config), "model.seq_length=64", "--step", str(step), "--json"]
        assert data.main(command) == 0
        shown = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
        assert {len(s["ids"]) for s in shown} == {length}
    assert [s["ids"] for s in shown] == expected[:8]


def read_by(dataset, samples):
    return [dataset.place(i)[1] + k for i in samples for k in range(dataset.seq_length)]


@pytest.mark.parametrize("isolate", [True, False])
def test_documents_that_begin_elsewhere_are_refused_where_they_are_kept_apart(
    tmp_path, capfd, isolate
):
    """The tokens and their order are the same; only runs that keep documents apart see the cut."""
    sections = {
        "train": {"steps": 1, "dtype": "fp32"},
        "data": {"train": str(tmp_path / "train"), "isolate_documents": isolate},
    }
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(toy_config(make_toy(tmp_path), "*-", **sections)))
    assert main([str(config)]) == 0
    capfd.readouterr()
    index = read_index(tmp_path / "train" / "shard-000.idx")
    lengths = [int(index.lengths[:2].sum()), *index.lengths[2:].tolist()]
    joined = index_bytes(np.array(lengths), index.dtype)
    (tmp_path / "train" / "shard-000.idx").write_bytes(joined)
    assert preprocess.main(["index", str(tmp_path / "train"), "--vocab-size", str(VOCAB)]) == 0
    assert main([str(config), "train.steps=2"]) == (2 if isolate else 0)
    said = capfd.readouterr().err
    assert ("the division into documents is not the checkpoint's" in said) == isolate
    assert "Traceback" not in said
