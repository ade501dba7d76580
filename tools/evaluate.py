# SPDX-License-Identifier: Apache-2.0
"""Tasks of lm-evaluation-harness on a checkpoint: `python -m tools.evaluate CKPT_DIR --tasks ...`.

python -m tools.evaluate runs/NAME/checkpoints --tasks arc_easy,hellaswag --limit 100
python -m tools.evaluate CKPT_DIR --tasks mine.yaml --output results.json [section.key=value ...]

A task is a name that the harness knows (it fetches the data) or the YAML file of one, whose data
may be local files. The model computes in the precision that it was trained in; overrides such as
precision.recipe=bf16 change that. One process; the package lm_eval must be installed.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from fused_ops.errors import ConfigError
from pretrain.command_line import output_problems, prepare, refused, run_program


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CKPT_DIR")
    add("overrides", nargs="*", metavar="section.key=value", help="over the run's own settings")
    add("--tasks", required=True, help="names or YAML files, separated by commas")
    add("--include", type=Path, metavar="DIR", help="a folder of further tasks")
    add("--num-fewshot", type=int, metavar="N", help="examples before a question")
    add("--limit", type=float, metavar="N", help="at most N questions a task; below 1 a share")
    add("--batch-size", type=int, default=8)
    add("--max-length", type=int, metavar="TOKENS", help="longest input (the run's seq_length)")
    add("--output", type=Path, metavar="FILE", help="write the results there as JSON")
    add("--tokenizer", type=Path, metavar="FILE", help="default: the checkpoint's or its data's")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    return parser


def _names(options: argparse.Namespace) -> list[str]:
    return [name.strip() for name in options.tasks.split(",") if name.strip()]


def _problems(options: argparse.Namespace) -> list[str]:
    rules = (
        (
            options.limit is None
            or 0 < options.limit < 1
            or (options.limit >= 1 and options.limit.is_integer()),
            f"--limit must be a whole number of questions, or a share below 1; got {options.limit}",
        ),
        (
            options.num_fewshot is None or options.num_fewshot >= 0,
            f"--num-fewshot must not be negative; got {options.num_fewshot}",
        ),
        (bool(_names(options)), f"--tasks must name a task; got {options.tasks!r}"),
        (options.batch_size >= 1, f"--batch-size must be at least 1; got {options.batch_size}"),
        (
            options.max_length is None or options.max_length >= 2,
            f"--max-length must be at least 2 tokens; got {options.max_length}",
        ),
        (
            options.include is None or options.include.is_dir(),
            f"--include must be a folder; {options.include} is not one",
        ),
    )
    found = [text for holds, text in rules if not holds]
    return found + output_problems("--output", options.output)


def _evaluate(options: argparse.Namespace) -> None:
    from pretrain.generation.harness import require_harness, run_tasks, table
    from pretrain.generation.opened import OpenedModel
    from pretrain.generation.scoring import Scorer

    if problems := _problems(options):
        raise ConfigError(problems)
    require_harness()  # before a large model is read
    opened = OpenedModel(
        options.checkpoint, options.tokenizer, options.device, overrides=options.overrides
    )
    scorer = Scorer(opened, options.batch_size, options.max_length)
    results = run_tasks(
        scorer,
        _names(options),
        include=options.include,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
    )
    print(table(results))
    for note in scorer.notes():
        print(f"note: {note}")
    if options.output is not None:
        options.output.write_text(json.dumps(_kept(results, opened), indent=2, default=str) + "\n")


def _kept(results: dict[str, Any], opened: Any) -> dict[str, Any]:
    """What the file holds: results, and what they are of."""
    named = ("results", "groups", "n-samples", "n-shot", "versions", "higher_is_better")
    kept = {name: results[name] for name in named if name in results}
    return {"checkpoint": str(opened.path), "overrides": list(opened.overrides), **kept}


def main(arguments: list[str] | None = None) -> int:
    """Prints the table of results; returns the exit status."""
    options = _parser().parse_intermixed_args(arguments)
    prepare()
    from pretrain.checkpoint.manager import CheckpointError
    from pretrain.initialize import shut_down

    try:
        _evaluate(options)
    except (ConfigError, CheckpointError) as error:
        return refused(error)
    finally:
        shut_down()
    return 0


if __name__ == "__main__":
    run_program(main)
