# SPDX-License-Identifier: Apache-2.0
"""Comparing runs: gaps, intervals, what may be said, and files that come back as they were."""

import json
import math

import pytest
import yaml

from fused_ops.errors import ConfigError
from models.precision_config import PrecisionConfig
from pretrain.checkpoint.compare import flatten
from pretrain.comparison import compare
from pretrain.comparison.compare import base_row, load_rows
from pretrain.comparison.gaps import (
    Interval,
    broken_seeds,
    diverged_at,
    final_gaps,
    first_difference,
    interval,
    paired_gaps,
    t95,
    training_gaps,
)
from pretrain.comparison.ratio import fieller, together
from pretrain.comparison.reference import (
    Reference,
    judge,
    precision_key,
    read_references,
    write_reference,
)
from pretrain.comparison.runs import read_run
from pretrain.comparison.spread import spread
from pretrain.comparison.summary import between_rows, cells, ratios, summarize, table
from pretrain.config_file import encode
from pretrain.history import encode_row, read_metrics
from tools.compare_runs import REFERENCE, main

STEPS = 120
# Final gaps in per cent, by row and seed: with means 0, 1.0, 1.1 and 2.0.
GAPS = {
    "bf16": {1: 0.0, 2: 0.0, 3: 0.0},
    "v1": {1: 1.0, 2: 1.1, 3: 0.9},
    "close": {1: 1.2, 2: 1.0, 3: 1.1},
    "far": {1: 2.0, 2: 2.1, 3: 1.9},
}
RECIPES = {"bf16": "bf16", "v1": "nvfp4", "close": "nvfp4_fast", "far": "mxfp4"}


