# SPDX-License-Identifier: Apache-2.0
"""Tensors of a checkpoint one at a time: read any region of one, write one after another.

The files are megatron-core's distributed format (torch.distributed.checkpoint's): `.metadata` says
which piece of which whole tensor lies where, whatever layout wrote it. Reading takes the bytes of
the rows that were asked for and no more; writing keeps nothing but the index. Both need no process
group and run no code of the files.
"""

import copy
import io
import json
import os
import pickle
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from pretrain.checkpoint.io import CheckpointError, fsync_path, refusal, write_durably
from pretrain.checkpoint.safe import load_object, read_index

AVERAGE = "ema."
"""What the moving average of a tensor is called: this, and the tensor's name."""
_FILE_BYTES = 4 * 2**30


class _Slice(io.RawIOBase):
    """A part of an open file as a file of its own."""

    def __init__(self, stream: BinaryIO, start: int, length: int) -> None:
        self._stream, self._start, self._length, self._at = stream, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(len(buffer), self._length - self._at))
        self._stream.seek(self._start + self._at)
        data = self._stream.read(size)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


class _TensorUnpickler(pickle.Unpickler):
    """Reads how torch.save described one tensor, without building it."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, size, stride, *rest: (storage, offset, size, stride)
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name.endswith("Storage"):
            return name
        raise CheckpointError(f"a tensor of a checkpoint asks for {module}.{name}: refused")

    def persistent_load(self, saved: Any) -> Any:
        return saved


@dataclass(frozen=True)
class _Place:
    """Where the bytes of a saved tensor lie in its file, in row order."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def _contiguous_data(stream: BinaryIO, info: Any) -> _Place | None:
    """Where a saved tensor's bytes lie; None when they are not in row order."""
    view = io.BufferedReader(_Slice(stream, info.offset, info.length), 4096)
    with zipfile.ZipFile(view) as archive:
        names = {name.split("/", 1)[1]: name for name in archive.namelist() if "/" in name}
        described = _TensorUnpickler(io.BytesIO(archive.read(names["data.pkl"]))).load()
        (_, storage, key, *_), offset, size, stride = described
        entry = archive.getinfo(names[f"data/{key}"])
        expected = torch.empty(size, device="meta").stride()
        if entry.compress_type != zipfile.ZIP_STORED or tuple(stride) != expected or offset:
            return None
        view.seek(entry.header_offset + 26)
        name_length, extra_length = (int.from_bytes(view.read(2), "little") for _ in range(2))
    start = info.offset + entry.header_offset + 30 + name_length + extra_length
    return _Place(start, tuple(size), getattr(torch, storage).dtype)


def _read_rows(stream: BinaryIO, place: _Place, start: list[int], sizes: list[int]) -> Tensor:
    """Rows start[0] to start[0] + sizes[0] of a saved tensor."""
    shape = (*sizes[:1], *place.shape[1:])
    rows = torch.empty(shape, dtype=place.dtype)
    if rows.numel():
        width = rows.numel() // (sizes[0] if sizes else 1) * place.dtype.itemsize
        stream.seek(place.offset + (start[0] if start else 0) * width)
        read_into(stream, rows)
    return rows


def read_into(stream: BinaryIO, tensor: Tensor) -> None:
    """Fill a contiguous tensor with the next bytes of a file. CheckpointError at its end."""
    view = memoryview(tensor.view(-1).view(torch.uint8).numpy())
    at = 0
    while at < len(view):
        count = stream.readinto(view[at:])  # type: ignore[attr-defined]
        if not count:
            raise CheckpointError(f"{stream.name} ends within a tensor")
        at += count


