# SPDX-License-Identifier: Apache-2.0
"""Rotary frequencies of models whose context was extended after training began."""

import math
from typing import Any, Literal

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor


@dataclass(kw_only=True, frozen=True, config=ConfigDict(extra="forbid"))
class RopeScaling:
    """How the frequencies of a shorter context are stretched."""

    type: Literal["linear", "llama3", "yarn"]
    """linear: all alike. llama3: only the slow ones. yarn: arXiv 2309.00071."""
    factor: float
    """How many times longer the context became."""
    original_max_position_embeddings: int = 8192
    """Tokens of the context before."""
    low_freq_factor: float = 1.0
    """llama3: frequencies with fewer turns than this in the old context are stretched."""
    high_freq_factor: float = 4.0
    """llama3: those with more turns are kept; between the two they are mixed."""
    beta_fast: float = 32.0
    """yarn: frequencies with more turns than this in the old context are kept."""
    beta_slow: float = 1.0
    """yarn: those with fewer are stretched."""
    truncate: bool = True
    """yarn: whether the bounds between the two are rounded outward to whole dimensions."""


def scaled_frequencies(inv_freq: Tensor, scaling: RopeScaling, base: float) -> Tensor:
    """fp32 [rotated features / 2] of the short context -> those of the long one."""
    stretched = inv_freq / scaling.factor
    if scaling.type == "linear":
        return stretched
    old = scaling.original_max_position_embeddings
    if scaling.type == "llama3":
        turns = old * inv_freq / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return kept * inv_freq + (1 - kept) * stretched
    count = 2 * inv_freq.numel()

    def dimension(turns: float) -> float:
        return count * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, count - 1)
    place = torch.arange(inv_freq.numel(), dtype=torch.float32, device=inv_freq.device)
    moved = ((place - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return moved * stretched + (1 - moved) * inv_freq


def note_concentration(config: Any, scaling: RopeScaling | None) -> None:
    """Tell megatron-core's attention the factor on rotated queries and keys that yarn asks for."""
    if scaling is not None and scaling.type == "yarn":
        config.yarn_rotary_scaling_factor = scaling.factor
        config.yarn_mscale = config.yarn_mscale_all_dim = None


def rotated_share(scaling: RopeScaling | None) -> float:
    """The factor itself: 1 except with yarn."""
    if scaling is None or scaling.type != "yarn" or scaling.factor <= 1:
        return 1.0
    return 0.1 * math.log(scaling.factor) + 1.0
