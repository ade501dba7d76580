# SPDX-License-Identifier: Apache-2.0
"""A run's configuration: the rooms' sections in one object, and the rules between sections.

A run is a YAML file plus `key=value`; nothing else is read, no environment variable. Each section's
dataclass lives beside what it configures. Here they are composed, read, checked once after the
overrides, frozen, and saved.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from models.config import ModelConfig, ParallelConfig
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from fused_ops.errors import ConfigError
from models.precision_config import PrecisionConfig
from models.presets import get_preset, merge_preset
from pretrain.checkpoint import CheckpointConfig
from pretrain.config_file import apply_overrides, decode, encode, parse_overrides, read_yaml
from pretrain.data.config import DataConfig
from pretrain.metrics import LogConfig, log_config_problems
from pretrain.optimizer import OptimizerConfig

CONFIG_FILE = "config.yaml"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(kw_only=True, frozen=True, config=ConfigDict(extra="forbid"))
class RunConfig:
    """Which run this is, and on what it runs."""

    name: str = "run"
    """Its folder is DIR/NAME."""
    dir: str = "runs"
    """Where runs lie."""
    seed: int = Field(default=1234, ge=0, lt=2**31)
    """Weights, data order and dither follow from it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU where there is one."""
    timeout_minutes: float = Field(default=30.0, gt=0)
    """How long a rank waits for the others before the run fails."""

    @property
    def path(self) -> Path:
        """The run's folder."""
        return Path(self.dir) / self.name


@dataclass(kw_only=True, frozen=True, config=ConfigDict(extra="forbid"))
class TrainConfig:
    """How long, how much at once, and in which number format outside the quantized GEMMs."""

    steps: int = Field(default=100, ge=0)
    """Steps of the whole run."""
    global_batch_size: int = Field(default=8, ge=1)
    """Sequences a step."""
    micro_batch_size: int = Field(default=1, ge=1)
    """Sequences that go through the model at once, on each data-parallel rank."""
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Parameters and activations; masters, moments and gradient sums are FP32 always."""
    eval_interval: int = Field(default=0, ge=0)
    """Steps between evaluations; 0 evaluates only at the end, where there is validation data."""
    eval_batches: int = Field(default=8, ge=1)
    """Global batches of each validation set that an evaluation reads; always the same ones."""
    dry_run: bool = False
    """Print the precision of every GEMM and stop before anything is trained."""
    profile_steps: list[int] = field(default_factory=list)
    """Steps to record: a torch trace, and on a GPU a memory snapshot, in RUN/profile."""
    deterministic: bool = False
    """Refuse operations on the GPU that could give other bits in a second run; slower."""
    max_skipped: int = Field(default=100, ge=1)
    """Steps skipped one after another at which the run gives up."""
    threads: int = Field(default=0, ge=0)
    """Threads of the process on a CPU; 0 leaves torch's choice (OMP_NUM_THREADS)."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch's."""
        return DTYPES[self.dtype]


@dataclass(kw_only=True, frozen=True, config=ConfigDict(extra="forbid"))
class PretrainConfig:
    """A run. Sections are described where they are defined."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig
    data: DataConfig
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> PretrainConfig:
    """The run in a YAML file, with `key=value` overrides. ConfigError holds every problem."""
    data = read_yaml(path)
    apply_overrides(data, parse_overrides(overrides))
    return make_config(data)


def make_config(data: dict[str, Any]) -> PretrainConfig:
    """The run in plain nested values, checked. ConfigError holds every problem."""
    problems: list[str] = []
    data = dict(data)
    model = data.get("model")
    if isinstance(model, dict) and isinstance(model.get("preset"), str):
        try:
            data["model"] = merge_preset(get_preset(model["preset"]), model)
        except ConfigError as error:
            problems.extend(error.problems)
    try:
        config = decode(PretrainConfig, data)
        problems.extend(cross_section_problems(config, world_size()))
    except ConfigError as error:
        problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    return config


