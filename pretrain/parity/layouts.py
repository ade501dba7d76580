# SPDX-License-Identifier: Apache-2.0
"""Layouts by name: `tp2sp`, `pp2v2`, `tp2sp_etp1_ep2`, `dp2_overlap`."""

import math
import re
from dataclasses import dataclass
from typing import Any

from fused_ops.errors import ConfigError
from models.config import ParallelConfig

_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "v": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
_SWITCHES: dict[str, dict[str, Any]] = {
    "sp": {"sequence_parallel": True},
    "overlap": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    "whole": {"use_distributed_optimizer": False},
}
_RECOMPUTE = {
    "recompute": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}
_WORD = re.compile(r"(etp|tp|pp|cp|ep|dp|v)(\d+)|(sp|overlap|whole|recompute|packed)")

DEFAULT_LAYOUTS = (
    "tp2",
    "tp2sp",
    "pp2",
    "pp2v2",
    "cp2",
    "ep2",
    "dp2",
    "dp2_overlap",
    "tp2sp_etp1_ep2",
    "tp2sp_recompute",
    "tp2sp_packed",
    "tp2pp2",
    "tp2sp_cp2",
    "pp2_ep2",
)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A way to lay a run over processes."""

    name: str
    parallel: ParallelConfig
    megatron: dict[str, Any]
    """Further fields of `model.megatron`: recomputation."""
    processes: int
    """How many it needs."""
    communicate: str = "bf16"
    """What sequence-parallel gathers move: `precision.communicate`."""


def parse_layout(name: str) -> Layout:
    """The layout of a name.

    Words, in any order, with or without `_` between them: tpN, sp, ppN, vN (stages a process), cpN,
    epN, etpN, dpN; overlap (of gradient reduction and parameter gather), whole (no distributed
    optimizer), recompute, packed (gathers of codes). dpN is as large as the others need where it
    is not given.

    Raises:
        ConfigError: a word that is none of them, or one twice.
    """
    fields: dict[str, Any] = {}
    megatron: dict[str, Any] = {}
    data, position, communicate = None, 0, "bf16"
    while position < len(name):
        if name[position] in "_-":
            position += 1
            continue
        found = _WORD.match(name, position)
        if found is None:
            raise ConfigError(
                f"a layout is made of tpN, sp, ppN, vN, cpN, epN, etpN, dpN, overlap, whole, "
                f"recompute and packed; got {name!r} at {name[position:]!r}; such as tp2sp, pp2v2 "
                "or dp2"
            )
        key, size, switch = found.groups()
        position = found.end()
        if key == "dp":
            data = int(size)
        elif key:
            fields[_SIZES[key]] = int(size)
        elif switch in _RECOMPUTE:
            megatron |= _RECOMPUTE[switch]
        elif switch == "packed":
            communicate = switch
        else:
            fields |= _SWITCHES[switch]
    if not name:
        raise ConfigError("a layout needs a name, such as tp2sp; got an empty one")
    parallel = ParallelConfig(**fields)
    return Layout(
        name=name,
        parallel=parallel,
        megatron=megatron,
        processes=_processes(parallel, data),
        communicate=communicate,
    )


def _processes(parallel: ParallelConfig, data: int | None) -> int:
    if data is not None:
        return parallel.dense_ranks * data
    return math.lcm(parallel.dense_ranks, parallel.expert_ranks)


def shares_experts_over_samples(layout: Layout, pattern: str) -> bool:
    """Whether tokens meet in an expert in another order than in one process.

    With experts over data-parallel ranks those of several micro-batches do; with context
    parallelism an expert has the tokens of a piece of the sequence.
    """
    if "E" not in pattern:
        return False
    parallel = layout.parallel
    if parallel.context_parallel_size > 1:
        return True
    tensor = parallel.tensor_model_parallel_size
    inner = parallel.expert_tensor_parallel_size or tensor
    # Ranks of one micro-batch are the tensor-parallel ones: experts over more than those mix.
    return parallel.expert_model_parallel_size * inner > tensor or (
        parallel.expert_model_parallel_size * inner < tensor
    )
