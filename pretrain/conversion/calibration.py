# SPDX-License-Identifier: Apache-2.0
"""Largest inputs of linear layers over validation batches, with one layer in memory at a time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fused_ops.errors import ConfigError
from models.conversion.streamed import StreamedModel
from pretrain.conversion.opened import OpenCheckpoint, process_groups
from pretrain.conversion.progress import Bar
from pretrain.data.config import DataConfig
from pretrain.data.dataset import open_validation
from pretrain.data.manifest import DataError


def calibration_tokens(checkpoint: OpenCheckpoint, given: Path | None, count: int) -> Tensor:
    """int64 [windows, tokens]: up to `count` tokens of validation data.

    `given`: a folder of token shards; None takes the run's `data.valid`. ConfigError without any.
    """
    valid = str(given) if given is not None else checkpoint.config.data.valid
    if valid is None:
        raise ConfigError(
            "scales of activations come from validation batches, and this checkpoint's run names "
            "none (data.valid); give a folder of token shards with --calibrate"
        )
    length = min(checkpoint.section.seq_length, count)
    size = max(1, count // length), length
    return validation_windows(valid, size, checkpoint.vocab_size, "--calibrate")


def validation_windows(valid: Any, size: tuple[int, int], vocab_size: int, option: str) -> Tensor:
    """int64 [at most size[0], size[1]]: windows of validation data, from its start.

    Args:
        valid: as `data.valid` in a run file.
        size: windows, and tokens of each.
        vocab_size: of the model: ids from there on are an error.
        option: how the user names another folder.

    Raises:
        ConfigError: no such data, too little of it, or of another tokenizer.
    """
    count, length = size
    try:
        sets = open_validation(DataConfig(train="-", valid=valid), length, None)
    except (ConfigError, DataError, OSError) as error:
        raise ConfigError(f"validation data cannot be read: {error}; give {option} DIR") from None
    windows: list[Tensor] = []
    for opened in sets.values():
        for number in range(min(len(opened), count)):
            tokens = torch.from_numpy(opened.window(number).astype("int64"))[:length]
            if len(tokens) == length:
                windows.append(tokens)
    if not windows:
        raise ConfigError(
            f"validation data must hold at least {length} tokens; give a larger folder with "
            f"{option} DIR"
        )
    found = torch.stack(windows[:count])
    if int(found.max()) >= vocab_size:
        raise ConfigError(
            f"validation data has token {int(found.max())}, the vocabulary {vocab_size} entries: "
            "it is of another tokenizer"
        )
    return found


@torch.no_grad()
def input_amaxes(
    checkpoint: OpenCheckpoint, tokens: Tensor, *, show: bool = True
) -> dict[str, list[float]]:
    """{global name of a linear layer: largest input; of experts one each}.

    An expert that got no token takes the largest of its layer's.
    """
    model = StreamedModel(checkpoint.section, checkpoint.reader, process_groups())
    found: dict[str, Tensor] = {}
    hidden = model.embed(tokens)
    with Bar("calibration, layers", len(model.pattern.layers), show=show) as bar:
        for position in range(len(model.pattern.layers)):

            def watch(stack: Any, position: int = position) -> None:
                for name, module in stack.layers[0].named_modules():
                    if hasattr(module, "gemm_name"):
                        key = f"layers.{position}.{name}"
                        module.register_forward_pre_hook(_noting(found, key))

            hidden = model.layer(position, hidden, watch)
            bar.step()
    return {name: _filled(amax) for name, amax in found.items()}


def _noting(found: dict[str, Tensor], key: str) -> Callable[..., None]:
    def note(module: Any, inputs: tuple[Any, ...]) -> None:
        x = inputs[0].detach().float()
        if len(inputs) > 1 and isinstance(inputs[1], list):
            parts = x.split(inputs[1])
            amax = torch.stack([p.abs().amax() if p.numel() else torch.zeros(()) for p in parts])
        else:
            amax = x.abs().amax().view(1)
        found[key] = torch.maximum(found[key], amax) if key in found else amax

    return note


def _filled(amax: Tensor) -> list[float]:
    return torch.where(amax > 0, amax, amax.amax()).tolist()
