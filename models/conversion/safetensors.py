# SPDX-License-Identifier: Apache-2.0
"""Folders of safetensors files, read and written one tensor (or one slice of it) at a time.

A file is the length of its header (8 bytes, little endian), the header (JSON: dtype, shape and
place of each tensor), and the bytes. Larger models are several files and an index of them.
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fused_ops.errors import ConfigError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor is, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its size in a file."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class _Entry:
    path: Path
    start: int
    spec: TensorSpec


class SafetensorsFolder:
    """The tensors of a model folder, by name. ConfigError when there are none or a file lies."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._entries: dict[str, _Entry] = {}
        for path in self._files():
            self._entries |= _read_header(path, self._entries)

    def _files(self) -> list[Path]:
        index = self.folder / INDEX
        if index.is_file():
            try:
                names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
                missing = [name for name in names if not (self.folder / name).is_file()]
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise ConfigError(
                    f"{index} is not an index of safetensors files ({error}); fetch the model anew"
                ) from None
            if missing:
                raise ConfigError(
                    f"{self.folder} lacks {', '.join(missing)}, which {INDEX} names; fetch the "
                    "model anew"
                )
            if SINGLE not in names and (self.folder / SINGLE).is_file():
                raise ConfigError(
                    f"{self.folder} must hold one model; it has {SINGLE} and the files of {INDEX}: "
                    "transformers reads the first of them; delete what is not the model"
                )
            return [self.folder / name for name in names]
        found = sorted(self.folder.glob("*.safetensors"))
        if not found:
            pickles = sorted(p.name for p in self.folder.glob("*.bin"))
            seen = "it holds none"
            if pickles:
                seen = f"{pickles[0]} is a pickle, which can run code, and is not read"
            raise ConfigError(
                f"{self.folder} must hold safetensors files; {seen}; save the model with "
                "safe_serialization, or fetch it anew"
            )
        single = self.folder / SINGLE
        return [single] if single in found else found

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def spec(self, name: str) -> TensorSpec:
        """Shape and dtype."""
        return self._entries[name].spec

    def file_of(self, name: str) -> str:
        """The file that holds a tensor."""
        return self._entries[name].path.name

    def read(self, name: str, index: int | None = None) -> Tensor:
        """The whole tensor, or entry `index` of its first axis."""
        entry = self._entries[name]
        shape, start = entry.spec.shape, entry.start
        if index is not None:
            shape = shape[1:]
            start += index * TensorSpec(shape, entry.spec.dtype).nbytes
        tensor = torch.empty(shape, dtype=entry.spec.dtype)
        if tensor.numel() == 0:
            return tensor
        with open(entry.path, "rb") as stream:
            stream.seek(start)
            view = memoryview(tensor.view(-1).view(torch.uint8).numpy())
            if stream.readinto(view) != len(view):
                raise ConfigError(f"{entry.path} ends within {name}; fetch the model anew")
        return tensor


def _read_header(path: Path, before: Mapping[str, _Entry]) -> dict[str, _Entry]:
    size = path.stat().st_size
    with open(path, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= size - 8:
            raise ConfigError(f"{path} is no safetensors file or is cut off; fetch the model anew")
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            raise ConfigError(f"{path} has no readable header; fetch the model anew") from None
    entries: dict[str, _Entry] = {}
    spans: list[tuple[int, int, str]] = []
    try:
        header.pop("__metadata__", None)
        for name, about in header.items():
            if name in before:
                other = before[name].path.name
                raise ConfigError(f"{name} is in {path.name} and {other}: keep one")
            if about["dtype"] not in DTYPES:
                raise ConfigError(
                    f"{path}: {name} has dtype {about['dtype']}, which is not read here"
                )
            spec = TensorSpec(tuple(about["shape"]), DTYPES[about["dtype"]])
            start, end = about["data_offsets"]
            whole = all(type(size) is int and size >= 0 for size in spec.shape)
            if not whole or end - start != spec.nbytes:
                raise ConfigError(f"{path}: {name} does not fit the file; fetch the model anew")
            spans.append((start, end, name))
            entries[name] = _Entry(path, 8 + length + start, spec)
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ConfigError(f"{path} has no readable header; fetch the model anew") from None
    at = 0
    for start, end, name in sorted(spans):  # the format allows neither holes nor overlaps
        if start != at or 8 + length + end > size:
            raise ConfigError(f"{path}: {name} does not fit the file; fetch the model anew")
        at = end
    return entries


class SafetensorsWriter:
    """Writes a model folder whose tensors are known beforehand; `finish` makes it visible."""

    def __init__(
        self, folder: Path, specs: Mapping[str, TensorSpec], *, max_file_bytes: int = 5 * 10**9
    ) -> None:
        self.folder = Path(folder)
        self._specs = dict(specs)
        self._left: dict[str, int] = {name: spec.nbytes for name, spec in specs.items()}
        self._streams: dict[str, BinaryIO] = {}
        self._place: dict[str, tuple[str, int]] = {}
        groups = list(_grouped(self._specs, max_file_bytes))
        for number, names in enumerate(groups, 1):
            file = (
                SINGLE
                if len(groups) == 1
                else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            )
            self._begin(file, names)

    def _begin(self, file: str, names: list[str]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name in names:
            spec = self._specs[name]
            header[name] = {
                "dtype": _NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [at, at + spec.nbytes],
            }
            at += spec.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        stream = open(self.folder / (file + ".part"), "wb")  # noqa: SIM115
        stream.write(struct.pack("<Q", len(text)) + text)
        base = stream.tell()
        stream.truncate(base + at)
        self._streams[file] = stream
        for name in names:
            self._place[name] = (file, base + header[name]["data_offsets"][0])

    def write(self, name: str, tensor: Tensor, index: int | None = None) -> None:
        """A whole tensor, or entry `index` of its first axis."""
        spec = self._specs[name]
        shape = spec.shape if index is None else spec.shape[1:]
        assert (tuple(tensor.shape), tensor.dtype) == (shape, spec.dtype), (
            f"{name}: {tuple(tensor.shape)} {tensor.dtype} where {shape} {spec.dtype} was announced"
        )
        file, start = self._place[name]
        data = tensor.contiguous()
        size = data.numel() * data.element_size()
        stream = self._streams[file]
        stream.seek(start + (index or 0) * size)
        if size:
            stream.write(memoryview(data.view(-1).view(torch.uint8).numpy()))
        self._left[name] -= size

    def finish(self) -> list[str]:
        """Close, make durable, give the files their names, write the index; the files' names."""
        unfinished = [name for name, left in self._left.items() if left]
        assert not unfinished, f"announced but not (or twice) written: {unfinished[:5]}"
        for file, stream in self._streams.items():
            stream.flush()
            os.fsync(stream.fileno())
            stream.close()
            os.replace(self.folder / (file + ".part"), self.folder / file)
        files = list(self._streams)
        if len(files) > 1:
            total = sum(spec.nbytes for spec in self._specs.values())
            weight_map = {name: file for name, (file, _) in self._place.items()}
            about = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (self.folder / INDEX).write_text(json.dumps(about, indent=2) + "\n")
            files.append(INDEX)
        return files

    def abort(self) -> None:
        """Close and delete what was written."""
        for file, stream in self._streams.items():
            stream.close()
            (self.folder / (file + ".part")).unlink(missing_ok=True)


def _grouped(specs: Mapping[str, TensorSpec], limit: int) -> Iterable[list[str]]:
    names: list[str] = []
    size = 0
    for name, spec in specs.items():
        if names and size + spec.nbytes > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += spec.nbytes
    yield names
