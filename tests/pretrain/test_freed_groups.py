# SPDX-License-Identifier: Apache-2.0
"""Runs that are over leave no model, no process group and no thread in their process."""

import gc
import os
import weakref
from pathlib import Path

import torch.distributed as dist

from pretrain.config import make_config
from pretrain.initialize import shut_down
from pretrain.trainer import Trainer
from tests.distributed import run_distributed
from tests.toy import make_toy, toy_config


def _threads():
    return len(os.listdir("/proc/self/task"))


def _run_and_drop(folder, number, pattern, dtype):
    """A run of two steps, of which nothing is kept but weak references."""
    changes = {"run": {"dir": folder, "name": f"run{number}"}, "data": {"valid": None}}
    train = {"steps": 2, "global_batch_size": 2, "micro_batch_size": 2, "dtype": dtype}
    trainer = Trainer(make_config(toy_config(Path(folder), pattern, train=train, **changes)))
    engine = trainer.engine
    trainer.run()
    return [weakref.ref(thing) for thing in (engine, engine.chunks[0], engine.optimizer)]


def _counts(folder):
    """(before, [while each run's groups stand], at the end) threads; models that still live."""
    before, during, kept = _threads(), [], []
    runs = [("*-", "fp32"), ("*E", "bf16"), ("M-", "fp16"), ("*-", "fp32")]
    for number, (pattern, dtype) in enumerate(runs):
        kept += _run_and_drop(folder, number, pattern, dtype)
        gc.collect()
        during.append(_threads())
    alive = [type(thing()).__name__ for thing in kept if thing() is not None]
    groups = dist.distributed_c10d._world.pg_map
    standing = len(groups)
    shut_down()
    return before, during, _threads(), alive, standing, len(groups)


def test_runs_that_are_over_leave_nothing(tmp_path):
    """FP32 weights are views of the optimizer's, attention caches by its module: both held all."""
    make_toy(tmp_path)
    ((before, during, after, alive, standing, groups),) = run_distributed(
        _counts, 1, args=(str(tmp_path),)
    )
    assert alive == []
    assert standing > 10, "the groups of the last run stand until they are left"
    assert groups == 0
    assert during == [during[0]] * len(during), "each run has the threads of the first"
    assert after == before
