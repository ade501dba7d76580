# SPDX-License-Identifier: Apache-2.0
"""What the command line starts, once megatron-core may be imported."""

import os
from collections.abc import Sequence

import torch

from fused_ops.errors import ConfigError
from pretrain.bad_steps import TrainingError
from pretrain.checkpoint.manager import CheckpointError
from pretrain.config import PretrainConfig, load_config, precision_plan
from pretrain.config_file import encode
from pretrain.environment import cudnn_shadow, unseen_gpus
from pretrain.initialize import choose_device, shut_down
from pretrain.recording import NotRecordedError
from pretrain.redact import mask_secrets
from pretrain.start import meet, own_record


def run(path: str, overrides: Sequence[str]) -> int:
    """Trains the run of a config file, or shows its precision; returns the exit status.

    Raises ConfigError for what the user can mend before training.
    """
    config, problems, device = _load(path, overrides)
    if config is not None and config.train.dry_run:
        if os.environ.get("RANK", "0") == "0":
            print(precision_plan(config).render())
        return 0
    warnings = [text for text in (cudnn_shadow(), unseen_gpus(device)) if text]
    plain = None if config is None else mask_secrets(encode(config))
    store = meet(own_record(problems, warnings, plain, device))
    assert config is not None, "a config that cannot be read is a problem, and raised by now"
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    from pretrain.trainer import Trainer  # only now: it loads the whole engine

    try:
        Trainer(config, store=store).run()
    except (CheckpointError, TrainingError) as error:
        raise ConfigError(str(error)) from error
    except NotRecordedError as error:
        raise ConfigError(
            f"train.cuda_graph_impl=full_iteration must record a step on every rank; {error}; set "
            "train.cuda_graph_impl=none"
        ) from error
    finally:
        shut_down()
    return 0


def _load(path: str, overrides: Sequence[str]) -> tuple[PretrainConfig | None, list[str], str]:
    """(the run, what is wrong with it on this host, cpu or cuda)."""
    device = ""
    try:
        config = load_config(path, overrides, for_training=True)
        if not config.train.dry_run:
            device = choose_device(config.run.device).type
    except ConfigError as error:
        return None, list(error.problems), device
    return config, [], device
