# SPDX-License-Identifier: Apache-2.0
"""A run on two devices beside the band of other orders of sums."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml

from pretrain.environment import sources_digest
from pretrain.parity import devices
from pretrain.parity.devices import Comparison, Gap, gap, write_bytes
from tests.distributed import ROOT
from tools import compare_devices


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.jsonl"
    words = ["def ", "return ", "x", "(y)", "\n", "import é"]
    rng = np.random.default_rng(0)
    lines = ["".join(rng.choice(words, 400)) for _ in range(20)]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


def test_bytes_become_tokens(text, tmp_path):
    from pretrain.data.manifest import load_manifest

    folder = write_bytes(text, tmp_path / "data", most=4000)
    manifest = load_manifest(folder)
    assert (manifest.vocab_size, manifest.eod_id) == (257, 256)
    first = json.loads(text.read_text().splitlines()[0])["text"].encode()
    stored = np.fromfile(next(folder.glob("shard-000*.bin")), np.uint16)
    assert stored[: len(first)].tolist() == list(first)
    assert stored[len(first)] == 256
    assert len(stored) <= 4100


def test_gaps():
    assert gap(np.array([1.0, 2.0, 4.0]), np.array([1.0, 2.5, 3.0])) == Gap(1.0, 0.5)
    apart = Comparison("nvfp4", 3, 5.0, 4.0, devices=Gap(1.0, 0.7), band=Gap(1.0, 0.2))
    assert not apart.is_within
    assert Comparison("nvfp4", 3, 5.0, 4.0, devices=None, band=Gap(1.0, 0.2)).is_within


def test_a_table_with_two_devices(text, monkeypatch, capsys):
    """What is compared with what, the runs themselves replaced."""

    def losses(config, name, overrides, gpu, order=0):
        shift = {"cpu": 0.0, "gpu": 0.01, "gpu-order1": 0.03, "gpu-order2": 0.02}[
            name.partition("-")[2]
        ]
        assert gpu == (not name.endswith("cpu"))
        assert overrides == ["precision.recipe=nvfp4_fast", "precision.decode=fp8"]
        return np.array([5.0, 4.0]) + shift

    monkeypatch.setattr(devices, "losses", losses)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    arguments = ["--steps", "2", "--recipes", "nvfp4_fast:fp8", "--text", str(text)]
    assert compare_devices.main(arguments) == 0
    row = capsys.readouterr().out.splitlines()[-1].split()
    assert row[:7] == [
        "nvfp4_fast:fp8", "5.000", "4.000", "1.00e-02", "1.00e-02", "2.00e-02", "2.00e-02"
    ]  # fmt: skip


def test_devices_far_apart_fail(text, monkeypatch, capsys):
    found = Comparison("bf16", 2, 5.0, 4.0, devices=Gap(1.0, 0.5), band=Gap(0.1, 0.1))
    monkeypatch.setattr(devices, "compare", lambda config, recipe, gpu: found)
    assert compare_devices.main(["--recipes", "bf16", "--text", str(text)]) == 1
    assert "FURTHER APART" in capsys.readouterr().out


def test_mistakes(capsys):
    assert compare_devices.main(["--text", "nothing"]) == 2
    assert "--text must be a file of tools.quickstart_text" in capsys.readouterr().err


def test_runs_that_are_kept_are_not_repeated(text, tmp_path, monkeypatch, capsys):
    """The CPU's runs of one machine, then the rest on another: a folder that has moved."""
    trained = []

    def train(command, **_):
        config = Path(next(word for word in command if word.endswith(".yaml")))
        name = command[-2].removeprefix("run.name=")
        trained.append(name)
        run = yaml.safe_load(config.read_text())
        place = Path(run["run"]["dir"]) / name
        start = place.parent / "start/checkpoints"
        assert (f"checkpoint.load={start}" in command) == (name != "start")
        (place / "checkpoints").mkdir(parents=True)
        steps = (1,) if name == "start" else (1, 2)
        rows = [{"step": step, "loss": 5.0 + 0.1 * len(trained)} for step in steps]
        (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(devices.subprocess, "run", train)
    first, second = tmp_path / "first", tmp_path / "second"
    options = ["--steps", "2", "--recipes", "bf16", "--text", str(text), "--keep"]
    assert compare_devices.main([*options, str(first), "--only-cpu"]) == 0
    assert trained == ["start", "bf16-cpu"]
    first.rename(second)
    assert compare_devices.main([*options, str(second)]) == 0
    assert trained[1:] == ["bf16-cpu", "bf16-cpu-order1", "bf16-cpu-order2"], "without a GPU"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    compare_devices.main([*options, str(second)])
    assert trained[4:] == ["bf16-gpu", "bf16-gpu-order1", "bf16-gpu-order2"], "none of the CPU's"
    monkeypatch.undo()
    assert compare_devices.main([*options, str(second), "--steps", "3"]) == 2
    assert "keeps the runs of one comparison" in capsys.readouterr().err
    (second / "comparison.json").write_text('{"te')
    assert compare_devices.main([*options, str(second)]) == 2
    assert "keeps the runs of one comparison" in capsys.readouterr().err


def test_kept_runs_of_other_code_are_named(text, tmp_path, monkeypatch, capsys):
    """By the digest that a run records; one that names none is of other code, too."""
    now = sources_digest(ROOT)

    def train(command, **_):
        config = Path(next(word for word in command if word.endswith(".yaml")))
        name = command[-2].removeprefix("run.name=")
        place = Path(yaml.safe_load(config.read_text())["run"]["dir"]) / name
        (place / "checkpoints").mkdir(parents=True)
        (place / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 5.0}) + "\n")
        code = {"commit": "abc", "sources": now}
        (place / "environment.json").write_text(json.dumps({"code": code}))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(devices.subprocess, "run", train)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    kept = tmp_path / "kept"
    options = ["--steps", "1", "--recipes", "nvfp4_fast:fp8", "--text", str(text)]
    options += ["--keep", str(kept)]
    assert compare_devices.main(options) == 0
    assert "other code" not in capsys.readouterr().out
    place = kept / "runs/nvfp4_fast_fp8-cpu"
    for code, said in (({"sources": "0123456789abcdef"}, "0123456789ab"), (None, "not recorded")):
        (place / "environment.json").write_text(json.dumps({"code": code}))
        for words in ([], ["--only-cpu"]):
            assert compare_devices.main([*options, *words]) == 0
            told = [line for line in capsys.readouterr().out.splitlines() if "other code" in line]
            assert [line.strip() for line in told] == [
                f"{place.name} was trained with other code (sources {said}; this is {now[:12]}): "
                f"remove {place} to train it again"
            ]


