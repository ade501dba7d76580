# SPDX-License-Identifier: Apache-2.0
"""An exponential moving average of the weights, kept beside training and saved with it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from pretrain.checkpoint.tensors import AVERAGE


class WeightAverage:
    """average = decay * average + (1 - decay) * weight, after every update; FP32.

    Each rank averages the parameters that it holds: a copy of them in FP32 is the memory it takes.
    Buffers (such as a router's bias) are not averaged: the newest ones go with the average.
    """

    def __init__(self, models: Sequence[torch.nn.Module], decay: float) -> None:
        """`models`: this rank's chunks, without wrappers."""
        self.decay = decay
        self._models = list(models)
        self._averages = [
            {name: p.detach().float().clone() for name, p in model.named_parameters()}
            for model in self._models
        ]

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        for model, averages in zip(self._models, self._averages):
            for name, parameter in model.named_parameters():
                yield averages[name], parameter

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights of now in."""
        for average, parameter in self._pairs():
            average.lerp_(parameter.float(), 1.0 - self.decay)

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again at the weights of now: a checkpoint without an average was loaded."""
        for average, parameter in self._pairs():
            average.copy_(parameter)

    def sharded_state(self, states: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """The averages as entries of a sharded state dict.

        Args:
            states: of the model's chunks, as `checkpoint.state.sharded_state` names them.
        """
        found: dict[str, Any] = {}
        for (name, state), averages in zip(states.items(), self._averages):
            for key, entry in state.items():
                if key in averages and isinstance(entry, ShardedTensor | ShardedTensorFactory):
                    found[f"{name}.{key}"] = _renamed(entry, averages[key])
        return found

    @torch.no_grad()
    def load(self, loaded: Mapping[str, Tensor], names: Sequence[str]) -> None:
        """The inverse, with values; `names`: of the chunks."""
        for name, averages in zip(names, self._averages):
            for key, average in averages.items():
                average.copy_(loaded[f"{name}.{key}"])


def _renamed(entry: ShardedTensor | ShardedTensorFactory, average: Tensor) -> Any:
    if isinstance(entry, ShardedTensorFactory):
        return replace(entry, key=AVERAGE + entry.key, data=average)
    return replace(entry, key=AVERAGE + entry.key, data=average, dtype=average.dtype)
