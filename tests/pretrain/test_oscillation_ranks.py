# SPDX-License-Identifier: Apache-2.0
"""Weights that oscillate are reset alike in every layout, bit for bit, and paths move between them.

Where nothing but weight decay moves the weights, masters are the same bits in all layouts; so must
paths, codes and resets be. Trained over data-parallel ranks they are those of one process.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pretrain.checkpoint.state import load_sharded
from pretrain.checkpoint.tensors import TensorReader
from pretrain.engine import build_engine
from pretrain.initialize import initialize
from pretrain.optimizer import update
from pretrain.oscillation_config import OscillationReset
from pretrain.parity.layouts import parse_layout
from pretrain.parity.toy import VOCAB, micro_batches, read_case, run_config
from pretrain.parity.train import IN_ORDER
from pretrain.train_step import train_step
from pretrain.weight_paths import PATHS
from tests.distributed import run_distributed
from tests.pretrain.common_start import common_start, leave_state

RESET = {"from": 0, "interval": 3, "window": 2}
UPDATES = 5  # reset before the third, followed again from the fourth on


def _engine(pattern, name, reset, **optimizer):
    config = run_config(read_case(pattern, "nvfp4", 100), parse_layout(name))
    changes = {"oscillation_reset": OscillationReset(**reset), **optimizer}
    config = replace(config, optimizer=replace(config.optimizer, **changes))
    return build_engine(config, initialize(config.parallel, seed=11), VOCAB)


def _decay_all(folder, pattern, layouts):
    """{layout: what its reset was said to be}; each leaves its state in the folder of its name."""
    folder, found = Path(folder), {}
    for name in layouts:
        reset = {**RESET, "threshold": 1.02}
        engine = _engine(pattern, name, reset, lr=1.0, weight_decay=0.02, clip_grad=0.0)
        common_start(engine, folder / "start")
        for chunk in engine.chunks:
            chunk.zero_grad_buffer()
        for step in range(1, UPDATES + 1):
            engine.precision_state.set_step(step)
            engine.scheduler.step(1)
            engine.optimizer.zero_grad()
            updated, norm = update(engine.optimizer, 0.0, engine.oscillation.around_update())
            assert (updated, norm) == (True, 0.0)
        found[name] = engine.oscillation.take_report()
        leave_state(engine, folder / name)
    return found


def _same(one, other):
    """Names of the paths that two checkpoints hold; all of their tensors are equal bit for bit."""
    one, other = TensorReader(one), TensorReader(other)
    assert sorted(one) == sorted(other)
    for name in one:
        assert torch.equal(one.read(name), other.read(name)), name
    return [n for n in one if n.startswith(tuple(f"optimizer.state.{path}." for path in PATHS))]


def _load_all(folder, pattern, names):
    """Loads what each layout has left, and saves it again."""
    for name in names:
        engine = _engine(pattern, "dp1", RESET)
        load_sharded(
            Path(folder, name), engine.chunks, engine.optimizer, None, engine.oscillation.paths
        )
        assert engine.oscillation.load_state_dict({"updates": 2}) == []
        leave_state(engine, Path(folder, f"{name}-again"))


def _check_layouts(folder, pattern, worlds, weights, again=()):
    """Layouts by number of processes against one process, which then loads those in `again`.
    `weights`: of linear layers, as checkpoints count them."""
    (alone,) = run_distributed(_decay_all, 1, args=(str(folder), pattern, ("dp1",)))
    assert 0.01 < alone["dp1"]["share"] < 0.99
    for size, layouts in worlds.items():
        first, *others = run_distributed(_decay_all, size, args=(str(folder), pattern, layouts))
        assert all(other == first for other in others)
        for name in layouts:
            assert first[name] == alone["dp1"], name
            assert len(_same(folder / "dp1", folder / name)) == 3 * weights, name
    if again:
        run_distributed(_load_all, 1, args=(str(folder), pattern, again))
    for name in again:
        assert len(_same(folder / name, folder / f"{name}-again")) == 3 * weights


def test_tensor_parallel_ranks_reset_the_same_elements(tmp_path):
    """Paths after a second window has begun, masters and report are those of one process."""
    _check_layouts(tmp_path, "-", {2: ("tp2sp",)}, 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_kind_of_layer_and_layout_resets_the_same_elements(tmp_path):
    """Experts, latent projections that tensor-parallel ranks hold whole, Mamba (whose input
    projection is saved in five parts), stages, and masters cut beside tensor-parallel ranks."""
    worlds = {2: ("dp2", "tp2sp", "pp2", "ep2"), 4: ("tp2sp_dp2", "tp2sp_ep2")}
    _check_layouts(tmp_path, "M-*E", worlds, 16, ("tp2sp", "ep2", "tp2sp_dp2"))


def _train_all(folder, pattern, runs):
    """[(losses, report)] of runs (layout, first, last), each of two micro-batches a step: behind
    step `first`, from what `dp2_overlap` has left there, or from new weights. All leave what they
    have behind step 3 and at their end."""
    folder, case, found = Path(folder), read_case(pattern, "nvfp4", 100), []
    for name, first, last in runs:
        reset = {"from": 0.01, "interval": 3, "window": 3, "threshold": 1.5}
        engine = _engine(pattern, name, reset, clip_grad=0.0)
        rank, ranks = engine.world.data_parallel_rank, engine.world.data_parallel_size
        if first:
            place, paths = folder / f"dp2_overlap-0-{first}", engine.oscillation.paths
            load_sharded(place, engine.chunks, engine.optimizer, None, paths)
            engine.oscillation.load_state_dict({"updates": first - 1})
            engine.scheduler.step(first)
            engine.precision_state.weights_changed()
        else:
            common_start(engine, folder / "start")
        losses = []
        for step in range(first + 1, last + 1):
            engine.precision_state.set_step(step)
            own = micro_batches(case, step, rank, ranks, IN_ORDER)[: 2 // ranks]
            losses.append(train_step(engine, own).loss)
            if step in (3, last):
                leave_state(engine, folder / f"{name}-{first}-{step}")
        found.append((losses, engine.oscillation.take_report()))
    return found


def test_data_parallel_ranks_train_as_one_process_and_continue_each_other(tmp_path):
    """Two ranks with a micro-batch each, and one with both, are followed behind the first step and
    reset before the fifth. From what two have left at step 3, in the middle of the window, one goes
    on: losses, weights, moments, paths bit for bit."""
    folder, whole = str(tmp_path), tmp_path / "dp2_overlap-0-6"
    runs = [("dp2_overlap", 0, 6)]
    (two,), _ = run_distributed(_train_all, 2, args=(folder, "-", runs))
    runs = [("dp1", 0, 6), ("dp1", 3, 6)]
    ((one, resumed),) = run_distributed(_train_all, 1, args=(folder, "-", runs))
    assert one == two
    losses, report = two
    assert report["share"] > 0.01
    assert resumed == (losses[3:], report)
    for name in ("dp1-0-6", "dp1-3-6"):
        assert len(_same(whole, tmp_path / name)) == 6
