# SPDX-License-Identifier: Apache-2.0
"""Bad steps: found, explained, skipped, rolled back or stopped at; a spike is told from noise."""

import copy
import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from models.precision import named_gemms, unwrap
from pretrain.bad_steps import BadStepConfig, BadSteps, TrainingError, spike_zscore
from pretrain.callbacks import Callback
from pretrain.config import make_config
from pretrain.data.skips import Skips
from pretrain.initialize import shut_down
from pretrain.trainer import Trainer
from tests.distributed import run_distributed
from tests.toy import make_toy, toy_config, write_toy_data

POISON = "layers.1.mlp.linear_fc2"
BAD_STEP, BATCH = 4, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy"))


class Poison(Callback):
    """Makes the output of one layer NaN, or the loss larger, when the bad batch goes by."""

    def __init__(self, factor: float = math.nan, times: int = 10**6, step: int = BAD_STEP) -> None:
        self.factor, self.times, self.step = factor, times, step
        self.active = False
        self.handles = []

    def before_step(self, trainer, step):
        if not self.handles:
            models = [unwrap(chunk) for chunk in trainer.engine.chunks]
            named = dict(pair for model in models for pair in named_gemms(model))
            targets = [named[POISON]] if math.isnan(self.factor) else models
            self.handles = [target.register_forward_hook(self.hook) for target in targets]
        first = trainer.loader.step_samples(trainer.state.consumed_samples)[0]
        self.active = first == (self.step - 1) * BATCH

    def hook(self, module, inputs, output):
        if not self.active or self.times <= 0 or not module.training:
            return output
        self.times -= torch.is_grad_enabled()
        if isinstance(output, tuple):
            return (output[0] * self.factor, *output[1:])
        return output * self.factor


def trained(folder, tmp_path, name, poison=(), recipe="bf16", **sections):
    """Losses by step, events, and the run's folder."""
    data = toy_config(
        folder,
        "*-",
        run={"dir": str(tmp_path), "name": name},
        data={"valid": None, **sections.pop("data", {})},
        train={
            "steps": 7,
            "global_batch_size": BATCH,
            "micro_batch_size": 4,
            "dtype": "fp32" if recipe == "bf16" else "bf16",
            **sections.pop("train", {}),
        },
        precision={"recipe": recipe, **sections.pop("precision", {})},
        **sections,
    )
    config = make_config(data)
    Trainer(config, list(poison)).run()
    return rows_of(config.run.path)


