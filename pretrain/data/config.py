# SPDX-License-Identifier: Apache-2.0
"""What a run reads."""

from dataclasses import field
from typing import Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass


@dataclass(kw_only=True, config=ConfigDict(extra="forbid"))
class SourceConfig:
    """One source of a blend."""

    path: str
    """Folder with `manifest.json` and the shards that it names, or its URL in an object store."""

    weight: float | list[tuple[int, float]] = 1.0
    """Share of the samples, relative to the other weights. A curriculum is a list of
    (first sample, weight): [[0, 0.9], [1000000, 0.5]]; the first entry starts at sample 0."""


@dataclass(kw_only=True, config=ConfigDict(extra="forbid"))
class CacheConfig:
    """How folders in object stores are read. One cache on each node, shared by its ranks."""

    dir: str | None = None
    """Folder of the cache, on a disk of the node; None takes one in the temporary folder."""

    size_gib: float = Field(default=16.0, gt=0)
    """The most that the cache takes; what was least recently used is deleted first."""

    block_kib: int = Field(default=1024, ge=64, multiple_of=64)
    """What is fetched at once."""

    workers: int = Field(default=8, ge=1)
    """Requests that a rank has under way at once."""

    ahead_samples: int = Field(default=256, ge=1)
    """Samples of this rank that are fetched before they are needed."""

    attempts: int = Field(default=8, ge=1)
    """How often a request is made before the run fails."""

    first_wait: float = Field(default=0.1, gt=0)
    """Seconds before a request is repeated; doubles with each repetition."""

    reader: Literal["auto", "fsspec", "megatron_core"] = "auto"
    """What reads URLs: fsspec, or megatron-core's own S3 and MSC readers; auto takes fsspec where
    the package of the protocol is installed."""


@dataclass(kw_only=True, config=ConfigDict(extra="forbid"))
class DataConfig:
    """Training and validation data, and how windows of tokens are cut from them."""

    train: str | list[SourceConfig]
    """Folder with a manifest, its URL (s3://BUCKET/FOLDER and the like), or a list of
    {path, weight}."""

    valid: str | dict[str, str] | None = None
    """Folder with a manifest, or {name: folder} for several named validation sets."""

    seed: int | None = None
    """Seed of the order of samples; None takes the run's seed."""

    on_change: Literal["refuse", "continue"] = "refuse"
    """What a resumed run does when sources, weights or model.seq_length are not the checkpoint's.
    continue: each source goes on after what was read of it, and a message at the start says what
    will be seen twice or never."""

    isolate_documents: bool = False
    """Attention, Mamba state, its convolution and multi-token prediction do not cross a document
    boundary (batches carry cu_seqlens). Formats with one scale for a tensor still let a document's
    codes depend on its neighbours; `tools.preflight` names them."""

    reset_position_ids: bool = False
    """Positions count from 0 again at each document start."""

    eod_mask_loss: bool = False
    """No loss where the input is the end-of-document token (the next document's first token)."""

    chunk_tokens: int = field(default=2_097_152)
    """Tokens of a chunk: consecutive windows that are read from one place."""

    chunks_per_group: int = field(default=64)
    """Chunks that are mixed together: samples are shuffled within such a group."""

    skip_samples: list[tuple[int, int]] = field(default_factory=list)
    """Samples to step over, as [first, last] of each range: a poisoned stretch of the data. May be
    set when a run continues; what it has trained on before stays as it was."""

    cache: CacheConfig = field(default_factory=CacheConfig)
    """How folders in object stores are read."""

    storage: dict[str, dict[str, Any]] = field(default_factory=dict)
    """{protocol: options of its fsspec file system}: {s3: {endpoint_url: ...}}. Credentials are
    better left to the environment or the provider's own files."""

    prefetch: bool = True
    """Prepare the next step's batches in a thread while this step computes."""

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "chunks_per_group"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name} must be at least 1; got {getattr(self, name)}")
        for first, last in self.skip_samples:
            if not 0 <= first <= last:
                raise ValueError(
                    "data.skip_samples holds [first, last] with 0 <= first <= last; got "
                    f"{[first, last]}; the numbers are samples of the run, as a bad step names them"
                )
        if isinstance(self.train, list) and not self.train:
            raise ValueError("data.train must name at least one source; got an empty list")
