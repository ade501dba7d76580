# SPDX-License-Identifier: Apache-2.0
"""Saved in one layout, continued in another: model and optimizer, every pair of layouts.

Two things are held for each pair: what was loaded is what was saved, bit for bit (saved again, and
every whole tensor of model and optimizer compared), and the steps that follow are those of the run
that was never stopped, within the FP32 bound of the parity of layouts.
"""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pretrain.checkpoint.state import load_sharded
from pretrain.checkpoint.tensors import TensorReader
from pretrain.parity.layouts import parse_layout
from pretrain.parity.matrix import FP32_BOUNDS
from pretrain.parity.toy import SAMPLES, read_case
from pretrain.parity.train import IN_ORDER, build, micro_batches
from pretrain.train_step import train_step
from tests.distributed import run_distributed
from tests.pretrain.common_start import common_start, leave_state

BEFORE, AFTER = 2, 3
TWO = {2: ("dp2", "tp2sp", "pp2", "pp2v2", "ep2", "cp2")}
# Of four ranks every pair; of fewer only with four.
FOUR = {
    1: ("dp1",),
    2: ("pp2v2",),
    4: ("tp2sp_pp2", "tp2sp_dp2", "tp2sp_ep2", "pp2v2_dp2", "tp2sp_cp2"),
}


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
    leave_state(engine, folder)
    if dist.get_rank() == 0:
        (folder / "scheduler.json").write_text(json.dumps(engine.scheduler.state_dict()))


def _save_all(folder, pattern, layouts):
    """{layout: figures of an uninterrupted run}; each leaves its state after BEFORE steps."""
    folder, case = Path(folder), read_case(pattern, "fp32", BEFORE + AFTER)
    found = {}
    for name in layouts:
        engine = build(case, parse_layout(name), "cpu")
        common_start(engine, folder / "start")
        _steps(case, engine, 0, BEFORE)
        _save(engine, folder / name)
        found[name] = _steps(case, engine, BEFORE, BEFORE + AFTER)
    return found


def _continue_all(folder, pattern, pairs):
    """{(saved in, continued in): figures of the steps that follow}; each saves what it loaded."""
    folder, case = Path(folder), read_case(pattern, "fp32", BEFORE + AFTER)
    found = {}
    for before, name in pairs:  # groups of a layout are made once: its pairs follow each other
        engine = build(case, parse_layout(name), "cpu")
        load_sharded(folder / before, engine.chunks, engine.optimizer)
        scheduler = json.loads((folder / before / "scheduler.json").read_text())
        engine.scheduler.load_state_dict(scheduler)
        engine.precision_state.weights_changed()
        _save(engine, folder / f"{before}-{name}")
        found[before, name] = _steps(case, engine, BEFORE, BEFORE + AFTER)
    return found


def _same_state(one, other):
    """How many tensors two checkpoints hold, all equal bit for bit; of model and of optimizer."""
    one, other = TensorReader(one), TensorReader(other)
    assert sorted(one) == sorted(other)
    for name in one:
        assert torch.equal(one.read(name), other.read(name)), name
    moments = sum(name.startswith("optimizer.") for name in one)
    return len(list(one)) - moments, moments


def check(folder, pattern, worlds, timeout, wanted=lambda before, after: True):
    """Every wanted pair of `worlds`, {processes: layouts}; a layout with itself bitwise."""
    sizes = {name: size for size, names in worlds.items() for name in names}
    alone, found = {}, {}
    for size, names in worlds.items():
        args = (str(folder), pattern, names)
        alone |= run_distributed(_save_all, size, timeout=timeout, args=args)[0]
    pairs = [(a, b) for b in sizes for a in sizes if wanted(sizes[a], sizes[b])]
    for size in worlds:
        # New processes: those of gloo's groups have threads that are never freed.
        args = (str(folder), pattern, [pair for pair in pairs if sizes[pair[1]] == size])
        found |= run_distributed(_continue_all, size, timeout=timeout, args=args)[0]
    assert len(found) == len(pairs)
    first = alone[next(iter(sizes))]
    for (before, after), figures in found.items():
        where = f"{before} -> {after}"
        for (loss, norm), (expected_loss, expected_norm) in zip(figures, first, strict=True):
            assert abs(loss - expected_loss) <= FP32_BOUNDS["loss"] * expected_loss, where
            assert abs(norm - expected_norm) <= FP32_BOUNDS["grad_norm"] * expected_norm, where
        model, moments = _same_state(folder / before, folder / f"{before}-{after}")
        assert model > 20, where
        assert moments >= 2 * 20, where
        if before == after:
            assert figures == alone[before], where
    losses = [loss for loss, _ in first]
    assert max(losses) - min(losses) > 1e-3, "nothing was trained"
    return len(pairs)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_pair_of_layouts(tmp_path):
    assert check(tmp_path, "M-*E", TWO, timeout=800) == 36


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_layouts_of_four_ranks(tmp_path):
    def with_four(before, after):
        return 4 in (before, after)

    assert check(tmp_path, "M-*E", FOUR, timeout=1700, wanted=with_four) == 45
