# SPDX-License-Identifier: Apache-2.0
"""Comparing runs that did not end as runs do: no numbers, no last validation, sets with names."""

import json
import math

import pytest
import yaml

from pretrain.comparison.compare import load_rows
from pretrain.comparison.gaps import (
    broken_seeds,
    diverged_at,
    final_gaps,
    first_difference,
    mean_curve,
    training_gaps,
)
from pretrain.comparison.picture import write_png
from pretrain.comparison.reference import Reference, judge
from pretrain.comparison.spread import spread
from pretrain.comparison.summary import cells, ratios, summarize
from pretrain.history import encode_row, read_metrics
from tests.pretrain.test_comparison import write_run
from tools.compare_runs import main

PAIR = (("bf16", "bf16"), ("v1", "nvfp4"))


def change_rows(run, change):
    """metrics.jsonl of a run with `change` done to each row."""
    path = run / "metrics.jsonl"
    path.write_bytes(b"".join(encode_row(change(row)) for row in read_metrics(path)))


def without_numbers(first, last=math.inf):
    """A change of rows: their losses are NaN at some steps."""
    return lambda row: {
        k: math.nan if "loss" in k and first <= row["step"] <= last else v for k, v in row.items()
    }


def test_validation_sets_with_names(tmp_path):
    """The columns are of the first; the others are told. Sets of other names are no pair."""
    runs = [write_run(tmp_path, "a", 1, 0.0, "bf16"), write_run(tmp_path, "b", 1, 0.02, "nvfp4")]

    def named(first, second, factor):
        return lambda row: {
            (f"{k}/{name}" if k.startswith("val") else k): v * scale if k.startswith("val") else v
            for k, v in row.items()
            for name, scale in ((first, 1.0), (second, factor))
        }

    change_rows(runs[0], named("web", "code", 1.0))
    change_rows(runs[1], named("web", "code", 1.01))
    base, row = load_rows([tmp_path])
    assert (broken_seeds(row), broken_seeds(base)) == ([], [])
    line = summarize([base, row], base)[1]
    assert line.gaps["own"].mean == pytest.approx(2.0)
    assert line.verdict == "one seed: no interval"
    assert line.notes == [
        "losses and gaps are of validation set web",
        "gap on code: own forward +3.02 %, bf16 forward +2.51 %",
    ]
    renamed = runs[1] / "metrics.jsonl"
    renamed.write_text(renamed.read_text().replace("/web", "/books"))
    base, row = load_rows([tmp_path])
    assert final_gaps(row, base) == {}, "books is not web"
    assert final_gaps(row, base, "own", "code") == {1: pytest.approx(3.02)}


def test_a_longer_run_is_no_base_of_a_shorter_one(tmp_path):
    """Before its learning rate falls, its loss is higher than where the shorter run ended."""
    for seed in (1, 2):
        write_run(tmp_path, "a", seed, 0.02, "bf16")
        write_run(tmp_path, "b", seed, 0.01, "nvfp4", steps=40)
    for run in tmp_path.glob("b-*"):
        config = run / "config.yaml"
        config.write_text(config.read_text().replace("steps: 120", "steps: 40"))
    rows = load_rows([tmp_path])
    assert all(run.finished for row in rows for run in row.runs.values())
    line = summarize(rows, rows[0])[1]
    assert (line.verdict, line.training_gap) == ("no common end", None)
    assert "differs from the base in train.steps: 120 and 40" in line.notes


def test_a_quantized_base_has_no_16_bit_forward_of_its_own(tmp_path, capsys):
    """Its quantized loss is not what a 16-bit forward is compared with, nor are references."""
    base, _ = (write_run(tmp_path, n, 1, f, r) for n, f, r in
               (("a", 0.01, "nvfp4"), ("b", 0.02, "nvfp4_fast")))  # fmt: skip
    change_rows(base, lambda row: {k: v for k, v in row.items() if k != "val_loss_bf16"})
    rows = load_rows([tmp_path])
    assert final_gaps(rows[1], rows[0]) == {1: pytest.approx(100 * (1.02 / 1.01 - 1))}
    assert final_gaps(rows[1], rows[0], "bf16") == {}
    for option in (["--against", "reference"], ["--write-reference", str(tmp_path)]):
        assert main([str(tmp_path), "--output", str(tmp_path), *option]) == 2
        assert "the base is a, which computes in other formats" in capsys.readouterr().err
    alone = write_run(tmp_path / "high", "c", 1, 0.0, "bf16")
    change_rows(alone, lambda row: {k: v for k, v in row.items() if k != "val_loss_bf16"})
    [high] = load_rows([alone])
    assert final_gaps(rows[1], high, "bf16")[1] == pytest.approx(100 * (1.02 / 1.005 - 1))


