# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (CPU compatibility comes before megatron-core)
"""A small training run on megatron-core for the tests of checkpoints, on synthetic data.

Dropout is on, so that a generator that is not restored changes the losses. Ranks are forked from a
server that has everything imported, so that a run costs no start-up.
"""

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pretrain import cpu_compat

cpu_compat.enable()
torch.set_num_threads(1)

from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from pydantic.dataclasses import dataclass as config_dataclass

from pretrain.checkpoint.manager import CheckpointConfig, CheckpointManager, override_config
from pretrain.config_file import encode
from pretrain.optimizer import (
    OptimizerConfig,
    OptimizerSetting,
    build_optimizer,
    build_scheduler,
    update,
)

VOCABULARY, LENGTH = 64, 16


@config_dataclass(kw_only=True)
class TrialModel:
    hidden: int = 32
    layers: int = 2


@config_dataclass(kw_only=True)
class TrialTrain:
    steps: int = 12
    global_batch_size: int = 4


@config_dataclass(kw_only=True)
class TrialParallel:
    tensor_model_parallel_size: int = 1


@config_dataclass(kw_only=True)
class TrialConfig:
    """The sections of a run that a resume looks at."""

    model: TrialModel = field(default_factory=TrialModel)
    train: TrialTrain = field(default_factory=TrialTrain)
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(lr=3e-3, warmup_steps=2, schedule="cosine")
    )
    parallel: TrialParallel = field(default_factory=TrialParallel)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


