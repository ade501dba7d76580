# SPDX-License-Identifier: Apache-2.0
"""Save and resume on megatron-core in one process: bitwise, in order, and with bad input."""

import copy
import io
import json
import logging
import os
import pickle
import random
import shutil

import numpy as np
import pytest
import torch

from fused_ops.errors import ConfigError
from pretrain.checkpoint import safe as checkpoint_safe
from pretrain.checkpoint.io import file_entry
from pretrain.checkpoint.layout import COMPLETE, LATEST, MANIFEST, STATE, read_manifest, seal
from pretrain.checkpoint.manager import UnsafeCheckpoint, find_latest
from tests.pretrain.checkpoint_trial import open_trial, own_group, run
from tests.pretrain.disk import Disk, lay_out

STEPS = 5


@pytest.fixture(scope="module", autouse=True)
def _group():
    with own_group():
        yield


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The run that was never interrupted, and its checkpoints at every step."""
    folder = tmp_path_factory.mktemp("straight")
    result = run(folder, {"checkpoint": {"interval": 1, "keep_last": 0}}, STEPS)
    return folder, result


@pytest.fixture
def copied(straight, tmp_path):
    """A copy of the finished run that a test may break."""
    shutil.copytree(straight[0], tmp_path / "run")
    return tmp_path / "run"


def step_dir(run_dir, step):
    return run_dir / "checkpoints" / f"step_{step:08d}"


def keep_only(run_dir, *steps):
    for path in (run_dir / "checkpoints").glob("step_*"):
        if int(path.name[5:]) not in steps:
            shutil.rmtree(path)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


# ---- bitwise


@pytest.mark.parametrize("stop", range(1, STEPS))
def test_a_resume_at_any_step_is_bitwise_the_uninterrupted_run(straight, copied, stop):
    keep_only(copied, stop)
    resumed = run(copied, {"checkpoint": {"interval": 0}}, STEPS)
    assert resumed["from"] == stop
    assert resumed["losses"] == straight[1]["losses"][stop:]
    assert torch.equal(resumed["weights"], straight[1]["weights"])


@pytest.mark.parametrize(
    "options",
    [{"dtype": "fp32"}, {"distributed_optimizer": False}, {"checkpoint": {"async_save": True}}],
    ids=["fp32", "whole optimizer", "async"],
)
def test_other_precisions_optimizers_and_async_are_bitwise_too(tmp_path, options):
    options = {**options, "checkpoint": {"interval": 2, **options.get("checkpoint", {})}}
    straight = run(tmp_path / "a", copy.deepcopy(options), 4)
    run(tmp_path / "b", copy.deepcopy(options), 2)
    resumed = run(tmp_path / "b", copy.deepcopy(options), 4)
    assert resumed["from"] == 2
    assert resumed["losses"] == straight["losses"][2:]
    assert torch.equal(resumed["weights"], straight["weights"])


def test_the_losses_depend_on_what_is_restored(straight, copied):
    """The test above can fail: with generators left alone the losses differ."""
    keep_only(copied, 2)
    trial = open_trial(copied, {"checkpoint": {"interval": 0}, "dropout": 0.5})
    trial.resume()
    assert trial.step() != straight[1]["losses"][2]
    trial.manager.close()


def test_every_generator_comes_back(tmp_path):
    trial = open_trial(tmp_path)
    from megatron.core import tensor_parallel

    def draw():
        with tensor_parallel.get_cuda_rng_tracker().fork():
            inner = torch.rand(3)
        return [random.random(), np.random.rand(), *torch.rand(3).tolist(), *inner.tolist()]

    random.seed(5)
    np.random.seed(6)
    draw()
    trial.save()
    first = draw()
    draw()
    trial.manager.find()
    trial.resume()
    assert draw() == first
    trial.manager.close()


def test_what_the_trainer_adds_comes_back(tmp_path):
    trial = open_trial(tmp_path)
    extra = {"train_state": {"step": 0}, "amax": torch.tensor([0.1, 2.0], dtype=torch.float32)}
    trial.manager.save(
        0, trial.chunks, trial.optimizer, trial.scheduler, extra=extra, resolved_config={"a": 1}
    )
    trial.manager.find()
    resumed = trial.manager.resume(
        trial.chunks, trial.optimizer, trial.scheduler, resolved_config={"a": 1}
    )
    assert torch.equal(resumed.extra["amax"], extra["amax"])
    assert resumed.config == {"a": 1}
    assert resumed.notes == []
    trial.manager.close()


# ---- order and crashes


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The calls of the second of two saves, keep_last=1, so that the first is deleted by it."""
    run_dir = tmp_path_factory.mktemp("recorded")
    trial = open_trial(run_dir, {"checkpoint": {"interval": 0, "keep_last": 1}})
    losses = [trial.step()]
    trial.save()
    losses.append(trial.step())
    with Disk(run_dir / "checkpoints") as disk:
        trial.save()
    losses.append(trial.step())
    trial.manager.close()
    return disk.moments, losses


