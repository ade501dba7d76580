# SPDX-License-Identifier: Apache-2.0
"""The goals of a study beside what was measured, each with its interval."""

from collections.abc import Sequence

from pretrain.comparison.gaps import broken_seeds, final_gaps, gap_differences, interval
from pretrain.comparison.ratio import Ratio, gap_ratio, together
from pretrain.comparison.summary import spoken
from pretrain.study.results import REFERENCE_ROW, ModelResults, StudyRow

FAST_ROWS = ("nvfp4_fast_fp8", "nvfp4_fast_x8")
"""Rows whose GEMMs all run at FP8 speed on Hopper, and which may be better than V1."""
_SHARE = 0.8
"""Of V1's gap, what the best recipe may have."""


def goals(models: Sequence[ModelResults], base_row: str) -> str:
    """The three goals of the study beside what was measured, each with its interval."""
    lines = (
        ("(a) without BF16 layers at most 0.8 of V1's gap", _goal_gap),
        ("(b) at FP8 speed, better than V1", _goal_fast),
        ("(c) BF16 tail and late forward under 0.5 %, 0.78 of the FLOPs in 4 bits", _goal_late),
    )
    found = []
    for model in models:
        base, v1 = model.find(base_row), model.find(REFERENCE_ROW)
        if base is not None and v1 is not None:
            found.append((model, v1, base))
    text = []
    for name, measured in lines:
        # A mean over V1's survivors would flatter V1: nothing is held against it.
        able = [one for one in found if measured is _goal_late or not broken_seeds(one[1].row)]
        said = [f"{model.name} {one}" for model, *rows in able for one in measured(model, *rows)]
        if measured is _goal_gap:
            said += _goal_gap_together(able)
        text.append(f"- {name}: {'; '.join(said) or 'not yet measured'}.")
    return "\n".join(text)


def _verdict(is_met: bool, is_missed: bool) -> str:
    return "met" if is_met else "missed" if is_missed else "not decided"


def _goal_gap(model: ModelResults, v1: StudyRow, base: StudyRow) -> list[str]:
    """(a): the best row without BF16 layers has at most 0.8 of V1's gap; missed if none may.

    8 bits are no BF16: a row with them says how much of its FLOPs has 4.
    """
    found = [
        (ratio.value, one.row.label, one, ratio)
        for one in model.rows
        if one not in (v1, base) and _has_no_bf16_layers(one)
        if (ratio := gap_ratio(one.row, v1.row, base.row)) is not None
    ]
    if not found:
        return []
    _, label, best, ratio = min(found, key=lambda entry: entry[:2])
    return [f"`{label}` {_of_v1(best.four_bit, ratio, [each for *_, each in found])}"]


def _has_no_bf16_layers(one: StudyRow) -> bool:
    """In any part of the run; a row with a seed that broke down counts for nothing."""
    whole = not any(one.precision.get(key) for key in ("plan", "rules", "schedule"))
    return one.low_bit >= 0.999 and whole and not broken_seeds(one.row)


def _of_v1(four_bit: float, ratio: Ratio, every: Sequence[Ratio]) -> str:
    """The best row's share of V1's gap; `every`: of all the rows that it was chosen from."""
    met = ratio.high is not None and ratio.high <= _SHARE
    missed = all(each.low is not None and each.low > _SHARE for each in every)
    share = f", {four_bit:.2f} of the linears' FLOPs in 4 bits" if four_bit < 1 else ""
    chosen = f" (the lowest of {len(every)}, so a little too low)" if len(every) > 1 else ""
    return f"{ratio}{share}{chosen}: {_verdict(met, missed)}"


def _goal_gap_together(found: Sequence[tuple[ModelResults, StudyRow, StudyRow]]) -> list[str]:
    """(a) of the models together that have run a row without BF16 layers in two seeds or more."""
    by_row: dict[str, list[tuple[str, StudyRow, tuple[dict[int, float], dict[int, float]]]]] = {}
    for model, v1, base in found:
        for one in model.rows:
            gaps = final_gaps(one.row, base.row), final_gaps(v1.row, base.row)
            if one in (v1, base) or not _has_no_bf16_layers(one):
                continue
            if len(gaps[0].keys() & gaps[1].keys()) > 1:
                by_row.setdefault(one.row.label, []).append((model.name, one, gaps))
    several = {
        label: (parts, ratio)
        for label, parts in by_row.items()
        if (ratio := together([gaps for *_, gaps in parts])) is not None
    }
    if not several:
        return []
    label = min(several, key=lambda name: (several[name][1].value, name))
    parts, ratio = several[label]
    names = " and ".join(name for name, *_ in parts)
    four_bit = min(one.four_bit for _, one, _ in parts)
    said = _of_v1(four_bit, ratio, [each for _, each in several.values()])
    return [f"{names} together `{label}` {said}"]


def _goal_fast(model: ModelResults, v1: StudyRow, base: StudyRow) -> list[str]:
    """(b): a recipe whose GEMMs all run at FP8 speed on Hopper is better than V1."""
    said = []
    for label in FAST_ROWS:
        one = model.find(label)
        found = None if one is None else gap_differences(one.row, v1.row, base.row)
        if one is None or found is None:
            continue
        broken = bool(broken_seeds(one.row))
        met, missed = found.verdict == "below" and not broken, found.verdict == "above" or broken
        said.append(f"`{label}` {spoken(found, '+.2f')} points: {_verdict(met, missed)}")
    return said


def _goal_late(model: ModelResults, v1: StudyRow, base: StudyRow) -> list[str]:
    """(c): BF16 tail and late forward switch under 0.5 %, with 0.78 of GEMM FLOPs in 4 bits."""
    said = []
    for one in model.rows:
        gap = interval(final_gaps(one.row, base.row))
        if "_tail_late" not in one.row.label or gap is None:
            continue
        half = gap.half if gap.half is not None else float("inf")
        met = gap.mean + half < 0.5 and one.four_bit >= 0.78
        missed = gap.mean - half > 0.5 or one.four_bit < 0.78
        if broken_seeds(one.row):
            met, missed = False, True
        share = f"{one.four_bit:.4f} of the block linears' FLOPs"
        if one.four_bit_all is not None:
            share += f" ({one.four_bit_all:.4f} of all matrix products')"
        said.append(f"`{one.row.label}` {spoken(gap, '+.2f')} %, {share}: {_verdict(met, missed)}")
    return said
