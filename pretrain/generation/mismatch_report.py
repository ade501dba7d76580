# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's mismatch between a sampler and a trainer: what is compared, and what comes out."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fused_ops.errors import ConfigError
from fused_ops.recipe import RECIPES
from models.plans import PLANS
from models.precision import apply_precision
from models.precision_config import PrecisionConfig
from models.precision_rules import PRETRAINING
from pretrain.command_line import each_recipe
from pretrain.config import make_config
from pretrain.config_file import apply_overrides, encode, parse_overrides
from pretrain.conversion.calibration import validation_windows
from pretrain.generation.handoff import latest_version, publish_weights, receive_weights
from pretrain.generation.mismatch import (
    Invariance,
    Mismatch,
    batch_invariance,
    compare,
    sampled_tokens,
    sampler_scores,
    trainer_scores,
)
from pretrain.generation.opened import OpenedModel, check_scales

ROW_SCALED = "nvfp4_fwd_mxfp8_bwd"
"""The named recipe whose forward is row-scaled NVFP4."""


class Sides:
    """One model that takes the sampler's precision and the trainer's in turn.

    Args:
        opened: the model.
        sampler, trainer: PLAN or RECIPE[:DECODE][+KEY=VALUE...], with keys of `precision`; None
            takes the run's plan of that phase (`precision.phases`), and where it names none the
            precision that the run has now.

    Raises:
        ConfigError: all that is wrong with the two.
    """

    def __init__(
        self, opened: OpenedModel, sampler: str | None = None, trainer: str | None = None
    ) -> None:
        self.opened = opened
        self._given = {"sampler": sampler, "trainer": trainer}
        phases = opened.config.precision.phases
        self._phase = {
            "sampler": "sampler" if phases.sampler else PRETRAINING,
            "trainer": "rl_trainer" if phases.rl_trainer else PRETRAINING,
        }
        self._sections: dict[str, PrecisionConfig] = {}
        problems = []
        for side, label in self._given.items():
            try:
                named = [] if label is None else [label]
                self._sections |= each_recipe(named, self._section, f"--{side}")
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(problems)

    def describe(self, side: str) -> str:
        """What a side computes in."""
        phase = self._phase[side]
        return self._given[side] or ("as trained" if phase == PRETRAINING else f"phase {phase}")

    def take(self, side: str) -> None:
        """Give every layer the precision of "sampler" or "trainer"."""
        label = self._given[side]
        if label is None:
            self.opened.plan.set_phase(self._phase[side])
        else:
            self._apply(self._sections[label])

    def take_named(self, name: str) -> None:
        """Give every layer what a plan or a recipe says, without the run's own rules."""
        self._apply(self._section(name, []))

    def _section(self, name: str, own: list[str]) -> PrecisionConfig:
        recipes = {*RECIPES, *self.opened.config.precision.recipes}
        if name not in {*PLANS, *recipes}:
            raise ConfigError(
                "a side must begin with the name of a plan or a recipe: "
                f"{', '.join(sorted({*PLANS, *recipes}))}; got {name!r}"
            )
        settings = parse_overrides(own)
        if others := [key for key, _ in settings if not key.startswith("precision.")]:
            raise ConfigError(
                f"a side's own settings must be of section precision; got {', '.join(others)}; "
                "put what is for both sides behind CKPT_DIR"
            )
        data = encode(self.opened.config)
        data["precision"] |= {
            "plan": None if name in recipes else name,
            "recipe": name if name in recipes else None,
            "rules": [],
            "schedule": [],
            "phases": {},
        }
        apply_overrides(data, settings)
        return make_config(data).precision

    def _apply(self, section: PrecisionConfig) -> None:
        taken = apply_precision([self.opened.model], section, self.opened.state)
        check_scales(taken, self.opened.path)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What to compare. ConfigError for numbers that do not go together."""

    sampler: str | None = None
    trainer: str | None = None
    data: Path | None = None
    """A folder of token shards; None for the run's `data.valid`."""
    sequences: int = 8
    length: int | None = None
    """Tokens of a sequence; None for up to 256."""
    prompt: int = 16
    """Tokens that are not compared, and that the sampler takes at once."""
    sample: bool = False
    """On tokens that the sampler writes."""
    seed: int = 0
    handoff: Path | None = None
    """A folder through which the sampler gets its weights."""

    def __post_init__(self) -> None:
        problems = []
        if self.sequences < 1:
            problems.append(f"--sequences must be at least 1; got {self.sequences}")
        if self.prompt < 1:
            problems.append(f"--prompt must be at least 1; got {self.prompt}")
        if self.length is not None and self.length <= self.prompt:
            problems.append(
                f"--length must be above --prompt {self.prompt}, for the rest is compared; got "
                f"{self.length}"
            )
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True)
class Report:
    """What was found."""

    sampler: str
    trainer: str
    sequences: int
    """As many as were asked for, or as the data holds."""
    length: int
    """Tokens of each."""
    mismatch: Mismatch
    baseline: Mismatch
    """BF16 (the model's own type) on both sides: what caches alone do."""
    invariance: list[Invariance]
    """Empty where the data holds no second sequence."""
    handoff: Path | None
    version: int | None


