# SPDX-License-Identifier: Apache-2.0
"""The tables of STUDY.md, written between markers, so that no figure is copied by hand.

    <!-- study:NAME -->  ...what is replaced...  <!-- /study:NAME -->

NAME is `goals`, `runs`, `evidence:MODEL`, `gaps:MODEL` or `split:MODEL`. Text outside the markers
stays.
"""

import re
from collections.abc import Callable, Sequence

from fused_ops.errors import ConfigError
from pretrain.comparison.gaps import (
    broken_seeds,
    diverged_at,
    final_gaps,
    gap_differences,
    interval,
)
from pretrain.comparison.ratio import gap_ratio
from pretrain.comparison.reference import Reference
from pretrain.comparison.runs import Row
from pretrain.comparison.spread import spread
from pretrain.comparison.summary import spoken
from pretrain.study.goals import goals
from pretrain.study.results import REFERENCE_ROW, ModelResults, StudyRow
from pretrain.study.split import HEAD, split

_MARK = re.compile(r"<!-- study:(?P<name>[\w:.-]+) -->.*?<!-- /study:(?P=name) -->", re.DOTALL)
_EVIDENCE = (
    ("x, dB", "fprop.x snr_db"),
    ("W, dB", "fprop.w snr_db"),
    ("dY (dgrad), dB", "dgrad.dy snr_db"),
    ("dY (dgrad), slope", "dgrad.dy slope"),
    ("dY (dgrad), slope at maxima", "dgrad.dy slope_max"),
    ("dY (wgrad), slope", "wgrad.dy slope"),
    ("zero gradients", "zero_gradients"),
)


def fill(
    text: str,
    base_row: str,
    models: Sequence[ModelResults],
    references: Sequence[Reference] = (),
) -> str:
    """`text` with every marked part written anew; parts of models without runs say so.

    Args:
        text: with marks.
        base_row: name of the row that gaps are against.
        models: what was measured.
        references: published gaps, told beside those of `split`.

    Raises:
        ConfigError: a mark of another name.
    """
    by_name = {model.name: model for model in models}
    makers: dict[str, Callable[[ModelResults, str], str]] = {
        "gaps": gaps,
        "evidence": why,
        "split": lambda model, base_row: parts(model, base_row, references),
    }
    problems = []

    def part(match: re.Match[str]) -> str:
        name = match["name"]
        kind, _, model = name.partition(":")
        if name == "runs":
            body = runs(models)
        elif name == "goals":
            body = goals(models, base_row)
        elif kind in makers and model:
            found = by_name.get(model)
            body = "No run has finished yet." if found is None else makers[kind](found, base_row)
        else:
            problems.append(
                "a mark must be goals, runs, gaps:MODEL, evidence:MODEL or split:MODEL; got "
                f"study:{name}"
            )
            return match[0]
        return f"<!-- study:{name} -->\n{body}\n<!-- /study:{name} -->"

    filled = _MARK.sub(part, text)
    if problems:
        raise ConfigError(problems)
    return filled


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def gaps(model: ModelResults, base_row: str) -> str:
    """One line a row: final gaps of both forwards, beside V1's, speed and memory."""
    base, v1 = model.find(base_row), model.find(REFERENCE_ROW)
    if base is None:
        return f"No run of {base_row} has finished yet."
    every = [one.row for one in model.rows]
    scatter = {forward: spread(every, forward) for forward in ("own", "bf16")}
    head = (
        *(
            "row",
            "seeds",
            "validation loss",
            "gap, own forward, %",
            "pooled",
            "gap, BF16 forward, %",
        ),
        *("less V1's gap", "pooled", "over V1's gap", "said of it and V1"),
        "4-bit share of the linears' FLOPs (of all matrix products')",
        *("tokens/s", "GiB", "diverged"),
    )
    lines = []
    for one in model.rows:
        row, is_base = one.row, one is base
        own = interval(final_gaps(row, base.row))
        lines.append(
            [
                f"`{row.label}`",
                _count(row),
                spoken(interval(_ends(row)), ".4f"),
                "0" if is_base else spoken(own, "+.2f"),
                "" if is_base or own is None else _half(scatter["own"], len(own.seeds)),
                spoken(interval(final_gaps(row, base.row, "bf16")), "+.2f") if not is_base else "0",
                *_beside(one, v1, base),
                _shares(one),
                _speed(row, base.row),
                _memory(row),
                "" if is_base else _diverged(row, base.row),
            ]
        )
    own_spread = scatter["own"]
    said = "no estimate yet"
    if own_spread is not None:
        said = f"{own_spread.percent:.3f} % of the loss, {own_spread.freedom} degrees of freedom"
    note = (
        f"{model.steps} steps, {model.tokens / 1e6:.1f} M tokens"
        + (f" ({model.epochs:.2f} epochs)" if model.epochs else "")
        + f", {model.tokens_per_parameter:.2f} tokens a parameter outside the embeddings. "
        f"Spread of a run in its row and seed, all rows together: {said}."
    )
    return f"{_markdown(head, lines)}\n\n{note}"


def parts(model: ModelResults, base_row: str, references: Sequence[Reference]) -> str:
    """Gaps of forward and backward alone, beside the published ones."""
    base = model.find(base_row)
    lines = [] if base is None else split(model, base, references)
    return _markdown(HEAD, lines) if lines else "No part has run alone yet."


