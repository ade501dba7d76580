# SPDX-License-Identifier: Apache-2.0
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tools import quickstart
from tools.quickstart import CONFIG, ROOT, Place, StepFailed, find_place, summary, train

SHORT = ("train.steps=150",)


@pytest.fixture
def place(tmp_path) -> Place:
    return Place(tmp_path / "data", tmp_path / "runs" / "quickstart", 150, SHORT)


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str, ...]]:
    made: list[tuple[str, ...]] = []

    def record(module, *arguments, capture=False):
        made.append((module, *map(str, arguments)))
        return "def sample():\n    pass\n" if capture else ""

    monkeypatch.setattr(quickstart, "_run", record)
    return made


def test_places_follow_the_run_file_and_the_overrides(tmp_path):
    usual = find_place(Path("data/quickstart"), [])
    steps = yaml.safe_load((ROOT / CONFIG).read_text())["train"]["steps"]
    assert (usual.run, usual.steps, usual.overrides) == (Path("runs/quickstart"), steps, ())
    other = find_place(tmp_path, [f"run.dir={tmp_path}", "run.name=x", "train.steps=7"])
    assert (other.run, other.steps) == (tmp_path / "x", 7)
    assert f"data.train={tmp_path}/shards/train" in other.overrides


@pytest.mark.parametrize(
    ("step", "said", "runs"),
    [(0, "starts; 150 steps", 1), (50, "continues from step 50", 1), (150, "kept", 0)],
)
def test_training_starts_continues_or_is_kept(place, calls, monkeypatch, capsys, step, said, runs):
    steps = iter([step, 150])
    monkeypatch.setattr(quickstart, "_completed", lambda path: next(steps))
    train(place)
    assert said in capsys.readouterr().out
    assert calls == [("pretrain", CONFIG, *SHORT)] * runs


def test_a_stopped_run_says_how_to_go_on(place, calls, monkeypatch, capsys):
    steps = iter([0, 42])
    monkeypatch.setattr(quickstart, "_completed", lambda path: next(steps))
    with pytest.raises(StepFailed):
        train(place)
    assert "the same command continues" in capsys.readouterr().out


def test_a_failing_step_ends_with_its_status(monkeypatch, tmp_path):
    def fail(module, *arguments, capture=False):
        raise StepFailed(2)

    monkeypatch.setattr(quickstart, "_run", fail)
    assert quickstart.main(["--data", str(tmp_path)]) == 2


def test_summary_has_the_figures(place, calls, monkeypatch):
    from tests.pretrain.run_folder import write_run

    write_run(place.run)
    monkeypatch.setattr(quickstart, "unigram_entropy", lambda folder: 6.5)
    text = summary(place, quickstart.sample(place), 90.0)
    assert "8.250 at step 0, 5.125 at step 60; unigram entropy of the text 6.500" in text
    assert "60 steps, 123\u202fk tokens, 2\u202f300 tokens/s" in text
    assert "1.5 minutes" in text
    assert f"{place.run}/: report.html" in text
    assert "    def sample():\n        pass" in text
    assert "python -m tools.generate" in text.replace(str(Path(sys.executable).name), "python")
    assert calls[0][0] == "tools.generate"


@pytest.mark.slow
def test_from_nothing_twice(tmp_path):
    """The real programs with a short run; the second time nothing is done again."""
    words = [
        f"run.dir={tmp_path / 'runs'}",
        "train.steps=4",
        "train.eval_interval=2",
        "train.eval_batches=1",
        "train.global_batch_size=2",
        "train.micro_batch_size=2",
        "optimizer.warmup_steps=1",
    ]
    command = [sys.executable, "-m", "tools.quickstart", "--data", str(tmp_path / "data"), *words]
    outputs = []
    for _ in range(2):
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    for output in outputs:
        assert re.search(r"Validation loss  [\d.]+ at step 2, [\d.]+ at step 4; unigram", output)
        assert "It writes:\n    def " in output
    assert "starts; 4 steps" in outputs[0]
    assert outputs[1].count("done before and whole, kept") == 2
    assert "step 4 of 4 was reached before, kept" in outputs[1]
    assert (tmp_path / "runs" / "quickstart" / "report.html").exists()


SLOW_TO_STOP = """
import pathlib, signal, sys, time

def stop(signum, frame):
    time.sleep(1)
    pathlib.Path("saved").write_text(signal.Signals(signum).name)
    sys.exit(0)

for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, stop)
pathlib.Path("started").touch()
time.sleep(60)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_to_all_lets_the_running_program_save(tmp_path, name):
    """As a terminal or a scheduler sends it: to the whole process group, and then it is awaited."""
    (tmp_path / "slow_to_stop.py").write_text(SLOW_TO_STOP)
    code = (
        "import pathlib, tools.quickstart as q\n"
        f"q.ROOT = pathlib.Path({str(tmp_path)!r})\n"
        "q._run('slow_to_stop')\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, start_new_session=True)
    deadline = time.monotonic() + 200
    while not (tmp_path / "started").exists():
        assert parent.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(parent.pid, signal.Signals[name])
    assert parent.wait(60) == 0
    assert (tmp_path / "saved").read_text() == name
