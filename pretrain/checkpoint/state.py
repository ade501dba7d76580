# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds of a training process, by way of megatron-core's dist_checkpointing.

Saved in the layout-free form: a checkpoint written under one tensor, pipeline, expert or data
parallel size loads under another, optimizer included.
"""

import contextlib
import gc
import json
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from torch.distributed.checkpoint import CheckpointException

from pretrain.checkpoint.agree import on_all
from pretrain.checkpoint.compare import rows_problem
from pretrain.checkpoint.io import CheckpointError, dump_json, load_json, write_durably
from pretrain.checkpoint.layout import rng_name
from pretrain.checkpoint.safe import read_index, refuse_code
from pretrain.checkpoint.tensors import AVERAGE
from pretrain.optimizer import create_moments, optimizer_parts

# Of an optimizer's parameter group: state that training changes. All else comes from the config.
_GROUP_STATE = ("step", "lr", "params")
# Of a parameter group: what stays the same when learning rate or weight decay are overridden.
_GROUP_IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "optimizer")


def unwrap(chunk: Any) -> Any:
    """The model within DistributedDataParallel and Float16Module."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _names(chunks: Sequence[Any]) -> list[str]:
    return ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]


def sharded_state(
    chunks: Sequence[Any],
    optimizer: Any,
    *,
    loading: bool = False,
    average: Any = None,
    paths: Any = None,
    held: Collection[str] = (),
) -> dict[str, Any]:
    """megatron-core's sharded state dict of the model chunks and, unless None, the optimizer and
    the moving average of the weights (`pretrain.ema.WeightAverage`).

    `paths` are the optimizer's `pretrain.weight_paths.WeightPaths`, where it has some: loading, it
    asks for those among `held`, the names that the checkpoint holds.
    """
    metadata = {
        "dp_cp_group": data_parallel_group(chunks[0]),
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
    }
    state: dict[str, Any] = {}
    for name, chunk in zip(_names(chunks), chunks):
        state[name] = unwrap(chunk).sharded_state_dict(metadata=metadata)
    if average is not None:
        state["ema"] = average.sharded_state(dict(state))
    if optimizer is not None:
        create_moments(optimizer)
        if paths is not None and loading:
            paths.expect(state, held)
        with _quick_collect():
            state["optimizer"] = optimizer.sharded_state_dict(
                state, is_loading=loading, metadata=metadata
            )
    return state


@contextlib.contextmanager
def _quick_collect() -> Iterator[None]:
    """megatron-core runs a full garbage collection here, half a second over a large program's
    modules: hide from it all that is older than this moment."""
    frozen = gc.get_freeze_count() == 0
    if frozen:
        gc.freeze()
    try:
        yield
    finally:
        if frozen:
            gc.unfreeze()


def data_parallel_group(chunk: Any) -> Any:
    """The group that holds replicas of the same weights: DistributedDataParallel knows it."""
    group = getattr(chunk, "dp_cp_group", None)
    if group is not None:
        return group
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def local_bytes(state: dict[str, Any]) -> int:
    """Bytes of tensors that this rank will write."""
    total = 0
    for value in nested_values(state):
        if isinstance(value, ShardedTensor | ShardedTensorFactory):
            tensor = value.data
            if tensor is not None and is_main_replica(value.replica_id):
                total += tensor.numel() * tensor.element_size()
    return total


def load_sharded(
    folder: Path,
    chunks: Sequence[Any],
    optimizer: Any,
    average: Any = None,
    paths: Any = None,
    *,
    whole: bool = False,
) -> None:
    """Load model chunks and, unless None, the optimizer. Runs no code of the checkpoint.

    A moving average that the checkpoint does not hold begins at its weights.

    Hyperparameters of the optimizer (everything in its parameter groups but the step) stay as this
    run's config made them. CheckpointError when the checkpoint does not fit this model; with
    `whole` also when it holds weights that the model has no place for.
    """
    index = read_index(folder)  # torch goes on without an index that it cannot read
    hyper = _hyperparameters(optimizer)
    names = index.state_dict_metadata
    held = any(name.startswith(AVERAGE) for name in names)
    kept = average if held else None
    state = sharded_state(chunks, optimizer, loading=True, average=kept, paths=paths, held=names)
    asked = set().union(*on_all(lambda: _asked(state))) if whole else set()
    if whole and (left := _left_over(names, asked)):
        raise CheckpointError(
            f"{folder} holds {len(left)} weights that this model has no place for, such as "
            f"{left[0]}: it is another model's; give the model section that it was trained with"
        )
    _check_rows(folder, names, state)
    try:
        with refuse_code():
            loaded = dist_checkpointing.load(state, str(folder))
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        cause = _cause(error)
        if isinstance(cause, CheckpointError | MemoryError):
            raise cause from None
        reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        raise CheckpointError(
            f"{folder} does not fit this model and optimizer: {reason[:500]}"
        ) from error
    for name, chunk in zip(_names(chunks), chunks):
        unwrap(chunk).load_state_dict(loaded[name])
    if average is not None and held:
        average.load(loaded["ema"], _names(chunks))
    elif average is not None:
        average.restart()
    if optimizer is None:
        return
    _adopt_groups(loaded["optimizer"], hyper)
    optimizer.load_state_dict(loaded["optimizer"])
    for group, (_, kept) in zip(_groups(optimizer), hyper):
        group.update(kept)


