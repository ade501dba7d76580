# SPDX-License-Identifier: Apache-2.0
"""A study: which runs it has, that it survives being cut, and what it says it costs."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from fused_ops.errors import ConfigError
from fused_ops.keys import GEMMS
from fused_ops.recipe import get_recipe
from pretrain.checkpoint.lock import RunLock
from pretrain.comparison.runs import apart, beside_recipe, trained_settings
from pretrain.config import make_config, precision_plan
from pretrain.history import METRICS_FILE, read_metrics
from pretrain.study import place
from pretrain.study.budget import _trial, costs, render, trial_rows
from pretrain.study.place import Places, run_all
from pretrain.study.plan import is_finished, load_study, select, steps_done
from tests.toy import make_toy, toy_config
from tools.study import main

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "examples" / "study"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy"))


def write_study(folder, data, steps=3, **changes):
    """Two rows, two seeds, of one toy."""
    folder.mkdir(parents=True, exist_ok=True)
    base = toy_config(data, "*-", train={"steps": steps, "eval_also_bf16": True})
    base["optimizer"] |= {"warmup_fraction": 0.1}
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    study = {
        "base": "base.yaml",
        "base_row": "bf16",
        "models": {"toy": {}},
        "rows": {
            "bf16": {"precision": {"recipe": "bf16"}},
            "v1": {"precision": {"recipe": "nvfp4"}},
            "ranked": {"file": "ranked-{model}.yaml"},
        },
        "stages": [{"models": ["toy"], "rows": ["bf16", "v1", "ranked"], "seeds": [1, 2]}],
    }
    (folder / "study.yaml").write_text(yaml.safe_dump({**study, **changes}))
    return folder


def test_runs_come_in_order_with_seeds_last(data, tmp_path):
    folder = write_study(tmp_path / "s", data)
    study = load_study(folder, tmp_path / "runs", ["train.global_batch_size=4"])
    assert [run.name for run in study.runs] == [
        *("toy-bf16-s1", "toy-bf16-s2", "toy-v1-s1", "toy-v1-s2"),
    ]
    assert study.runs[3].data["precision"] == {"recipe": "nvfp4"}
    assert study.runs[3].data["run"]["seed"] == 2
    assert study.runs[3].data["train"]["global_batch_size"] == 4
    assert "toy-ranked is left out" in study.notes[0]
    (folder / "ranked-toy.yaml").write_text("precision: {recipe: mxfp8}\n")
    study = load_study(folder, tmp_path / "runs")
    assert study.runs[-1].data["precision"]["recipe"] == "mxfp8"
    assert study.notes == []


@pytest.mark.parametrize(
    ("changes", "overrides", "said"),
    [
        ({"rows": {"bf16": {"file": ["a"]}}}, [], r"rows\.bf16\.file must be a name.*\['a'\]"),
        ({"rows": {"bf16": {"run": {"seed": 3}}}}, [], r"rows\.bf16: run\.seed cannot be set"),
        ({"models": {"toy": {"run": 3}}}, [], r"models\.toy: run must be a section; got 3"),
        ({}, ["run.name=x", "run.seed=3"], r"behind DIR: run\.name cannot .*\n.*run\.seed cannot"),
        ({}, ["run={seed: 3}"], "behind DIR: run cannot be set"),
        ({"stages": []}, [], "stages must name models, rows and seeds"),
        ({"seeds": []}, [], r"stages\.0\.seeds must not be empty"),
        ({"seeds": [True, "3"]}, [], r"seeds\.0: .*valid integer.*\n.*seeds\.1: .*valid integer"),
        (
            {"models": {"toy": {}, "toy-x": {}}, "rows": {"bf16": {}, "x-bf16": {}}},
            [],
            "toy-x-bf16-s1 is of model toy-x, row bf16, and of model toy, row x-bf16",
        ),
    ],
)  # fmt: skip
def test_studies_that_cannot_be_meant(data, tmp_path, capsys, changes, overrides, said):
    """Nothing is dropped or set otherwise without a word."""
    stage = {"models": list(changes.get("models", {"toy": 0})), "seeds": [1]}
    stage |= {"rows": list(changes.get("rows", {"bf16": 0}))}
    if "seeds" in changes:
        stage |= {"seeds": changes.pop("seeds")}
    folder = write_study(tmp_path / "s", data, **{"stages": [stage], **changes})
    assert main([str(folder), "--runs", str(tmp_path / "r"), "--list", *overrides]) == 2
    assert re.search(said, capsys.readouterr().err), said


def test_a_base_and_a_budget_that_cannot_be_read(data, tmp_path, capsys):
    folder = write_study(tmp_path / "s", data)
    words = [str(folder), "--runs", str(tmp_path / "runs"), "--list"]
    (folder / "ranked-{x}.yaml").write_text("precision: {recipe: mxfp8}\n")
    rows = {"bf16": {}, "odd": {"file": "ranked-{x}.yaml"}}
    stage = {"models": ["toy"], "rows": ["bf16", "odd"], "seeds": [0]}
    write_study(tmp_path / "s", data, rows=rows, stages=[stage])
    base = yaml.safe_load((folder / "base.yaml").read_text())
    del base["train"]["steps"]
    (folder / "base.yaml").write_text(yaml.safe_dump(base | {"run": None}))
    assert main(words) == 2
    assert "base.yaml: run must be a section; got None" in capsys.readouterr().err
    (folder / "base.yaml").write_text(yaml.safe_dump(base | {"train": {"global_batch_size": 2}}))
    assert main(words) == 0
    assert "toy-odd-s0" in capsys.readouterr().out
    assert load_study(folder, tmp_path / "runs").runs[0].steps == 100, "as by default"
    for text in ('{"toy": {"bf16"', '{"toy": 3}', "[]"):
        (tmp_path / "runs").mkdir(exist_ok=True)
        (tmp_path / "runs" / "budget.json").write_text(text)
        assert main(words) == 2, text
        assert "budget.json must hold the rates" in capsys.readouterr().err


def test_runs_are_picked_by_texts_in_their_order(data, tmp_path, capsys):
    folder = write_study(tmp_path / "s", data)
    study = load_study(folder, tmp_path / "runs")
    names = [run.name for run in select(study.runs, ["v1-s2", "toy-bf16", "s1", ""])]
    assert names == ["toy-v1-s2", "toy-bf16-s1", "toy-bf16-s2", "toy-v1-s1"]
    assert select(study.runs, []) == study.runs
    words = [str(folder), "--runs", str(tmp_path / "runs"), "--list"]
    assert main([*words, "--only", "v1-s2,bf16-s1", "--only", "v1-s1"]) == 0
    said = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "toy-" in line]
    assert said[:3] == ["toy-v1-s2", "toy-bf16-s1", "toy-v1-s1"]
    assert main([*words, "--only", "v1,v2", "--only", "v3"]) == 2
    said = capsys.readouterr().err
    assert "no run has 'v2'" in said
    assert "no run has 'v3'" in said


def test_numbers_and_places_that_cannot_be_meant(data, tmp_path, capsys, monkeypatch):
    """Without a GPU none is counted, though megatron-core is let to count one."""
    words = [str(write_study(tmp_path / "s", data)), "--runs", str(tmp_path / "runs")]
    wrong = ["--gpus", "0", "--per-gpu", "0", "--budget-steps", "0", "--minutes", "nan"]
    wrong += ["--hours", "-1", "--grace", "-1"]
    assert main([*words, "--cpu", *wrong]) == 2
    said = [line.split()[1] for line in capsys.readouterr().err.splitlines()]
    assert said == ["--gpus", "--per-gpu", "--budget-steps", "--minutes", "--hours", "--grace"]
    assert main([*words, "--cpu", "--gpus", "1", "--list"]) == 2
    said = "error: --gpus cannot go with --cpu, which uses none; leave one of the two out\n"
    assert capsys.readouterr().err == said
    assert main([*words, "--cpu", "--budget", "--budget-rows", "v1, v3,bf61", "--only", "v1"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said == [
        f"error: --budget-rows must name rows that the runs have: v1; got '{name}'"
        for name in ("v3", "bf61")
    ]
    assert main([*words, "--cpu", "--budget-rows", "v1", "--list"]) == 2
    assert "add --budget, or leave it out" in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(words) == 2
    assert "--gpus 1 needs so many GPUs; torch sees 0; use --cpu" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    file = str(tmp_path / "s" / "base.yaml")
    assert main([*words[:2], file, "--cpu"]) == 2
    assert f"--runs must be a folder that can be written to; got {file}" in capsys.readouterr().err
    assert main([words[0], "--report", str(tmp_path)]) == 2
    assert "must name a text with marks" in capsys.readouterr().err


def test_every_problem_is_told_at_once(data, tmp_path):
    stages = [{"models": ["toy", "toi"], "rows": ["v2"], "seeds": [1]}]
    with pytest.raises(ConfigError) as error:
        load_study(write_study(tmp_path / "a", data, stages=stages), tmp_path / "runs")
    assert len(error.value.problems) == 2
    rows = {"bf16": {"precision": {"recipe": "bf17"}}, "v1": {"train": {"steps": "x"}}}
    stages = [{"models": ["toy"], "rows": ["bf16", "v1"], "seeds": [1]}]
    with pytest.raises(ConfigError) as error:
        load_study(write_study(tmp_path / "b", data, rows=rows, stages=stages), tmp_path / "runs")
    assert {text.split(":")[0] for text in error.value.problems} == {"toy-bf16", "toy-v1"}
    with pytest.raises(ConfigError, match="at most 4 times"):
        load_study(write_study(tmp_path / "c", data, steps=20000), tmp_path / "runs")


def test_the_shipped_study_is_sound(tmp_path):
    """Every row of every model, the precision of each GEMM included."""
    study = load_study(SHIPPED, tmp_path)
    names = [run.name for run in study.runs]
    assert names[:4] == [f"dense-30m-bf16-s{seed}" for seed in (1, 2, 3, 4)]
    assert len(names) == len(set(names)) > 90
    assert "nvfp4_ranked is left out" in study.notes[0]
    for row, high in {"forward": ("dgrad", "wgrad"), "backward": ("fprop",)}.items():
        for family, recipe in {"nvfp4": "nvfp4", "nvfp4_fast": "nvfp4_fast"}.items():
            name = f"dense-30m-set2-{family}_{row}_only-s1"
            config = make_config(next(run for run in study.runs if run.name == name).data)
            for own in precision_plan(config).recipes().values():
                for gemm in GEMMS:
                    wanted = get_recipe("bf16" if gemm in high else recipe).specs(gemm)
                    labels = [spec.label.removesuffix(" from_forward") for spec in wanted]
                    assert [spec.label for spec in own.specs(gemm)] == labels
    bases = {run.model: run.data for run in study.runs if run.row == study.base_row}
    for name, run in {f"{run.model}-{run.row}": run for run in study.runs}.items():
        of_base, own = (beside_recipe(trained_settings(d)) for d in (bases[run.model], run.data))
        assert not apart(of_base, own), f"{name} could never be reported"
    run = next(run for run in study.runs if run.model == "dense-100m")
    assert run.data["model"]["preset"] == "dense-100m"
    assert run.data["model"]["vocab_size"] == 32768


def _start_tool(folder, runs, *words):
    return subprocess.Popen(
        [sys.executable, "-m", "tools.study", str(folder), "--cpu", "--runs", str(runs), *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_a_study_is_cut_killed_and_ends_as_if_it_had_not_been(data, tmp_path, capsys):
    """SIGTERM saves; SIGKILL of the study ends its runs too; each call goes on. Two at a time."""
    steps = 60
    folder, runs = write_study(tmp_path / "s", data, steps=steps), tmp_path / "runs"

    def begun(least):
        rows = [len(read_metrics(path)) for path in runs.glob(f"toy-*/{METRICS_FILE}")]
        return sum(rows) >= least

    for number, word in enumerate((signal.SIGTERM, signal.SIGKILL)):
        tool = _start_tool(folder, runs, "--per-gpu", "2")
        end = time.monotonic() + 600
        while not begun(4 + 20 * number):
            assert tool.poll() is None, tool.communicate()[0]
            assert time.monotonic() < end, "no step"
            time.sleep(0.05)
        tool.send_signal(word)
        said, _ = tool.communicate(timeout=400)
        if word == signal.SIGTERM:
            assert tool.returncode == 3, said
            assert "0 of 4 runs finished" in said
    assert main([str(folder), "--cpu", "--runs", str(runs), "--per-gpu", "2"]) == 0
    said = capsys.readouterr().out
    assert "4 of 4 runs finished" in said
    table = (runs / "tables" / "toy.txt").read_text()
    assert "v1" in table
    assert "+-" in table
    assert (runs / "tables" / "toy.html").exists()
    study = load_study(folder, runs)
    assert all(is_finished(run) for run in study.runs)
    for run in study.runs:
        rows = [row for row in read_metrics(run.folder / METRICS_FILE) if "loss" in row]
        assert [row["step"] for row in rows] == list(range(1, steps + 1)), run.name
    whole = load_study(folder, tmp_path / "whole")
    outcome = run_all(whole.runs[2:3], Places(), tmp_path / "whole", tell=lambda text: None)
    assert outcome.finished == ["toy-v1-s1"]
    losses = [
        [row["loss"] for row in read_metrics(run.folder / METRICS_FILE) if "loss" in row]
        for run in (study.runs[2], whole.runs[2])
    ]
    assert losses[0] == losses[1], "bitwise"


def test_what_the_machine_lacks_is_said_before_anything_starts(data, tmp_path, capsys):
    folder = write_study(tmp_path / "s", data)
    words = [str(folder), "--cpu", "--runs", str(tmp_path / "runs")]
    assert main([*words, f"data.train={tmp_path / 'nothing'}", "--per-gpu", "0"]) == 2
    errors = capsys.readouterr().err
    assert "toy: data.train" in errors
    assert "--per-gpu must be at least 1" in errors
    assert main([*words, "--gpus", "99", "--only", "nobody"]) == 2
    assert "no run has 'nobody'" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_run_that_waits_for_its_folder_says_so_once(data, tmp_path, monkeypatch):
    """What it said before it waited is not taken for what it says later."""
    run = load_study(write_study(tmp_path / "s", data), tmp_path / "runs").runs[0]
    held = RunLock(run.folder)
    held.take()
    with pytest.raises(ConfigError) as error:
        RunLock(run.folder).take()
    held.release()
    script, count = tmp_path / "python", tmp_path / "count"
    script.write_text(
        f"#!/bin/sh\necho >> {count}\n"
        f"[ $(wc -l < {count}) -gt 3 ] && echo 'error: something else' && exit 2\n"
        f"echo 'error: {error.value}'; exit 2\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(place.sys, "executable", str(script))
    monkeypatch.setattr(place, "_WAIT", 0.25)
    said = []
    outcome = run_all([run], Places(), tmp_path / "runs", minutes=1, tell=said.append)
    assert said == [
        f"{run.name}: started on the CPU",
        f"{run.name}: its folder belongs to a live run (process {os.getpid()} on this machine); "
        "it waits for that to end, and is tried again every 0.25 s: stop that run if nobody "
        "needs it",
        f"{run.name}: failed with status 2\nerror: something else",
    ]
    assert outcome.failed == {run.name: "error: something else"}
    assert count.read_text() == 4 * "\n"


@pytest.mark.slow
def test_one_run_to_its_end_and_a_failed_one(data, tmp_path):
    study = load_study(write_study(tmp_path / "s", data), tmp_path / "runs")
    good, bad = study.runs[0], study.runs[2]
    good.data["checkpoint"] = {"interval": 0, "at_end": False}
    bad.data["data"] = {**bad.data["data"], "train": str(tmp_path / "nothing")}
    said = []
    outcome = run_all([bad, good], Places(per_device=2), tmp_path / "runs", tell=said.append)
    assert outcome.finished == [good.name]
    assert "nothing" in outcome.failed[bad.name]
    assert is_finished(good)
    assert steps_done(good) == 3
    assert not list(good.folder.glob("checkpoints/step*")), "at_end: false"
    assert not is_finished(bad)
    again = run_all([good], Places(), tmp_path / "runs", tell=said.append)
    assert again.finished == []
    assert (tmp_path / "runs" / "files" / f"{good.name}.yaml").exists()
    late = run_all(study.runs[1:2], Places(), tmp_path / "runs", minutes=0.0, tell=said.append)
    assert late.not_started == [study.runs[1].name]


def test_the_cost_counts_what_is_left(data, tmp_path):
    """3 steps of 8 sequences of 32: 768 tokens a run."""
    study = load_study(write_study(tmp_path / "s", data), tmp_path / "runs")
    found = costs(study, {"toy": {"bf16": 1.0, "v9": 0.5}})
    assert [cost.tokens for cost in found] == [768] * 4
    assert [cost.rate for cost in found] == [1.0, 1.0, 0.5, 0.5]
    assert found[0].hours == 768 / 3600
    text = render(found, Places((0, 1), 2), hours=0.15)
    assert "4 runs, 4 at once: 0.32 hours of training" in text
    assert "1 of 2 rows end within 0.15 hours" in text
    late = next(line for line in text.splitlines() if "too late" in line)
    assert late.split()[:6] == ["toy", "v1", "2", "1,536", "0", "*"], "at the rate of v9"
    assert "* not measured: counted at the slowest rate measured of that model; a row" in text
    assert trial_rows(study) == ["bf16", "v1"]


def test_a_trial_is_a_run_whatever_its_row_does_later(data, tmp_path):
    """Resets that begin late, a warmup and a profile that are longer than the trial."""
    folder = write_study(tmp_path / "s", data, steps=90)
    base = yaml.safe_load((folder / "base.yaml").read_text())
    base["train"] |= {"profile_steps": [50]}
    base["optimizer"] |= {"warmup_fraction": None, "warmup_steps": 60}
    reset = {"oscillation_reset": {"from": 0.6, "interval": 30, "window": 25}}
    study = yaml.safe_load((folder / "study.yaml").read_text())
    study["rows"]["v1"] |= {"optimizer": reset}
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    (folder / "study.yaml").write_text(yaml.safe_dump(study))
    for run in load_study(folder, tmp_path / "runs").runs:
        config = make_config(_trial(run, 1, 40, tmp_path).data)
        assert (config.train.steps, config.optimizer.lr) == (40, 3e-3)
        assert config.precision.recipe == run.data["precision"]["recipe"]


@pytest.mark.slow
def test_the_budget_is_measured(data, tmp_path, capsys):
    folder, runs = write_study(tmp_path / "s", data), tmp_path / "runs"
    words = [str(folder), "--cpu", "--runs", str(runs), "--per-gpu", "2", "--budget"]
    assert main([*words, "--budget-steps", "4"]) == 0
    assert "4 runs, 2 at once" in capsys.readouterr().out
    rates = yaml.safe_load((runs / "budget.json").read_text())
    assert all(10 < rates["toy"][row] < 1e6 for row in ("bf16", "v1"))
    assert main([str(folder), "--cpu", "--runs", str(runs), "--list"]) == 0
    assert "toy-v1-s2" in capsys.readouterr().out
