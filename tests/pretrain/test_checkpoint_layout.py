# SPDX-License-Identifier: Apache-2.0
"""Folders of checkpoints without a model: what is whole, what is kept, who holds the run."""

import json
import os
import signal
import socket
import time

import numpy as np
import pytest
import torch
import yaml

from fused_ops.errors import ConfigError
from pretrain.checkpoint.compare import compare, kind_of, override_config
from pretrain.checkpoint.config import find_latest, require_latest
from pretrain.checkpoint.io import (
    CheckpointError,
    dump_json,
    explain,
    file_entry,
    from_json,
    load_json,
    make_folder,
    to_json,
    write_durably,
)
from pretrain.checkpoint.layout import (
    COMPLETE,
    LATEST,
    MANIFEST,
    check_contents,
    check_sizes,
    prune,
    scan,
    seal,
    step_folder,
    step_of,
)
from pretrain.checkpoint.lock import STALE_SECONDS, RunLock


def make_checkpoint(checkpoints, step, files=3):
    """A whole checkpoint of arbitrary files."""
    folder = step_folder(checkpoints, step)
    checkpoints.mkdir(exist_ok=True)
    make_folder(folder)
    entries = {}
    for index in range(files):
        data = bytes([step % 251, index]) * 500
        write_durably(folder / f"__{index}_0.distcp", data)
        entries[f"__{index}_0.distcp"] = file_entry(folder / f"__{index}_0.distcp")
    seal(folder, step, entries)
    return folder


def steps(checkpoints):
    return sorted(step_of(path) for path in checkpoints.iterdir() if step_of(path) is not None)


def test_names_of_steps(tmp_path):
    assert step_folder(tmp_path, 100).name == "step_00000100"
    assert step_of(tmp_path / "step_00000100") == 100
    assert step_of(tmp_path / "step_123456789") == 123456789
    assert step_of(tmp_path / "step_100") is None
    assert step_of(tmp_path / "step_00000100.tmp") is None


def test_a_sealed_folder_is_whole_and_latest_names_it(tmp_path):
    make_checkpoint(tmp_path, 1)
    folder = make_checkpoint(tmp_path, 2)
    assert check_sizes(folder) is None
    assert check_contents(folder) is None
    assert (tmp_path / LATEST).read_text() == "step_00000002\n"
    found = find_latest(tmp_path)
    assert (found.step, found.path, found.skipped) == (2, folder, ())
    assert not [name for name in os.listdir(folder) if name.endswith(".tmp")]


def _truncate(folder):
    path = folder / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])


def _flip(folder):
    path = folder / "__1_0.distcp"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _edit_manifest(folder):
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"]["__1_0.distcp"]["bytes"] += 1
    (folder / MANIFEST).write_text(json.dumps(manifest))


BREAKS = {
    "truncated": (_truncate, "__1_0.distcp has 999 bytes instead of 1000"),
    "flipped": (_flip, "__1_0.distcp is damaged"),
    "missing": (lambda f: (f / "__1_0.distcp").unlink(), "__1_0.distcp is missing"),
    "unfinished": (lambda f: (f / COMPLETE).unlink(), "has no COMPLETE: it was never finished"),
    "empty mark": (lambda f: (f / COMPLETE).write_bytes(b""), "COMPLETE is not readable"),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), "manifest.json: No such file"),
    "other manifest": (_edit_manifest, "manifest.json differs from what COMPLETE says"),
}


@pytest.mark.parametrize("kind", BREAKS)
def test_a_broken_checkpoint_is_named_and_the_older_one_found(tmp_path, caplog, kind):
    make_checkpoint(tmp_path, 1)
    folder = make_checkpoint(tmp_path, 2)
    damage, reason = BREAKS[kind]
    damage(folder)
    assert reason in check_contents(folder)
    found = find_latest(tmp_path)
    assert found.step == 1
    assert len(found.skipped) == 1
    assert found.skipped[0].startswith("step_00000002")
    assert reason in found.skipped[0]
    assert require_latest(tmp_path) == found
    assert [record.getMessage() for record in caplog.records] == [
        f"checkpoint passed over, step_00000001 is read: {found.skipped[0]}"
    ]
    (tmp_path / "step_00000001" / COMPLETE).unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint of .* can be read") as caught:
        find_latest(tmp_path)
    assert reason in str(caught.value)
    assert "step_00000001 has no COMPLETE" in str(caught.value)


def test_a_manifest_cannot_point_outside(tmp_path):
    folder = make_checkpoint(tmp_path, 1)
    entries = {"../secret": {"bytes": 1, "sha256": "0"}}
    seal(folder, 1, entries)
    assert "names a file outside" in check_sizes(folder)


