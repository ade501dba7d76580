# SPDX-License-Identifier: Apache-2.0
"""A recipe's gap beside the gaps of its forward alone and of its backward alone."""

from collections.abc import Sequence

from pretrain.comparison.gaps import final_gaps, interval
from pretrain.comparison.ratio import fieller
from pretrain.comparison.reference import Reference
from pretrain.comparison.summary import spoken
from pretrain.study.results import ModelResults, StudyRow

FAMILIES = (
    ("nvfp4", "nvfp4_forward_only", "nvfp4_backward_only"),
    ("nvfp4_fast_fp8", "nvfp4_fast_forward_only", "nvfp4_fast_backward_only"),
)
"""Rows: the whole recipe, its forward with the rest in BF16, its backward with a BF16 forward."""
HEAD = (
    *("recipe", "where", "whole, %", "forward only, %", "backward only, %"),
    *("forward and backward only, added", "forward only over whole", "backward only over whole"),
)


def split(model: ModelResults, base: StudyRow, references: Sequence[Reference]) -> list[list[str]]:
    """Lines under HEAD for each recipe of which a part has run, with the published ones below it.

    Args:
        model: the rows.
        base: what gaps are against.
        references: published gaps; those named published-SIZE/ROW of the model's size are told.
    """
    lines = []
    for names in FAMILIES:
        gaps = [_gaps(model.find(name), base) for name in names]
        if not gaps[0] or not (gaps[1] or gaps[2]):
            continue
        whole, forward, backward = gaps
        both = {seed: forward[seed] + backward[seed] for seed in forward.keys() & backward.keys()}
        parts = [_told(each) for each in (whole, forward, backward, both)]
        ratios = [fieller(part, whole) for part in (forward, backward)]
        lines.append([f"`{names[0]}`", "here", *parts, *(str(r) if r else "" for r in ratios)])
        lines += _published(names, model.name.rpartition("-")[2], references)
    return lines


def _gaps(one: StudyRow | None, base: StudyRow) -> dict[int, float]:
    return {} if one is None else final_gaps(one.row, base.row)


def _told(gaps: dict[int, float]) -> str:
    found = interval(gaps)
    seeds = f" ({len(gaps)} seed{'s' if len(gaps) != 1 else ''})"
    return "" if found is None else spoken(found, "+.2f") + seeds


def _published(names: Sequence[str], size: str, references: Sequence[Reference]) -> list[list[str]]:
    """One line for each number of tokens a parameter at which a part was published."""
    found: dict[float, dict[str, float]] = {}
    for one in references:
        for name in names:
            if one.name == f"published-{size}/{name}" and one.gaps["own"]:
                found.setdefault(one.tokens_per_parameter, {})[name] = one.gaps["own"][0]
    lines = []
    for tokens, gaps in sorted(found.items()):
        values = [gaps.get(name) for name in names]
        whole, forward, backward = values
        both = None if forward is None or backward is None else forward + backward
        cells = ["" if value is None else f"{value:+.2f}" for value in (*values, both)]
        shares = [
            f"{part / whole:.2f}" if part is not None and whole else ""
            for part in (forward, backward)
        ]
        lines.append(
            [f"`{names[0]}`", f"published, {tokens:g} tokens a parameter", *cells, *shares]
        )
    return lines