def test_the_order_of_a_save(recorded):
    """Files, their folder, manifest, COMPLETE, latest, and only then the older one goes."""
    calls = [(moment.call, moment.path) for moment in recorded[0]]
    new, old = "step_00000002", "step_00000001"
    names = [f"{new}/{name}" for name in ("__0_0.distcp", ".metadata.tmp", "metadata.json")]
    names += [f"{new}/{STATE}.tmp", f"{new}/rng_00000.json.tmp"]
    forced = [calls.index(("fsync", name)) for name in names]
    manifest = calls.index(("rename", f"{new}/{MANIFEST}"))
    mark = calls.index(("rename", f"{new}/{COMPLETE}"))
    latest = calls.index(("rename", LATEST))
    gone = calls.index(("unlink", f"{old}/{COMPLETE}"))
    folder = [i for i, call in enumerate(calls) if call == ("fsync", new)]
    root = [i for i, call in enumerate(calls) if call == ("fsync", ".")]
    assert any(calls.index(("mkdir", new)) < i < min(forced) for i in root)
    assert any(max(forced) < i < manifest for i in folder)
    assert calls.index(("fsync", f"{new}/{MANIFEST}.tmp")) < manifest
    assert any(manifest < i < mark for i in folder)
    assert calls.index(("fsync", f"{new}/{COMPLETE}.tmp")) < mark
    assert any(mark < i < latest for i in folder)
    assert calls.index(("fsync", f"{LATEST}.tmp")) < latest
    assert any(latest < i < gone for i in root)


def test_after_a_crash_at_any_moment_the_right_checkpoint_is_chosen(recorded, tmp_path):
    """Every prefix of the calls, killed or without power: the old one until COMPLETE, then the new.

    Of each the newest whole one is found, checksums included; one of each kind is trained on.
    """
    moments, losses = recorded
    mark = next(i for i, m in enumerate(moments) if m.call == "rename" and COMPLETE in m.path)
    durable = next(
        i
        for i, m in enumerate(moments)
        if i > mark and (m.call, m.path) == ("fsync", "step_00000002")
    )
    assert len(moments) > 30
    trained = set()
    for index, moment in enumerate(moments):
        for kind, tree in (("seen", moment.seen), ("durable", moment.durable)):
            run_dir = tmp_path / f"{index}-{kind}"
            lay_out(tree, run_dir / "checkpoints")
            found = find_latest(run_dir)
            expected = 2 if index >= (mark if kind == "seen" else durable) else 1
            assert found.step == expected, (index, kind, moment)
            key = (kind, expected)
            if key not in trained or index == len(moments) - 1:
                trained.add(key)
                trial = open_trial(run_dir, {"checkpoint": {"interval": 0}})
                trial.resume()
                assert trial.step() == losses[expected], (index, kind)
                trial.manager.close()
            shutil.rmtree(run_dir)
    assert len(trained) == 4


