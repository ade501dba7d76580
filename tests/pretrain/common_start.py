# SPDX-License-Identifier: Apache-2.0
"""What toys in every layout begin with, and what they leave."""

from pathlib import Path
from typing import Any

import torch.distributed as dist

from pretrain.checkpoint.state import data_parallel_group, sharded_state
from pretrain.checkpoint.write import ShardWriter
from pretrain.evaluate import gathered_parameters
from pretrain.parity.train import load_weights, save_weights


def common_start(engine: Any, folder: Path) -> None:
    """The weights in `folder`, which the first call leaves there; a collective."""
    there = folder.exists()
    dist.barrier()  # no rank looks after another has begun to write
    if not there:
        save_weights(engine, folder)
        dist.barrier()
    load_weights(engine, folder)


def leave_state(engine: Any, folder: Path) -> None:
    """All of model and optimizer, in a new folder; a collective."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    with gathered_parameters(engine):
        state = sharded_state(engine.chunks, engine.optimizer)
        replicas = data_parallel_group(engine.chunks[0])
        ShardWriter(folder, state, forked=False, replicas=replicas).done(wait=True)
