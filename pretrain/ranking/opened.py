# SPDX-License-Identifier: Apache-2.0
"""A run's engine with a checkpoint's weights, and batches of its validation data; one process."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fused_ops.errors import ConfigError
from models.parallel_config import ParallelConfig
from pretrain.checkpoint.config import require_latest
from pretrain.checkpoint.io import load_json
from pretrain.checkpoint.layout import STATE
from pretrain.checkpoint.state import load_sharded
from pretrain.config import PretrainConfig
from pretrain.data.dataset import open_dataset, open_validation
from pretrain.data.loader import BatchOptions, ValidLoader
from pretrain.engine import Engine, build_engine
from pretrain.initialize import initialize
from pretrain.train_step import MicroBatch


def open_engine(config: PretrainConfig, checkpoint: Path) -> tuple[Engine, int]:
    """The engine, whole in this process whatever the run's layout is, with the weights of the
    newest whole checkpoint, and that checkpoint's step.

    Raises:
        ConfigError: several processes, no data, or no checkpoint there.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("layers are ranked in one process; start it without torchrun")
    found = require_latest(checkpoint)
    config = replace(config, model=config.model.unstaged, parallel=ParallelConfig())
    world = initialize(config.parallel, device=config.run.device, seed=config.run.seed)
    model = config.model
    data = open_dataset(config.data, model.seq_length, config.run.seed, model.vocab_size)
    engine = build_engine(config, world, data.vocab_size)
    load_sharded(found.path, engine.chunks, None, whole=True)
    engine.optimizer.reload_model_params()
    engine.precision_state.weights_changed()
    engine.precision_state.set_step(found.step + 1)
    engine.plan.load_scales(load_json(found.path / STATE)["extra"].get("precision", {}))
    return engine, found.step


def read_batches(config: PretrainConfig, count: int) -> list[Sequence[MicroBatch]]:
    """The first `count` global batches of the (first) validation set, as the run validates on.

    Raises:
        ConfigError: there is no validation data, or not so much of it.
    """
    sets = open_validation(config.data, config.model.seq_length, config.model.vocab_size)
    if not sets:
        raise ConfigError("layers are ranked on validation data; set data.valid")
    loader = ValidLoader(
        next(iter(sets.values())),
        config.train.global_batch_size,
        config.train.micro_batch_size,
        options=BatchOptions.of(config.data),
    )
    found: list[Sequence[MicroBatch]] = list(loader.batches(count))
    if len(found) < count:
        raise ConfigError(
            f"{count} global batches of validation data are needed, one to rank on and --verify to "
            f"judge on; there are {len(found)}; lower --verify, or train.global_batch_size"
        )
    return found
