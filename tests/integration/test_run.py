# SPDX-License-Identifier: Apache-2.0
"""The program itself: a whole run, a stopped one, two ranks, and what a user's mistake says."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from pretrain.__main__ import main
from pretrain.data.manifest import load_manifest
from tests.distributed import ROOT, run_distributed
from tests.pretrain.data.shard_folders import write_folder
from tests.toy import VOCAB, make_toy, toy_config
from tools.preflight import main as preflight


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy"))


def _write(path: Path, data: dict) -> Path:
    path.write_text(yaml.safe_dump(data))
    return path


def _rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _losses(run: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in _rows(run) if "loss" in row}


def _start(config: Path, *words: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "pretrain", str(config), *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_hybrid_in_nvfp4_is_stopped_and_continued(folder, tmp_path):
    """SIGTERM saves and exits with 0; the same command continues; all equals an unstopped run."""
    sections = {
        "run": {"dir": str(tmp_path / "runs"), "name": "stopped"},
        "train": {"steps": 12, "dtype": "bf16", "global_batch_size": 4, "eval_interval": 5},
        "precision": {"recipe": "nvfp4"},
        "log": {"progress": "lines", "interval": 1, "report": True},
    }
    config = _write(tmp_path / "run.yaml", toy_config(folder, "M*-E", **sections))
    run = tmp_path / "runs" / "stopped"
    process = _start(config)
    end = time.monotonic() + 600
    while not (run / "metrics.jsonl").exists() or len(_losses(run)) < 2:
        assert time.monotonic() < end, "no step within 600 s"
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    step = max(_losses(run))
    assert 2 <= step < 12, "it stopped before its end"
    assert (run / "checkpoints" / f"step_{step:08d}" / "COMPLETE").exists()
    assert _rows(run)[-1]["event"] == "stop"
    assert main([str(config)]) == 0
    losses = _losses(run)
    assert list(losses) == list(range(1, 13))
    assert [r["step"] for r in _rows(run) if "val_loss" in r] == [5, 10, 12]
    assert main([str(config), "run.name=whole"]) == 0
    assert _losses(tmp_path / "runs" / "whole") == losses, "bitwise"
    _check_folder(run)


def _check_folder(run: Path) -> None:
    for name in ("config.yaml", "environment.json", "precision.json", "report.html"):
        assert (run / name).stat().st_size > 100, name
    data = json.loads((run / "environment.json").read_text())["data"]
    folders = yaml.safe_load((run / "config.yaml").read_text())["data"]
    assert data["train"] == [load_manifest(folders["train"]).fingerprint()]
    assert data["valid"] == load_manifest(folders["valid"]).fingerprint()
    row = next(row for row in _rows(run) if "loss" in row)
    keys = (
        "step",
        "loss",
        "lr",
        "grad_norm",
        "tokens",
        "samples",
        "tokens_per_s",
        "seconds",
        "skipped",
        "memory_gib",
    )
    assert tuple(row) == keys
    assert (row["tokens"], row["skipped"]) == (4 * 32, 0)
    table = json.loads((run / "precision.json").read_text())
    assert any("nvfp4" in json.dumps(entry) for entry in table)


def _train(paths: list[str]) -> list[dict[str, list[float]]]:
    """On a rank: losses and gradient norms of runs, one after the other."""
    from pretrain.config import load_config
    from pretrain.trainer import Trainer

    found = []
    for path in paths:
        config = load_config(path, for_training=True)
        Trainer(config).run()
        rows = [row for row in _rows(config.run.path) if "loss" in row]
        found.append({name: [row[name] for row in rows] for name in ("loss", "grad_norm")})
    return found


# Sums of gradients in another order; in NVFP4 a code at a boundary may flip after an update.
_TOLERANCE = {"fp32": 1e-5, "nvfp4": 2e-3}


def test_two_ranks_train_what_one_does(folder, tmp_path):
    """Data parallelism over 2 ranks is accumulation over twice the micro-batches on one."""
    paths = {1: [], 2: []}
    for ranks, files in paths.items():
        for precision in _TOLERANCE:
            data = toy_config(
                folder,
                "M*E",
                run={"dir": str(tmp_path), "name": f"{precision}{ranks}"},
                train={"micro_batch_size": 2, "dtype": "fp32" if precision == "fp32" else "bf16"},
                precision={"recipe": "bf16" if precision == "fp32" else "nvfp4"},
            )
            files.append(str(_write(tmp_path / f"{precision}{ranks}.yaml", data)))
    one, two = _train(paths[1]), run_distributed(_train, 2, timeout=800, args=(paths[2],))[0]
    for tolerance, a, b in zip(_TOLERANCE.values(), one, two):
        assert len(a["loss"]) == 4
        assert b["loss"] == pytest.approx(a["loss"], rel=tolerance)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=tolerance)
        assert b["loss"][0] == pytest.approx(a["loss"][0], rel=1e-6)


def test_what_looks_on_changes_nothing(folder, tmp_path):
    """Monitor, evaluation in two precisions, TensorBoard, progress, report, checkpoints:
    losses, gradient norms and rates of a hybrid with experts are the same bits."""
    watched = {
        "train": {"eval_interval": 1, "eval_batches": 1, "eval_also_bf16": True},
        "monitor": {"interval": 1},
        "log": {"progress": "lines", "interval": 1, "report": True, "tensorboard": True},
        "checkpoint": {"interval": 2},
    }
    rows = []
    for name, more in (("plain", {}), ("watched", watched)):
        sections = {"train": {"dtype": "bf16", "steps": 3}, "precision": {"recipe": "nvfp4"}}
        for section, changes in more.items():
            sections[section] = sections.get(section, {}) | changes
        config = toy_config(folder, "M*E", run={"dir": str(tmp_path), "name": name}, **sections)
        assert main([str(_write(tmp_path / f"{name}.yaml", config))]) == 0
        rows.append([r for r in _rows(tmp_path / name) if "grad_norm" in r])
    seen = [[(r["step"], r["loss"], r["grad_norm"], r["lr"]) for r in run] for run in rows]
    assert len(seen[0]) == 3
    assert seen[0] == seen[1]
    assert (tmp_path / "watched" / "numerics.jsonl").exists()
    assert sum("val_loss" in row for row in _rows(tmp_path / "watched")) == 3
    assert not (tmp_path / "plain" / "numerics.jsonl").exists()


def test_a_run_that_keeps_nothing(folder, tmp_path):
    """Without a checkpoint at the end there is none, and the run is done all the same."""
    sections = {"run": {"dir": str(tmp_path)}, "train": {"steps": 2, "global_batch_size": 4}}
    config = toy_config(folder, checkpoint={"interval": 0, "at_end": False}, **sections)
    assert main([str(_write(tmp_path / "run.yaml", config))]) == 0
    run = tmp_path / "toy"
    assert sorted(_losses(run)) == [1, 2]
    assert not list(run.rglob("step_*"))
    assert json.loads((run / "heartbeat.json").read_text())["phase"] == "done"


def _fails(capfd, *arguments: str) -> str:
    """What the program says on its way to status 2."""
    capfd.readouterr()
    assert main(list(arguments)) == 2
    said = capfd.readouterr()
    assert "Traceback" not in said.err + said.out
    assert said.err.startswith("error: ")
    return said.err


def test_mistakes_end_with_status_2_and_no_trace(folder, tmp_path, capfd):
    good = _write(tmp_path / "run.yaml", toy_config(folder, run={"dir": str(tmp_path / "runs")}))
    assert "no such file" in _fails(capfd, str(tmp_path / "none.yaml"))
    (tmp_path / "bad.yaml").write_text("a: [1\n")
    assert "must be YAML" in _fails(capfd, str(tmp_path / "bad.yaml"))
    said = _fails(capfd, str(good), "train.stpes=3", "optimizer.lr=-1", "data.train=/nowhere")
    assert said.count("error: ") >= 3
    assert "did you mean train.steps" in said
    assert "data.train: a data folder must exist; there is no /nowhere" in said
    assert "must read section.key=value" in _fails(capfd, str(good), "train.steps")
    (tmp_path / "empty").mkdir()
    assert "manifest.json" in _fails(capfd, str(good), f"data.train={tmp_path / 'empty'}")
    assert "checkpoint.resume=must" in _fails(capfd, str(good), "checkpoint.resume=must")
    assert main([]) == 2
    assert main(["--help"]) == 0


def test_mistakes_of_training_and_validation_data_are_told_together(tmp_path, capfd):
    for name, document in (("train", [1, 2, 0]), ("near", [0]), ("far", [0])):
        write_folder(tmp_path / name, [np.array(document)], num_shards=1, vocab=VOCAB)
    valid = {name: str(tmp_path / name) for name in ("near", "far")}
    data = {"train": str(tmp_path / "train"), "valid": valid}
    run = {"dir": str(tmp_path / "runs")}
    config = _write(tmp_path / "run.yaml", toy_config(tmp_path, run=run, data=data))
    said = _fails(capfd, str(config))
    assert f"{tmp_path / 'train'}: a source must hold at least one window" in said
    for folder in valid.values():
        assert f"validation data must hold at least 2 tokens; {folder} has 1: give" in said
    assert said.count("error: ") == 3


def test_a_run_folder_that_cannot_be_written(folder, tmp_path, capfd):
    (tmp_path / "file").write_text("not a folder")
    good = _write(tmp_path / "run.yaml", toy_config(folder))
    said = _fails(capfd, str(good), f"run.dir={tmp_path / 'file'}")
    assert "the run folder must be writable" in said
    assert "set run.dir" in said


def test_a_full_disk_is_said_in_one_line(folder, tmp_path, capfd, monkeypatch):
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "config.yaml"))

    monkeypatch.setattr("pretrain.trainer.save_config", full)
    good = _write(tmp_path / "run.yaml", toy_config(folder, run={"dir": str(tmp_path / "runs")}))
    assert "no space left on device" in _fails(capfd, str(good))


def test_a_checkpoint_of_another_vocabulary(folder, tmp_path, capfd):
    """Runs once had the data's, whatever was set: no row is made up, and one setting continues."""
    data = toy_config(folder, run={"dir": str(tmp_path)}, train={"steps": 2})
    good = str(_write(tmp_path / "run.yaml", data))
    assert main([good]) == 0
    before, longer = _rows(tmp_path / "toy"), ["train.steps=4"]
    for more in ([], [f"checkpoint.load={tmp_path / 'toy'}", "checkpoint.load_parts=model"]):
        name = ["run.name=other"] if more else []
        for vocabulary in (129, 1000):
            wrong = [good, *longer, *more, *name, f"model.vocab_size={vocabulary}"]
            rows = -(-vocabulary // 128) * 128
            said = _fails(capfd, *wrong)
            assert f"has a vocabulary of 128 rows, and this model of {rows}" in said
            assert "model.vocab_size=null" in said
    assert _rows(tmp_path / "toy") == before
    assert preflight([good, *longer, "model.vocab_size=1000"]) == 2
    assert "has a vocabulary of 128 rows, and this model of 1024" in capfd.readouterr().out
    assert main([good, *longer, "model.vocab_size=128"]) == 0
    assert max(row["loss"] for row in _rows(tmp_path / "toy")[-3:] if "loss" in row) < 5.0


def test_weights_of_another_model_are_refused(folder, tmp_path, capfd, caplog):
    """What the model has no place for is not left out; a setting that may differ is said."""
    data = toy_config(folder, "*-*-", run={"dir": str(tmp_path)}, train={"steps": 1})
    good = str(_write(tmp_path / "run.yaml", data))
    assert main([good]) == 0
    load = ["run.name=other", f"checkpoint.load={tmp_path / 'toy'}", "checkpoint.load_parts=model"]
    said = _fails(capfd, good, *load, "model.pattern=*-")
    assert "such as decoder.layers.2.input_layernorm.weight: it is another model's" in said
    said = _fails(capfd, good, *load, "model.megatron.qk_layernorm=false")
    assert "holds 4 weights that this model has no place for" in said
    assert main([good, *load, "model.rotary_base=500000"]) == 0
    said = capfd.readouterr().err + caplog.text
    assert "changed model.rotary_base: 10000.0 -> 500000.0" in said


def test_a_run_that_only_skips_gives_up_with_status_2(folder, tmp_path, capfd):
    data = toy_config(
        folder,
        run={"dir": str(tmp_path / "runs")},
        train={"dtype": "fp16", "max_skipped": 3, "steps": 9},
    )
    said = _fails(capfd, str(_write(tmp_path / "run.yaml", data)))
    assert "train.max_skipped=3" in said
    events = [row for row in _rows(tmp_path / "runs" / "toy") if row.get("event") == "skip"]
    assert [row["step"] for row in events] == [1, 2, 3]


def test_a_dry_run_prints_the_table_and_trains_nothing(tmp_path, capfd):
    data = toy_config(tmp_path, "M*-E", precision={"recipe": "nvfp4"}, train={"dry_run": True})
    assert main([str(_write(tmp_path / "run.yaml", data))]) == 0
    said = capfd.readouterr().out
    assert "layers.1.self_attention.linear_qkv" in said
    assert "nvfp4" in said
    assert not (tmp_path / "runs").exists()


def test_a_profile_is_left_behind(folder, tmp_path):
    data = toy_config(folder, run={"dir": str(tmp_path)}, train={"steps": 2, "profile_steps": [2]})
    assert main([str(_write(tmp_path / "run.yaml", data))]) == 0
    names = sorted(path.name for path in (tmp_path / "toy" / "profile").iterdir())
    assert names == ["step00000002-rank0.trace.json.gz", "step00000002-rank0.txt"]
