# SPDX-License-Identifier: Apache-2.0
"""The folder of checkpoints: names, what makes one whole, which is newest, which are kept.

    checkpoints/
      latest                     the name of the newest whole checkpoint, for people and scripts
      step_00000100/
        __0_0.distcp ...         megatron-core's shards, one or more a rank
        .metadata metadata.json  megatron-core's index of them
        rng_00000.json ...       random generators, one file a rank
        state.json               step, configuration, scheduler, and what the trainer added
        manifest.json            size and SHA-256 of every file above
        COMPLETE                 SHA-256 of the manifest; written last

A checkpoint is whole when COMPLETE names its manifest and every file in that has its size and
checksum. Order of a save, each step durable before the next: files, folder, manifest, COMPLETE,
latest. Whatever the moment of a crash, the newest whole checkpoint is the right one to load.
"""

import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.checkpoint.io import (
    CheckpointError,
    file_entry,
    fsync_path,
    remove_folder,
    write_durably,
)

COMPLETE = "COMPLETE"
MANIFEST = "manifest.json"
STATE = "state.json"
LATEST = "latest"
FORMAT = 1
_STEP = re.compile(r"step_(\d{8,})")


def step_folder(checkpoints: Path, step: int) -> Path:
    """The folder of the checkpoint after `step` completed steps."""
    return checkpoints / f"step_{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step in a checkpoint folder's name; None when it is not one."""
    match = _STEP.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def rng_name(rank: int) -> str:
    """The file of one rank's random generators."""
    return f"rng_{rank:05d}.json"


def read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """{file name: {"bytes", "sha256"}} of a checkpoint that COMPLETE vouches for.

    Raises CheckpointError saying why the folder is not a whole checkpoint. Reads two small files.
    """
    try:
        seal = json.loads((folder / COMPLETE).read_bytes())["manifest_sha256"]
    except FileNotFoundError:
        raise CheckpointError(f"{folder.name} has no {COMPLETE}: it was never finished") from None
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise CheckpointError(f"{folder.name}/{COMPLETE} is not readable ({error})") from None
    try:
        data = (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{folder.name}/{MANIFEST}: {error.strerror}") from None
    if hashlib.sha256(data).hexdigest() != seal:
        raise CheckpointError(f"{folder.name}/{MANIFEST} differs from what {COMPLETE} says of it")
    manifest = json.loads(data)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder.name} has format {manifest.get('format')!r}, this program reads {FORMAT}"
        )
    for name in manifest["files"]:
        if "/" in name or name in ("", ".", ".."):
            raise CheckpointError(f"{folder.name}/{MANIFEST} names a file outside: {name!r}")
    return manifest["files"]


def check_sizes(folder: Path) -> str | None:
    """Why the folder is not a whole checkpoint, by names and sizes alone; None: nothing seen."""
    try:
        files = read_manifest(folder)
    except CheckpointError as error:
        return str(error)
    for name, entry in files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            return f"{folder.name}/{name} is missing ({error.strerror})"
        if size != entry["bytes"]:
            return f"{folder.name}/{name} has {size} bytes instead of {entry['bytes']}"
    return None


def check_contents(folder: Path, rank: int = 0, world_size: int = 1) -> str | None:
    """As `check_sizes`, and the checksums of this rank's share of the files (all of them for one).

    Reads everything once: the ranks of a run share the work.
    """
    reason = check_sizes(folder)
    if reason is not None:
        return reason
    files = sorted(read_manifest(folder).items())
    for name, entry in files[rank::world_size]:
        try:
            seen = file_entry(folder / name)
        except OSError as error:
            return f"{folder.name}/{name} cannot be read ({error.strerror})"
        if seen != entry:
            return f"{folder.name}/{name} is damaged: its SHA-256 is not the manifest's"
    return None


def _steps(checkpoints: Path) -> list[Path]:
    """The step folders in a checkpoints folder, newest first."""
    if not checkpoints.is_dir():
        return []
    folders = [path for path in checkpoints.iterdir() if step_of(path) is not None]
    return sorted(folders, key=lambda path: step_of(path) or 0, reverse=True)


@dataclass
class Scan:
    """What a checkpoints folder holds, by names and sizes."""

    whole: list[Path] = field(default_factory=list)
    """Newest first."""
    broken: list[tuple[Path, str]] = field(default_factory=list)
    """Newest first, with the reason."""
    once_complete: bool = False
    """Whether any checkpoint here was ever finished, readable now or not."""


def scan(checkpoints: Path) -> Scan:
    """Look through a checkpoints folder; a folder that does not exist holds nothing."""
    result = Scan()
    for folder in _steps(checkpoints):
        reason = check_sizes(folder)
        if reason is None:
            result.whole.append(folder)
        else:
            result.broken.append((folder, reason))
        result.once_complete |= os.path.lexists(folder / COMPLETE)
    result.once_complete |= os.path.lexists(checkpoints / LATEST)
    return result


def seal(folder: Path, step: int, files: dict[str, dict[str, Any]]) -> None:
    """Make a written folder a checkpoint: folder, manifest, COMPLETE, then `latest`, durably.

    Every file in `files` must have been fsynced before.
    """
    fsync_path(folder)
    ordered = dict(sorted(files.items()))
    manifest = json.dumps({"format": FORMAT, "step": step, "files": ordered}, indent=1).encode()
    write_durably(folder / MANIFEST, manifest)
    mark = {"step": step, "manifest_sha256": hashlib.sha256(manifest).hexdigest()}
    write_durably(folder / COMPLETE, (json.dumps(mark) + "\n").encode())
    write_durably(folder.parent / LATEST, f"{folder.name}\n".encode())


def prune(checkpoints: Path, newest: int, keep_last: int, keep_every: int) -> list[Path]:
    """Delete what retention no longer wants; returns the folders deleted.

    Kept: the `keep_last` newest whole ones (0: all), multiples of `keep_every`. Unfinished or
    damaged folders older than `newest` (a step that is whole) go as well.
    """
    found = scan(checkpoints)
    older = [path for path in found.whole if (step_of(path) or 0) <= newest]
    doomed = [
        path
        for path in older[keep_last:]
        if keep_last and not (keep_every and (step_of(path) or 0) % keep_every == 0)
    ]
    doomed += [path for path, _ in found.broken if (step_of(path) or 0) < newest]
    for folder in doomed:
        remove_folder(folder, COMPLETE)
    return doomed


def _checkpoints(path: Path) -> Path:
    """The checkpoints folder of a run folder; any other folder stands for itself."""
    inner = path / "checkpoints"
    return inner if inner.is_dir() else path


def candidates(path: Path) -> list[Path]:
    """The step folders that `path` means, whole or not, newest first: itself, or those of a
    checkpoints folder or of a run folder."""
    if step_of(path) is not None and path.is_dir():
        return [path]
    return _steps(_checkpoints(path))


def ever_finished(path: Path) -> bool:
    """Whether a checkpoints folder or a run folder ever held a finished checkpoint."""
    return scan(_checkpoints(path)).once_complete
