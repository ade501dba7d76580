# SPDX-License-Identifier: Apache-2.0
"""Reading a checkpoint without running code from it.

torch.distributed.checkpoint unpickles `.metadata` with plain `pickle.load`, and loads objects (not
tensors) with `weights_only=False`. Either runs whatever a crafted file asks for. `refuse_code`
gives megatron-core's two places that open a checkpoint a reader with neither: the index is
unpickled with a short list of allowed names, objects with `weights_only=True`. An old `common.pt`,
which megatron-core would load without that word wherever one lies, is refused.
"""

import contextlib
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.checkpoint import FileSystemReader, Metadata
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import StorageMeta

from pretrain.checkpoint.io import CheckpointError

_PREFIX = "torch.distributed.checkpoint."
_ALLOWED = {
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(
        (_PREFIX + "metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    *(
        (_PREFIX + "planner", name)
        for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
    ),
    (_PREFIX + "filesystem", "_StorageInfo"),
    (_PREFIX + "filesystem", "_StoragePrefix"),
}


_LEGACY = "common.pt"


class UnsafeCheckpoint(CheckpointError):
    """A file of a checkpoint asks to run code. It was not run."""


class _IndexUnpickler(pickle.Unpickler):
    """Builds the index of a checkpoint and nothing else."""

    def __init__(self, stream: Any, path: Path) -> None:
        super().__init__(stream)
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise UnsafeCheckpoint(
            f"{self.path} asks for {module}.{name}, which no index of a checkpoint holds: refused"
            " without running it. Do not use this checkpoint; find out who wrote it"
        )


def read_index(folder: Path) -> Metadata:
    """The index of a checkpoint: which tensor lies where. UnsafeCheckpoint, CheckpointError."""
    path = Path(folder) / ".metadata"
    if (path.parent / _LEGACY).exists():
        raise UnsafeCheckpoint(
            f"{path.parent / _LEGACY} is a pickle that no checkpoint of this format holds: refused"
            " without opening it. Do not use this checkpoint; find out who wrote it"
        )
    try:
        with open(path, "rb") as stream:
            index = _IndexUnpickler(stream, path).load()
    except UnsafeCheckpoint:
        raise
    except Exception as error:  # a damaged pickle raises whatever it stumbles on
        raise CheckpointError(f"{path} is not readable: {type(error).__name__}: {error}") from None
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        raise CheckpointError(f"{path} is not the index of a checkpoint")
    for info in index.storage_data.values():
        if "/" in str(info.relative_path):
            raise UnsafeCheckpoint(f"{path} points outside its folder: {info.relative_path}")
    return index


def load_object(stream: io.BytesIO, path: Path, name: str) -> Any:
    """One saved object that is not a tensor: plain Python values and tensors only."""
    try:
        return torch.load(stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()
        named = [line.strip() for line in reason if "GLOBAL" in line or "Unsupported" in line]
        raise UnsafeCheckpoint(
            f"{path}: the object {name!r} asks for more than plain values"
            f" ({named[0] if named else reason[0]}): refused without running it"
        ) from None


class SafeReader(FileSystemReader):
    """Opens a checkpoint of torch.distributed.checkpoint without running code from it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index, read by `read_index`."""
        index = read_index(Path(self.path))
        meta = getattr(index, "storage_meta", None) or StorageMeta()
        meta.load_id, index.storage_meta = self.load_id, meta
        return index

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Upstream's, with objects loaded by `load_object`."""

        def load_bytes(item: Any, value: io.BytesIO) -> None:
            name = item.dest_index.fqn
            loaded = load_object(value, Path(self.path), name)
            if planner.flatten_state_dict:
                set_element(planner.original_state_dict, planner.mappings[name], loaded)
            else:
                planner.state_dict[name] = loaded

        planner.load_bytes = load_bytes
        return super().read_data(plan, planner)


@contextlib.contextmanager
def refuse_code() -> Iterator[None]:
    """Within it, megatron-core reads checkpoints through `SafeReader`."""
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import torch as strategy

    def reader(checkpoint_dir: Any, *args: Any, **kwargs: Any) -> SafeReader:
        return SafeReader(checkpoint_dir)

    with (
        mock.patch.object(serialization, "_get_filesystem_reader", reader),
        mock.patch.object(strategy, "_get_filesystem_reader", reader),
    ):
        yield
