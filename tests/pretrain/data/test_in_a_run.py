# SPDX-License-Identifier: Apache-2.0
"""In whole runs: what `tools.data show` says is what the model is given; data that changes."""

import json

import pytest
import yaml

import pretrain.train_step
from pretrain.__main__ import main
from pretrain.data import DataConfig, open_dataset
from tests.toy import SEQ_LENGTH, make_toy, toy_config
from tools import data

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
        assert main([str(config)]) == 0
    return folder, config, seen


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
