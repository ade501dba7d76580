# SPDX-License-Identifier: Apache-2.0
"""Files that survive a crash: durable writes, checksums, JSON with tensors, errors in plain words.

A file is durable once its data is fsynced and the folder that names it is fsynced too. Every
function here goes through `os`, so that a test can record the order of the calls.
"""

import base64
import contextlib
import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; earlier ones are untouched. Says what to do."""


def fsync_path(path: Path) -> None:
    """Flush a file's data, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create one folder durably; its parent must exist. An existing folder is left alone."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    fsync_path(path.parent)


def write_durably(path: Path, data: bytes) -> None:
    """Put `data` at `path` in one step: temporary name, fsync, rename, fsync of the folder.

    After a crash `path` holds its former content or all of the new one, never a part.
    """
    temporary = path.with_name(path.name + ".tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(temporary, path)
    fsync_path(path.parent)


def file_entry(path: Path) -> dict[str, Any]:
    """Size and checksum of a file, as a manifest holds them: {"bytes": int, "sha256": hex}."""
    with open(path, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return {"bytes": os.fstat(stream.fileno()).st_size, "sha256": digest}


def remove_folder(path: Path, *first: str) -> None:
    """Delete a folder, the files named in `first` durably before the rest."""
    for name in first:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path / name)
            fsync_path(path)
    shutil.rmtree(path, ignore_errors=False)


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write on the disk of `path`."""
    return shutil.disk_usage(path).free


def refusal(error: BaseException) -> OSError | None:
    """The refusal of the machine behind an error: torch.save reports one in words of its own."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, OSError):
        seen = seen.__cause__ or seen.__context__
    return seen


def explain(error: BaseException, path: Path) -> str:
    """One line for a failed write: what failed, and what to do about it."""
    error = refusal(error) or error
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT):
        free = ""
        with contextlib.suppress(OSError):
            free = f" ({free_bytes(path.parent) / 2**30:.2f} GiB free)"
        return f"the disk of {path} is full{free}: free some space, or lower checkpoint.keep_last"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"no permission to write {path}: make the run folder writable, or set run.dir"
    if number == errno.EFBIG:
        return f"{path}: a limit on the size of files forbids it: raise it (ulimit -f)"
    if number == errno.ENOENT:
        return f"{path} has vanished while it was in use: was the run folder moved or deleted?"
    return f"{path}: {type(error).__name__}: {error}"


def to_json(value: Any) -> Any:
    """`value` as plain JSON values; tensors and numpy arrays become base64 of their bytes.

    Tuples become lists. TypeError on anything else, and on keys that are not strings.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray):
        return to_json(torch.from_numpy(value.copy()))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return {
            "__tensor__": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "data": base64.b64encode(flat.numpy().tobytes()).decode(),
        }
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"a checkpoint's keys are strings, not {key!r}")
        return {key: to_json(item) for key, item in value.items()}
    raise TypeError(f"a checkpoint holds JSON values and tensors, not {type(value).__name__}")


def from_json(value: Any) -> Any:
    """The inverse of `to_json`; tensors come back on the CPU."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if isinstance(value, dict):
        if "__tensor__" not in value:
            return {key: from_json(item) for key, item in value.items()}
        dtype = getattr(torch, value["__tensor__"])
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"not a dtype of torch: {value['__tensor__']!r}")
        data = bytearray(base64.b64decode(value["data"]))
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0).byte()
        return flat.view(dtype).reshape(value["shape"]).clone()
    return value


def dump_json(value: Any) -> bytes:
    """`value` (see `to_json`) as UTF-8 text, indented, keys in their order."""
    return (json.dumps(to_json(value), indent=1) + "\n").encode()


def load_json(path: Path) -> Any:
    """Read what `dump_json` wrote. CheckpointError when it is not JSON."""
    try:
        return from_json(json.loads(path.read_bytes()))
    except (ValueError, RuntimeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is not readable: {error}") from None
