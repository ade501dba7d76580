# SPDX-License-Identifier: Apache-2.0
"""Saves that fail, saves in the background, and who may write to a run folder."""

import os
import resource
import shutil
import signal

import pytest
import torch

from fused_ops.errors import ConfigError
from pretrain.checkpoint import io as checkpoint_io
from pretrain.checkpoint.layout import MANIFEST, STATE
from pretrain.checkpoint.manager import CheckpointError, find_latest
from pretrain.config_file import encode
from tests.pretrain.checkpoint_trial import open_trial, own_group


@pytest.fixture(scope="module", autouse=True)
def _group():
    with own_group():
        yield


def step_dir(run_dir, step):
    return run_dir / "checkpoints" / f"step_{step:08d}"


def writer_process(trial):
    """The forked process of the save in flight."""
    return trial.manager._pending.writer._calls.async_calls[0].async_caller.process


# ---- disks and folders that fail


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_is_said_and_nothing_is_lost(tmp_path, monkeypatch, asynchronous):
    trial = open_trial(tmp_path, {"checkpoint": {"async_save": asynchronous}})
    trial.step()
    trial.save()
    trial.manager.wait()
    trial.step()
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(filesystem_async, "_write_item", full)

    def save_and_wait():
        trial.save()
        trial.manager.wait()

    with pytest.raises(CheckpointError, match=r"_00000002 was not written: the disk of .* full"):
        save_and_wait()
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step_00000001"]
    assert find_latest(tmp_path).step == 1
    monkeypatch.undo()
    trial.save()  # the same process tries again: nothing stale is finished in its name
    trial.manager.close()
    assert find_latest(tmp_path).step == 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_write_that_the_machine_refuses_is_said_in_its_words(tmp_path, asynchronous):
    """Not in those of torch.save, which reports a position in a file."""
    trial = open_trial(tmp_path, {"checkpoint": {"async_save": asynchronous}})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))

    def save_and_wait():
        trial.save()
        trial.manager.wait()

    try:
        with pytest.raises(CheckpointError, match=r"_00000000 was not written: .* size of files"):
            save_and_wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert find_latest(tmp_path) is None
    trial.save()
    trial.manager.close()
    assert find_latest(tmp_path).step == 0


def test_room_is_checked_before_anything_is_written(tmp_path, monkeypatch):
    trial = open_trial(tmp_path)
    monkeypatch.setattr("pretrain.checkpoint.manager.free_bytes", lambda path: 1000)
    with pytest.raises(CheckpointError, match=r"needs 0.00 GiB.* has 0.00 GiB free"):
        trial.save()
    assert not list((tmp_path / "checkpoints").iterdir())
    trial.manager.close()


def test_a_full_disk_at_the_manifest_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    trial = open_trial(tmp_path)
    real = checkpoint_io.os.replace

    def replace(source, target):
        if str(target).endswith(MANIFEST):
            raise OSError(28, "No space left on device")
        return real(source, target)

    monkeypatch.setattr(checkpoint_io.os, "replace", replace)
    with pytest.raises(CheckpointError, match=r"is full"):
        trial.save()
    monkeypatch.undo()
    assert find_latest(tmp_path) is None
    trial.manager.close()


def test_a_dead_writer_is_said(tmp_path, monkeypatch):
    trial = open_trial(tmp_path, {"checkpoint": {"async_save": True}})
    monkeypatch.setattr("pretrain.checkpoint.write._bind_to_parent", lambda parent: os._exit(9))
    trial.save()
    with pytest.raises(CheckpointError, match=r"the process that wrote .*step_00000000 died"):
        trial.manager.wait()
    assert find_latest(tmp_path) is None
    monkeypatch.undo()
    trial.save()
    trial.manager.close()
    assert find_latest(tmp_path).step == 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_folder_deleted_underneath_is_said(tmp_path, asynchronous):
    run_dir = tmp_path / "run"
    trial = open_trial(run_dir, {"checkpoint": {"async_save": asynchronous}})
    shutil.rmtree(run_dir)
    with pytest.raises(CheckpointError, match=r"run folder .* was deleted while"):
        trial.save()
    assert not run_dir.exists()
    trial.manager.close()


def test_a_step_folder_deleted_during_an_async_save_is_said(tmp_path):
    trial = open_trial(tmp_path, {"checkpoint": {"async_save": True}})
    trial.save()
    writer_process(trial).join()
    shutil.rmtree(step_dir(tmp_path, 0))
    with pytest.raises(CheckpointError, match=r"step_00000000.*(vanished|not written)"):
        trial.manager.wait()
    trial.manager.close()


def test_a_folder_that_may_not_be_written_is_said(tmp_path, monkeypatch):
    trial = open_trial(tmp_path)

    def denied(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "mkdir", denied)
    with pytest.raises(CheckpointError, match=r"no permission to write .*step_00000000"):
        trial.save()
    monkeypatch.undo()
    trial.manager.close()


def test_a_second_live_run_is_refused(tmp_path):
    trial = open_trial(tmp_path)
    with pytest.raises(ConfigError, match=r"belongs to a live run"):
        open_trial(tmp_path)
    trial.manager.close()
    open_trial(tmp_path).manager.close()


# ---- in the background


def test_an_async_save_holds_the_moment_of_the_save(tmp_path):
    """Training goes on while the writer writes; what lands is the state at the call."""
    trial = open_trial(tmp_path, {"checkpoint": {"async_save": True}})
    trial.step()
    trial.save()
    wanted = trial.weights().clone()
    losses = [trial.step() for _ in range(3)]
    trial.manager.close()
    assert not torch.equal(trial.weights(), wanted)
    again = open_trial(tmp_path)
    assert again.resume().step == 1
    assert torch.equal(again.weights(), wanted)
    assert [again.step() for _ in range(3)] == losses
    again.manager.close()


def test_one_save_in_flight_and_poll_finishes_it(tmp_path):
    trial = open_trial(tmp_path, {"checkpoint": {"async_save": True}})
    trial.save()
    assert find_latest(tmp_path) is None
    writer_process(trial).join()
    assert find_latest(tmp_path) is None
    trial.manager.poll()
    assert find_latest(tmp_path).step == 0
    trial.step()
    trial.save()
    trial.step()
    trial.save()  # waits for step 1
    assert find_latest(tmp_path).step == 1
    trial.manager.close()
    assert find_latest(tmp_path).step == 2


def test_abort_stops_the_writer(tmp_path):
    trial = open_trial(tmp_path, {"checkpoint": {"async_save": True}})
    trial.save()
    process = writer_process(trial)
    trial.manager.abort()
    process.join(10)
    assert not process.is_alive()
    assert not (tmp_path / "lock").exists()


def test_a_step_that_comes_again_after_a_rollback_is_written_again(tmp_path):
    """The checkpoint that the rollback passed over is damaged: it must not count as saved."""
    trial = open_trial(tmp_path, {"checkpoint": {"keep_last": 0}})
    trial.step()
    trial.save()
    loss = trial.step()
    trial.save()
    (step_dir(tmp_path, 2) / STATE).write_text("{}")
    resumed = trial.manager.roll_back(
        trial.manager.newest(),
        trial.chunks,
        trial.optimizer,
        trial.scheduler,
        resolved_config=encode(trial.config),
    )
    trial.done = resumed.step
    assert (trial.done, trial.step()) == (1, loss)
    trial.save()
    trial.manager.close()
    assert find_latest(tmp_path).step == 2