@dataclass
class Trial:
    """A built run."""

    config: TrialConfig
    manager: CheckpointManager
    dtype: str = "bf16"
    distributed_optimizer: bool = True
    seed: int = 1
    dropout: float = 0.1

    def build(self) -> None:
        """Model, optimizer, scheduler on this process group."""
        tp = self.config.parallel.tensor_model_parallel_size
        if not parallel_state.model_parallel_is_initialized():  # some thirty groups, with threads
            parallel_state.initialize_model_parallel(tp)
        torch.manual_seed(self.seed)
        tensor_parallel.model_parallel_cuda_manual_seed(self.seed)
        bf16 = self.dtype == "bf16"
        dtype = torch.bfloat16 if bf16 else torch.float32
        engine = TransformerConfig(
            num_layers=self.config.model.layers,
            hidden_size=self.config.model.hidden,
            num_attention_heads=4,
            ffn_hidden_size=2 * self.config.model.hidden,
            hidden_dropout=self.dropout,
            attention_dropout=self.dropout,
            add_bias_linear=False,
            normalization="RMSNorm",
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            persist_layer_norm=False,
            tensor_model_parallel_size=tp,
            params_dtype=dtype,
            bf16=bf16,
        )
        spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
        model: Any = GPTModel(engine, spec, VOCABULARY, LENGTH)
        if bf16:
            model = Float16Module(engine, model)
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=self.distributed_optimizer, grad_reduce_in_fp32=True
        )
        self.chunks = [DistributedDataParallel(engine, ddp, model)]
        self.chunks[0].broadcast_params()
        setting = OptimizerSetting(
            steps=self.config.train.steps,
            params_dtype=dtype,
            use_distributed_optimizer=self.distributed_optimizer,
        )
        groups = ProcessGroupCollection.use_mpu_process_groups()
        self.optimizer = build_optimizer(self.config.optimizer, setting, self.chunks, groups)
        self.scheduler: OptimizerParamScheduler = build_scheduler(
            self.config.optimizer, self.config.train.steps, self.optimizer
        )
        engine.grad_scale_func = self.optimizer.scale_loss
        engine.finalize_model_grads_func = finalize_model_grads
        self.done = 0

    def step(self) -> float:
        """One optimizer step on samples that follow from its number alone; the global loss."""
        rank = parallel_state.get_data_parallel_rank()
        world = parallel_state.get_data_parallel_world_size()
        samples = range(rank, self.config.train.global_batch_size, world)

        def batch(sample: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(1000 * self.done + sample)
            first = torch.randint(0, VOCABULARY, (1, 1), generator=generator)
            return (first + 3 * torch.arange(LENGTH + 1)) % VOCABULARY

        def forward(batches: Any, model: Any) -> Any:
            tokens = next(batches)
            positions = torch.arange(LENGTH)[None]
            out = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
            return out, lambda losses: (losses.float().mean(), {"loss": losses.float().mean()})

        self.chunks[0].zero_grad_buffer()
        self.optimizer.zero_grad()
        self.scheduler.step(1)
        losses = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter([batch(sample) for sample in samples]),
            model=self.chunks[0],
            num_microbatches=len(samples),
            seq_length=LENGTH,
            micro_batch_size=1,
            forward_only=False,
        )
        updated, _ = update(self.optimizer, 1.0)
        assert updated
        self.done += 1
        total = torch.stack([loss["loss"].detach() for loss in losses]).double().sum()
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return float(total) / self.config.train.global_batch_size

    def rates(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def weights(self) -> torch.Tensor:
        """All weights and the optimizer's state of this rank as one vector of FP32."""
        parts = [p.detach().float().flatten() for p in self.chunks[0].parameters()]
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for group in part.optimizer.param_groups:
                for param in group["params"]:
                    state = part.optimizer.state[param]
                    parts += [param.detach().float().flatten()]
                    parts += [state[key].flatten() for key in sorted(state)]
        return torch.cat(parts)

    def save(self) -> None:
        """A checkpoint of this moment."""
        self.manager.save(
            self.done,
            self.chunks,
            self.optimizer,
            self.scheduler,
            extra={"train_state": {"step": self.done}},
            resolved_config=encode(self.config),
        )

    def resume(self) -> Any:
        """What the manager restored."""
        resumed = self.manager.resume(
            self.chunks, self.optimizer, self.scheduler, resolved_config=encode(self.config)
        )
        self.done = resumed.extra["train_state"]["step"] if resumed else 0
        return resumed


def start_group(rank: int = 0, world_size: int = 1, store: str | None = None) -> bool:
    """A gloo group of this process, alone without `store`, the path of a file to meet at.

    Returns whether there was none before.
    """
    if dist.is_initialized():
        return False
    parallel_state.destroy_model_parallel()
    place: Any = dist.FileStore(store, world_size) if store else dist.HashStore()
    dist.init_process_group("gloo", store=place, rank=rank, world_size=world_size)
    return True


@contextmanager
def own_group() -> Iterator[None]:
    """A group of this process alone, unless it has one; it ends with the block."""
    ours = start_group()
    yield
    if ours:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def open_trial(run_dir: Path | str, options: dict[str, Any] | None = None) -> Trial:
    """Find, override, build; not resumed yet. `options`: fields of Trial and of the config."""
    options = dict(options or {})
    start_group()
    sections = {
        name: options.pop(name, {})
        for name in ("model", "train", "optimizer", "parallel", "checkpoint")
    }
    base = encode(TrialConfig())
    config = TrialConfig(**{name: {**base[name], **value} for name, value in sections.items()})
    manager = CheckpointManager(config.checkpoint, run_dir)
    if manager.find() is not None:
        config = override_config(config, config.checkpoint.override)
    trial = Trial(config, manager, **options)
    trial.build()
    return trial


def run(
    run_dir: Path | str,
    options: dict[str, Any],
    until: int,
    say: Callable[[str, int, float], None] = lambda *_: None,
) -> dict[str, Any]:
    """Resume if there is something, train to step `until`, saving as the interval says."""
    trial = open_trial(run_dir, options)
    try:
        resumed = trial.resume()
        losses = []
        for _ in range(trial.done, until):
            losses.append(trial.step())
            say("step", trial.done, losses[-1])
            trial.manager.poll()
            if trial.manager.due(trial.done):
                say("saving", trial.done, 0.0)
                trial.save()
                say("saved", trial.done, 0.0)
    finally:
        trial.manager.close()
    return {
        "from": resumed.step if resumed else 0,
        "losses": losses,
        "weights": trial.weights(),
        "rates": trial.rates(),
        "notes": resumed.notes if resumed else [],
        "skipped": list(trial.manager._found.skipped) if trial.manager._found else [],
    }


def _serve(
    pipe: Connection, place: tuple[int, int, str], quiet: str, work: Callable[..., Any], args: Any
) -> None:
    """A rank: run `work(*args, say)` and send what it says and returns."""
    log = os.open(quiet, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    start_group(*place)
    try:
        result = work(*args, lambda *message: pipe.send(message))
    except Exception as error:
        import traceback

        traceback.print_exc()
        pipe.send(("error", type(error).__name__, str(error)))
        return
    # As numpy: a tensor would travel as a handle that dies with this process.
    result = {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in result.items()}
    pipe.send(("result", result, None))


class Ranks:
    """Processes of one group, each running `work(*args, say)`; killed at the end of the block."""

    def __init__(self, world_size: int, work: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self.log = Path(self.folder.name, "log")
        store = str(Path(self.folder.name, "store"))
        self.pipes, self.processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, (rank, world_size, store), str(self.log), work, args)
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: Any) -> None:
        self.kill()
        self.folder.cleanup()

    def kill(self) -> None:
        """SIGKILL to every rank that still runs."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join()

    def messages(self, timeout: float = 240.0) -> Iterator[tuple[str, Any, Any]]:
        """What rank 0 says, until it ends. TimeoutError with the log after `timeout` of silence."""
        while True:
            if not self.pipes[0].poll(timeout):
                raise TimeoutError(self.log.read_text())
            try:
                yield self.pipes[0].recv()
            except EOFError:
                return

    def results(self, timeout: float = 240.0) -> list[Any]:
        """What each rank returns. RuntimeError with the log when one failed."""
        found = []
        for pipe in self.pipes:
            while True:
                if not pipe.poll(timeout):
                    raise TimeoutError(self.log.read_text())
                try:
                    kind, value, _ = pipe.recv()
                except EOFError:
                    raise RuntimeError(self.log.read_text()) from None
                if kind == "result":
                    found.append(value)
                    break
                if kind == "error":
                    raise RuntimeError(f"{value}: {_}")
        return found