# ---- damage


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("__0_0.distcp", "flip"),
        ("__0_0.distcp", "truncate"),
        ("__0_0.distcp", "remove"),
        (".metadata", "flip"),
        (STATE, "truncate"),
        ("rng_00000.json", "remove"),
    ],
)
def test_a_damaged_file_is_named_and_the_older_checkpoint_used(
    straight, copied, caplog, name, damage
):
    keep_only(copied, 3, 4)
    path = step_dir(copied, 4) / name
    if damage == "flip":
        flip(path)
    elif damage == "truncate":
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.unlink()
    with caplog.at_level(logging.WARNING):
        trial = open_trial(copied, {"checkpoint": {"interval": 0}})
    assert f"checkpoint passed over: step_00000004/{name}" in caplog.text
    assert "continuing from the older step_00000003" in caplog.text
    assert trial.resume().step == 3
    if (name, damage) == ("__0_0.distcp", "flip"):
        assert trial.step() == straight[1]["losses"][3]
    trial.manager.close()


@pytest.mark.parametrize("resume", ["auto", "must"])
def test_never_from_zero_when_none_can_be_read(copied, resume):
    keep_only(copied, 3, 4)
    flip(step_dir(copied, 4) / "__0_0.distcp")
    (step_dir(copied, 3) / COMPLETE).unlink()
    with pytest.raises(ConfigError) as caught:
        open_trial(copied, {"checkpoint": {"resume": resume}})
    assert "none can be read" in caught.value.problems[0]
    assert "step_00000004/__0_0.distcp is damaged" in caught.value.problems[1]
    assert "step_00000003 has no COMPLETE" in caught.value.problems[2]
    assert step_dir(copied, 4).exists()


def test_not_even_when_only_latest_is_left_of_a_finished_one(copied):
    keep_only(copied, 4)
    (step_dir(copied, 4) / COMPLETE).unlink()
    with pytest.raises(ConfigError, match=r"step_00000004 has no COMPLETE"):
        open_trial(copied)


def test_a_first_save_that_never_finished_is_said_and_replaced(copied, caplog):
    keep_only(copied, 1)
    (step_dir(copied, 1) / COMPLETE).unlink()
    (copied / "checkpoints" / LATEST).unlink()
    with caplog.at_level(logging.WARNING):
        result = run(copied, {"checkpoint": {"interval": 1}}, 1)
    assert result["from"] == 0
    assert "passed over: step_00000001 has no COMPLETE" in caplog.text
    assert "starting from step 0" in caplog.text
    assert find_latest(copied).step == 1


def test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(straight, copied):
    keep_only(copied, 3, 4)
    flip(step_dir(copied, 4) / "__0_0.distcp")
    result = run(copied, {"checkpoint": {"interval": 1}}, 4)
    assert (result["from"], result["losses"]) == (3, straight[1]["losses"][3:4])
    assert find_latest(copied).step == 4


# ---- auto, never, must, load


def test_must_and_never_say_what_to_do(copied, tmp_path):
    with pytest.raises(ConfigError, match=r"resume=must.*no checkpoint.*resume=auto"):
        open_trial(tmp_path / "new", {"checkpoint": {"resume": "must"}})
    with pytest.raises(ConfigError, match=r"resume=never.*already holds.*another run.name"):
        open_trial(copied, {"checkpoint": {"resume": "never"}})
    trial = open_trial(tmp_path / "newer", {"checkpoint": {"resume": "never"}})
    assert trial.resume() is None
    trial.manager.close()


