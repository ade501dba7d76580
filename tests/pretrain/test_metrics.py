# SPDX-License-Identifier: Apache-2.0
import importlib.util
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fused_ops.errors import ConfigError
from pretrain import metrics
from pretrain.history import read_metrics
from pretrain.metrics import LogConfig, MetricsLogger, wandb_run_id

ROOT = Path(__file__).resolve().parents[2]


def test_rows_and_events_share_one_history(tmp_path):
    logger = MetricsLogger(tmp_path, LogConfig())
    logger.event("resume", 0, checkpoint="step_00000000")
    logger.log({"step": 1, "loss": 2.0})
    logger.log({"step": 1, "val_loss/books": 3.0})
    logger.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 0, "event": "resume", "checkpoint": "step_00000000"},
        {"step": 1, "loss": 2.0},
        {"step": 1, "val_loss/books": 3.0},
    ]


def test_other_ranks_leave_nothing(tmp_path):
    logger = MetricsLogger(tmp_path / "run", LogConfig(tensorboard=True, wandb=True), enabled=False)
    logger.log({"step": 1, "loss": 2.0})
    logger.event("stop", 1)
    logger.close()
    assert not (tmp_path / "run").exists()
    assert not [t for t in threading.enumerate() if t.name.startswith("log-")]


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_a_missing_package_is_refused_with_the_command(tmp_path, monkeypatch, package):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == package else find(name, *a)
    )
    with pytest.raises(ConfigError, match=f"`pip install {package}`, or set log.{package}=false"):
        MetricsLogger(tmp_path, LogConfig(**{package: True}))
    MetricsLogger(tmp_path, LogConfig()).close()


def test_unknown_settings_are_refused():
    with pytest.raises(ValueError, match="tensorbord"):
        LogConfig(tensorbord=True)


def test_tensorboard_has_the_numbers(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    logger = MetricsLogger(tmp_path, LogConfig(tensorboard=True))
    for step in range(1, 4):
        logger.log({"step": step, "loss": 4.0 / step, "lr": float("nan"), "note": "text"})
    logger.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [
        (1, 4.0),
        (2, 2.0),
        (3, pytest.approx(4 / 3)),
    ]
    assert events.Tags()["scalars"] == ["loss"]


class Hanging:
    name = "hanging"

    def __init__(self):
        self.release = threading.Event()

    def start(self):
        self.release.wait()

    def write(self, row):
        pass

    def close(self):
        pass


class Failing(Hanging):
    name = "failing"

    def __init__(self):
        self.written = []

    def start(self):
        pass

    def write(self, row):
        if row["step"] == 3:
            raise SystemExit("the service went away")
        self.written.append(row["step"])


def test_a_hanging_sink_never_blocks_a_step(monkeypatch, caplog):
    monkeypatch.setattr(metrics, "_QUEUE_ROWS", 10)
    monkeypatch.setattr(metrics, "_CLOSE_SECONDS", 0.05)
    hanging = Hanging()
    sink = metrics._Background(hanging)
    start = time.monotonic()
    for step in range(100):
        sink.put({"step": step})
    sink.close()
    assert time.monotonic() - start < 1.0
    assert sink.lost_rows == 90
    assert "hanging did not finish" in caplog.text
    hanging.release.set()


def test_a_failing_sink_is_one_warning(caplog):
    failing = Failing()
    sink = metrics._Background(failing)
    for step in range(1, 6):
        sink.put({"step": step})
    sink._thread.join(5)
    sink.put({"step": 6})
    sink.close()
    assert failing.written == [1, 2]
    assert caplog.text.count("training goes on without it") == 1
    assert sink.lost_rows == 3
    assert "the service went away" in caplog.text


def test_names_are_legal_everywhere():
    row = {"step": 1, "_step": 2, "val loss/a:b": 1.5, "flag": True, "skip": None, "inf": 1e999}
    assert metrics._numbers(row) == {"metric_step": 2.0, "val_loss/a_b": 1.5, "flag": 1.0}


def test_run_id_is_made_once(tmp_path):
    first = wandb_run_id(tmp_path)
    assert wandb_run_id(tmp_path) == first
    assert (tmp_path / "wandb_id").read_text().strip() == first


def test_wandb_offline_without_a_network(tmp_path):
    """Two starts of one run: files on disk, the same id, no secret, nothing fatal."""
    pytest.importorskip("wandb", reason="wandb is not installed")
    code = """
import sys
from pretrain.metrics import LogConfig, MetricsLogger
step = int(sys.argv[2])
logger = MetricsLogger(sys.argv[1], LogConfig(wandb=True), {"api_key": "sesame-0123"}, step)
logger.log({"step": step + 1, "loss": 2.0})
logger.close()
"""
    hidden = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    for resumed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path), resumed],
            cwd=ROOT,
            env={**hidden, "HOME": str(tmp_path / "home")},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert "failed" not in done.stderr, done.stderr
    kept = (tmp_path / "wandb_id").read_text().strip()
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(folders) >= 1
    assert {f.name for f in files} == {f"run-{kept}.wandb"}
    for file in (p for p in (tmp_path / "wandb").rglob("*") if p.is_file()):
        assert b"sesame-0123" not in file.read_bytes(), file
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