def _shares(one: StudyRow) -> str:
    """Of the block linears' FLOPs, and of all matrix products'."""
    if not one.four_bit:
        return ""
    every = "" if one.four_bit_all is None else f" ({one.four_bit_all:.4f})"
    return f"{one.four_bit:.4f}{every}"


def _count(row: Row) -> str:
    broken = broken_seeds(row)
    return f"{len(row.runs)}" + (f", {len(broken)} without a finite end" if broken else "")


def _ends(row: Row) -> dict[int, float]:
    broken = broken_seeds(row)
    return {
        seed: run.validation["own", ""][-1][1]
        for seed, run in row.runs.items()
        if seed not in broken
    }


def _half(found: object, seeds: int) -> str:
    half = getattr(found, "half", None)
    return "" if half is None else f"+- {half(seeds):.2f}"


def _beside(one: StudyRow, v1: StudyRow | None, base: StudyRow) -> list[str]:
    """Less V1's gap, pooled, over V1's gap, and what may be said."""
    if v1 is None or one in (v1, base):
        return ["", "", "1" if one is v1 else "", ""]
    found = gap_differences(one.row, v1.row, base.row)
    if found is None:
        return ["", "", "", "no common seed"]
    if broken_seeds(one.row) or broken_seeds(v1.row):
        return ["", "", "", "not every run ended with a finite loss"]
    pooled = spread([base.row, v1.row, one.row])
    words = {"above": "worse", "below": "better", "one seed": "one seed: nothing"}
    ratio = gap_ratio(one.row, v1.row, base.row)
    return [
        spoken(found, "+.2f"),
        _half(pooled, len(found.seeds)),
        "" if ratio is None else str(ratio),
        words.get(found.verdict, found.verdict),
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value]
    return sum(known) / len(known) if known else None


def _speed(row: Row, base: Row) -> str:
    own = _mean([run.tokens_per_s for run in row.runs.values()])
    other = _mean([run.tokens_per_s for run in base.runs.values()])
    if own is None:
        return ""
    return f"{own:,.0f}" + (f" ({own / other:.2f}x)" if other and row is not base else "")


def _memory(row: Row) -> str:
    held = max((run.memory_gib or 0.0 for run in row.runs.values()), default=0.0)
    return f"{held:.1f}" if held else ""


def _diverged(row: Row, base: Row) -> str:
    steps = [diverged_at(row.runs[s], base.runs[s]) for s in row.runs.keys() & base.runs.keys()]
    known = [step for step in steps if step is not None]
    return f"from step {min(known)}" if known else "no"


def runs(models: Sequence[ModelResults]) -> str:
    """What every figure is of: run file, seeds, tokens, epochs, card, commit."""
    head = ("model", "row", "seeds", "tokens of a run", "epochs", "card", "commit")
    lines = []
    for model in models:
        for one in model.rows:
            made = list(one.row.runs.values())
            lines.append(
                [
                    model.name,
                    f"`{one.row.label}`",
                    ", ".join(str(seed) for seed in sorted(one.row.runs)),
                    f"{model.tokens:,}",
                    f"{model.epochs:.2f}" if model.epochs else "?",
                    ", ".join(sorted({run.card for run in made})),
                    ", ".join(sorted({run.commit for run in made if run.commit})) or "?",
                ]
            )
    if not lines:
        return "No run has finished yet."
    return "\n\n".join([_markdown(head, lines), *_beginnings(models)])


def _beginnings(models: Sequence[ModelResults]) -> list[str]:
    """A sentence: how far apart rows with one forward began, which nothing but chance may do."""
    told = [(model.name, *entry) for model in models for entry in model.starts]
    if not told:
        return []
    parts = []
    for name, row, other, seeds, apart in told:
        words = "equal to the bit" if apart == 0 else f"up to {apart:.2g} apart"
        parts.append(f"{name} `{row}` and `{other}`, {_seeds(len(seeds))}: {words}")
    return [
        "First losses of rows whose forward is the same, so that only other weights, other data or "
        f"other sums could part them: {'; '.join(parts)}."
    ]


def _seeds(count: int) -> str:
    return f"{count} seed{'s' if count != 1 else ''}"


def why(model: ModelResults, base_row: str) -> str:
    """Means over the layers of what the monitor saw: operands of GEMMs and their products."""
    head = [
        "row",
        *(name for name, _ in _EVIDENCE),
        *(f"{g} error" for g in ("fprop", "dgrad", "wgrad")),
    ]
    lines = []
    for one in model.rows:
        means, errors = one.numerics.get("means", {}), one.numerics.get("errors", {})
        if one.row.label == base_row or not means:
            continue
        cells = [means.get(key) for _, key in _EVIDENCE]
        products = [_mean(errors.get(gemm, [])) for gemm in ("fprop", "dgrad", "wgrad")]
        lines.append(
            [f"`{one.row.label}`", *(_number(cell) for cell in cells), *map(_number, products)]
        )
    if not lines:
        return "Nothing has been monitored yet."
    steps = sorted({one.numerics["step"] for one in model.rows if one.numerics})
    place = f"Step {', '.join(map(str, steps))}, first seed, means over the linear layers."
    return f"{_markdown(head, lines)}\n\n{place}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
