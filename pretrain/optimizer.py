# SPDX-License-Identifier: Apache-2.0
"""Optimizers with FP32 master weights, their weight-decay groups, schedules and loss scaling."""

import importlib.util
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import field
from typing import Any, Literal

import torch
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig as MegatronOptimizerConfig,
    get_megatron_optimizer,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride
from megatron.core.process_groups_config import ProcessGroupCollection
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from fused_ops.errors import ConfigError
from pretrain import adamw
from pretrain.oscillation_config import OscillationReset

MUON_MISSING = (
    "optimizer.name=muon needs the package emerging-optimizers, which is not installed; "
    "pip install emerging-optimizers, or set optimizer.name=adamw"
)
_DECAY_STYLES = {"wsd": "WSD", "cosine": "cosine", "constant": "constant"}
# Of a Mamba layer: initial states of the dynamics, not matrices that multiply activations.
_NEVER_DECAYED = ("A_log", "D", "dt_bias")


@dataclass(kw_only=True, frozen=True, config=ConfigDict(extra="forbid"))
class OptimizerConfig:
    """What updates the weights, and how fast."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon for matrices with adamw for the rest (needs emerging-optimizers)."""
    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """What the schedule decays to."""
    weight_decay: float = 0.1
    """Decoupled; not applied to norms, biases, and A_log, D and dt_bias of Mamba layers."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the two moments."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    clip_grad: float = 1.0
    """Largest norm of the whole gradient; 0 switches clipping off."""
    schedule: Literal["wsd", "cosine", "constant"] = "wsd"
    """wsd: warm up, stay, decay over the last `decay_fraction`; cosine: warm up, then decay."""
    warmup_steps: int | None = None
    """Updates with a rising rate. At most one of warmup_steps and warmup_fraction."""
    warmup_fraction: float | None = None
    """The same as a share of the run."""
    decay_fraction: float = 0.2
    """Share of the run that decays (wsd)."""
    decay_shape: Literal["linear", "cosine", "minus_sqrt"] = "linear"
    """Shape of that decay; minus_sqrt is 1 - sqrt(progress) (arXiv 2405.18392)."""
    muon_momentum: float = 0.95
    """Momentum of muon."""
    oscillation_reset: OscillationReset | None = None
    """Late in the run, put weights that hop between two codes onto the middle of one; None: off."""
    loss_scale: float | None = None
    """A constant loss scale for fp16; None scales dynamically."""
    initial_loss_scale: float = 2.0**32
    """First dynamic scale; halved at each overflow once `loss_scale_hysteresis` is used up."""
    min_loss_scale: float = 1.0
    """The dynamic scale never falls below."""
    loss_scale_window: int = 1000
    """Steps without overflow after which the scale doubles and the hysteresis is restored."""
    loss_scale_hysteresis: int = 2
    """Overflows before the scale is halved."""

    def problems(self, steps: int) -> list[str]:
        """What cannot work in a run of `steps` updates, each with rule, value and remedy."""
        found = []

        def rule(holds: bool, text: str) -> None:
            if not holds:
                found.append("optimizer." + text)

        rule(
            0 < self.lr < math.inf,
            f"lr must be positive and finite; got {self.lr}; 3e-4 is a usual start",
        )
        rule(
            0 <= self.min_lr <= self.lr,
            f"min_lr must lie between 0 and lr={self.lr}; got {self.min_lr}; lower it",
        )
        rule(self.weight_decay >= 0, f"weight_decay must be >= 0; got {self.weight_decay}")
        rule(
            all(0 <= b < 1 for b in self.betas),
            f"betas must lie in [0, 1); got {list(self.betas)}; [0.9, 0.95] is usual",
        )
        rule(self.eps > 0, f"eps must be positive; got {self.eps}; 1e-8 is usual")
        rule(self.clip_grad >= 0, f"clip_grad must be >= 0; got {self.clip_grad}; 0 is off")
        rule(
            self.warmup_steps is None or self.warmup_fraction is None,
            f"warmup_steps and warmup_fraction exclude each other; got {self.warmup_steps} and "
            f"{self.warmup_fraction}; remove one",
        )
        rule(
            0 <= (self.warmup_fraction or 0) < 1,
            f"warmup_fraction must lie in [0, 1); got {self.warmup_fraction}",
        )
        rule(
            0 <= (self.warmup_steps or 0) < max(steps, 1),
            f"warmup_steps must lie in [0, train.steps={steps}); got {self.warmup_steps}; warm up "
            "for less, or train for longer",
        )
        rule(
            0 < self.decay_fraction <= 1,
            f"decay_fraction must lie in (0, 1]; got {self.decay_fraction}",
        )
        rule(
            self.schedule != "wsd" or self.warmup(steps) + self.decay(steps) <= steps,
            f"decay_fraction of train.steps={steps} ({self.decay(steps)}) and the warmup "
            f"({self.warmup(steps)}) must fit in the run; shorten one",
        )
        rule(
            min(self.initial_loss_scale, self.min_loss_scale, self.loss_scale or 1) > 0
            and self.initial_loss_scale >= self.min_loss_scale,
            f"initial_loss_scale must be >= min_loss_scale > 0; got {self.initial_loss_scale} and "
            f"{self.min_loss_scale}",
        )
        rule(
            min(self.loss_scale_window, self.loss_scale_hysteresis) > 0,
            f"loss_scale_window and loss_scale_hysteresis must be positive; got "
            f"{self.loss_scale_window} and {self.loss_scale_hysteresis}",
        )
        reset = self.oscillation_reset
        return found + (reset.problems(steps) if reset is not None else [])

    def warmup(self, steps: int) -> int:
        """Updates with a rising rate."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return math.floor((self.warmup_fraction or 0.0) * steps)

    def decay(self, steps: int) -> int:
        """Updates with a falling rate of the wsd schedule."""
        return max(1, round(self.decay_fraction * steps))


