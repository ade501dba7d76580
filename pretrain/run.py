# SPDX-License-Identifier: Apache-2.0
"""What the command line starts, once megatron-core may be imported."""

import os
from collections.abc import Sequence

import torch

from fused_ops.errors import ConfigError
from pretrain.bad_steps import TrainingError
from pretrain.checkpoint.manager import CheckpointError
from pretrain.config import load_config, precision_plan
from pretrain.initialize import shut_down


def run(path: str, overrides: Sequence[str]) -> int:
    """Trains the run of a config file, or shows its precision; returns the exit status.

    Raises ConfigError for what the user can mend before training.
    """
    config = load_config(path, overrides, for_training=True)
    if config.train.dry_run:
        if os.environ.get("RANK", "0") == "0":
            print(precision_plan(config).render())
        return 0
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    from pretrain.trainer import Trainer  # only now: it loads the whole engine

    try:
        Trainer(config).run()
    except (CheckpointError, TrainingError) as error:
        raise ConfigError(str(error)) from error
    finally:
        shut_down()
    return 0