def test_load_starts_another_run_where_this_one_stood(straight, tmp_path):
    source = straight[0] / "checkpoints" / "step_00000003"
    options = {"checkpoint": {"interval": 0, "load": str(source)}}
    result = run(tmp_path / "new", options, STEPS)
    assert result["from"] == 3
    assert result["losses"] == straight[1]["losses"][3:]
    run(tmp_path / "own", {"checkpoint": {"interval": 2}}, 2)
    options = {"checkpoint": {"interval": 0, "load": str(source)}}
    assert run(tmp_path / "own", options, 3)["from"] == 2  # its own come first


def test_load_of_weights_only_starts_at_step_zero(straight, tmp_path):
    options = {"load": str(straight[0]), "load_parts": "model"}
    trial = open_trial(tmp_path, {"checkpoint": options, "seed": 9, "optimizer": {"lr": 0.1}})
    resumed = trial.manager.resume(
        trial.chunks, trial.optimizer, trial.scheduler, resolved_config={}
    )
    assert (resumed.step, resumed.extra) == (0, {})
    models = sum(p.numel() for p in trial.chunks[0].parameters())
    assert torch.equal(trial.weights()[:models], straight[1]["weights"][:models])
    masters = trial.optimizer.chained_optimizers[0].optimizer.param_groups[0]["params"]
    assert all(m.dtype == torch.float32 for m in masters)
    assert torch.equal(masters[0].bfloat16().float(), masters[0])  # made from the weights
    trial.manager.close()


def test_load_of_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"load=.*no/where holds no checkpoint"):
        open_trial(tmp_path, {"checkpoint": {"load": str(tmp_path / "no/where")}})


# ---- configuration


def test_another_shape_is_refused_with_the_keys(copied):
    trial = open_trial(copied, {"model": {"layers": 1}, "optimizer": {"lr": 1.0}})
    with pytest.raises(ConfigError) as caught:
        trial.resume()
    assert any(p.startswith("model.layers: 2 in the chec") for p in caught.value.problems)
    assert any("add optimizer.lr: 1.0 to checkpoint.over" in p for p in caught.value.problems)
    trial.manager.close()


def test_an_override_of_the_learning_rate_acts_from_the_first_step(straight, copied):
    keep_only(copied, 3)
    options = {"checkpoint": {"interval": 1, "override": {"optimizer.lr": 3e-4}}}
    trial = open_trial(copied, options)
    assert trial.config.optimizer.lr == 3e-4
    resumed = trial.resume()
    assert "override optimizer.lr: 0.003 -> 0.0003" in resumed.notes
    assert trial.step() == straight[1]["losses"][3]  # the forward before the first new update
    groups = trial.optimizer.param_groups
    assert {group["max_lr"] for group in groups} == {3e-4}
    expected = 0.0003 * straight_rate(trial)
    assert trial.rates() == pytest.approx([expected] * len(groups), rel=1e-12)
    trial.save()
    trial.manager.close()
    again = open_trial(copied, {"optimizer": {"lr": 3e-4}, "checkpoint": {"interval": 0}})
    assert again.resume().step == 4  # now it is the run's own setting
    again.step()
    assert again.rates()[0] == pytest.approx(0.0003 * straight_rate(again), rel=1e-12)
    again.manager.close()


def straight_rate(trial):
    """The schedule's factor of the trial's config at the step just done: cosine after 2 steps."""
    import math

    total, warm = 12 + 1, 2
    return 0.5 * (1 + math.cos(math.pi * (trial.done - warm) / (total - warm)))


def test_other_data_is_refused(copied):
    trial = open_trial(copied)
    trial.manager.fingerprints = {"data": "a"}
    trial.step()
    trial.resume()
    trial.step()
    trial.save()
    trial.manager.fingerprints = {"data": "b"}
    trial.manager.find()
    with pytest.raises(ConfigError, match=r"the data is not the checkpoint's"):
        trial.resume()
    trial.manager.close()


# ---- code in a checkpoint