@dataclass(kw_only=True, frozen=True, config=ConfigDict(arbitrary_types_allowed=True))
class OptimizerSetting:
    """What the optimizer must know of the rest of the run."""

    steps: int
    """Updates of the whole run."""
    params_dtype: torch.dtype
    """Of the model's parameters; masters are FP32."""
    use_distributed_optimizer: bool = True
    """Shard masters and moments over the data-parallel ranks."""
    overlap_param_gather: bool = False
    """Gather updated parameters during the next forward."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of megatron-core's optimizer config."""


def decays(name: str, param: torch.Tensor) -> bool:
    """Whether weight decay acts on a parameter: on matrices, not on norms, biases, A_log, D, dt."""
    last = name.rsplit(".", 1)[-1]
    return param.dim() > 1 and not last.startswith("bias") and last not in _NEVER_DECAYED


def build_optimizer(
    config: OptimizerConfig,
    setting: OptimizerSetting,
    chunks: list[Any],
    pg_collection: ProcessGroupCollection,
) -> MegatronOptimizer:
    """megatron-core's optimizer over chunks that are wrapped in its DistributedDataParallel."""
    if config.name == "muon" and not has_muon():
        raise ConfigError(MUON_MISSING)
    adamw.install()
    fp16 = setting.params_dtype == torch.float16
    distributed = setting.use_distributed_optimizer and config.name == "adamw"
    engine = MegatronOptimizerConfig(
        optimizer="adam" if config.name == "adamw" else config.name,
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        muon_momentum=config.muon_momentum,
        clip_grad=config.clip_grad,
        fp16=fp16,
        bf16=setting.params_dtype == torch.bfloat16,
        params_dtype=setting.params_dtype,
        loss_scale=config.loss_scale if fp16 else None,
        initial_loss_scale=config.initial_loss_scale,
        min_loss_scale=config.min_loss_scale,
        loss_scale_window=config.loss_scale_window,
        hysteresis=config.loss_scale_hysteresis,
        use_distributed_optimizer=distributed,
        overlap_param_gather=setting.overlap_param_gather and distributed,
        **setting.extra,
    )
    return get_megatron_optimizer(
        engine,
        chunks,
        config_overrides=_group_overrides(setting.params_dtype, config.name),
        use_gloo_process_groups=False,
        pg_collection=pg_collection,
    )


