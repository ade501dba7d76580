# SPDX-License-Identifier: Apache-2.0
"""The `precision` section of a run file: which format each operand of each GEMM has.

Data only. `models/plans.py` reads layer selectors and named plans, `models/precision.py` resolves
all of it against a model and reports every contradiction at once.
"""

from dataclasses import field
from typing import Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

Gemm = Literal["fprop", "dgrad", "wgrad"]
GEMMS: tuple[Gemm, ...] = ("fprop", "dgrad", "wgrad")
PHASES = ("pretraining_forward", "pretraining_backward", "sampler", "rl_trainer")

_STRICT = ConfigDict(
    extra="forbid", validate_by_name=True, validate_by_alias=True, serialize_by_alias=True
)


@dataclass(kw_only=True, frozen=True, config=_STRICT)
class PrecisionRule:
    """One line of the rule list; the first rule that matches a GEMM decides its recipe."""

    layers: str | int = "all"
    """Positions in the pattern: `first 2`, `last 8`, `last 15%`, `last 1/6`, `3`, `3-7`, `mtp`,
    `all`, or several of them separated by commas. `|` and MTP do not count as positions."""
    modules: str = "*"
    """Glob over global module names, such as `*.mixer.out_proj` or `layers.3.*`; several are
    separated by commas."""
    gemms: tuple[Gemm, ...] = GEMMS
    """Which of the three GEMMs of the module the rule decides."""
    recipe: str
    """Name of a recipe, built in or from `precision.recipes`."""


@dataclass(kw_only=True, frozen=True, config=_STRICT)
class PrecisionStep:
    """A change of precision during the run. It may only raise precision or keep it."""

    from_: float = Field(alias="from")
    """Fraction of the run's samples, 0 to 1, at which the step begins. It becomes an absolute
    number of samples when the run first starts and is kept in checkpoints."""
    gemms: tuple[Gemm, ...] = GEMMS
    """Which GEMMs change."""
    layers: str | int = "all"
    """Which layers change, as in a rule."""
    modules: str = "*"
    """Which modules change, as in a rule."""
    recipe: str
    """The recipe that the GEMMs take from then on."""


@dataclass(kw_only=True, frozen=True, config=_STRICT)
class PhasePlans:
    """Named plans for phases that need another precision than the rest of the run."""

    pretraining_forward: str | None = None
    """Plan of fprop in pretraining; replaces `plan` for this GEMM."""
    pretraining_backward: str | None = None
    """Plan of dgrad and wgrad in pretraining; replaces `plan` for these GEMMs."""
    sampler: str | None = None
    """Plan of the generating model in reinforcement learning."""
    rl_trainer: str | None = None
    """Plan of the trained model in reinforcement learning."""


@dataclass(kw_only=True, frozen=True, config=_STRICT)
class PrecisionConfig:
    """What every GEMM of the model computes in."""

    backend: Literal["fused_ops", "transformer_engine"] = "fused_ops"
    """Who computes: this project's operations (any machine) or Transformer Engine's modules."""
    recipe: str | None = None
    """Recipe of every GEMM that no rule names; None takes the plan's, and without a plan bf16."""
    decode: Literal["exact", "fp8"] = "exact"
    """How NVFP4 operands are decoded where FP4 tensor cores are missing: `exact` multiplies on
    BF16 cores, `fp8` rounds what E4M3 cannot hold and multiplies on FP8 cores. Operands with
    power-of-two scales are exact in both."""
    plan: str | None = None
    """A named list of rules, put before `rules`."""
    rules: tuple[PrecisionRule, ...] = ()
    """First match wins. A rule that matches no module is an error."""
    schedule: tuple[PrecisionStep, ...] = ()
    """Changes during the run, in increasing order of `from`; applied after the rules."""
    amax_scope: Literal["layout_invariant", "shard"] = "layout_invariant"
    """Over what a tensor amax is taken: the whole logical operand, so that every layout computes
    the same codes, or the local shard, as Transformer Engine does."""
    check_finite: bool = False
    """Raise at the first operand that is not finite. It waits for the device at every GEMM;
    without it a device flag is read once a step."""
    recipes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The user's own recipes: name to operands, each operand a mapping of its format."""
    phases: PhasePlans = field(default_factory=PhasePlans)
    """Plans of single phases."""
    communicate: Literal["bf16", "packed"] = "bf16"
    """What sequence-parallel gathers of linear layers, and the transfer of tokens to experts, move:
    the tensors, or the codes and block scales of operands, with the same results bit for bit. Where
    an operand has no codes, a rank's tokens are no multiple of its blocks, or an expert's recipe
    needs more than pow2 codes of X, tensors move, and the run says so at its start."""
    allow_reference: bool = True
    """Whether quantized GEMMs may run in the PyTorch reference where the machine has no kernels
    for them. With false such a run is refused."""