def test_a_newer_format_is_not_guessed_at(tmp_path, monkeypatch):
    monkeypatch.setattr("pretrain.checkpoint.layout.FORMAT", 2)
    folder = make_checkpoint(tmp_path, 1)
    monkeypatch.undo()
    assert "has format 2, this program reads 1" in check_sizes(folder)


def test_nothing_there_is_none(tmp_path):
    assert find_latest(tmp_path / "missing") is None
    assert find_latest(tmp_path) is None
    (tmp_path / "notes.txt").write_text("x")
    assert find_latest(tmp_path) is None


def test_the_ranks_share_the_checksums(tmp_path):
    folder = make_checkpoint(tmp_path, 1, files=5)
    _flip(folder)
    reasons = [check_contents(folder, rank, 4) for rank in range(4)]
    assert [bool(reason) for reason in reasons] == [False, True, False, False]


def test_a_run_folder_a_checkpoints_folder_and_a_step_all_lead_there(tmp_path):
    folder = make_checkpoint(tmp_path / "checkpoints", 7)
    for path in (tmp_path, tmp_path / "checkpoints", folder):
        assert find_latest(path).path == folder


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [
        (0, 0, [1, 2, 3, 4, 5, 6]),
        (1, 0, [6]),
        (2, 0, [5, 6]),
        (1, 2, [2, 4, 6]),
        (2, 3, [3, 5, 6]),
        (9, 0, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_retention(tmp_path, keep_last, keep_every, kept):
    for step in range(1, 7):
        make_checkpoint(tmp_path, step)
        prune(tmp_path, step, keep_last, keep_every)
    assert steps(tmp_path) == kept
    assert find_latest(tmp_path).step == 6


def test_retention_counts_whole_checkpoints_only(tmp_path):
    for step in range(1, 5):
        make_checkpoint(tmp_path, step)
    (step_folder(tmp_path, 3) / COMPLETE).unlink()
    (step_folder(tmp_path, 9)).mkdir()  # a save that died, of an abandoned future
    removed = prune(tmp_path, 4, 2, 0)
    assert steps(tmp_path) == [2, 4, 9]
    assert {path.name for path in removed} == {"step_00000001", "step_00000003"}


def test_deleting_starts_with_the_mark(tmp_path, monkeypatch):
    for step in (1, 2):
        make_checkpoint(tmp_path, step)
    order = []
    unlink, fsync = os.unlink, os.fsync
    monkeypatch.setattr(
        os, "unlink", lambda p, **k: (order.append(os.path.basename(p)), unlink(p, **k))
    )
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("fsync"), fsync(fd)))
    prune(tmp_path, 2, 1, 0)
    assert order[:2] == [COMPLETE, "fsync"]


def test_scan_knows_whether_anything_was_ever_finished(tmp_path):
    assert not scan(tmp_path).once_complete
    step_folder(tmp_path, 1).mkdir()
    assert not scan(tmp_path).once_complete
    folder = make_checkpoint(tmp_path, 2)
    (folder / COMPLETE).unlink()
    assert scan(tmp_path).once_complete  # `latest` tells
    (tmp_path / LATEST).unlink()
    assert not scan(tmp_path).once_complete


def test_json_brings_tensors_back_bit_for_bit():
    value = {
        "bf16": torch.tensor([1.5, float("nan"), -0.0], dtype=torch.bfloat16),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 4),
        "words": np.arange(5, dtype=np.uint32),
        "list": [1, 2.5, None, True, "text", float("inf")],
    }
    back = from_json(json.loads(dump_json(value)))
    assert back["list"] == value["list"]
    assert torch.equal(back["bf16"].view(torch.int16), value["bf16"].view(torch.int16))
    assert back["scalar"].shape == ()
    assert back["scalar"] == 3
    assert back["empty"].shape == (0, 4)
    assert np.array_equal(back["words"].numpy(), value["words"])
    assert back["words"].dtype == torch.uint32


def test_json_refuses_what_it_cannot_hold(tmp_path):
    with pytest.raises(TypeError, match=r"not object"):
        to_json({"a": object()})
    with pytest.raises(TypeError, match=r"not 3"):
        to_json({3: 1})
    (tmp_path / "x").write_text('{"a": {"__tensor__": "load", "shape": [], "data": ""}}')
    with pytest.raises(CheckpointError, match=r"not a dtype"):
        load_json(tmp_path / "x")
    (tmp_path / "x").write_text("{")
    with pytest.raises(CheckpointError, match=r"not readable"):
        load_json(tmp_path / "x")


