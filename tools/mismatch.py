# SPDX-License-Identifier: Apache-2.0
"""How far a sampler is from its trainer, in log-probabilities: `python -m tools.mismatch CKPT_DIR`.

python -m tools.mismatch CKPT_DIR --sampler nvfp4_pow2 --trainer bf16
python -m tools.mismatch CKPT_DIR --sample --handoff DIR        # the seam as a training loop has it

The sampler goes through caches, token by token; the trainer through the training forward; both on
the same tokens of validation data, or with --sample on what the sampler writes. A side is a plan or
a recipe by name, as in nvfp4_fast:fp8, with settings of its own as in
nvfp4+precision.amax_scope=shard; without a name it is the run's `precision.phases`, or what the run
trains in. With --handoff the sampler multiplies with weights that were handed over, packed, through
that folder.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from fused_ops.errors import ConfigError
from pretrain.command_line import (
    folder_problems,
    output_problems,
    prepare,
    refused,
    run_program,
    seed_problems,
)

if TYPE_CHECKING:
    from pretrain.generation.mismatch_report import Question, Report

COLUMNS = (
    ("mean", "mean |d|"),
    ("largest", "max |d|"),
    ("probability_error", "E exp|d|"),
    ("k3", "k3 s||t"),
    ("k3_reverse", "k3 t||s"),
    ("kl", "KL s||t"),
    ("kl_reverse", "KL t||s"),
    ("outside", "outside [1/2, 2]"),
    ("sequence", "max |sum d|"),
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.mismatch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CKPT_DIR")
    add("overrides", nargs="*", metavar="section.key=value", help="over the run's own settings")
    side = "PLAN or RECIPE[:DECODE][+KEY=VALUE...] of the"
    add("--sampler", metavar="NAME", help=f"{side} cached pass")
    add("--trainer", metavar="NAME", help=f"{side} training forward")
    add("--data", type=Path, metavar="DIR", help="token shards (default: the run's data.valid)")
    add("--sequences", type=int, default=8)
    add("--length", type=int, metavar="TOKENS", help="of a sequence (default: up to 256)")
    add("--prompt", type=int, default=16, metavar="TOKENS", help="not compared, taken at once")
    add("--sample", action="store_true", help="compare on what the sampler writes to the prompts")
    add("--seed", type=int, default=0, help="of --sample")
    add("--handoff", type=Path, metavar="DIR", help="hand packed weights over through this folder")
    add("--output", type=Path, metavar="FILE", help="write the figures there as JSON")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    return parser


def _question(options: argparse.Namespace) -> "Question":
    """ConfigError with all that is wrong, before the model is read."""
    from pretrain.generation.mismatch_report import Question

    problems = output_problems("--output", options.output) + seed_problems(options.seed)
    problems += folder_problems("--handoff", options.handoff)
    try:
        question = Question(
            sampler=options.sampler,
            trainer=options.trainer,
            data=options.data,
            sequences=options.sequences,
            length=options.length,
            prompt=options.prompt,
            sample=options.sample,
            seed=options.seed,
            handoff=options.handoff,
        )
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    return question


def _print_report(report: "Report") -> None:
    rows = [
        ("bf16 both", report.baseline),
        (f"sampler {report.sampler}, trainer {report.trainer}", report.mismatch),
    ]
    width = max(len(name) for name, _ in rows)
    print(f"{report.mismatch.tokens} tokens; d = log p of the trainer - log p of the sampler")
    print(" " * width, *(f"{title:>10}" for _, title in COLUMNS))
    for name, found in rows:
        cells = (f"{getattr(found, key):>{max(10, len(title))}.3g}" for key, title in COLUMNS)
        print(f"{name:<{width}}", *cells)
    if report.version is not None:
        print(f"the sampler had version {report.version} of the weights, from {report.handoff}")
    if not report.invariance:
        length = report.length
        print(f"batch invariance was not tried: the data holds one sequence of {length} tokens")
        return
    print("batch invariance, the same bits alone and beside others:")
    for each in report.invariance:
        why = f" ({each.shared} layers share an amax over tokens)" if each.shared else ""
        print(f"  {each.name}{why}: cached {_said(each.cached)}, training {_said(each.full)}")


def _said(gap: float) -> str:
    return "yes" if gap == 0 else f"no, logits differ by {gap:.2g}"


def main(arguments: list[str] | None = None) -> int:
    """Prints the comparison; returns the exit status."""
    options = _parser().parse_intermixed_args(arguments)
    prepare()
    from pretrain.checkpoint.manager import CheckpointError
    from pretrain.generation.handoff import HandoffError
    from pretrain.generation.mismatch_report import measure
    from pretrain.generation.opened import OpenedModel
    from pretrain.initialize import shut_down

    try:
        question = _question(options)
        opened = OpenedModel(
            options.checkpoint,
            device=options.device,
            overrides=options.overrides,
            needs_tokenizer=False,
        )
        report = measure(opened, question)
        if report.sequences < question.sequences:
            print(
                f"note: the data holds {report.sequences} of the {question.sequences} sequences "
                "that were asked for",
                file=sys.stderr,
            )
        _print_report(report)
        if options.output is not None:
            options.output.write_text(json.dumps(asdict(report), indent=2, default=str) + "\n")
    except (ConfigError, CheckpointError, HandoffError) as error:
        return refused(error)
    finally:
        shut_down()
    return 0


if __name__ == "__main__":
    run_program(main)