def test_a_last_validation_that_is_still_to_come_is_no_broken_end(tmp_path):
    """All steps taken, the evaluation behind them running, or its line torn."""
    write_run(tmp_path, "a", 1, 0.0, "bf16")
    path = write_run(tmp_path, "b", 1, 0.01, "nvfp4") / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    base, row = load_rows([tmp_path])
    line = summarize([base, row], base)[1]
    assert (line.unfinished, line.broken, line.verdict) == ((1,), (), "no common end")
    assert row.runs[1].validation["own", ""][-1][0] == 80


def test_no_number_in_a_base_is_no_fault_of_a_row(tmp_path):
    """A base that diverges makes no row diverge, nor is a row judged by the seeds that are left."""
    for seed in (1, 2, 3):
        write_run(tmp_path, "a", seed, 0.0, "bf16")
        write_run(tmp_path, "b", seed, 0.01, "nvfp4")
    change_rows(tmp_path / "a-s1", without_numbers(61))
    base, row = load_rows([tmp_path])
    line = summarize([base, row], base)[1]
    assert line.diverged is None
    assert line.training_gap.seeds == line.gaps["own"].seeds == (2, 3)
    assert line.verdict == "no finite end of the base in 1 of its seeds"
    assert spread([base, row]).freedom == 1, "the loss of step 40 is no end"


def test_skipped_steps_are_no_difference(tmp_path):
    """A step that both runs have skipped; one that a run has skipped near its end."""
    write_run(tmp_path, "a", 1, 0.0, "bf16")
    write_run(tmp_path, "b", 1, 0.0, "nvfp4")
    for name in ("a-s1", "b-s1"):
        change_rows(tmp_path / name, without_numbers(20, 20))
    change_rows(tmp_path / "b-s1", without_numbers(119, 119))
    base, row = load_rows([tmp_path])
    assert first_difference(row.runs[1], base.runs[1]) == 119
    assert diverged_at(row.runs[1], base.runs[1]) is None
    write_run(tmp_path / "other", "b", 2, 0.0, "nvfp4")
    [unpaired] = load_rows([tmp_path / "other"])
    assert cells(summarize([unpaired], base)[0])[-2:] == ["", ""], "nothing was compared"
    assert cells(summarize([row], base)[0])[-2:] == ["119", "no"]


def test_references_and_ratios_are_not_of_survivors(tmp_path):
    for seed in (1, 2, 3):
        for name, factor, recipe in (
            ("a", 0.0, "bf16"),
            ("b", 0.01, "nvfp4"),
            ("c", 0.02, "mxfp4"),
        ):
            write_run(tmp_path, name, seed, factor, recipe)
    reference = Reference(
        "toy/b", {"recipe": "nvfp4"}, 5.0, "here", {"own": [1.0, 1.1, 0.9], "bf16": []}
    )
    base, b, c = load_rows([tmp_path])
    assert "as expected" in judge(b, base, 5.0, [reference])[0]
    assert len(ratios([base, b, c], c, base)) == 1
    change_rows(tmp_path / "b-s3", without_numbers(81))
    base, b, c = load_rows([tmp_path])
    assert judge(b, base, 5.0, [reference]) == ["b: no finite end in 1 of 3 seeds: not judged"]
    assert ratios([base, b, c], c, base) == ratios([base, b, c], b, base) == []


def test_every_line_of_a_picture_has_its_name(tmp_path, monkeypatch):
    """Also of a row that has trained and not validated."""
    from matplotlib import pyplot

    write_run(tmp_path, "a", 1, 0.0, "bf16")
    write_run(tmp_path, "b", 1, 0.01, "nvfp4")
    going_on = write_run(tmp_path, "c", 1, 0.02, "mxfp8", steps=30)
    rows, kept = load_rows([tmp_path, going_on]), []
    monkeypatch.setattr(pyplot, "close", kept.append)
    write_png(rows, rows[0], tmp_path / "compare.png")
    [legend] = [axis.get_legend() for axis in kept[0].axes if axis.get_legend()]
    assert [text.get_text() for text in legend.get_texts()] == ["b", "c"]


def test_without_a_gap_there_are_words_and_no_picture(tmp_path, capsys):
    """One row, of two seeds here, has no gap; neither have rows that share no seed."""
    runs = [str(write_run(tmp_path / "runs", "a", seed, 0.0, "bf16")) for seed in (1, 2)]
    out = tmp_path / "out"
    assert main([*runs, "--output", str(out)]) == 0
    said = capsys.readouterr().out
    assert "a is the only row: there is nothing to compare it with" in said
    assert said.splitlines()[1].split()[:2] == ["a", "2"], "its losses are told all the same"
    assert said.splitlines()[-1] == str(out / "compare.html")
    assert "a is the only row" in (out / "compare.html").read_text()
    asked = ["--against=reference", f"--write-reference={tmp_path / 'new'}", "--ratio-to=a"]
    for option in asked:
        assert main([*runs, option, "--output", str(out)]) == 2
        assert "a is the only row; name runs with other settings" in capsys.readouterr().err
    other = str(write_run(tmp_path / "runs", "b", 3, 0.0, "nvfp4"))
    assert main([*runs, other, "--output", str(out)]) == 0
    said = capsys.readouterr().out
    assert "no row shares a seed and a step with a: there is no gap to draw" in said
    assert not (out / "compare.png").exists()