def _group_overrides(params_dtype: torch.dtype, name: str) -> dict[ParamKey, ParamGroupOverride]:
    """How parameters are told apart: those without weight decay, and those kept in FP32.

    The latter (A_log, D and dt_bias of Mamba layers in a 16-bit model) need a group of their own:
    the distributed optimizer numbers the parameters of a group in another order than it stores
    them when the group holds both, and a checkpoint then mixes them up. Naming the optimizer is
    what makes it another group; it is one of the keys by which a checkpoint finds its groups.
    """
    undecayed = ParamWithNamePredicate(
        name="no_weight_decay", fn=lambda param, name: not decays(name, param)
    )
    overrides = {ParamKey(with_name_predicate=undecayed): ParamGroupOverride(wd_mult=0.0)}
    if name == "muon":  # sorts parameters by optimizer itself, and shards nothing
        return overrides
    kept = ParamWithNamePredicate(
        name="kept_in_fp32", fn=lambda param, name: param.dtype is not params_dtype
    )
    overrides[ParamKey(with_name_predicate=kept)] = ParamGroupOverride(optimizer="adam")
    return overrides


def has_muon() -> bool:
    """Whether the package that megatron-core takes muon from is installed."""
    return importlib.util.find_spec("emerging_optimizers") is not None


def build_scheduler(config: OptimizerConfig, steps: int, optimizer: Any) -> OptimizerParamScheduler:
    """The learning rate as a function of the number of the update; see `learning_rate`.

    `scheduler.num_steps` counts completed updates. Before an update `scheduler.step(1)` sets its
    rate; when the update is skipped `scheduler.step(-1)` takes that back. The config in force
    decides, not the one in a checkpoint: a longer run stretches its own schedule.
    """
    warmup, decay = config.warmup(steps), config.decay(steps)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=steps + 1,  # min_lr would be the rate of the update after the last one
        lr_decay_style=_DECAY_STYLES[config.schedule],
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=steps + 1,
        wd_incr_style="constant",
        wsd_decay_steps=decay + 1,
        lr_wsd_decay_style=config.decay_shape,
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def optimizer_parts(optimizer: Any) -> Iterator[Any]:
    """The optimizers of a chain, or the only one; without those that have no parameters here."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not getattr(part, "is_stub_optimizer", False):
            yield part


def create_moments(optimizer: Any) -> None:
    """An optimizer that has made no update yet has no moments: give it zeros."""
    for part in optimizer_parts(optimizer):
        if not part.optimizer.state:
            part.init_state_fn(part.optimizer, part.config)


@torch.no_grad()
def update(
    optimizer: MegatronOptimizer,
    clip_grad: float,
    around: AbstractContextManager[None] | None = None,
) -> tuple[bool, float]:
    """Clip the gradient and update, unless a gradient is not finite.

    Args:
        optimizer: its gradients are complete.
        clip_grad: see `OptimizerConfig`.
        around: held around the update, if there is one.

    Returns (whether the weights were updated, norm of the gradient before clipping). Every rank
    gets the same answer: the norm is summed over all of them, an fp16 overflow is shared by all.
    """
    if optimizer.prepare_grads():  # fp16: unscales once, and adapts the scale
        return False, math.inf
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        return False, norm
    if clip_grad > 0:
        for part in optimizer_parts(optimizer):
            if params := part.get_parameters():
                clip_grad_by_total_norm_fp32(params, clip_grad, norm)
    with around or nullcontext():
        return bool(optimizer.step_with_ready_grads()), norm