def save_config(config: PretrainConfig, path: Path | str) -> None:
    """Writes the resolved config as YAML: to a temporary name, then renamed."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(yaml.safe_dump(encode(config), sort_keys=False, width=100))
    os.replace(temporary, path)


def world_size() -> int:
    """Processes of this run, as torchrun tells them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def data_parallel_size(config: PretrainConfig, world: int) -> int:
    """Ranks that read different samples. `validate` has made sure that it is whole."""
    parallel = config.parallel
    return world // (
        parallel.tensor_model_parallel_size
        * parallel.pipeline_model_parallel_size
        * parallel.context_parallel_size
    )


def cross_section_problems(config: PretrainConfig, world: int) -> list[str]:
    """What no section can see alone, for a run of `world` processes."""
    return [
        *_batch_problems(config, world),
        *_expert_problems(config, world),
        *config.optimizer.problems(config.train.steps),
        *_run_problems(config),
        *log_config_problems(config.log),
    ]


def _batch_problems(config: PretrainConfig, world: int) -> list[str]:
    parallel, train = config.parallel, config.train
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    cp = parallel.context_parallel_size
    if world % (tp * pp * cp):
        return [
            "the number of processes must be a multiple of tensor_model_parallel_size * "
            f"pipeline_model_parallel_size * context_parallel_size = {tp} * {pp} * {cp} = "
            f"{tp * pp * cp}; got {world}; start another number with torchrun, or change parallel"
        ]
    ranks, found = world // (tp * pp * cp), []
    if train.global_batch_size % (train.micro_batch_size * ranks):
        found.append(
            "train.global_batch_size must be a multiple of micro_batch_size * data-parallel ranks "
            f"= {train.micro_batch_size} * {ranks}; got {train.global_batch_size}; the next one is "
            f"{_next_multiple(train.global_batch_size, train.micro_batch_size * ranks)}"
        )
    virtual = parallel.virtual_pipeline_model_parallel_size
    micro_batches = train.global_batch_size // (train.micro_batch_size * ranks)
    if virtual and virtual > 1 and micro_batches % pp:
        found.append(
            "with virtual_pipeline_model_parallel_size the micro-batches of a step must be a "
            f"multiple of pipeline_model_parallel_size={pp}; got {micro_batches}; change "
            "train.global_batch_size"
        )
    if parallel.sequence_parallel and tp == 1:
        found.append(
            "parallel.sequence_parallel needs tensor_model_parallel_size > 1; got 1; set it to "
            "false"
        )
    cut = (2 * cp if cp > 1 else 1) * (tp if parallel.sequence_parallel else 1)
    if config.model.seq_length % cut:
        found.append(
            f"model.seq_length must be a multiple of {cut} in this layout; got "
            f"{config.model.seq_length}; the next one is "
            f"{_next_multiple(config.model.seq_length, cut)}"
        )
    return found


def _expert_problems(config: PretrainConfig, world: int) -> list[str]:
    parallel = config.parallel
    expert = parallel.expert_model_parallel_size * (
        parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    )
    stages = parallel.pipeline_model_parallel_size
    if world % (expert * stages):
        return [
            "the number of processes must be a multiple of expert_model_parallel_size * "
            f"expert_tensor_parallel_size * pipeline_model_parallel_size = {expert * stages}; got "
            f"{world}; start another number with torchrun, or change parallel"
        ]
    return []


def _run_problems(config: PretrainConfig) -> list[str]:
    found, train = [], config.train
    if config.run.device == "cuda" and not torch.cuda.is_available():
        found.append("run.device=cuda needs a GPU; torch sees none here; set run.device=auto")
    if Path(config.run.name).name != config.run.name or config.run.name in ("", ".", ".."):
        found.append(
            f"run.name must be a plain folder name; got {config.run.name!r}; a path goes to run.dir"
        )
    wrong = [step for step in train.profile_steps if not 1 <= step <= train.steps]
    if wrong:
        found.append(
            f"train.profile_steps must lie in 1 to train.steps={train.steps}; got {wrong}; steps "
            "count from 1"
        )
    if train.dtype == "fp16" and config.optimizer.name == "muon":
        found.append(
            "optimizer.name=muon does not run with train.dtype=fp16 (megatron-core refuses it); "
            "set train.dtype=bf16, or optimizer.name=adamw"
        )
    return found


def _next_multiple(value: int, of: int) -> int:
    return math.ceil(value / of) * of
