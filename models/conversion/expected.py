# SPDX-License-Identifier: Apache-2.0
"""The tensors that a model has in a checkpoint, from the model itself, without its memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
)
from torch.overrides import TorchFunctionMode

from models.config import ModelConfig
from models.conversion.safetensors import TensorSpec
from models.conversion.sections import engine_config
from models.hybrid_model import build_model

_FACTORIES = {
    getattr(torch, name)
    for name in ("empty", "zeros", "ones", "full", "rand", "randn", "tensor", "arange", "linspace")
}


class _OnMeta(TorchFunctionMode):
    """Every new tensor is on the meta device, whatever device was asked for: it has no memory."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _FACTORIES:
            kwargs["device"] = "meta"
        elif func is torch.Tensor.to:
            kwargs.pop("device", None)
            kept = [a for a in args[1:] if not isinstance(a, str | torch.device)]
            if not kept and not kwargs:
                return args[0]
            args = (args[0], *kept)
        elif func in (torch.Tensor.cuda, torch.Tensor.cpu):
            return args[0]
        return func(*args, **kwargs)


@dataclass
class Expected:
    """What a checkpoint of a model holds."""

    tensors: dict[str, TensorSpec] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    """What is no tensor, by the name in the index."""


def sharded_entries(state: dict[str, Any]) -> tuple[list[ShardedTensor], list[ShardedObject]]:
    """The sharded tensors and objects of a sharded state dict, factories built."""
    apply_factories(state)
    values = list(nested_values(state))
    return (
        [value for value in values if isinstance(value, ShardedTensor)],
        [value for value in values if isinstance(value, ShardedObject)],
    )


def factories_of(state: dict[str, Any]) -> Any:
    """The factories of a sharded state dict, for `apply_factory_merges` after loading."""
    found, _ = extract_matching_values(
        state, lambda value: isinstance(value, ShardedTensorFactory), return_lists_as_dicts=True
    )
    return found


def expected_tensors(
    section: ModelConfig, vocab_size: int, dtype: torch.dtype, groups: Any
) -> Expected:
    """Names, whole shapes and dtypes of a model's tensors, as megatron-core names them.

    Needs the process groups of one process (`groups`); the model is built without memory.
    """
    config = engine_config(section, dtype)
    config.perform_initialization = False
    with _OnMeta():
        chunks = build_model(section, config, groups, vocab_size)
        state = chunks[0].sharded_state_dict(metadata={"dp_cp_group": groups.dp_cp})
        tensors, objects = sharded_entries(state)
    found = Expected()
    for tensor in tensors:
        assert tensor.data is not None, f"{tensor.key} has no data"
        found.tensors[tensor.key] = TensorSpec(tuple(tensor.global_shape), tensor.data.dtype)
    for value in objects:
        found.objects[value.unique_key] = value.data
    return found
