# SPDX-License-Identifier: Apache-2.0
"""Saved in one layout, continued in another: model and optimizer, every pair of layouts."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from pretrain.checkpoint.state import data_parallel_group, load_sharded, sharded_state
from pretrain.checkpoint.write import ShardWriter
from pretrain.parity.layouts import parse_layout
from pretrain.parity.matrix import FP32_BOUNDS
from pretrain.parity.toy import SAMPLES, read_case
from pretrain.parity.train import IN_ORDER, build, load_weights, micro_batches, save_weights
from pretrain.train_step import train_step
from tests.distributed import run_distributed

BEFORE, AFTER = 2, 3
LAYOUTS = ("dp2", "tp2sp", "pp2", "pp2v2", "ep2", "cp2")


def _steps(case, engine, first, last):
    """Losses and gradient norms of the steps first + 1 to last."""
    found = []
    for step in range(first + 1, last + 1):
        engine.plan.update((step - 1) * SAMPLES)
        engine.precision_state.set_step(step)
        world = engine.world
        rank, size = world.data_parallel_rank, world.data_parallel_size
        result = train_step(engine, micro_batches(case, step, rank, size, IN_ORDER))
        assert result.updated
        found.append((result.loss, result.grad_norm))
    return found


def _save(engine, folder):
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
        (folder / "scheduler.json").write_text(json.dumps(engine.scheduler.state_dict()))
    dist.barrier()
    state = sharded_state(engine.chunks, engine.optimizer)
    replicas = data_parallel_group(engine.chunks[0])
    ShardWriter(folder, state, forked=False, replicas=replicas).done(wait=True)


def _save_all(folder, pattern, layouts):
    """{layout: figures of an uninterrupted run}; each leaves its state after BEFORE steps."""
    folder, case = Path(folder), read_case(pattern, "fp32", BEFORE + AFTER)
    found = {}
    for number, name in enumerate(layouts):
        engine = build(case, parse_layout(name), "cpu")
        if number == 0:
            save_weights(engine, folder / "start")
        load_weights(engine, folder / "start")
        _steps(case, engine, 0, BEFORE)
        _save(engine, folder / name)
        found[name] = _steps(case, engine, BEFORE, BEFORE + AFTER)
    return found


def _continue_all(folder, pattern, layouts):
    """{(saved in, continued in): figures of the steps that follow}."""
    folder, case = Path(folder), read_case(pattern, "fp32", BEFORE + AFTER)
    found = {}
    for name in layouts:  # outside: groups of a layout are made once
        for before in layouts:
            engine = build(case, parse_layout(name), "cpu")
            load_sharded(folder / before, engine.chunks, engine.optimizer)
            scheduler = json.loads((folder / before / "scheduler.json").read_text())
            engine.scheduler.load_state_dict(scheduler)
            engine.precision_state.weights_changed()
            found[before, name] = _steps(case, engine, BEFORE, BEFORE + AFTER)
    return found


def check(folder, pattern, layouts, timeout):
    """Every pair within the FP32 bound of the parity of layouts; a layout with itself bitwise."""
    args = (str(folder), pattern, layouts)
    alone = run_distributed(_save_all, 2, timeout=timeout, args=args)[0]
    # New processes: those of gloo's groups have threads that are never freed.
    found = run_distributed(_continue_all, 2, timeout=timeout, args=args)[0]
    assert len(found) == len(layouts) ** 2
    first = alone[layouts[0]]
    for (before, after), figures in found.items():
        for (loss, norm), (expected_loss, expected_norm) in zip(figures, first, strict=True):
            where = f"{before} -> {after}"
            assert abs(loss - expected_loss) <= FP32_BOUNDS["loss"] * expected_loss, where
            assert abs(norm - expected_norm) <= FP32_BOUNDS["grad_norm"] * expected_norm, where
    for name in layouts:
        assert found[name, name] == alone[name], name
    losses = [loss for loss, _ in first]
    assert max(losses) - min(losses) > 1e-3, "nothing was trained"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_pair_of_layouts(tmp_path):
    check(tmp_path, "M-*E", LAYOUTS, timeout=800)