def test_recipes_are_read_before_anything_is_trained(text, monkeypatch, capsys):
    monkeypatch.setattr(devices.subprocess, "run", lambda *_, **__: pytest.fail("a run began"))
    recipes = "bf16,nvfp5,nvfp4:fp9,,nvfp4+precision.communicat=packed"
    assert compare_devices.main(["--text", str(text), "--recipes", recipes]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in said] == [
        *("--recipes nvfp5", "--recipes nvfp4:fp9", "--recipes ", f"--recipes {recipes[-33:]}")
    ]
    assert compare_devices.main(["--text", str(text), "--pattern", "X-"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_run_without_all_losses_is_not_compared(text, tmp_path, monkeypatch, capsys):
    """One that was cut after its last checkpoint has nothing left to train, and ends well."""
    place = tmp_path / "kept/runs/bf16-cpu"
    place.mkdir(parents=True)
    (place / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 5.0}) + "\n")
    ended = subprocess.CompletedProcess([], 0, "", "")
    monkeypatch.setattr(devices.subprocess, "run", lambda command, **_: ended)
    options = ["--steps", "2", "--recipes", "bf16", "--text", str(text), "--only-cpu"]
    assert compare_devices.main([*options, "--keep", str(tmp_path / "kept")]) == 2
    said = capsys.readouterr().err
    assert "of all of its 2 steps" in said
    assert f"remove {place}" in said


def test_kept_runs_need_their_text(capsys):
    for wrong in (["--keep", "x"], ["--only-cpu"]):
        with pytest.raises(SystemExit):
            compare_devices.main(wrong)
        assert "needs --" in capsys.readouterr().err


@pytest.mark.slow
def test_cpu_against_cpu_in_other_orders(text, capsys):
    arguments = ["--steps", "3", "--recipes", "nvfp4", "--pattern", "*-", "--text", str(text)]
    assert compare_devices.main(arguments) == 0
    row = capsys.readouterr().out.splitlines()[-1].split()
    assert row[0] == "nvfp4"
    assert row[3:5] == ["-", "-"]
    assert 0 < float(row[6]) <= float(row[5]) < 0.1
    assert 4 < float(row[2]) < 6.5