def write_run(folder, name, seed, factor, recipe, steps=STEPS, **settings):
    """A run whose losses are those of the base of its seed, raised by `factor` towards the end."""
    run = folder / f"{name}-s{seed}"
    run.mkdir(parents=True)
    rows = []
    for step in range(1, steps + 1):
        loss = 3.0 + 5.0 / step + 0.01 * seed
        loss *= 1 + factor * step / STEPS
        row = {"step": step, "loss": loss, "tokens": 1000 * step, "memory_gib": 2.5}
        rows.append({**row, "tokens_per_s": 5000.0 if recipe == "bf16" else 6000.0})
        if step % 40 == 0:
            value = {"val_loss": loss, "val_loss_bf16": loss / (1 + 0.25 * factor * step / STEPS)}
            rows.append({"step": step, "tokens": 1000 * step, **value})
    (run / "metrics.jsonl").write_bytes(b"".join(map(encode_row, rows)))
    config = {
        "run": {"name": run.name, "seed": seed, "dir": str(folder)},
        "model": {"pattern": "*-", "seq_length": 32},
        "data": {"train": "data/train", "valid": "data/valid"},
        "train": {"steps": STEPS, **settings},
        "precision": encode(PrecisionConfig(recipe=recipe)),
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (run / "environment.json").write_text(
        json.dumps({"gpus": ["NVIDIA H200"], "code": {"commit": "abc123"}})
    )
    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    for name, gaps in GAPS.items():
        for seed, gap in gaps.items():
            write_run(place, name, seed, gap / 100, RECIPES[name])
    return place


@pytest.fixture(scope="module")
def rows(folder):
    return load_rows([folder])


def test_students_points():
    assert t95(2) == pytest.approx(4.3027, abs=1e-4)
    assert t95(31) == pytest.approx(2.0395, abs=2e-4)
    assert t95(1000) == pytest.approx(1.9623, abs=1e-4)


def test_an_interval_is_students():
    found = interval({1: 1.0, 2: 1.1, 3: 0.9})
    assert found.mean == pytest.approx(1.0)
    assert found.half == pytest.approx(4.30265 * 0.1 / math.sqrt(3), rel=1e-5)
    assert interval({}) is None
    assert interval({4: 1.5}) == Interval(1.5, None, (4,))
    assert interval({4: 1.5}).verdict == "one seed"
    assert interval({1: 1.0, 2: -0.5}).verdict == "not distinguishable"
    assert interval({1: -1.0, 2: -1.01}).verdict == "below"


def test_rows_are_seeds_of_one_setting(rows):
    assert {row.label: sorted(row.runs) for row in rows} == {name: [1, 2, 3] for name in GAPS}
    assert base_row(rows, None).label == "bf16"
    with pytest.raises(ConfigError, match="bf16, close, far, v1"):
        base_row(rows, "none")


def test_gaps_are_paired_by_seed_and_forward(rows):
    base, v1 = base_row(rows, "bf16"), base_row(rows, "v1")
    own = paired_gaps(v1, base)
    assert [step for step, _ in own[1]] == [40, 80, 120]
    assert own[2][0][1] == pytest.approx(1.1 / 3, rel=1e-6)
    assert final_gaps(v1, base) == {s: pytest.approx(g) for s, g in GAPS["v1"].items()}
    bf16 = final_gaps(v1, base, "bf16")
    assert bf16[1] == pytest.approx(100 * (1.01 / 1.0025 - 1), rel=1e-6)
    assert training_gaps(v1, base, bins=10)[1][-1][1] == pytest.approx(1.0, rel=0.1)


def test_what_may_be_said(rows):
    base = base_row(rows, "bf16")
    lines = {line.label: line for line in summarize(rows, base)}
    assert lines["v1"].verdict == "worse"
    assert lines["v1"].speed == pytest.approx(1.2)
    assert lines["v1"].memory_gib == 2.5
    assert lines["v1"].first_difference == 1
    assert lines["bf16"].verdict == "base"
    said = {text.rsplit(":", 2)[0]: text for text in between_rows(rows, base)}
    assert "not distinguishable" in said["close less v1"]
    assert "v1 is better" in said["far less v1"]
    assert ratios(rows, base_row(rows, "v1"), base)[1].startswith("gap of far over that of v1: 2.0")
    text = table(list(lines.values()))
    assert "+1.00 +- 0.25" in text
    assert summarize(rows, base_row(rows, "far"))[0].verdict == "better"


def test_fiellers_interval():
    """Its ends are where Student's test of a - r b just does not tell it from 0."""
    a, b = {1: 0.8, 2: 0.95, 3: 0.7, 4: 0.82}, {1: 1.1, 2: 1.25, 3: 0.95, 4: 1.05, 9: 7.0}
    found = fieller(a, b)
    assert found.seeds == (1, 2, 3, 4)
    assert found.value == pytest.approx(3.27 / 4.35)
    assert 0.6 < found.low < found.value < found.high < 0.9
    for ratio in (found.low, found.high):
        edge = interval({seed: a[seed] - ratio * b[seed] for seed in a})
        assert abs(edge.mean) == pytest.approx(edge.half, rel=1e-6)
    assert str(fieller({1: 1.0}, b)) == "0.91 (one seed)"
    assert fieller({1: 1.0, 2: 1.0}, {1: 0.4, 2: -0.1}).high is None, "b may be 0"
    assert fieller({1: 1.0}, {2: 1.0}) is None


def test_the_ratio_of_several_models_together():
    """By seed: what a seed does to both models, as the order of its data may, is its own scatter.

    The residuals 0.1, -0.1 and 0 of three seeds are the same in both models: the interval is that
    of one model, where models of independent seeds would have a narrower one.
    """
    bottom = {1: 1.0, 2: 1.1, 3: 1.2}
    top = {seed: 0.6 * bottom[seed] + rest for seed, rest in ((1, 0.1), (2, -0.1), (3, 0.0))}
    found, alone = together([(top, bottom), (top, bottom)]), fieller(top, bottom)
    assert found.value == pytest.approx(0.6)
    assert (found.low, found.high) == (pytest.approx(alone.low), pytest.approx(alone.high))
    opposite = {seed: 1.2 * bottom[seed] - top[seed] for seed in top}
    exact = together([(top, bottom), (opposite, bottom)])
    assert (exact.low, exact.high) == (pytest.approx(0.6), pytest.approx(0.6))
    larger = {1: 4.0, 2: 4.5, 3: 4.1, 8: 9.0}
    more = together([(top, bottom), (larger, {**larger, 9: 1.0})])
    assert more.value == pytest.approx((3 * 0.66 + 12.6) / (3.3 + 12.6))
    assert more.seeds == (1, 2, 3), "of both"
    assert together([(top, bottom)]) is None, "one model"
    assert together([(top, bottom), ({7: 1.0}, {7: 2.0})]) is None, "no seed of both"


def test_the_spread_of_all_rows(tmp_path):
    """Beside a row and a seed effect: of four runs one degree of freedom is left."""
    for name, recipe, factors in (("a", "bf16", (0.0, 0.0)), ("b", "nvfp4", (0.01, 0.012))):
        for seed, factor in enumerate(factors, 1):
            write_run(tmp_path, name, seed, factor, recipe)
    rows = load_rows([tmp_path])
    found = spread(rows)
    # Residuals of a 2 x 2 table are plus and minus a quarter of its interaction.
    interaction = 100 * (math.log(1.012) - math.log(1.01))
    assert found.freedom == 1
    assert found.percent == pytest.approx(interaction / 2, rel=1e-6)
    assert found.half(2) == pytest.approx(12.7062 * interaction / 2, rel=1e-5)
    write_run(tmp_path, "c", 3, 0.02, "mxfp4")
    more = spread(load_rows([tmp_path]))
    assert more.freedom == found.freedom, "a row of its own seed says nothing"
    # Logarithms near 1 differ by 1e-3: other sums, rounded at 2e-16, move that by some 2e-13.
    assert more.percent == pytest.approx(found.percent, rel=1e-11)
    assert spread(rows[:1]) is None


def test_the_code_of_a_run_is_told(tmp_path):
    """A commit alone only where the code was that commit's; a copy has its sources' digest."""
    run = write_run(tmp_path, "v1", 1, 0.0, "nvfp4")
    digest = "0123456789abcdef"
    for code, said in (
        ({"commit": "abc123", "dirty": False, "sources": digest}, "abc123"),
        ({"commit": "abc123", "dirty": True}, "abc123 changed"),
        (
            {"commit": "abc123", "dirty": True, "sources": digest},
            "abc123 changed, sources 0123456789ab",
        ),
        ({"sources": digest}, "sources 0123456789ab"),
        (None, ""),
    ):
        (run / "environment.json").write_text(json.dumps({"code": code}))
        assert read_run(run).commit == said


def test_one_seed_has_no_interval(tmp_path):
    write_run(tmp_path, "a", 1, 0.0, "bf16")
    write_run(tmp_path, "b", 1, 0.5, "nvfp4")
    rows = load_rows([tmp_path])
    line = summarize(rows, rows[0])[1]
    assert line.verdict == "one seed: no interval"
    assert "+50.00" in cells(line)
    assert line.diverged == 25, "the gap of half a per cent a step has passed 10 % behind step 24"


def test_what_differs_and_what_is_missing_is_said(tmp_path):
    write_run(tmp_path, "a", 1, 0.0, "bf16")
    write_run(tmp_path, "b", 1, 0.01, "nvfp4", global_batch_size=3)
    write_run(tmp_path, "c", 2, 0.01, "mxfp8")
    write_run(tmp_path, "d", 1, 0.01, "mxfp4", steps=60)
    rows = load_rows([tmp_path])
    lines = {line.label: line for line in summarize(rows, rows[0])}
    assert lines["b"].notes == ["differs from the base in train.global_batch_size: 8 and 3"]
    assert lines["c"].notes == ["no run of the base has seed 2"]
    assert lines["c"].verdict == "no common end"
    assert lines["d"].unfinished == (1,)
    assert lines["d"].gaps["own"] is None, "its last gap is not that of the end"
    write_run(tmp_path / "again", "a", 1, 0.0, "bf16")
    with pytest.raises(ConfigError, match="leave one of them out"):
        load_rows([tmp_path, tmp_path / "again"])
    with pytest.raises(ConfigError, match=r"nowhere must be the folder of a run"):
        load_rows([tmp_path / "nowhere"])


def test_first_difference_and_divergence(tmp_path):
    a = load_rows([write_run(tmp_path, "a", 1, 0.0, "bf16")])[0].runs[1]
    same = load_rows([write_run(tmp_path, "b", 1, 0.0, "nvfp4")])[0].runs[1]
    assert first_difference(same, a) is None
    assert diverged_at(same, a) is None
    losses = [(step, 9.0 if 50 <= step < 60 else loss) for step, loss in a.losses]
    spike = type(a)(**{**vars(a), "losses": losses})
    assert first_difference(spike, a) == 50
    assert diverged_at(spike, a) is None, "it healed"
    losses = [(step, math.nan if step >= 71 else loss) for step, loss in a.losses]
    assert diverged_at(type(a)(**{**vars(a), "losses": losses}), a) == 71


def test_runs_of_older_code_had_the_defaults(tmp_path):
    """A setting that came later, left as it is by default, makes no other row; changed, it does."""
    for seed in (1, 2, 3):
        write_run(tmp_path, "v1", seed, 0.0, "nvfp4", dtype="bf16")
    for seed, clip in ((2, 1.0), (3, 2.0)):
        path = tmp_path / f"v1-s{seed}" / "config.yaml"
        data = yaml.safe_load(path.read_text())
        data["optimizer"] = {"clip_grad": clip}
        path.write_text(yaml.safe_dump(data))
    rows = load_rows([tmp_path])
    assert [sorted(row.runs) for row in rows] == [[1, 2], [3]]
    later = {"model": {"qk_norm_over": "head"}, "data": {"seed": None}}
    later["precision"] = {"rules": [{"layers": "last 1", "modules": "*", "recipe": "bf16"}]}
    short = {"precision": {"rules": [{"layers": "last 1", "recipe": "bf16"}]}}
    for seed, changes in ((1, later), (2, short)):
        path = tmp_path / f"v1-s{seed}" / "config.yaml"
        data = yaml.safe_load(path.read_text())
        for section, values in changes.items():
            data[section] |= values
        path.write_text(yaml.safe_dump(data))
    rows = load_rows([tmp_path])
    assert [sorted(row.runs) for row in rows] == [[1, 2], [3]], "also within a rule"


def test_other_tokens_in_the_same_folder_are_told(tmp_path):
    """By the fingerprints that runs record; what older runs do not tell is no difference."""
    for seed in (1, 2):
        write_run(tmp_path, "bf16", seed, 0.0, "bf16")
        write_run(tmp_path, "v1", seed, 0.01, "nvfp4")

    def notes(name, content):
        path = tmp_path / name / "environment.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "data": {"train": [content]}}))
        rows = load_rows([tmp_path])
        return summarize(rows, base_row(rows, "bf16"))[1].notes

    assert notes("bf16-s1", "sha256:a") == notes("v1-s1", "sha256:a") == []
    assert "have read the same tokens" in notes("v1-s2", "sha256:b")[0]


def test_a_row_is_not_judged_by_its_survivors(tmp_path):
    """Seed 3 ends in NaN, as metrics.jsonl has it: the mean of the others is no better row."""
    for seed in (1, 2, 3):
        write_run(tmp_path, "bf16", seed, 0.02, "bf16")
        write_run(tmp_path, "v1", seed, 0.0, "nvfp4")
        write_run(tmp_path, "v2", seed, 0.01, "nvfp4_v2")
    path = tmp_path / "v1-s3" / "metrics.jsonl"
    rows = read_metrics(path)
    lost = [
        {k: math.nan if "loss" in k and row["step"] >= 80 else v for k, v in row.items()}
        for row in rows
    ]
    path.write_bytes(b"".join(map(encode_row, lost)))
    base, v1, v2 = load_rows([tmp_path])
    assert (v1.label, broken_seeds(v1), broken_seeds(v2)) == ("v1", [3], [])
    line = summarize([base, v1, v2], base)[1]
    assert line.verdict == "no finite end in 1 of 3 seeds"
    assert line.val_loss.seeds == line.gaps["own"].seeds == (1, 2)
    assert "seed 3: means are of the others" in line.notes[0]
    assert summarize([base, v1, v2], base)[2].verdict == "better"
    assert between_rows([base, v1, v2], base) == []
    path.write_bytes(b"".join(map(encode_row, rows)))
    back = load_rows([tmp_path])
    assert len(between_rows(back, back[0])) == 1


def test_references_come_back_and_judge(rows, tmp_path):
    base, v1, far = (base_row(rows, name) for name in ("bf16", "v1", "far"))
    path = write_reference(v1, base, "toy/v1", 5.25, tmp_path)
    [reference] = read_references(tmp_path)
    assert json.loads(path.read_text())["runs"][1]["gaps"][-1][:2] == [120_000, 1.1]
    assert reference == Reference(
        name="toy/v1",
        precision={"recipe": "nvfp4"},
        tokens_per_parameter=5.25,
        source="NVIDIA H200, commit abc123",
        gaps={"own": [1.0, 1.1, 0.9], "bf16": reference.gaps["bf16"]},
    )
    [own, bf16] = judge(v1, base, 5.0, [reference])
    assert "+1.00 % +- 0.35 for 3 seeds: as expected" in own
    assert "bf16 forward" in bf16
    larger = Reference(**{**vars(reference), "precision": {"recipe": "mxfp4"}})
    assert "larger" in judge(far, base, 5.0, [larger])[0]
    assert judge(far, base, 5.0, [reference]) == [
        'far: no reference has its precision {"recipe": "mxfp4"}'
    ]
    for tokens, times in ((2.5, "2.1"), (11.0, "0.48")):
        own, _ = judge(v1, base, tokens, [reference])
        assert f"for 3 seeds: no verdict, it was trained {times} times as long" in own
    endless = {**json.loads(path.read_text()), "tokens_per_parameter": 0}
    for damaged in ({}, endless):
        (tmp_path / "bad.json").write_text(json.dumps(damaged))
        with pytest.raises(ConfigError, match=r"bad\.json must be"):
            read_references(tmp_path)


def test_the_published_grid_ships():
    found = {ref.name: ref for ref in read_references(REFERENCE)}
    assert found["published-30m/nvfp4"].precision == {"recipe": "nvfp4"}
    assert found["published-100m/nvfp4_v2_4over6"].gaps["own"][0] > 1.0
    rules = [{"gemms": ["dgrad", "wgrad"], "recipe": "bf16"}]
    own = encode(PrecisionConfig(recipe="nvfp4", rules=rules))
    key = precision_key(flatten(own, "precision."))
    forward = [ref for ref in read_references(REFERENCE) if ref.precision == key]
    assert {ref.tokens_per_parameter: ref.gaps["own"] for ref in forward}[25] == [1.43]
    for name, one in found.items():
        resets = [key for key in one.precision if key.startswith("optimizer.oscillation_reset.")]
        assert len(resets) == (4 if name.endswith("_reset") else 0), name


def test_command_line(folder, tmp_path, capsys):
    out = ["--output", str(tmp_path)]
    assert main([str(folder), "--base", "bf16", "--ratio-to", "v1", *out]) == 0
    said = capsys.readouterr().out
    assert "v1" in said
    assert (tmp_path / "compare.html").exists()
    assert main([str(folder), "--json", *out]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {line["row"] for line in data["lines"]} == set(GAPS)
    assert main([str(folder), "--base", "x", *out]) == 2
    assert "error: --base" in capsys.readouterr().err
    file = tmp_path / "compare.html"
    wrong = ["--output", str(file), "--write-reference", str(file / "x"), "--diverged", "nan"]
    assert main([str(folder), *wrong]) == 2
    said = capsys.readouterr().err.splitlines()
    assert (
        said[0]
        == f"error: --output must be a folder that can be written to; got {file} (file exists)"
    )
    assert [line.split()[1] for line in said] == ["--output", "--write-reference", "--diverged"]


def test_json_is_all_of_the_output(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compare, "tokens_per_parameter", lambda row: 1.0)
    words = ["--output", str(tmp_path), "--json", "--write-reference", str(tmp_path / "made")]
    assert main([str(folder), "--base", "bf16", *words]) == 0
    printed = capsys.readouterr()
    assert [line["row"] for line in json.loads(printed.out)["lines"]] == [*sorted(GAPS)]
    assert f"{tmp_path}/made/model-v1.json" in printed.err


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("metrics.jsonl", '{"step": 1, "loss": "abc"}\n', "could not convert string to float"),
        ("metrics.jsonl", '{"step": 1, "loss": null}\n', "must hold numbers"),
        ("metrics.jsonl", '{"step": 1, "val_loss": 2.0}\n', "at least one step"),
        ("config.yaml", "run: {name: a, seed: b}\ntrain: {steps: 1}\n", "ValueError"),
        ("config.yaml", "run: {name: a, seed: 1}\ntrain: {steps: 1}\nmodel:\n", "TypeError"),
        ("config.yaml", "- 1\n", "AttributeError"),
        ("config.yaml", "run: {name: a, seed: 1}\ntrain: {steps: 0}\nmodel: {}\n", "steps 0;"),
    ],
)
def test_a_damaged_run_is_named(tmp_path, capsys, file, text, said):
    run = write_run(tmp_path, "a", 1, 0.0, "bf16")
    (run / file).write_text(text)
    assert main([str(run), "--output", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert str(run) in error
    assert said in error


def test_references_tell_resets_from_none_and_own_recipes_by_what_they_compute(tmp_path):
    """A reset is part of what a reference is of; the name that a run has for a recipe is not."""
    fast = {"precision": {"recipe": "nvfp4_fast", "decode": "fp8"}}
    reset = {"oscillation_reset": {"from": 0.6, "interval": 40, "window": 25, "threshold": 8.0}}
    own = {"x8": {"base": "nvfp4_fast", "fprop_x": "fp8_tensorwise"}}
    rules = [{"layers": "last 2", "recipe": "x8"}]
    sections = {
        "fast": fast,
        "fast_reset": {**fast, "optimizer": reset},
        "a8": {
            "precision": {"recipe": "nvfp4", "rules": [{**rules[0], "recipe": "nvfp4_fast_a8"}]}
        },
        "x8": {"precision": {"recipe": "nvfp4", "rules": rules, "recipes": own}},
    }
    for seed in (1, 2):
        write_run(tmp_path / "runs", "bf16", seed, 0.0, "bf16")
        for number, (name, changes) in enumerate(sections.items()):
            run = write_run(tmp_path / "runs", name, seed, 0.01 + 0.001 * number + 1e-4 * seed, "")
            config = yaml.safe_load((run / "config.yaml").read_text()) | changes
            (run / "config.yaml").write_text(yaml.safe_dump(config))
    rows = load_rows([tmp_path / "runs"])
    assert [row.label for row in rows] == ["a8", "bf16", "fast", "fast_reset", "x8"]
    base, by_name = base_row(rows, "bf16"), {row.label: row for row in rows}
    for name in sections:
        write_reference(by_name[name], base, f"toy/{name}", 5.0, tmp_path / "references")
    references = read_references(tmp_path / "references")
    found = {}
    for name in sections:
        said = judge(by_name[name], base, 5.0, references)
        found[name] = {word for text in said for word in text.split() if word.startswith("toy/")}
    assert found == {
        "fast": {"toy/fast"},
        "fast_reset": {"toy/fast_reset"},
        "a8": {"toy/a8", "toy/x8"},
        "x8": {"toy/a8", "toy/x8"},
    }
    assert precision_key(by_name["fast_reset"].settings) == {
        "decode": "fp8",
        "recipe": "nvfp4_fast",
        **{f"optimizer.oscillation_reset.{k}": v for k, v in reset["oscillation_reset"].items()},
    }