class Evil:
    """Leaves a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def reseal(folder):
    """Vouch for the folder as it is now, as an attacker would."""
    files = {name: file_entry(folder / name) for name in read_manifest(folder)}
    seal(folder, int(folder.name[5:]), files)


def test_a_hostile_index_is_refused_by_name(copied, tmp_path):
    folder = step_dir(copied, STEPS)
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    reseal(folder)
    trial = open_trial(copied)
    with pytest.raises(UnsafeCheckpoint, match=r"step_00000005/.metadata asks for posix.mkdir"):
        trial.resume()
    assert not (tmp_path / "ran").exists()
    trial.manager.close()


def test_a_hostile_object_is_refused_by_name(copied, tmp_path):
    folder = step_dir(copied, STEPS)
    index = checkpoint_safe.read_index(folder)
    (key,) = [key for key in index.storage_data if key.fqn.startswith("common_state")]
    place = index.storage_data[key]
    stream = io.BytesIO()
    torch.save([Evil(tmp_path / "ran")], stream)
    data = bytearray((folder / place.relative_path).read_bytes())
    place.offset, place.length = len(data), len(stream.getvalue())
    (folder / place.relative_path).write_bytes(data + stream.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    reseal(folder)
    trial = open_trial(copied)
    with pytest.raises(UnsafeCheckpoint, match=r"step_00000005: the object 'common_state.*mkdir"):
        trial.resume()
    assert not (tmp_path / "ran").exists()
    trial.manager.close()


def test_a_hostile_common_state_is_refused_by_name(copied, tmp_path, monkeypatch):
    """megatron-core prefers an old common.pt, and torch obeys this variable there."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save([Evil(tmp_path / "ran")], step_dir(copied, STEPS) / "common.pt")
    trial = open_trial(copied)
    with pytest.raises(UnsafeCheckpoint, match=r"step_00000005/common.pt .* refused without"):
        trial.resume()
    assert not (tmp_path / "ran").exists()
    trial.manager.close()


def test_an_index_cannot_point_outside(copied):
    folder = step_dir(copied, STEPS)
    index = checkpoint_safe.read_index(folder)
    next(iter(index.storage_data.values())).relative_path = "../step_00000001/__0_0.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(UnsafeCheckpoint, match=r"points outside its folder"):
        checkpoint_safe.read_index(folder)


def test_upstream_still_reads_through_our_reader(copied, monkeypatch):
    """Fails when megatron-core opens checkpoints by another way than the one that is guarded."""
    seen = []
    read = checkpoint_safe.SafeReader.read_metadata
    monkeypatch.setattr(
        checkpoint_safe.SafeReader,
        "read_metadata",
        lambda self, *a, **k: (seen.append(1), read(self, *a, **k))[1],
    )
    monkeypatch.setattr(pickle, "load", lambda *a, **k: pytest.fail("an unguarded pickle.load"))
    unguarded = torch.load

    def load(*args, **kwargs):
        assert kwargs.get("weights_only") is True, "a torch.load that may run code"
        return unguarded(*args, **kwargs)

    monkeypatch.setattr(torch, "load", load)
    trial = open_trial(copied, {"checkpoint": {"interval": 0}})
    assert trial.resume().step == STEPS
    assert len(seen) == 2  # the common state's, then the shards'
    trial.manager.close()


# ---- the rest


def test_saving_a_step_twice_writes_once(copied):
    trial = open_trial(copied, {"checkpoint": {"interval": 1, "keep_last": 0}})
    trial.resume()
    mark = step_dir(copied, STEPS) / COMPLETE
    before = mark.stat().st_mtime_ns
    trial.save()
    assert mark.stat().st_mtime_ns == before
    trial.manager.close()


def test_the_state_file_is_readable_text(straight):
    state = json.loads((step_dir(straight[0], 3) / STATE).read_text())
    assert state["step"] == 3
    assert state["config"]["model"] == {"hidden": 32, "layers": 2}
    assert state["parts"] == ["model", "optimizer"]
    assert state["extra"] == {"train_state": {"step": 3}}
