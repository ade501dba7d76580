# SPDX-License-Identifier: Apache-2.0
"""Log files rotate, stay within bounds, survive a full disk, and hold no secret."""

import json
import logging
import subprocess
import sys

import pytest
import yaml

from pretrain import logs
from pretrain.config import make_config, save_config
from pretrain.logs import log_to_file, stop_logging
from tests.distributed import ROOT
from tests.toy import make_toy, toy_config

SECRET = "hunter2hunter2abcdef"


def test_log_files_rotate_and_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "_FILE_BYTES", 4000)
    handler = log_to_file(tmp_path, 3)
    logger = logging.getLogger("rotation")
    logger.setLevel(logging.INFO)
    for number in range(1000):
        logger.info("line %d", number)
    stop_logging(handler)
    files = sorted((tmp_path / "logs").iterdir())
    assert [f.name for f in files] == [
        "rank00003.log", "rank00003.log.1", "rank00003.log.2", "rank00003.log.3"
    ]  # fmt: skip
    assert all(file.stat().st_size <= 4000 for file in files)
    assert files[0].read_text().endswith("INFO line 999\n")


def test_a_rank_that_says_nothing_makes_no_file(tmp_path):
    stop_logging(log_to_file(tmp_path, 7))
    assert list((tmp_path / "logs").iterdir()) == []


def test_a_full_disk_silences_the_file_only(tmp_path, capfd):
    handler = log_to_file(tmp_path, 0)
    logging.getLogger("disk").warning("one")

    class Full:
        def __getattr__(self, name):
            raise OSError(28, "No space left on device")

    stream, handler.stream = handler.stream, Full()
    logging.getLogger("disk").warning("two")
    handler.stream = stream
    stop_logging(handler)
    assert "Traceback" not in capfd.readouterr().err
    assert (tmp_path / "logs" / "rank00000.log").read_text().endswith("WARNING one\n")


def test_logs_and_saved_configs_hold_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    handler = log_to_file(tmp_path, 0)
    logging.getLogger("secret").warning("key %s in a line", SECRET)
    stop_logging(handler)
    assert SECRET not in (tmp_path / "logs" / "rank00000.log").read_text()
    config = make_config(
        toy_config(tmp_path, data={"train": f"s3://user:{SECRET}x@store/train", "valid": None})
    )
    save_config(config, tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    assert SECRET not in text
    assert yaml.safe_load(text)["data"]["train"] == "s3://***@store/train"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_file_and_no_line_of_a_run_holds_a_secret(tmp_path):
    """In the environment, in settings, in overrides right and wrong: found nowhere after."""
    make_toy(tmp_path)
    run = tmp_path / "run.yaml"
    secrets = [SECRET, *(f"{word}-0123456789-secret" for word in ("config", "given", "wrong"))]
    _, config, given, wrong = secrets
    data = toy_config(
        tmp_path,
        run={"name": "secret", "dir": str(tmp_path / "runs")},
        data={"storage": {"gcs": {"token": config}}},
        checkpoint={"interval": 2},
        log={"progress": "lines", "report": True, "wandb_entity": SECRET, "tensorboard": True},
    )
    run.write_text(yaml.safe_dump(data))
    env = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "WANDB_API_KEY": SECRET}
    storage = f"data.storage.s3={{client_kwargs: {{aws_secret_access_key: {given}}}}}"
    said = ""
    for words, status in (
        ([storage], 0),
        (["log.wandb_api_key=" + wrong], 2),
        (["data.storage.s3.secret=[" + wrong], 2),
        ([f"data.train=s3://me:{wrong}@127.0.0.1/x"], 2),
        (["train.steps=5", "optimizer.lr=-1", storage], 2),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "pretrain", str(run), *words],
            cwd=ROOT, env=env, capture_output=True, text=True, timeout=900,
        )  # fmt: skip
        said += done.stdout + done.stderr
        assert done.returncode == status, said
    assert "Traceback" not in said
    assert not [secret for secret in secrets if secret in said], said
    found = [p for p in (tmp_path / "runs").rglob("*") if p.is_file()]
    assert len(found) > 6
    held = [p for p in found for s in secrets if s.encode() in p.read_bytes()]
    assert not held
    (command,) = {
        json.loads(p.read_text())["command"] for p in found if p.name == "environment.json"
    }
    assert "aws_secret_access_key: ***" in command