INVARIANCE_SIZE = (4, 8)
"""Sequences, and tokens of each behind its prompt, that batch invariance is tried on."""


def measure(opened: OpenedModel, question: Question) -> Report:
    """Everything that `tools.mismatch` prints. The model's weights may be other ones afterwards."""
    sides = Sides(opened, question.sampler, question.trainer)
    # Invariance needs others beside a sequence, however few are compared.
    found = _tokens(opened, question, max(question.sequences, INVARIANCE_SIZE[0]))
    tokens, prompt = found[: question.sequences], question.prompt
    sides.take_named("bf16")
    baseline = compare(
        sampler_scores(opened, tokens, prompt), trainer_scores(opened, tokens, prompt)
    )
    few = found[: INVARIANCE_SIZE[0], : prompt + INVARIANCE_SIZE[1]]
    invariance = _invariance(opened, sides, few, prompt) if len(few) > 1 else []
    sides.take("sampler")
    if question.sample:
        tokens = sampled_tokens(opened, tokens, prompt, question.seed)
    sides.take("trainer")
    trainer = trainer_scores(opened, tokens, prompt)
    sides.take("sampler")
    version = _hand_over(opened, question.handoff)
    mismatch = compare(sampler_scores(opened, tokens, prompt), trainer)
    return Report(
        sampler=sides.describe("sampler"),
        trainer=sides.describe("trainer"),
        sequences=len(tokens),
        length=tokens.shape[1],
        mismatch=mismatch,
        baseline=baseline,
        invariance=invariance,
        handoff=question.handoff,
        version=version,
    )


def _invariance(opened: OpenedModel, sides: Sides, few: Tensor, prompt: int) -> list[Invariance]:
    """Of the sampler's precision, and of the two kinds of NVFP4 that are made for it."""
    sides.take("sampler")
    tried = [batch_invariance(opened, f"sampler {sides.describe('sampler')}", few, prompt)]
    for name, recipe in (("row-scaled NVFP4", ROW_SCALED), ("pow2 NVFP4", "nvfp4_pow2")):
        sides.take_named(recipe)
        tried.append(batch_invariance(opened, name, few, prompt))
    return tried


def _tokens(opened: OpenedModel, question: Question, sequences: int) -> Tensor:
    """int64 [at most `sequences`, length] of validation data."""
    valid = opened.config.data.valid if question.data is None else str(question.data)
    if valid is None:
        raise ConfigError(
            "the comparison needs tokens, and this checkpoint's run names no data.valid; give a "
            "folder of token shards with --data DIR"
        )
    longest = opened.config.model.seq_length
    length = question.length or min(256, longest)
    if length <= question.prompt:
        raise ConfigError(
            f"--prompt must be below the length of a sequence, {length}; got {question.prompt}"
        )
    if length > longest:
        raise ConfigError(f"--length must be at most model.seq_length {longest}; got {length}")
    return validation_windows(valid, (sequences, length), opened.vocab_size, "--data")


def _hand_over(opened: OpenedModel, folder: Path | None) -> int | None:
    """The weights through a folder and back; the version that they had there."""
    if folder is None:
        return None
    version = (latest_version(folder) or 0) + 1
    publish_weights(folder, opened.model, version)
    return receive_weights(folder, opened.model)
