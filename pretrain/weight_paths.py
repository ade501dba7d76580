# SPDX-License-Identifier: Apache-2.0
"""How far weights have moved, summed beside the optimizer's moments, and saved and cut like those.

Three FP32 tensors in the optimizer's state of a master, of its shape: `weight_path`,
`quantized_path` and `last_quantized` (see `pretrain.oscillation_config`). Only weights that are
followed have them, and only while they are.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from models.adopt import adopt
from pretrain.optimizer import create_moments, optimizer_parts

PATHS = ("weight_path", "quantized_path", "last_quantized")


class PathOptimizer(DistributedOptimizer):
    """megatron-core's, which knows two states of a parameter by name and saves no others."""

    followed: frozenset[Tensor] = frozenset()
    """Parameters of the model whose masters have paths, on whatever rank they lie."""

    @property
    def optimizer_state_keys(self) -> tuple[str, ...]:
        """What is saved of a parameter beside its master."""
        return (*super().optimizer_state_keys, *(PATHS if self.followed else ()))

    def _get_main_param_and_optimizer_states(self, model_param: Any) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = super()._get_main_param_and_optimizer_states(model_param)
        if self.followed:  # megatron-core collects them for a buffer of all parameters
            tensors = dict.fromkeys(PATHS, torch.zeros(())) | tensors
        return tensors

    def sharded_param_state_fully_reshardable(self, *args: Any, **kwargs: Any) -> Any:
        """Signature: that of megatron-core's. Without the zeros that stand for no path."""
        state = super().sharded_param_state_fully_reshardable(*args, **kwargs)
        places = (param for buffer in self.buffers for param in buffer.param_index_map)
        for index, param in enumerate(places):
            if self.followed and param not in self.followed:
                for key in PATHS:
                    del state[index][key]
        return state


@dataclass(frozen=True)
class Master:
    """This rank's part of a parameter in the optimizer: elements `start` to `end` of it, flat."""

    part: Any
    tensor: Tensor
    start: int
    end: int

    @property
    def state(self) -> dict[str, Tensor]:
        """The optimizer's tensors beside it."""
        found: dict[str, Tensor] = self.part.optimizer.state[self.tensor]
        return found


class WeightPaths:
    """The paths of the weights of an optimizer, to be begun, dropped, saved and loaded.

    Args:
        optimizer: megatron-core's, with or without sharded states; an AdamW.
        weights: parameters that may be followed.
    """

    def __init__(self, optimizer: Any, weights: Iterable[Tensor]) -> None:
        self.optimizer = optimizer
        self._parts = list(optimizer_parts(optimizer))
        for part in self._parts:
            if type(part) is DistributedOptimizer:
                adopt(part, PathOptimizer)
        wanted = set(weights)
        self.masters: dict[Tensor, Master] = {
            param: master for part in self._parts for param, master in _masters(part, wanted)
        }
        self._wanted = frozenset(wanted)
        self.followed: frozenset[Tensor] = frozenset()

    def follow(self, weights: Collection[Tensor]) -> None:
        """Of these weights alone there are paths from now on; new ones are of length 0."""
        create_moments(self.optimizer)
        self.followed = frozenset(weights)
        for part in self._parts:
            if isinstance(part, PathOptimizer):
                part.followed = self.followed
        for param, master in self.masters.items():
            for key in PATHS:
                if param not in self.followed:
                    master.state.pop(key, None)
                elif key not in master.state:
                    master.state[key] = torch.zeros_like(master.tensor)

    def expect(self, model: Mapping[str, Any], held: Collection[str]) -> None:
        """Have the paths that a checkpoint holds, for their values to be loaded.

        Args:
            model: the sharded state dict of the model chunks.
            held: names of all that the checkpoint holds.
        """
        prefix = f"optimizer.state.{PATHS[0]}."
        whole = {name.removeprefix(prefix) for name in held if name.startswith(prefix)}
        for name in list(whole):  # what is saved in parts has the name of the whole in front
            parts = name.split(".")
            whole.update(".".join(parts[:end]) for end in range(2, len(parts)))
        places = nested_values(dict(model))
        found = {p.data for p in places if getattr(p, "key", None) in whole}
        self.follow(self._wanted & {p for p in found if isinstance(p, Tensor)})


def _masters(part: Any, wanted: Collection[Tensor]) -> Iterator[tuple[Tensor, Master]]:
    """(parameter of the model, its master) of one of megatron-core's optimizers."""
    groups = part.optimizer.param_groups
    if isinstance(part, DistributedOptimizer):
        for param in part.model_param_gbuf_map:
            if param in wanted:
                group, order = part.model_param_group_index_map[param]
                place = part._get_model_param_range_map(param)["param"]
                yield param, Master(part, groups[group]["params"][order], place.start, place.end)
        return
    for param in wanted:
        own = getattr(param, "main_param", param)  # an FP32 parameter is its own master
        if any(own is each for group in groups for each in group["params"]):
            yield param, Master(part, own, 0, own.numel())
