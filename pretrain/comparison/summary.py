# SPDX-License-Identifier: Apache-2.0
"""The table of a comparison: one line a row of runs, and what may be said about pairs of rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pretrain.comparison.gaps import (
    DIVERGED,
    Interval,
    broken_seeds,
    diverged_at,
    end_together,
    final_gaps,
    first_difference,
    gap_differences,
    interval,
    training_gaps,
)
from pretrain.comparison.ratio import gap_ratio
from pretrain.comparison.runs import FORWARDS, Row, differences

HEAD = (
    *("row", "seeds", "val loss", "gap, own forward %", "gap, BF16 forward %", "training gap %"),
    *("against the base", "tokens/s", "memory GiB", "4-bit", "first other step", "diverged"),
)


@dataclass(frozen=True)
class Line:
    """One row of runs beside the base."""

    label: str
    is_base: bool
    seeds: tuple[int, ...]
    unfinished: tuple[int, ...]
    broken: tuple[int, ...]
    """Finished without a finite loss: nothing is said of the others' mean."""
    base_broken: tuple[int, ...]
    """Of these seeds, those of the base."""
    paired: bool
    """Whether it shares a seed with the base."""
    val_loss: Interval | None
    """Of the own forward, where finished."""
    gaps: dict[str, Interval | None]
    """By forward, per cent, at the end."""
    training_gap: Interval | None
    """Of the last tenth of the steps."""
    tokens_per_s: float | None
    speed: float | None
    """Over the base's."""
    memory_gib: float | None
    four_bit_share: float | None
    first_difference: int | None
    diverged: int | None
    notes: list[str]

    @property
    def verdict(self) -> str:
        """Better or worse than the base, where the interval of the own forward's gap says so."""
        if self.is_base:
            return "base"
        if self.broken:
            return f"no finite end in {len(self.broken)} of {len(self.seeds)} seeds"
        if self.base_broken:
            return f"no finite end of the base in {len(self.base_broken)} of its seeds"
        gap = self.gaps["own"]
        if gap is None:
            return "no common end"
        words = {"above": "worse", "below": "better", "one seed": "one seed: no interval"}
        return words.get(gap.verdict, gap.verdict)


def summarize(rows: Sequence[Row], base: Row, diverged: float = DIVERGED) -> list[Line]:
    """A line for each row; the base's stands among them."""
    return [_line(row, base, diverged) for row in rows]


def _line(row: Row, base: Row, diverged: float) -> Line:
    runs, shared = row.runs, sorted(row.runs.keys() & base.runs.keys())
    ends = {seed: loss for seed, run in runs.items() if (loss := run.final_loss()) is not None}
    last = {}
    for seed, points in training_gaps(row, base, bins=10).items():
        both_ended = end_together(runs[seed], base.runs[seed])
        if both_ended and points[-1][0] >= runs[seed].steps:
            last[seed] = points[-1][1]
    first = [first_difference(runs[seed], base.runs[seed]) for seed in shared]
    ended = [diverged_at(runs[seed], base.runs[seed], diverged) for seed in shared]
    speed = _mean([run.tokens_per_s for run in runs.values()])
    base_speed = _mean([run.tokens_per_s for run in base.runs.values()])
    return Line(
        label=row.label,
        is_base=row is base,
        seeds=tuple(sorted(runs)),
        unfinished=tuple(sorted(seed for seed, run in runs.items() if not run.finished)),
        broken=tuple(broken_seeds(row)),
        base_broken=tuple(sorted(set(broken_seeds(base)) & set(shared))),
        paired=bool(shared),
        val_loss=interval(ends),
        gaps={forward: interval(final_gaps(row, base, forward)) for forward in FORWARDS},
        training_gap=interval(last),
        tokens_per_s=speed,
        speed=speed / base_speed if speed and base_speed else None,
        memory_gib=max((run.memory_gib or 0.0 for run in runs.values()), default=0.0) or None,
        four_bit_share=next(iter(runs.values())).four_bit_share,
        first_difference=min((step for step in first if step is not None), default=None),
        diverged=min((step for step in ended if step is not None), default=None),
        notes=[*_notes(row, base), *_of_other_sets(row, base)],
    )


def _notes(row: Row, base: Row) -> list[str]:
    """What keeps a row from being compared fairly with the base, in sentences."""
    both = [*row.runs.values(), *base.runs.values()]
    notes = [f"differs from the base in {text}" for text in differences(row, base)]
    cards = {run.card or "not recorded" for run in both}
    if len(cards) > 1:
        notes.append(f"speeds are of different machines: {', '.join(sorted(cards))}")
    if len({run.data for run in both if run.data}) > 1:
        notes.append(
            "not all runs, the base's among them, have read the same tokens (data in "
            "environment.json): their losses are of different data"
        )
    missing = sorted(row.runs.keys() - base.runs.keys())
    if missing:
        notes.append(f"no run of the base has seed {', '.join(map(str, missing))}")
    broken = broken_seeds(row)
    if broken:
        notes.append(
            f"no finite loss at the end of seed {', '.join(map(str, broken))}: means are of the "
            "others"
        )
    return notes