_WEIGHTS = ("embedding.", "decoder.", "mtp.", "output_layer.")


def _asked(state: dict[str, Any]) -> set[str]:
    """Keys that a sharded state dict asks a checkpoint for."""
    asked: set[str] = set()

    def walk(value: Any) -> None:
        if isinstance(value, dict | list):
            for each in value.values() if isinstance(value, dict) else value:
                walk(each)
        elif hasattr(value, "key"):
            asked.add(value.key)

    walk(state)
    return asked


def _left_over(held: Iterable[str], asked: set[str]) -> list[str]:
    """Weights of a checkpoint that no rank asks for."""
    found: list[str] = []
    for name in held:
        parts = name.split(".")  # what is saved in parts has the name of the whole in front
        parents = (".".join(parts[:end]) for end in range(len(parts), 1, -1))
        if name.startswith(_WEIGHTS) and "_extra_state" not in name:
            found += [] if asked & set(parents) else [name]
    return sorted(found)


def _check_rows(folder: Path, held: Mapping[str, Any], state: dict[str, Any]) -> None:
    """CheckpointError for a vocabulary of another size: megatron-core lets it pass, and leaves rows
    that the checkpoint does not have as zeros, or drops what it has."""
    for place in nested_values(state):
        if not isinstance(place, ShardedTensor) or place.key not in held:
            continue
        own, theirs = place.global_shape, getattr(held[place.key], "size", place.global_shape)
        if place.allow_shape_mismatch and own[0] != theirs[0]:
            raise CheckpointError(rows_problem(str(folder), theirs[0], own[0]))


def _cause(error: BaseException) -> BaseException:
    """The error of one rank within torch's summary of all, the plainest one first."""
    while isinstance(error, CheckpointException) and error.failures:
        causes = [wrapped[0] for _, wrapped in sorted(error.failures.items())]
        error = next((e for e in causes if isinstance(e, CheckpointError)), causes[0])
    return error


def _groups(optimizer: Any) -> Iterator[dict[str, Any]]:
    for part in optimizer_parts(optimizer):
        yield from part.optimizer.param_groups


def _identity(group: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in _GROUP_IDENTITY)


def _hyperparameters(optimizer: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """(what identifies it, everything the config decides) of each parameter group, in order."""
    if optimizer is None:
        return []
    return [
        (_identity(group), {k: v for k, v in group.items() if k not in _GROUP_STATE})
        for group in _groups(optimizer)
    ]


def _adopt_groups(loaded: Any, hyper: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
    """Give loaded parameter groups this run's hyperparameters.

    megatron-core pairs groups by learning rates and weight decay too: after an override it would
    find none.
    """
    if isinstance(loaded, dict):
        for key, value in loaded.items():
            if key != "param_groups":
                _adopt_groups(value, hyper)
                continue
            rest = list(hyper)
            for group in value:
                fits = [entry for entry in rest if entry[0] == _identity(group)]
                if fits:
                    rest.remove(fits[0])
                    group.update(fits[0][1])
    elif isinstance(loaded, list | tuple):
        for value in loaded:
            _adopt_groups(value, hyper)


def rng_state() -> dict[str, Any]:
    """Every generator of this rank: Python's, numpy's, torch's, CUDA's, megatron-core's."""
    version, words, gauss = random.getstate()
    name, keys, *numbers = np.random.get_state()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [name, keys, *numbers],
        "torch": torch.get_rng_state(),
        "tracker": {
            key: value.get_state() if isinstance(value, torch.Generator) else value
            for key, value in tensor_parallel.get_cuda_rng_tracker().get_states().items()
        },
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """The inverse of `rng_state`."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *numbers = state["numpy"]
    np.random.set_state((name, keys.numpy(), *numbers))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    tracker = tensor_parallel.get_cuda_rng_tracker()
    present = tracker.get_states()
    for key, value in state["tracker"].items():
        if isinstance(present.get(key), torch.Generator):
            present[key].set_state(value)
        else:
            present[key] = value
    tracker.set_states(present)


def write_rng(folder: Path, rank: int) -> str:
    """Write this rank's generators; returns the file's name."""
    write_durably(folder / rng_name(rank), dump_json(rng_state()))
    return rng_name(rank)


def read_rng(folder: Path, rank: int) -> dict[str, Any]:
    """What `write_rng` wrote for a rank."""
    return load_json(folder / rng_name(rank))


def layout_of(resolved_config: dict[str, Any], world_size: int) -> str:
    """A text that two runs share when their ranks hold the same parts of the model and data."""
    parallel = resolved_config.get("parallel") or {}
    sizes = {k: v for k, v in sorted(parallel.items()) if k.endswith("_size")}
    return json.dumps({"world_size": world_size, **sizes})
