# SPDX-License-Identifier: Apache-2.0
"""A checkpoint opened for conversion: its tensors, model section, vocabulary and carried files."""

from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fused_ops.errors import ConfigError
from models.config import ModelConfig, padded_vocab_size
from models.conversion.expected import Expected, expected_tensors
from models.conversion.safetensors import TensorSpec
from models.pattern import parse_pattern
from pretrain.checkpoint.config import require_latest
from pretrain.checkpoint.io import load_json
from pretrain.checkpoint.layout import STATE
from pretrain.checkpoint.tensors import AVERAGE, TensorReader
from pretrain.config import make_config
from pretrain.data.manifest import load_manifest
from pretrain.pretrain_config import DTYPES, PretrainConfig

CARRIED = "hf."
"""Files of a model folder travel in a checkpoint under their name with this in front."""
# Text files of a model folder. Python files are not taken: they are code.
_TAKEN = (".json", ".txt", ".jinja", ".model", ".tiktoken")
_LARGEST = 64 * 2**20
# Those that say how its weights are stored, which a conversion changes.
_OF_WEIGHTS = ("*.index.json", "hf_quant_config.json")


def text_files(folder: Path) -> list[Path]:
    """Configuration, tokenizer and generation config of a model folder: what travels with it."""
    return [
        path
        for path in sorted(Path(folder).iterdir())
        if path.is_file()
        and path.suffix in _TAKEN
        and not any(fnmatch(path.name, pattern) for pattern in _OF_WEIGHTS)
        and path.stat().st_size <= _LARGEST
    ]


def process_groups() -> Any:
    """megatron-core's groups of this one process."""
    from models.config import ParallelConfig
    from pretrain.initialize import initialize

    return initialize(ParallelConfig()).groups


@dataclass
class OpenCheckpoint:
    """One step of a run (or an import), by what a conversion needs of it."""

    path: Path
    state: dict[str, Any]
    config: PretrainConfig
    vocab_size: int
    reader: TensorReader

    @property
    def section(self) -> ModelConfig:
        """The `model` section of one process, with the vocabulary filled in."""
        return replace(self.config.model.unstaged, vocab_size=self.vocab_size)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return DTYPES[self.config.train.dtype]

    @property
    def step(self) -> int:
        """Steps of training."""
        return int(self.state["step"])

    @cached_property
    def expected(self) -> Expected:
        """The tensors that the model has; computed from the model, not from the files."""
        return expected_tensors(self.section, self.vocab_size, self.dtype, process_groups())

    def tensors(self) -> dict[str, TensorSpec]:
        """The model's tensors as they are stored. ConfigError when some are missing or differ."""
        problems, found = [], {}
        for name, spec in self.expected.tensors.items():
            if name not in self.reader:
                problems.append(f"{self.path.name} lacks {name}, a tensor of its model")
            elif self.reader.shape(name) != spec.shape:
                problems.append(
                    f"{self.path.name}: {name} is {self.reader.shape(name)}, and {spec.shape} by "
                    "its configuration"
                )
            else:
                found[name] = TensorSpec(spec.shape, self.reader.dtype(name))
        if problems:
            raise ConfigError(problems[:8])
        return found

    def unused(self) -> list[str]:
        """Tensors in the files that are no part of the model, those of the optimizer aside."""
        known = self.expected.tensors
        return [
            name
            for name in self.reader
            if name not in known and not name.startswith(("optimizer.", AVERAGE))
        ]

    def carried(self) -> dict[str, Path]:
        """Files of a model folder that came with an import, by their own names."""
        return {p.name.removeprefix(CARRIED): p for p in sorted(self.path.glob(CARRIED + "*"))}


def open_checkpoint(
    path: Path, vocab_size: int | None = None, weights: str = "trained"
) -> OpenCheckpoint:
    """The newest whole checkpoint that `path` means. ConfigError, CheckpointError.

    `weights`: trained, or ema for their moving average.
    """
    found = require_latest(path)
    state = load_json(found.path / STATE)
    config = make_config(state["config"])
    reader = TensorReader(found.path)
    if weights == "ema":
        reader = reader.averaged()
    known = config.model.vocab_size or state["extra"].get("vocab_size")
    if vocab_size is not None and (vocab_size < 1 or vocab_size != (known or vocab_size)):
        what = f"that of the checkpoint, {known}" if known else "at least 1"
        raise ConfigError(f"--vocab-size must be {what}; got {vocab_size}; leave it out")
    vocab_size = vocab_size or known or vocabulary_of_data(config)
    padded = padded_vocab_size(config.model, vocab_size)
    embedding = "embedding.word_embeddings.weight"
    if embedding in reader and reader.shape(embedding)[0] != padded:
        raise ConfigError(
            f"a vocabulary of {vocab_size} is padded to {padded} rows, but {found.path.name} has "
            f"{reader.shape(embedding)[0]}; give the true one with --vocab-size"
        )
    return OpenCheckpoint(found.path, state, config, vocab_size, reader)


def vocabulary_of_data(config: PretrainConfig, remedy: str = "give --vocab-size") -> int:
    """Entries of the vocabulary of a run's training data. ConfigError if it is not there."""
    train = config.data.train
    folder = train if isinstance(train, str) else train[0].path
    try:
        return load_manifest(folder).vocab_size
    except ConfigError:
        raise ConfigError(
            "the vocabulary's size is needed to cut padding off; model.vocab_size is not set and "
            f"{folder} is not there to ask; {remedy}"
        ) from None


def prediction_depths(section: ModelConfig) -> int:
    """Multi-token prediction depths of a section."""
    return parse_pattern(section.pattern).mtp_depths