def _of_other_sets(row: Row, base: Row) -> list[str]:
    """Which validation set the columns are of, where sets have names, and gaps of the others."""
    first = next(iter(row.runs.values()))
    if not first.main_set:
        return []
    found = [f"losses and gaps are of validation set {first.main_set}"]
    for name in first.other_sets if row is not base else ():
        gaps = {f: interval(final_gaps(row, base, f, name)) for f in FORWARDS}
        told = [f"{f} forward {spoken(gap, '+.2f')} %" for f, gap in gaps.items() if gap]
        found.append(f"gap on {name}: {', '.join(told) or 'no common end'}")
    return found


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value]
    return sum(known) / len(known) if known else None


def cells(line: Line) -> list[str]:
    """The line under HEAD."""
    seeds = str(len(line.seeds))
    if line.unfinished:
        seeds += f" ({len(line.unfinished)} unfinished)"
    speed = "" if line.tokens_per_s is None else f"{line.tokens_per_s:.0f}"
    if line.speed is not None and not line.is_base:
        speed += f" ({line.speed:.2f}x)"
    gaps = ["" if line.is_base else spoken(line.gaps[name], "+.2f") for name in FORWARDS]
    if line.is_base and line.gaps["bf16"] is not None and line.gaps["bf16"].mean:
        gaps[1] = spoken(line.gaps["bf16"], "+.2f")
    return [
        line.label,
        seeds,
        spoken(line.val_loss, ".4f"),
        *gaps,
        "" if line.is_base else spoken(line.training_gap, "+.2f"),
        line.verdict,
        speed,
        "" if line.memory_gib is None else f"{line.memory_gib:.2f}",
        "" if line.four_bit_share is None else f"{100 * line.four_bit_share:.0f}%",
        "" if line.is_base or not line.paired else str(line.first_difference or "none"),
        "" if line.is_base or not line.paired else str(line.diverged or "no"),
    ]


def spoken(value: Interval | None, style: str) -> str:
    """`+1.12 +- 0.09`; a single seed stands alone."""
    if value is None:
        return ""
    half = "" if value.half is None else f" +- {format(value.half, style.lstrip('+'))}"
    return f"{format(value.mean, style)}{half}"


def table(lines: Sequence[Line]) -> str:
    """The table as text, with its notes."""
    rows = [list(HEAD), *(cells(line) for line in lines)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    ]
    notes = [f"{line.label}: {note}" for line in lines for note in line.notes]
    legend = (
        "+- is the 95 % t interval of the mean over seeds, each paired with the base of its seed; "
        "one seed has none. 4-bit: of the FLOPs of all matrix products, as the run began."
    )
    return "\n".join([*text, "", legend, *notes])


def between_rows(rows: Sequence[Row], base: Row, forward: str = "own") -> list[str]:
    """What pairs of rows say of each other: the difference of their gaps, paired by seed.

    Rows with a seed that did not end with a finite loss are left out: `Line.verdict` says so.
    """
    others, said = [row for row in rows if row is not base and not broken_seeds(row)], []
    for i, first in enumerate(others):
        for second in others[i + 1 :]:
            found = gap_differences(first, second, base, forward)
            if found is None:
                continue
            words = {
                "above": f"{second.label} is better",
                "below": f"{first.label} is better",
                "one seed": "one seed: nothing can be said",
            }
            verdict = words.get(found.verdict, found.verdict)
            difference = spoken(found, "+.2f")
            said.append(f"{first.label} less {second.label}: {difference} points: {verdict}")
    return said


def ratios(rows: Sequence[Row], other: Row, base: Row, forward: str = "own") -> list[str]:
    """Each row's gap over another row's, paired by seed, with Fieller's interval.

    Of rows whose seeds have all ended with a finite loss, as `between_rows`.
    """
    said = []
    for row in rows if not broken_seeds(other) else ():
        found = gap_ratio(row, other, base, forward)
        if row not in (base, other) and found is not None and not broken_seeds(row):
            said.append(f"gap of {row.label} over that of {other.label}: {found}")
    return said


def as_data(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Plain data, for a file that is read again."""

    def plain(value: Interval | None) -> Any:
        if value is None:
            return None
        return {"mean": value.mean, "half": value.half, "seeds": list(value.seeds)}

    return [
        {
            "row": line.label,
            "seeds": list(line.seeds),
            "unfinished": list(line.unfinished),
            "broken": list(line.broken),
            "val_loss": plain(line.val_loss),
            "gaps": {name: plain(gap) for name, gap in line.gaps.items()},
            "training_gap": plain(line.training_gap),
            "verdict": line.verdict,
            "tokens_per_s": line.tokens_per_s,
            "speed": line.speed,
            "memory_gib": line.memory_gib,
            "four_bit_share": line.four_bit_share,
            "first_difference": line.first_difference,
            "diverged": line.diverged,
            "notes": line.notes,
        }
        for line in lines
    ]
