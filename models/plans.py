# SPDX-License-Identifier: Apache-2.0
"""Named precision plans as data, and how layers are selected.

A plan lists the exceptions of a published run; every GEMM that it does not name takes
`precision.recipe`, which defaults to the recipe of that run. The user's own rules come after it.
"""

import difflib
import fnmatch
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from fused_ops.errors import ConfigError

_TERM = re.compile(
    r"(?P<all>all)|(?P<mtp>mtp)"
    r"|(?P<end>first|last)\s+(?P<amount>\d+(\.\d+)?\s*%|\d+\s*/\s*\d+|\d+)"
    r"|(?P<low>\d+)(\s*-\s*(?P<high>\d+))?"
)


@dataclass(frozen=True)
class LayerSelection:
    """What a selector means for a model: positions, and whether multi-token prediction counts."""

    positions: frozenset[int]
    mtp: bool

    def contains(self, position: int | None) -> bool:
        """Whether a module at `position` (None: multi-token prediction) is selected."""
        return self.mtp if position is None else position in self.positions


def select_layers(text: str | int, num_layers: int, *, pairs: bool = False) -> LayerSelection:
    """Read a layer selector.

    Args:
        text: `first 2`, `last 8`, `last 15%`, `last 1/6`, `3`, `3-7`, `all` (multi-token prediction
            included), `mtp`, or several separated by commas. A share is the exact fraction of the
            positions, rounded up: 7 % of 100 is 7.
        num_layers: positions of the model.
        pairs: widen the selection to whole (attention, MLP) pairs.

    Raises:
        ValueError: the text is no selector, or names a position that the model does not have.
    """
    positions: set[int] = set()
    mtp = False
    for term in str(text).split(","):
        match = _TERM.fullmatch(term.strip())
        if match is None:
            raise ValueError(
                f"layers must be like 'first 2', 'last 15%', 'last 1/6', '3', '3-7', 'all' or "
                f"'mtp'; got {term.strip()!r}"
            )
        if match["all"]:
            positions |= set(range(num_layers))
        mtp |= bool(match["all"] or match["mtp"])
        if match["end"]:
            count = _amount(match["amount"], num_layers)
            start = 0 if match["end"] == "first" else num_layers - count
            positions |= set(range(start, start + count))
        elif match["low"]:
            positions |= _range(term.strip(), match["low"], match["high"], num_layers)
    if pairs:
        positions |= {position ^ 1 for position in positions}
    return LayerSelection(frozenset(positions), mtp)


def _amount(text: str, num_layers: int) -> int:
    if text.endswith("%"):
        count = math.ceil(Fraction(text[:-1].strip()) / 100 * num_layers)
    elif "/" in text:
        above, below = (int(part) for part in text.split("/"))
        if below == 0:
            raise ValueError(f"a share of layers must have a denominator above 0; got {text!r}")
        count = math.ceil(Fraction(above, below) * num_layers)
    else:
        return min(int(text), num_layers)
    if count > num_layers:
        raise ValueError(f"a share of layers must be at most all of them; got {text!r}")
    return count


def _range(term: str, low: str, high: str | None, num_layers: int) -> set[int]:
    first, last = int(low), int(high or low)
    if first > last or last >= num_layers:
        raise ValueError(
            f"layers count from 0 to {num_layers - 1} in this model, lower number first; "
            f"got {term!r}"
        )
    return set(range(first, last + 1))


def match_module(globs: str, name: str) -> bool:
    """Whether a global module name matches one of the comma-separated globs, and none after `!`."""
    patterns = [glob.strip() for glob in globs.split(",")]
    wanted = [glob for glob in patterns if not glob.startswith("!")] or ["*"]
    refused = [glob[1:] for glob in patterns if glob.startswith("!")]
    return any(fnmatch.fnmatchcase(name, glob) for glob in wanted) and not any(
        fnmatch.fnmatchcase(name, glob) for glob in refused
    )


@dataclass(frozen=True, kw_only=True)
class PlanRule:
    """One exception of a plan."""

    layers: str = "all"
    modules: str = "*"
    recipe: str
    optional: bool = False
    """Whether models without such modules may use the plan; otherwise that is an error."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A named list of exceptions and the recipe of the rest."""

    name: str
    recipe: str
    """What the rest takes when `precision.recipe` is not set."""
    rules: tuple[PlanRule, ...]
    source: str


_ATTENTION = "*.self_attention.*"
_EXPERTS = "*.mlp.experts.*"
_LATENT = "*.mlp.fc1_latent_proj,*.mlp.fc2_latent_proj"

PLANS: dict[str, Plan] = {
    plan.name: plan
    for plan in (
        Plan(
            name="nvfp4_paper",
            recipe="nvfp4",
            rules=(
                PlanRule(layers="first 2", recipe="bf16"),
                PlanRule(layers="last 8", recipe="bf16"),
            ),
            source="Pretraining LLMs with NVFP4, arXiv 2509.25149, section 4.1",
        ),
        Plan(
            name="fp8_paper",
            recipe="fp8_blockwise_fp32",
            rules=(
                PlanRule(layers="first 1", recipe="bf16"),
                PlanRule(layers="last 2", recipe="bf16"),
            ),
            source="Pretraining LLMs with NVFP4, arXiv 2509.25149, appendix A (the FP8 baseline)",
        ),
        Plan(
            name="nemotron3",
            recipe="nvfp4",
            rules=(
                PlanRule(layers="mtp", recipe="bf16", optional=True),
                PlanRule(layers="last 15%", recipe="bf16"),
                PlanRule(modules=_ATTENTION, recipe="bf16", optional=True),
                PlanRule(modules=_LATENT, recipe="bf16", optional=True),
                PlanRule(modules="*.mixer.out_proj", recipe="mxfp8", optional=True),
            ),
            source="Nemotron 3 Super, arXiv 2604.12374, section 2.4",
        ),
        Plan(
            name="inkling2",
            recipe="nvfp4",
            rules=(
                PlanRule(layers="last 1/6", modules=_EXPERTS, recipe="mxfp8"),
                PlanRule(modules=f"!{_EXPERTS}", recipe="bf16"),
            ),
            source="published weights of Inkling 2 Mini, Thinking Machines, November 2026",
        ),
    )
}


def get_plan(name: str) -> Plan:
    """The named plan; ConfigError with the nearest names if there is none."""
    if name not in PLANS:
        raise ConfigError(
            f"a plan must be one of {sorted(PLANS)}, got {name!r}{nearest(name, PLANS)}"
        )
    return PLANS[name]


def nearest(name: str, valid: Iterable[str], count: int = 1) -> str:
    """`; did you mean ...?` with up to `count` names, or nothing if none is near."""
    close = difflib.get_close_matches(name, list(valid), n=count, cutoff=0.4)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
