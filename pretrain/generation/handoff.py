# SPDX-License-Identifier: Apache-2.0
"""Packed weights from a trainer to a sampler, by version: a sampler sees a whole one or none.

    FOLDER/v00000012/model.safetensors   codes, scales and the tensors that stay high
    FOLDER/v00000012/manifest.json       formats, and size and SHA-256 of every file
    FOLDER/VERSION                       which folder counts, and the SHA-256 of its manifest

Files of a version are made durable under another name before their folder gets its own, and VERSION
is replaced in one step after that. A trainer that dies at any point leaves the version before it.
A sampler checks every byte before it touches its model.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fused_ops.errors import ConfigError
from models.conversion.safetensors import SafetensorsFolder, SafetensorsWriter, TensorSpec
from models.generation.packed_weights import install_weights, pack_weights
from pretrain.checkpoint.io import file_entry, fsync_path, make_folder, write_durably

VERSION, MANIFEST = "VERSION", "manifest.json"
_NAME = re.compile(r"v(\d{8,})(\.part)?")
_TRIES = 3


class HandoffError(RuntimeError):
    """A version could not be read or written; a model is as it was. Says what to do."""


@dataclass(frozen=True)
class Received:
    """A version in memory, checked."""

    version: int
    tensors: Mapping[str, Tensor]
    formats: Mapping[str, Any]


def publish_weights(folder: Path, model: Any, version: int, *, keep: int = 2) -> Path:
    """Hand the weights of a model over, packed in the precision that it has now.

    Args:
        folder: made if it is not there; one trainer writes to it.
        model: a whole model in one process (`models.generation.packed_weights.pack_weights`).
        version: above that of the last one, such as the optimizer step.
        keep: versions that stay, this one included; a sampler may still read the one before.

    Returns:
        The folder of this version.

    Raises:
        ConfigError: a version that is not new, or a model that is cut over processes.
        HandoffError: the folder cannot be written; the version before it counts.
    """
    current = _pointer(folder)
    problems = []
    if current is not None and version <= current["version"]:
        problems.append(
            f"a handed-over version must be above the last, {current['version']}; got {version}; "
            "count on from there, also in a run that went back to an earlier step, or name another "
            "folder"
        )
    if version < 0:
        problems.append(f"a handed-over version must be at least 0; got {version}; count steps")
    if keep < 2:
        problems.append(f"keep must be at least 2, for whoever reads the one before; got {keep}")
    if problems:
        raise ConfigError(problems)
    tensors, formats = pack_weights(model)
    try:
        return _publish(folder, version, keep, (tensors, formats))
    except OSError as error:
        last = "none counts" if current is None else f"version {current['version']} counts"
        raise HandoffError(
            f"a hand-over needs a folder that can be written and has room; got {folder} "
            f"({(error.strerror or str(error)).lower()}); {last}; make room or name another folder"
        ) from error


def _publish(
    folder: Path, version: int, keep: int, packed: tuple[Mapping[str, Tensor], Mapping[str, Any]]
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    name = f"v{version:08d}"
    part, target = folder / f"{name}.part", folder / name
    for leftover in (part, target):  # of a trainer that died before VERSION
        if leftover.exists():
            shutil.rmtree(leftover)
    make_folder(part)
    _write(part, version, *packed)
    os.rename(part, target)
    fsync_path(folder)
    pointer = {
        "version": version,
        "folder": name,
        "manifest_sha256": file_entry(target / MANIFEST)["sha256"],
    }
    write_durably(folder / VERSION, (json.dumps(pointer) + "\n").encode())
    _prune(folder, version, keep)
    return target


def _write(
    part: Path, version: int, tensors: Mapping[str, Tensor], formats: Mapping[str, Any]
) -> None:
    specs = {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    writer = SafetensorsWriter(part, specs)
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    files = writer.finish()
    for name in files:
        fsync_path(part / name)
    manifest = {
        "version": version,
        "files": {name: file_entry(part / name) for name in files},
        "formats": formats,
    }
    write_durably(part / MANIFEST, (json.dumps(manifest) + "\n").encode())


def _prune(folder: Path, newest: int, keep: int) -> None:
    """Older versions beyond the last `keep`, and what trainers left that died.

    What cannot be removed yet (a reader on a network drive) is left for the next time.
    """
    whole = []
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        if match[2] or int(match[1]) > newest:
            shutil.rmtree(path, ignore_errors=True)
        else:
            whole.append((int(match[1]), path))
    for _, path in sorted(whole)[:-keep]:
        shutil.rmtree(path, ignore_errors=True)


def latest_version(folder: Path) -> int | None:
    """The version that counts now; None before the first."""
    pointer = _pointer(folder)
    return None if pointer is None else int(pointer["version"])


def _pointer(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / VERSION).read_bytes())
        if not (isinstance(found, dict) and {"version", "folder", "manifest_sha256"} <= set(found)):
            raise ValueError("keys are missing")
        if type(found["version"]) is not int or not _NAME.fullmatch(str(found["folder"])):
            raise ValueError("it names no version")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise HandoffError(
            f"{folder / VERSION} is not readable ({error}); let the trainer hand over again"
        ) from None
    return found


def read_weights(folder: Path) -> Received | None:
    """The version that counts now, every byte checked; None before the first.

    Raises:
        HandoffError: files are missing or are not those that were handed over, or newer versions
            come faster than one is read.
    """
    pointer, gone = _pointer(folder), []
    while pointer is not None:
        try:
            return _checked(folder / pointer["folder"], pointer)
        except (OSError, ValueError) as error:  # a ConfigError is a ValueError
            problem = str(error)
        before, pointer = pointer, _pointer(folder)
        if pointer == before:  # it was not removed for a newer one
            raise HandoffError(
                f"{folder}: version {before['version']} is damaged: {problem}; let the trainer "
                "hand over a new version"
            )
        gone.append(str(before["version"]))
        if len(gone) == _TRIES:
            raise HandoffError(
                f"{folder}: versions {', '.join(gone)} were gone for newer ones before they were "
                "read; hand over less often, or keep more versions (keep of publish_weights)"
            )
    return None


def _checked(place: Path, pointer: Mapping[str, Any]) -> Received:
    text = (place / MANIFEST).read_bytes()
    if hashlib.sha256(text).hexdigest() != pointer["manifest_sha256"]:
        raise ValueError(f"{MANIFEST} is not the one that {VERSION} names")
    manifest = json.loads(text)
    for name, entry in manifest["files"].items():
        if file_entry(place / name) != entry:
            raise ValueError(f"{name} has another size or SHA-256 than {MANIFEST} says")
    source = SafetensorsFolder(place)
    tensors = {name: source.read(name) for name in source}
    return Received(int(manifest["version"]), tensors, manifest["formats"])


def receive_weights(folder: Path, model: Any, known: int | None = None) -> int | None:
    """Put the version that counts now into a sampler's model, if it is not the known one.

    Args:
        folder: where a trainer hands over.
        model: a whole model in one process, with the precision that the weights were packed in.
        known: the version that the model has.

    Returns:
        The version that the model has now; None before the first.

    Raises:
        HandoffError: a damaged version; the model is as it was.
        ConfigError: weights of another model or precision; the model is as it was.
    """
    version = latest_version(folder)
    if version is None or version == known:
        return version
    received = read_weights(folder)
    assert received is not None, "a version that was there stays or is replaced"
    install_weights(model, received.tensors, received.formats)
    return received.version