class TensorReader:
    """The tensors of one checkpoint folder, by name. CheckpointError, UnsafeCheckpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._index = read_index(self.folder)
        self._tensors: dict[str, TensorStorageMetadata] = {
            name: entry
            for name, entry in self._index.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self._pieces: dict[str, list[tuple[ChunkStorageMetadata, Any]]] = {}
        self._found: dict[tuple[str, int], _Place | None] = {}
        places = {
            (index.fqn, tuple(index.offset)): info
            for index, info in self._index.storage_data.items()
            if index.offset is not None
        }
        for name, entry in self._tensors.items():
            self._pieces[name] = [
                (chunk, places[name, tuple(chunk.offsets)]) for chunk in entry.chunks
            ]

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self._tensors[name].size)

    def dtype(self, name: str) -> torch.dtype:
        """As it is stored."""
        return self._tensors[name].properties.dtype

    def nbytes(self, name: str) -> int:
        """Of the whole tensor."""
        return self._tensors[name].size.numel() * self.dtype(name).itemsize

    def pieces(self, name: str) -> list[tuple[tuple[int, ...], tuple[int, ...], str]]:
        """(offsets, sizes, file) of each stored piece."""
        return [
            (tuple(chunk.offsets), tuple(chunk.sizes), info.relative_path)
            for chunk, info in self._pieces[name]
        ]

    def averaged(self) -> "TensorReader":
        """The same tensors with the values of their moving averages, in the weights' dtypes.

        CheckpointError when the run kept none.
        """
        if not any(name.startswith(AVERAGE) for name in self._tensors):
            raise CheckpointError(
                f"{self.folder.name} holds no moving average of the weights: its run had "
                "train.ema_decay=0"
            )
        found = copy.copy(self)
        found._tensors = {
            name: entry for name, entry in self._tensors.items() if not name.startswith(AVERAGE)
        }
        found._pieces = {
            name: self._pieces.get(AVERAGE + name, self._pieces[name]) for name in found._tensors
        }
        return found

    def objects(self) -> list[str]:
        """Names of what is stored and no tensor."""
        return [name for name in self._index.state_dict_metadata if name not in self._tensors]

    def read(self, name: str, index: int | None = None) -> Tensor:
        """The whole tensor, or entry `index` of its first axis, in its stored dtype."""
        shape = self.shape(name)
        if index is None:
            return self.read_region(name, [0] * len(shape), shape)
        region = self.read_region(name, [index] + [0] * (len(shape) - 1), (1, *shape[1:]))
        return region[0]

    def read_region(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """The box of `sizes` that begins at `offsets`."""
        out = torch.empty(tuple(sizes), dtype=self.dtype(name))
        covered = 0
        for chunk, info in self._pieces[name]:
            first = [max(a, b) for a, b in zip(offsets, chunk.offsets)]
            last = [
                min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, chunk.offsets, chunk.sizes)
            ]
            if any(a >= b for a, b in zip(first, last)) and out.dim():
                continue
            start = [a - b for a, b in zip(first, chunk.offsets)]
            part = self._part(info, chunk, start, [b - a for a, b in zip(first, last)])
            target = out
            for axis, (low, high, base) in enumerate(zip(first, last, offsets)):
                target = target.narrow(axis, low - base, high - low)
            target.copy_(part)
            covered += part.numel()
        if covered != out.numel():
            raise CheckpointError(
                f"{self.folder.name}: {name} holds {covered} of the {out.numel()} elements that "
                f"were asked for at {tuple(offsets)}"
            )
        return out

    def _part(
        self, info: Any, chunk: ChunkStorageMetadata, start: list[int], sizes: list[int]
    ) -> Tensor:
        """A box of one stored piece, read by whole rows of its first axis."""
        path, place = self.folder / info.relative_path, (info.relative_path, info.offset)
        with open(path, "rb") as stream:
            if place not in self._found:
                self._found[place] = _contiguous_data(stream, info)
            found = self._found[place]
            if found is None:
                stream.seek(info.offset)
                part = load_object(io.BytesIO(stream.read(info.length)), path, "a tensor")
            else:
                part = _read_rows(stream, found, start, sizes)
        for axis, (first, size) in enumerate(zip(start, sizes)):
            if axis > 0 or found is None:
                part = part.narrow(axis, first, size)
        return part


class TensorWriter:
    """Writes the shards of a checkpoint one piece after another; `finish` writes the index."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._stream: BinaryIO | None = None
        self._files: list[str] = []
        self._chunks: dict[str, list[ChunkStorageMetadata]] = {}
        self._about: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._entries: dict[str, Any] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}

    def _file(self) -> BinaryIO:
        if self._stream is None or self._stream.tell() > _FILE_BYTES:
            self._close_file()
            self._files.append(f"__0_{len(self._files)}.distcp")
            self._stream = open(self.folder / self._files[-1], "wb")  # noqa: SIM115
        return self._stream

    def _close_file(self) -> None:
        if self._stream is not None:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
            self._stream = None

    def _save(self, value: Any) -> _StorageInfo:
        stream = self._file()
        start = stream.tell()
        try:
            torch.save(value, stream)
        except RuntimeError as error:
            raise refusal(error) or error from None
        return _StorageInfo(self._files[-1], start, stream.tell() - start)

    def add(self, name: str, tensor: Tensor, shape: Sequence[int], offsets: Sequence[int]) -> None:
        """One piece of the tensor `name` of `shape`; the pieces must cover it exactly."""
        data = tensor.detach().contiguous()
        if data.untyped_storage().nbytes() != data.numel() * data.element_size():
            data = data.clone()
        about = self._about.setdefault(name, (data.dtype, tuple(shape)))
        assert about == (data.dtype, tuple(shape)), f"pieces of {name} differ: {about}"
        index = len(self._chunks.setdefault(name, []))
        place, size = torch.Size(offsets), torch.Size(data.shape)
        self._chunks[name].append(ChunkStorageMetadata(offsets=place, sizes=size))
        self._storage[MetadataIndex(name, place, index)] = self._save(data)

    def add_object(self, name: str, value: Any) -> None:
        """A value that is no tensor, as megatron-core stores its sharded objects."""
        self._entries[name] = BytesStorageMetadata()
        self._storage[MetadataIndex(name)] = self._save([value])

    def finish(self) -> list[str]:
        """Write the index; names of all files. AssertionError if a tensor has a gap."""
        self._close_file()
        for name, chunks in self._chunks.items():
            dtype, shape = self._about[name]
            total = sum(chunk.sizes.numel() for chunk in chunks)
            size = torch.Size(shape)
            assert total == size.numel(), f"{name}: {total} of {size.numel()} elements written"
            properties = TensorProperties(dtype=dtype)
            self._entries[name] = TensorStorageMetadata(properties, size, chunks)
        if "common_state/shard_0_1" not in self._entries:
            self.add_object("common_state/shard_0_1", {})
            self._close_file()
        index = Metadata(self._entries, None, self._storage)
        index.storage_meta = StorageMeta(checkpoint_id=None, save_id="converted")
        write_durably(self.folder / ".metadata", pickle.dumps(index))
        about = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        write_durably(self.folder / "metadata.json", json.dumps(about).encode())
        fsync_path(self.folder)
        return [*self._files, ".metadata", "metadata.json"]