def rows_of(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    return losses, [row for row in rows if "event" in row], run


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4", "fp8_delayed"])
def test_a_bad_step_is_skipped_and_its_cause_named(folder, tmp_path, recipe):
    losses, events, run = trained(folder, tmp_path, "skip", [Poison()], recipe)
    (skip,) = [event for event in events if event["event"] == "skip"]
    assert skip["step"] == BAD_STEP
    assert skip["samples"] == [24, 31]
    assert losses[BAD_STEP] == "NaN"
    assert all(math.isfinite(loss) for step, loss in losses.items() if step != BAD_STEP)
    dump = json.loads((run / skip["dump"]).read_text())
    # The poison is the last layer's output: no forward GEMM sees it, the layer's own backward does.
    assert dump["first"]["layer"] == POISON
    assert (dump["first"]["gemm"], dump["first"]["operand"]) == ("dgrad", "dy")
    assert dump["first"]["nonfinite"] == dump["first"]["values"]
    assert f"first in {POISON}, dgrad.dy" in skip["cause"]
    assert {row["sample"] for row in dump["samples"]} == set(range(24, 32))
    assert dump["reproduced"] is True
    assert (run / skip["dump"]).stat().st_size < 64 * 1024
    quiet, _, _ = trained(
        folder,
        tmp_path,
        "quiet",
        [Poison()],
        recipe,
        train={"bad_steps": {"inspect": False}},
    )
    assert quiet == losses, "looking again leaves no trace, bitwise"


def test_what_does_not_appear_again_is_called_transient(folder, tmp_path):
    _, events, _ = trained(folder, tmp_path, "once", [Poison(times=1)])
    (skip,) = [event for event in events if event["event"] == "skip"]
    assert skip["transient"] is True
    assert "no operand of a GEMM" in skip["cause"]


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_a_rollback_is_the_run_that_left_the_batch_out(folder, tmp_path, recipe):
    """Bitwise; and a later start knows what was left out. In 4 bits the bad step is also the first
    one with delayed scales, of which the checkpoint before it knows none."""
    stage = {"from": 0.4, "gemms": ["fprop"], "recipe": "fp8_delayed"}
    options = {
        "recipe": recipe,
        "checkpoint": {"interval": 2},
        "precision": {"schedule": [stage] if recipe == "nvfp4" else []},
    }
    losses, events, run = trained(
        folder,
        tmp_path,
        "back",
        [Poison()],
        train={"bad_steps": {"policy": "rollback"}},
        **copy.deepcopy(options),
    )
    (rollback,) = [event for event in events if event["event"] == "rollback"]
    assert (rollback["step"], rollback["bad_step"]) == (2, BAD_STEP)
    assert (run / "metrics.dropped.jsonl").exists()
    clean, _, _ = trained(folder, tmp_path, "clean", data={"skip_samples": [[24, 31]]}, **options)
    assert losses == clean
    state = json.loads((run / "checkpoints" / "step_00000007" / "state.json").read_text())["extra"][
        "train_state"
    ]
    assert (state["skip"], state["rollbacks"]) == ([[24, 31]], 1)
    assert state["consumed_samples"] == 8 * BATCH, "one batch more than was trained on"


def test_a_rollback_to_before_the_data_changed(folder, tmp_path):
    """The newest checkpoint is that of the start, which was made with the former data."""
    write_toy_data(tmp_path / "more", documents=40, seed=9)
    trained(folder, tmp_path, "turn", train={"steps": 3})
    sources = [{"path": str(folder / "train")}, {"path": str(tmp_path / "more")}]
    losses, events, _ = trained(
        folder,
        tmp_path,
        "turn",
        [Poison()],
        data={"train": sources, "on_change": "continue"},
        train={"bad_steps": {"policy": "rollback"}},
    )
    (rollback,) = [event for event in events if event["event"] == "rollback"]
    assert (rollback["step"], rollback["bad_step"]) == (3, BAD_STEP)
    assert sorted(losses) == list(range(1, 8))
    assert all(math.isfinite(loss) for loss in losses.values())


class Damage(Callback):
    """Flips a bit of checkpoints before a step."""

    def __init__(self, step, *damaged):
        self.step, self.damaged = step, damaged

    def before_step(self, trainer, step):
        for number in self.damaged if step == self.step else ():
            shard = trainer.run_dir / "checkpoints" / f"step_{number:08d}" / "__0_0.distcp"
            data = bytearray(shard.read_bytes())
            data[len(data) // 2] ^= 1
            shard.write_bytes(data)


def test_a_rollback_stops_where_only_checkpoints_of_the_former_data_are_whole(folder, tmp_path):
    """Samples before the change are not those of the data that is open. Started again, the run
    goes on from there, where the data then changes."""
    write_toy_data(tmp_path / "more", documents=40, seed=9)
    checkpoint = {"interval": 1, "keep_last": 0}
    trained(folder, tmp_path, "turn", train={"steps": 3}, checkpoint=checkpoint)
    sources = [{"path": str(folder / "train")}, {"path": str(tmp_path / "more")}]
    sections = {
        "data": {"train": sources, "on_change": "continue"},
        "train": {"bad_steps": {"policy": "rollback"}},
        "checkpoint": checkpoint,
    }
    callbacks = [Damage(5, 3, 4), Poison(step=5)]
    words = "step_00000002, of the data before it changed at sample 24.*start the run again"
    with pytest.raises(TrainingError, match=words):
        trained(folder, tmp_path, "turn", callbacks, **copy.deepcopy(sections))
    losses, events, run = rows_of(tmp_path / "turn")
    assert (events[-1]["event"], events[-1]["step"]) == ("bad_step", 5)
    assert sorted(losses) == [1, 2, 3, 4, 5]
    losses, events, run = trained(folder, tmp_path, "turn", [Poison(step=5)], **sections)
    (rollback,) = [event for event in events if event["event"] == "rollback"]
    assert (rollback["step"], rollback["bad_step"]) == (4, 5)
    assert sorted(losses) == list(range(1, 8))
    assert all(math.isfinite(loss) for loss in losses.values())
    state = json.loads((run / "checkpoints" / "step_00000007" / "state.json").read_text())
    segments = state["extra"]["data"]["segments"]
    assert [segment["first_sample"] for segment in segments] == [0, 16]


@pytest.mark.parametrize(
    ("bad_steps", "interval", "words"),
    [
        ({"policy": "stop"}, 2, "says stop"),
        ({"policy": "rollback"}, 0, "no checkpoint to roll back to"),
        ({"policy": "rollback", "max_rollbacks": 0}, 2, "max_rollbacks=0"),
    ],
)
def test_the_run_stops_where_it_must(folder, tmp_path, bad_steps, interval, words):
    with pytest.raises(TrainingError, match=words) as failure:
        trained(
            folder,
            tmp_path,
            "stop",
            [Poison()],
            train={"bad_steps": bad_steps},
            checkpoint={"interval": interval},
        )
    assert POISON in str(failure.value)
    _, events, _ = rows_of(tmp_path / "stop")
    assert [e["event"] for e in events if e["event"] in ("bad_step", "stop")] == ["bad_step"]


def test_samples_are_stepped_over_on_resume(folder, tmp_path):
    """data.skip_samples may be set when a run continues; the past stays as it was."""
    whole, _, _ = trained(folder, tmp_path, "whole")
    trained(folder, tmp_path, "cut", train={"steps": 3}, checkpoint={"interval": 0})
    after, _, _ = trained(folder, tmp_path, "cut", data={"skip_samples": [[0, 9], [26, 29]]})
    assert [after[step] for step in (1, 2, 3)] == [whole[step] for step in (1, 2, 3)]
    assert after[4] != whole[4]
    ahead, _, _ = trained(folder, tmp_path, "ahead", data={"skip_samples": [[26, 29]]})
    assert after == ahead


def _spiked(place: str) -> tuple[dict, list]:
    """On a rank: its own state at the end, and the events of the run."""
    data = toy_config(
        Path(place),
        run={"dir": place, "name": "spike"},
        data={"valid": None},
        train={
            "steps": 14,
            "micro_batch_size": 2,
            "bad_steps": {"spike_policy": "skip", "spike_after": 8, "spike_zscore": 6.0},
        },
        optimizer={"lr": 1e-4},
    )
    trainer = Trainer(make_config(data), [Poison(factor=1.5, step=12)])
    state = asdict(trainer.run())
    return state, rows_of(trainer.run_dir)[1]


@pytest.mark.slow
def test_a_spike_is_found_the_same_on_two_ranks(folder):
    (first, events), (second, _) = run_distributed(_spiked, 2, timeout=900, args=(str(folder),))
    assert first == second
    assert (first["skipped"], len(first["recent_losses"])) == (1, 13)
    (skip,) = [event for event in events if event["event"] == "skip"]
    assert (skip["step"], skip["samples"]) == (12, [88, 95])
    assert "robust standard deviations above the median" in skip["reason"]
    assert skip["zscore"] > 6


class OneRank(Callback):
    """In one batch, on one rank alone: a layer's output or gradient is not finite, or its losses
    are larger."""

    def __init__(self, kind: str, rank: int, step: int = BAD_STEP) -> None:
        self.kind, self.rank, self.step = kind, rank, step
        self.active = False

    def before_step(self, trainer, step):
        if step == 1 and trainer.world.rank == self.rank:
            for chunk in trainer.engine.chunks:
                model = unwrap(chunk)
                layer = dict(named_gemms(model)).get(POISON)
                module = model if self.kind == "spike" else layer
                if module is not None:
                    module.register_forward_hook(self.hook)
        # By its batch: a step that comes again after a rollback has another.
        first = trainer.loader.step_samples(trainer.state.consumed_samples)[0]
        self.active = first == (self.step - 1) * BATCH

    def hook(self, module, inputs, output):
        first = output[0] if isinstance(output, tuple) else output
        if not (self.active and module.training and torch.is_grad_enabled()):
            return output
        if self.kind == "gradient":
            first.register_hook(lambda grad: grad * math.inf)
            return output
        changed = first * (math.nan if self.kind == "loss" else 1.5)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed


ONE_RANK = {
    "dp-loss": ("loss", 1, {}),
    "dp-gradient": ("gradient", 1, {}),
    "dp-spike": ("spike", 1, {}),
    "tp-gradient": ("gradient", 1, {"tensor_model_parallel_size": 2}),
    "tp-loss": ("loss", 0, {"tensor_model_parallel_size": 2}),
    "pp-loss": ("loss", 1, {"pipeline_model_parallel_size": 2}),
    "pp-gradient": ("gradient", 1, {"pipeline_model_parallel_size": 2}),
}


def _one_bad_rank(place: str) -> dict[str, tuple[dict, list]]:
    """On a rank, for each case: its own state at the end, and the events of the run."""
    found = {}
    for name, (kind, rank, parallel) in ONE_RANK.items():
        judged = {"spike_policy": "skip", "spike_after": 4, "spike_zscore": 6.0}
        data = toy_config(
            Path(place),
            run={"dir": place, "name": name},
            data={"valid": None},
            train={
                "steps": 8,
                "micro_batch_size": 2,
                "bad_steps": judged if kind == "spike" else {"policy": "rollback"},
            },
            parallel=parallel,
            checkpoint={"interval": 2},
            optimizer={"lr": 1e-4},
        )
        step = 7 if kind == "spike" else BAD_STEP
        trainer = Trainer(make_config(data), [OneRank(kind, rank, step)])
        state = asdict(trainer.run())
        found[name] = state, rows_of(trainer.run_dir)[1]
    shut_down()
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_what_one_rank_alone_does_is_found_the_same_on_all(folder):
    """Its loss, its gradient, a spike; over data-, tensor- and pipeline-parallel ranks."""
    first, second = run_distributed(_one_bad_rank, 2, timeout=1800, args=(str(folder),))
    for name, (kind, rank, _) in ONE_RANK.items():
        (state, events), (other, _) = first[name], second[name]
        assert state == other, name
        assert math.isfinite(sum(state["recent_losses"])), name
        if kind == "spike":
            (skip,) = [event for event in events if event["event"] == "skip"]
            assert "robust standard deviations" in skip["reason"]
            assert (skip["step"], skip["samples"]) == (7, [48, 55])
            continue
        (back,) = [event for event in events if event["event"] == "rollback"]
        assert (back["step"], back["bad_step"]) == (2, BAD_STEP), name
        assert state["skip"] == [[24, 31]], name
        assert state["step"] == 8, name
        where = f"first in {POISON}"
        assert where in back["cause"], (name, back["cause"])
        if not name.startswith("tp"):  # what tensor-parallel ranks share is bad on all of them
            assert f"(rank {rank})" in back["cause"], (name, back["cause"])


def test_an_fp16_overflow_is_no_bad_step(folder, tmp_path):
    """The loss scale starts far too high: it falls, and nothing else happens."""
    data = toy_config(
        folder,
        run={"dir": str(tmp_path), "name": "fp16"},
        data={"valid": None},
        train={"dtype": "fp16", "steps": 60, "bad_steps": {"policy": "stop", "spike_after": 4}},
        optimizer={"loss_scale_hysteresis": 1},
    )
    Trainer(make_config(data)).run()
    losses, events, run = rows_of(tmp_path / "fp16")
    skips = [event for event in events if event["event"] == "skip"]
    assert skips
    assert all("loss scale" in event["reason"] for event in skips)
    assert not [e for e in events if e["event"] in ("bad_step", "spike")]
    assert not (run / "bad_steps").exists()
    assert len(losses) == 60
    shut_down()


def test_zscores_against_numpy():
    """Median and scaled MAD, by their definition; noise of a normal distribution is no spike."""
    noise = np.random.default_rng(0).normal(3.0, 0.05, 200)
    median = np.median(noise)
    sigma = 1.4826 * np.median(np.abs(noise - median))
    assert spike_zscore(4.0, noise.tolist()) == pytest.approx((4.0 - median) / sigma, rel=1e-12)
    judge = BadSteps(BadStepConfig(spike_after=32))
    recent: list[float] = []
    for loss in noise:
        assert judge.before_update(float(loss), recent) is None
        judge.remember(float(loss), recent)
    assert len(recent) == 128
    assert judge.before_update(2.0, recent) is None, "a fall is no spike"
    assert judge.before_update(3.0, [3.0] * 64) is None
    assert judge.before_update(3.01, [3.0] * 64) is None, "rounding of a constant is none either"
    found = judge.before_update(4.0, recent)
    assert (found.kind, found.policy) == ("spike", "log")
    assert judge.before_update(math.inf, recent).kind == "nonfinite"
    assert judge.before_update(9.0, recent[:31]) is None, "too little is known yet"


def test_skips_against_a_plain_list():
    ranges = [(5, 7), (6, 9), (10, 10), (20, 29), (0, 1)]
    out = {n for first, last in ranges for n in range(first, last + 1)}
    kept = [n for n in range(200) if n not in out]
    skips = Skips(ranges)
    assert skips.ranges == [(0, 1), (5, 10), (20, 29)]
    for consumed in range(40):
        for count in (1, 3, 8, 30):
            expected = [n for n in kept if n >= consumed][:count]
            assert skips.samples(consumed, count) == expected
            assert skips.after(consumed, count) == expected[-1] + 1
    assert Skips().samples(3, 2) == [3, 4]
    assert Skips().after(3, 0) == 3
