# SPDX-License-Identifier: Apache-2.0
"""One set of initial weights for a toy in every layout."""

from pathlib import Path
from typing import Any

import torch.distributed as dist

from pretrain.parity.train import load_weights, save_weights


def common_start(engine: Any, folder: Path) -> None:
    """The weights in `folder`, which the first call leaves there; a collective."""
    there = folder.exists()
    dist.barrier()  # no rank looks after another has begun to write
    if not there:
        save_weights(engine, folder)
        dist.barrier()
    load_weights(engine, folder)
