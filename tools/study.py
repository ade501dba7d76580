# SPDX-License-Identifier: Apache-2.0
"""Runs a study: many runs on the devices of one machine, resumed, and their table.

    python -m tools.study examples/study --budget --gpus 1 --per-gpu 4    # what it costs, first
    python -m tools.study examples/study --gpus 4                        # one run on each GPU
    python -m tools.study examples/study --gpus 1 --per-gpu 4 --minutes 9
    python -m tools.study examples/study --report STUDY.md               # tables and figures

DIR holds study.yaml (pretrain/study/plan.py says how it reads). Small models are bound by the
host: --per-gpu lets several share a GPU. --only picks runs by parts of their names, in that order.
Interrupted or out of time, the runs save and stop; called again, the study goes on. The tables of
finished runs are in RUNS/tables. `section.key=value` behind DIR changes all runs. --report writes
what the finished runs came to into DIR/results.json and, from that file, which it keeps where there
are no runs, the marked parts of a text and DIR/figures. Runs of several machines are reported
together when their folders lie in one RUNS. Exit status: 0 when all is finished, 3 when something
is left, 1 when a run failed.
"""

import argparse
import fcntl
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fused_ops.errors import ConfigError
from pretrain.command_line import folder_problems, prepare, refused, run_program

if TYPE_CHECKING:
    from pretrain.study.place import Places
    from pretrain.study.plan import Study


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; returns its exit status."""
    prepare()
    parser = argparse.ArgumentParser(prog="python -m tools.study", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("directory", metavar="DIR", type=Path, help="holds study.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for all runs")
    parser.add_argument("--gpus", type=int, help="GPUs to use (1)")
    parser.add_argument("--per-gpu", type=int, default=1, help="runs on each at once (%(default)s)")
    parser.add_argument("--cpu", action="store_true", help="no GPU: --per-gpu runs on the CPU")
    parser.add_argument("--runs", type=Path, help="where runs go (runs/ and the name of DIR)")
    parser.add_argument("--minutes", type=float, help="save and stop after this time")
    parser.add_argument("--grace", type=float, default=90.0, help="seconds to save (%(default)s)")
    parser.add_argument("--budget", action="store_true", help="measure rates and print the cost")
    parser.add_argument(
        "--budget-rows", default="", help="rows to measure (the base row and the first other one)"
    )
    parser.add_argument("--budget-steps", type=int, default=40, help="of a trial (%(default)s)")
    parser.add_argument("--hours", type=float, help="with --budget: which rows end within")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="TEXT,...",
        help="runs whose names contain a text, in the order of the texts; may be repeated",
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="fill FILE's marks and stop")
    parser.add_argument("--list", action="store_true", help="print the runs and how far they are")
    options = parser.parse_intermixed_args(arguments)
    try:
        return _study(options)
    except ConfigError as error:
        return refused(error)


def _study(options: argparse.Namespace) -> int:
    from pretrain.study.place import Places
    from pretrain.study.plan import load_study, select, start_problems_of

    folder = options.runs or Path("runs") / options.directory.resolve().name
    study = load_study(options.directory, folder.resolve(), options.overrides)
    if options.report and options.only:
        raise ConfigError("--report is of all finished runs; leave --only out")
    whole, texts = study, [text for one in options.only for text in one.split(",")]
    study = replace(whole, runs=select(whole.runs, texts))
    problems = [*_number_problems(options), *_row_problems(options, study)]
    options.gpus = 1 if options.gpus is None else options.gpus
    places = Places(() if options.cpu else tuple(range(options.gpus)), options.per_gpu)
    if (options.report or options.list) and not problems:
        _tell(study, folder, places, options)
        return 0
    from pretrain.study.trained import problems_of, read_all

    problems += [*_place_problems(options), *start_problems_of(study)]
    # Tables are of the whole: a folder that cannot be read is told before anything runs.
    picked = {run.name for run in study.runs}
    problems += problems_of([one for one in read_all(whole.runs) if one[0].name in picked])
    if problems := problems or folder_problems("--runs", folder):
        raise ConfigError(problems)
    with _alone_in(folder):
        if options.budget:
            _budget(study, folder, places, options)
            return 0
        return _run(study, whole, folder, places, options)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """ConfigError where another study works in the folder of runs."""
    with (folder / "study.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"one study at a time may work in {folder}; another one does; wait for it, or "
                "name another --runs"
            ) from None
        yield


def _budget(study: "Study", folder: Path, places: "Places", options: argparse.Namespace) -> None:
    """Measures rates, and prints what the rest of the study costs."""
    from pretrain.study.budget import costs, measure, render, trial_rows

    rows = _budget_rows(options) or trial_rows(study)
    steps, minutes = options.budget_steps, options.minutes
    rates = measure(study, rows, places, folder, steps=steps, minutes=minutes)
    print(render(costs(study, rates), places, options.hours))


def _run(
    study: "Study", whole: "Study", folder: Path, places: "Places", options: argparse.Namespace
) -> int:
    """Runs what is left of the study, prints the tables of the whole; returns the exit status."""
    from pretrain.study.collect import Tables, collect
    from pretrain.study.place import run_all
    from pretrain.study.plan import is_finished

    tables = Tables(whole, folder)
    outcome = run_all(
        study.runs,
        places,
        folder,
        minutes=options.minutes,
        grace_seconds=options.grace,
        after=lambda run: tables.refresh(),
    )
    tables.close()
    for text in collect(whole, folder).values():
        print(f"\n{text}")
    for note in study.notes:
        print(note)
    left = [run.name for run in study.runs if not is_finished(run)]
    print(f"\n{len(study.runs) - len(left)} of {len(study.runs)} runs finished; {folder}/tables")
    if outcome.failed:
        print(f"failed: {', '.join(outcome.failed)}; {folder}/logs says why", file=sys.stderr)
        return 1
    return 3 if left else 0


def _tell(study: "Study", folder: Path, places: "Places", options: argparse.Namespace) -> None:
    """What there is already: the report, or how far each run is."""
    from pretrain.study.budget import costs, read_rates, render
    from pretrain.study.collect import state_of
    from pretrain.study.report import report

    if options.report:
        print("\n".join(report(study, options.directory, options.report)))
        return
    print(state_of(study))
    if rates := read_rates(folder):
        print(f"\n{render(costs(study, rates), places, options.hours)}")


def _number_problems(options: argparse.Namespace) -> list[str]:
    """What no call can mean."""
    problems = []
    if options.cpu and options.gpus is not None:
        problems.append("--gpus cannot go with --cpu, which uses none; leave one of the two out")
    problems += [
        f"{name} must be at least 1; got {value}"
        for name, value in (
            ("--gpus", 1 if options.cpu or options.gpus is None else options.gpus),
            ("--per-gpu", options.per_gpu),
            ("--budget-steps", options.budget_steps),
        )
        if value < 1
    ]
    problems += [
        f"{name} must be a time above 0; got {value:g}"
        for name, value in (("--minutes", options.minutes), ("--hours", options.hours))
        if value is not None and not 0 < value < math.inf
    ]
    if not 0 <= options.grace < math.inf:
        problems.append(f"--grace must be at least 0 seconds; got {options.grace:g}")
    return problems


def _budget_rows(options: argparse.Namespace) -> list[str]:
    return [name.strip() for name in options.budget_rows.split(",") if name.strip()]


def _row_problems(options: argparse.Namespace, study: "Study") -> list[str]:
    """Of --budget-rows, beside the runs that --only has left."""
    wanted, known = _budget_rows(options), dict.fromkeys(run.row for run in study.runs)
    problems = [
        f"--budget-rows must name rows that the runs have: {', '.join(known)}; got {name!r}"
        for name in wanted
        if name not in known
    ]
    if wanted and not options.budget:
        problems.append("--budget-rows says what --budget measures; add --budget, or leave it out")
    return problems


def _place_problems(options: argparse.Namespace) -> list[str]:
    import torch

    # On a CPU `cpu_compat` lets megatron-core count one.
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if options.cpu or options.gpus <= there:
        return []
    return [
        f"--gpus {options.gpus} needs so many GPUs; torch sees {there}; "
        + ("lower it, or use --cpu" if there else "use --cpu")
    ]


if __name__ == "__main__":
    run_program(main)