def test_a_write_is_all_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "latest"
    write_durably(path, b"old")
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match=r"full"):
        write_durably(path, b"new")
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize(
    ("number", "words"),
    [(28, "is full"), (13, "no permission"), (30, "no permission"), (2, "has vanished")],
)
def test_errors_of_the_system_say_what_to_do(tmp_path, number, words):
    text = explain(OSError(number, os.strerror(number)), tmp_path / "step_00000001")
    assert words in text
    assert "step_00000001" in text


# ---- the lock


def test_a_live_run_is_respected_and_a_killed_one_taken_over(tmp_path):
    reader, writer = os.pipe()
    holder = os.fork()
    if holder == 0:
        RunLock(tmp_path).take()
        os.write(writer, b"held")
        time.sleep(60)
        os._exit(0)
    try:
        assert os.read(reader, 4) == b"held"
        with pytest.raises(ConfigError, match=rf"live run .process {holder} on this machine"):
            RunLock(tmp_path).take()
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    lock = RunLock(tmp_path)
    assert f"process {holder}" in lock.take()
    assert lock.problem() is None
    with pytest.raises(ConfigError, match=r"live run"):
        RunLock(tmp_path).take()
    lock.release()
    assert os.listdir(tmp_path) == []
    assert RunLock(tmp_path).take() is None


def test_another_process_with_the_dead_ones_number_does_not_hold(tmp_path):
    lock = RunLock(tmp_path)
    lock.take()
    held = json.loads(lock.path.read_text())
    lock.path.write_text(json.dumps({**held, "start": "1"}))
    assert "took over" in RunLock(tmp_path).take()
    lock.path.write_text(json.dumps({**held, "boot": "before the restart"}))
    assert "took over" in RunLock(tmp_path).take()


def test_another_machine_holds_as_long_as_it_touches_the_file(tmp_path):
    path = tmp_path / "lock"
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1, "start": "1", "boot": "b"}))
    with pytest.raises(ConfigError, match=r"process 1 on elsewhere.*if it is dead, delete"):
        RunLock(tmp_path).take()
    old = time.time() - STALE_SECONDS - 1
    os.utime(path, (old, old))
    assert "process 1 on elsewhere" in RunLock(tmp_path).take()
    assert json.loads(path.read_text())["host"] == socket.gethostname()


def test_a_lost_lock_is_noticed(tmp_path):
    run = tmp_path / "run"
    lock = RunLock(run)
    lock.take()
    text = lock.path.read_text()
    lock.path.write_text(text.replace(str(os.getpid()), "1"))
    assert "another run has taken over" in lock.problem()
    lock.release()
    assert lock.path.exists()  # not ours to delete
    lock = RunLock(tmp_path / "two")
    lock.take()
    lock.path.unlink()
    assert "was deleted while" in lock.problem()
    lock.path.parent.rmdir()
    assert "run folder" in lock.problem()


def test_a_fork_does_not_release(tmp_path):
    lock = RunLock(tmp_path)
    lock.take()
    child = os.fork()
    if child == 0:
        lock.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert lock.path.exists()


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run folder"):
        RunLock(tmp_path / "file" / "run").take()


# ---- what may differ

SAVED = {
    "run": {"seed": 1, "name": "a"},
    "model": {"pattern": "*-", "megatron": {"hidden_size": 64}},
    "data": {"train": "x", "isolate_documents": False},
    "train": {"steps": 100, "dtype": "bf16", "global_batch_size": 8},
    "optimizer": {"name": "adamw", "lr": 1e-3, "betas": (0.9, 0.95)},
    "precision": {"recipe": "nvfp4"},
    "parallel": {"tensor_model_parallel_size": 1},
}


def changed(section, **values):
    return {**SAVED, section: {**SAVED[section], **values}}


def test_the_same_config_has_no_notes():
    assert compare(SAVED, json.loads(json.dumps(SAVED)), {}) == []


def test_every_forbidden_change_is_listed_at_once():
    now = changed("model", pattern="*E", megatron={"hidden_size": 128})
    now = {**now, "run": {"seed": 2, "name": "b"}, "optimizer": {**SAVED["optimizer"], "lr": 1.0}}
    now["data"] = {"train": "y", "isolate_documents": True}
    with pytest.raises(ConfigError) as caught:
        compare(SAVED, now, {})
    text = caught.value.problems
    assert len(text) == 5
    assert any(line.startswith("model.pattern: '*-' in the checkpoint, '*E' now") for line in text)
    assert any(line.startswith("model.megatron.hidden_size: 64 ") for line in text)
    assert any(line.startswith("run.seed: 1 ") for line in text)
    assert any(line.startswith("data.isolate_documents: False ") for line in text)
    assert any("add optimizer.lr: 1.0 to checkpoint.override" in line for line in text)


