# SPDX-License-Identifier: Apache-2.0
"""`manifest.json`: what the shards of a folder hold.

A folder of shards is megatron-core's `NAME.bin` and `NAME.idx` pairs and one manifest, written
last. The stream of a folder is its shards in the manifest's order, so the order of samples depends
on the manifest and on nothing that a file system decides.
"""

import hashlib
import os
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from fused_ops.errors import ConfigError

MANIFEST_NAME = "manifest.json"

# Bytes a token takes. megatron-core's index knows more types; token ids use these.
ITEM_SIZES = {"uint8": 1, "uint16": 2, "int32": 4, "int64": 8}


class DataError(ConfigError):
    """Data that is missing, damaged or of another kind than was said. Names file and offset."""


class ShardInfo(BaseModel):
    """One pair of files. `tokens` counts end-of-document ids too."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    """Path of the pair without suffix, relative to the manifest."""
    tokens: int
    documents: int
    dtype: Literal["uint8", "uint16", "int32", "int64"]
    bin_checksum: str
    """'sha256:' and the hexadecimal digest of the .bin file."""
    idx_checksum: str


class Manifest(BaseModel):
    """All shards of a folder, in the order of the token stream."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["token-shards"] = "token-shards"
    version: Literal[1] = 1
    tokenizer_fingerprint: str | None
    """'sha256:' and the digest of the tokenizer file; None where it is not known."""
    vocab_size: int
    eod_id: int | None
    """Id that ends each document; None where documents end without one."""
    origin: str | None = None
    """Fingerprint of the inputs and settings that the folder was made from."""
    counts: dict[str, int] = {}
    """What the preparation skipped or repaired."""
    shards: list[ShardInfo]

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    def fingerprint(self) -> str:
        """Digest of what decides the order of samples: contents, not paths."""
        digest = hashlib.sha256(
            f"{self.tokenizer_fingerprint}|{self.vocab_size}|{self.eod_id}".encode()
        )
        for shard in self.shards:
            digest.update(f"|{shard.tokens},{shard.dtype},{shard.bin_checksum}".encode())
        return f"sha256:{digest.hexdigest()}"

    def division(self) -> str:
        """Digest of where documents begin: samples do not depend on it, isolated documents do."""
        text = "|".join(shard.idx_checksum for shard in self.shards)
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"

    def token_ends(self) -> np.ndarray:
        """int64[shards]: tokens up to and with each shard."""
        return np.cumsum(np.array([shard.tokens for shard in self.shards], dtype=np.int64))


class Reader(Protocol):
    """What a manifest in an object store is read with."""

    def read_all(self, name: str) -> bytes:
        """A whole object. Raises FileNotFoundError."""


def load_manifest(directory: str | Path, store: Reader | None = None) -> Manifest:
    """Reads DIRECTORY/manifest.json, from `store` where the folder is a URL.

    Raises DataError when it is missing or unreadable.
    """
    if store is not None:
        place = f"{directory}/{MANIFEST_NAME}"
        try:
            return _parse_manifest(store.read_all(MANIFEST_NAME), place, str(directory))
        except FileNotFoundError:
            raise DataError(f"a data folder must hold {MANIFEST_NAME}; no {place}") from None
    path = Path(str(directory).removeprefix("file://")) / MANIFEST_NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise DataError(_missing(path)) from None
    except OSError as error:
        raise DataError(f"a manifest must be readable; {path}: {error.strerror}") from None
    return _parse_manifest(text, str(path), str(path.parent))


def _parse_manifest(text: bytes, path: str, folder: str) -> Manifest:
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DataError(
            f"a manifest must be whole and of version 1; {path}: {where} {first['msg']}; "
            f"write it again with `python -m tools.preprocess index {folder}`"
        ) from None
    if not manifest.shards or manifest.tokens == 0:
        raise DataError(f"a folder of shards must hold at least one token; {path} holds none")
    return manifest


def _missing(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"a data folder must exist; there is no {folder}"
    nested = [name for name in ("train", "valid") if (folder / name / MANIFEST_NAME).exists()]
    if nested:
        return (
            f"a data folder must hold {MANIFEST_NAME}; {folder} has none, "
            f"but {folder / nested[0]} does: name that"
        )
    if any(folder.glob("*.bin")):
        return (
            f"a data folder must hold {MANIFEST_NAME}; {folder} has shards but no manifest: "
            f"run `python -m tools.preprocess index {folder}`, or finish the interrupted "
            "`python -m tools.preprocess` that wrote them"
        )
    return f"a data folder must hold {MANIFEST_NAME}; {folder} has none"


def save_manifest(directory: str | Path, manifest: Manifest) -> Path:
    """Writes DIRECTORY/manifest.json under a temporary name, then renames it."""
    path = Path(directory) / MANIFEST_NAME
    write_atomic(path, manifest.model_dump_json(indent=1).encode() + b"\n")
    return path


def write_atomic(path: Path, content: bytes) -> None:
    """Writes a file so that it is either whole or absent."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)


def file_checksum(path: str | Path) -> str:
    """'sha256:' and the hexadecimal digest of a file."""
    with open(path, "rb") as stream:
        return "sha256:" + hashlib.file_digest(stream, "sha256").hexdigest()