def test_steps_without_numbers_leave_the_other_seeds_their_curve(tmp_path):
    """A point of the mean is of one part of the run in all seeds, whatever steps one of them
    lacks: three in the middle, or those after a stop."""
    for seed in (1, 2):
        write_run(tmp_path, "bf16", seed, 0.0, "bf16")
        write_run(tmp_path, "v1", seed, 0.01, "nvfp4")
    change_rows(tmp_path / "v1-s2", without_numbers(51, 53))
    base, v1 = load_rows([tmp_path])
    found = mean_curve(training_gaps(v1, base))
    assert [step for step, *_ in found] == [step for step in range(2, 121, 2) if step != 52]
    expected = 100 * (0.01 * (119 + 120) / 2 / 120)
    assert found[-1][1] == pytest.approx(expected, rel=1e-3)
    path = tmp_path / "v1-s2" / "metrics.jsonl"
    path.write_bytes(b"".join(encode_row(r) for r in read_metrics(path) if r["step"] <= 90))
    base, v1 = load_rows([tmp_path])
    found = mean_curve(training_gaps(v1, base))
    assert [step for step, *_ in found] == [step for step in range(2, 91, 2) if step != 52]


def test_the_last_tenth_is_a_tenth(tmp_path):
    for name, factor, recipe in (("bf16", 0.0, "bf16"), ("v1", 0.01, "nvfp4")):
        run = write_run(tmp_path, name, 1, factor, recipe, steps=101)
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["train"]["steps"] = 101
        (run / "config.yaml").write_text(yaml.safe_dump(config))
    base, v1 = load_rows([tmp_path])
    own, other = (dict(row.runs[1].losses) for row in (v1, base))
    last = range(91, 102)
    expected = 100 * (sum(own[s] for s in last) / sum(other[s] for s in last) - 1)
    assert training_gaps(v1, base, bins=10)[1][-1] == (101, pytest.approx(expected, rel=1e-9))


def test_steps_that_were_taken_again_count_once(tmp_path):
    """As they stand where a history could not be cut back: what came last is the run's."""
    runs = [write_run(tmp_path, name, 1, 0.0, recipe) for name, recipe in PAIR]
    path = runs[1] / "metrics.jsonl"
    whole = read_metrics(path)
    cut = next(i for i, row in enumerate(whole) if row["step"] == 60)
    again = [{**row, "loss": 9.0} for row in whole[cut : cut + 20] if "loss" in row]
    path.write_bytes(b"".join(map(encode_row, [*whole[:cut], *again, *whole[cut:]])))
    base, v1 = load_rows([tmp_path])
    assert v1.runs[1].losses == base.runs[1].losses
    assert first_difference(v1.runs[1], base.runs[1]) is None


def test_rows_of_one_name_are_told_apart(tmp_path):
    for folder, settings in (("x", {}), ("y", {"global_batch_size": 16})):
        for seed in (1, 2):
            write_run(tmp_path / folder, "v1", seed, 0.0, "nvfp4", **settings)
    rows = load_rows([tmp_path / "x", tmp_path / "y"])
    assert [(row.label, sorted(row.runs)) for row in rows] == [
        (str(tmp_path / folder / "v1"), [1, 2]) for folder in "xy"
    ]


def test_machines_that_were_not_recorded_and_references_that_cannot_be_read(tmp_path, capsys):
    runs = [write_run(tmp_path, name, 1, 0.0, recipe) for name, recipe in PAIR]
    (runs[1] / "environment.json").unlink()
    words = [*map(str, runs), "--output", str(tmp_path)]
    assert main(words) == 0
    said = "speeds are of different machines: NVIDIA H200, not recorded\n"
    assert said in capsys.readouterr().out
    place = tmp_path / "references"
    (place / "folder.json").mkdir(parents=True)
    reference = {"format": "nibble reference gaps", "version": 1, "name": "x/y", "precision": {}}
    reference |= {"tokens_per_parameter": 1.0, "source": "a card"}
    reference["runs"] = [{"seed": 1, "gaps": [[1000, math.nan, None]]}]
    (place / "nan.json").write_text(json.dumps(reference))
    assert main([*words, "--against", str(place)]) == 2
    errors = capsys.readouterr().err
    assert "folder.json must be 'nibble reference gaps', version 1 (IsADirectoryError" in errors
    assert "nan.json must be 'nibble reference gaps', version 1 (ValueError: gap nan" in errors