def test_free_changes_are_listed():
    now = {**changed("train", steps=200), "parallel": {"tensor_model_parallel_size": 2}}
    assert compare(SAVED, now, {}) == [
        "changed parallel.tensor_model_parallel_size: 1 -> 2",
        "changed train.steps: 100 -> 200",
    ]


def test_pipeline_cuts_and_recomputation_belong_to_the_layout():
    """A run that was cut into stages by hand goes on in one, or with what memory asks for."""
    saved = changed("model", pattern="*|-")
    wanted = "changed model.pattern: '*|-' -> '*-'"
    assert compare(saved, SAVED, {}) == [wanted]
    fields = {**SAVED["model"]["megatron"], "recompute_granularity": "full"}
    now = changed("model", megatron=fields)
    assert compare(SAVED, now, {}) == [
        "changed model.megatron.recompute_granularity: None -> 'full'"
    ]


def test_an_override_is_allowed_and_shown():
    now = changed("optimizer", lr=5e-4)
    notes = compare(SAVED, now, {"optimizer.lr": 5e-4})
    assert notes == ["override optimizer.lr: 0.001 -> 0.0005"]
    assert compare(SAVED, now, {"optimizer": {"lr": 5e-4}}) == notes


def test_a_section_that_is_switched_off_or_on_is_one_change_and_its_remedy_works():
    """What `checkpoint.override` is given is what the message says."""
    off = changed("optimizer", reset=None, warmup_steps=None)
    on = changed("optimizer", reset={"from": 0.5, "window": 9}, warmup_steps=20)
    for saved, now, words in (
        (on, off, ["reset: null", "warmup_steps: null"]),
        (off, on, ['reset: {"from": 0.5, "window": 9}', "warmup_steps: 20"]),
    ):
        with pytest.raises(ConfigError) as caught:
            compare(saved, now, {})
        texts = [text.partition("add ")[2] for text in caught.value.problems]
        assert texts == [f"optimizer.{one} to checkpoint.override" for one in words]
        pairs = ", ".join(text.partition(" to checkpoint")[0] for text in texts)
        override = yaml.safe_load(f"{{{pairs}}}")
        assert len(compare(saved, now, override)) == 2


def test_other_data_under_the_same_settings_is_refused():
    with pytest.raises(ConfigError, match=r"the data is not the checkpoint's .fingerprint a"):
        compare(SAVED, SAVED, {}, ({"data": "a"}, {"data": "b"}))
    moved = changed("data", train="elsewhere")
    assert compare(SAVED, moved, {}, ({"data": "a"}, {"data": "a"})) == [
        "changed data.train: 'x' -> 'elsewhere'"
    ]


def test_kinds_of_settings():
    for key in ("model.pattern", "data.seed", "run.seed", "train.dtype", "optimizer.name"):
        assert kind_of(key) == "fixed", key
    for key in ("optimizer.lr", "precision.recipe", "train.global_batch_size"):
        assert kind_of(key) == "bound", key
    for key in ("train.steps", "log.interval", "run.name", "data.valid", "parallel.x"):
        assert kind_of(key) == "free", key


def test_override_config_replaces_validates_and_refuses():
    from pretrain.optimizer import OptimizerConfig
    from tests.pretrain.checkpoint_trial import TrialConfig

    config = TrialConfig()
    new = override_config(config, {"optimizer.lr": 0.5, "train": {"steps": 7}})
    assert (new.optimizer.lr, new.train.steps) == (0.5, 7)
    assert new.optimizer.warmup_steps == config.optimizer.warmup_steps
    assert isinstance(new.optimizer, OptimizerConfig)
    assert override_config(config, {}) is config
    with pytest.raises(ConfigError, match=r"checkpoint.override cannot change model.hidden"):
        override_config(config, {"model.hidden": 3})
    with pytest.raises(ConfigError, match=r"holds .* settings of optimizer, precision and train"):
        override_config(config, {"parallel.tensor_model_parallel_size": 2})
    with pytest.raises(ConfigError, match=r"optimizer.lrr is not a setting.*optimizer.lr"):
        override_config(config, {"optimizer.lrr": 3})
    with pytest.raises(ConfigError, match=r"optimizer.lr must be"):
        override_config(config, {"optimizer.lr": "fast"})
