# SPDX-License-Identifier: Apache-2.0
"""A run in one object: the rooms' sections, and the two of its own, run and train.

Each other section's dataclass lives beside what it configures.
"""

from dataclasses import field
from pathlib import Path
from typing import Literal

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from models.config import ModelConfig
from models.parallel_config import ParallelConfig
from models.precision_config import PrecisionConfig
from pretrain.bad_steps import BadStepConfig
from pretrain.checkpoint.config import CheckpointConfig
from pretrain.data.batch_sizes import BatchSizes
from pretrain.data.config import DataConfig
from pretrain.metrics import LogConfig
from pretrain.monitor_config import MonitorConfig
from pretrain.optimizer import OptimizerConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(kw_only=True, frozen=True, config=ConfigDict(extra="forbid"))
class RunConfig:
    """Which run this is, and on what it runs."""

    name: str = "run"
    """Its folder is DIR/NAME."""
    dir: str = "runs"
    """Where the folders of runs are."""
    seed: int = Field(default=1234, ge=0, lt=2**31)
    """Weights, data order and dither follow from it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU where there is one."""
    timeout_minutes: float = Field(default=30.0, gt=0)
    """How long a rank waits for the others before the run fails."""
    hang_seconds: float = Field(default=600.0, ge=0)
    """Time without any progress after which the watchdog names the rank that hangs and all exit
    with status 75, to be started again; building, saving and evaluating may take two to three
    times as long. 0: no watchdog."""
    max_failures: int = Field(default=3, ge=0)
    """How often in a row a run may fail at the same step; then a start is refused until something
    is changed. 0: always."""

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
    step_batch_size_schedule: list[tuple[int, int]] = field(default_factory=list)
    """Sizes that grow: [[first sample, sequences a step], ...], from sample 0 to one that equals
    global_batch_size."""
    micro_batch_size: int = Field(default=1, ge=1)
    """Sequences that go through the model at once, on each data-parallel rank."""
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Parameters and activations; masters, moments and gradient sums are FP32 always."""
    eval_interval: int = Field(default=0, ge=0)
    """Steps between evaluations; 0 evaluates only at the end, where there is validation data."""
    eval_batches: int = Field(default=8, ge=1)
    """Global batches of each validation set that an evaluation reads; always the same ones."""
    eval_also_bf16: bool = False
    """Validate twice: with the run's own forward pass (`val_loss`), and with no GEMM quantized
    (`val_loss_bf16`), as the weights would be served in 16 bits."""
    dry_run: bool = False
    """Print the precision of every GEMM and stop before anything is trained."""
    profile_steps: list[int] = field(default_factory=list)
    """Steps to record: a torch trace, and on a GPU a memory snapshot, in RUN/profile."""
    deterministic: bool = False
    """Refuse operations on the GPU that could give other bits in a second run; slower."""
    cuda_graph_impl: Literal["none", "full_iteration"] = "none"
    """full_iteration: on a GPU, record forward and backward of a step once and replay them; the
    same bits, and faster where the host is the bottleneck, at the cost of a whole step's memory."""
    ema_decay: float = Field(default=0.0, ge=0, lt=1)
    """Keep an exponential moving average of the weights with this decay, in FP32, and save it with
    every checkpoint (`tools.convert export --weights ema`); 0 keeps none."""
    max_skipped: int = Field(default=100, ge=1)
    """Steps skipped in a row after which the run gives up."""
    bad_steps: BadStepConfig = field(default_factory=BadStepConfig)
    """What is done about losses and gradients that are not finite, and about loss spikes."""
    threads: int = Field(default=0, ge=0)
    """Threads of the process on a CPU; 0 leaves torch's choice (OMP_NUM_THREADS)."""

    @property
    def batch_sizes(self) -> BatchSizes:
        """The global batch size at every sample. Raises ConfigError for a bad schedule."""
        return BatchSizes.of(self.global_batch_size, self.step_batch_size_schedule)

    @property
    def total_samples(self) -> int:
        """Samples of all steps."""
        return self.batch_sizes.consumed_after(self.steps)

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
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
