# SPDX-License-Identifier: Apache-2.0
"""The tables of a study: each model's rows beside its base row."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pretrain.comparison.picture import write_html, write_png
from pretrain.comparison.runs import Row
from pretrain.comparison.summary import between_rows, summarize, table
from pretrain.study.plan import Study, has_ended
from pretrain.study.trained import changes, read_all, told

_OTHERWISE = "trained otherwise than study.yaml says now"


def collect(study: Study, folder: Path) -> dict[str, str]:
    """{model: its table as text}; also written to `folder`/tables as text, PNG and HTML.

    Models whose base row has no run yet are left out, and runs that are not the study's: those are
    named below the table.
    """
    found = {}
    for model in study.models:
        rows: dict[str, Row] = {}
        trained = read_all(run for run in study.runs if run.model == model)
        other = changes(trained)
        for run, there in trained:
            if run.name not in other:
                rows.setdefault(run.row, Row(run.row)).runs[run.seed] = there
        base = rows.get(study.base_row)
        if base is None:
            continue
        found_rows = list(rows.values())
        lines, said = summarize(found_rows, base), between_rows(found_rows, base)
        said += [f"{name} is left out: {_OTHERWISE}: {told(each)}" for name, each in other.items()]
        text = "\n".join([f"{model}", "", table(lines), "", *said])
        place = folder / "tables"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{model}.txt").write_text(text + "\n")
        write_png(found_rows, base, place / f"{model}.png")
        write_html(found_rows, base, lines, said, place / f"{model}.html")
        found[model] = text
    return found


class Tables:
    """Writes the tables in a thread, so that no device waits for them; one `collect` at a time.

    What fails in it fails again in the caller's own last `collect`.
    """

    def __init__(self, study: Study, folder: Path) -> None:
        self.study, self.folder = study, folder
        self._pool = ThreadPoolExecutor(1, "study-tables")
        self._last: Future[Any] | None = None

    def refresh(self) -> None:
        """Begins to write them, unless that is going on."""
        if self._last is None or self._last.done():
            self._last = self._pool.submit(collect, self.study, self.folder)

    def close(self) -> None:
        """Waits for what has begun."""
        self._pool.shutdown(wait=True)


def state_of(study: Study) -> str:
    """One line a run: finished, how far, or not begun; and where it is not the study's run."""
    trained = read_all(study.runs)
    taken = {run.name: max(step for step, _ in there.losses) for run, there in trained}
    lines, other = [], changes(trained)
    for run in study.runs:
        done = taken.get(run.name, 0)
        finished = done >= run.steps and has_ended(run)
        word = "finished" if finished else f"step {done} of {run.steps}" if done else "-"
        if run.name in other:
            word += f"; {_OTHERWISE}: {told(other[run.name])}"
        lines.append(f"{run.name:40} {word}")
    return "\n".join([*lines, *study.notes])
