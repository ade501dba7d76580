# SPDX-License-Identifier: Apache-2.0
"""Trains one toy in every layout and compares it with one process: `python -m tools.parity`.

Starts its own processes: gloo on a CPU, NCCL with --gpus. For each layout, the largest difference
of losses, gradient norms and weights after a few steps from one checkpoint, stochastic rounding on.

  fp32     1e-5
  orders   three times what one process gives when its GEMMs sum in other orders, measured here
  tokens   the same when its samples also change places: where layouts cannot agree which tokens
           meet in an expert (experts over data-parallel ranks; experts under context parallelism)
  flips    three times what one flipped code gives in one process: where activations are FP32 and a
           row is out of its band, it is trained again and every operand looked at. This is the
           bound if each is, bit for bit, what one process makes of the same tensor, and the tensors
           agree until a first code differs, which is named

With recipes that have codes, nvfp4_fast:fp32 (FP32 activations) is compared too: its band is the
narrowest, and shows a wrong amax or a wrong coordinate of the dither that BF16 activations hide.

Differences of losses and norms are relative, that of a weight is relative to the largest of its
tensor; "updates" compares the changes of tensors by their root mean square, the mean over tensors.
Under a row out of bound stands which blocks of its recipe the layout cuts, if it does: those codes
cannot be those of one process, and `tools.preflight` says so of a run.
Exit status 1 if one is out of bound or fails, 2 for a mistake on the command line.
"""

import argparse
import logging
import time
import warnings
from collections.abc import Sequence

from fused_ops.errors import ConfigError
from pretrain import cpu_compat
from pretrain.command_line import refused, run_program

DEFAULT_PATTERNS = "M-*-,M-*E"
DEFAULT_RECIPES = "fp32,bf16,nvfp4,nvfp4_fast"
# Between FP32 activations, power-of-two codes leave a band of 1e-5: here a wrong coordinate of one
# element's dither shows, which BF16 activations hide.
SHARP = "nvfp4_fast:fp32"


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; returns its exit status."""
    logging.basicConfig(level=logging.ERROR)
    warnings.simplefilter("ignore")
    cpu_compat.enable()
    from pretrain.parity.layouts import DEFAULT_LAYOUTS

    parser = argparse.ArgumentParser(prog="python -m tools.parity", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--layouts",
        default=",".join(DEFAULT_LAYOUTS),
        help="of tpN, sp, ppN, vN, cpN, epN, etpN, dpN, overlap, whole, recompute, packed "
        "(%(default)s)",
    )
    parser.add_argument(
        "--patterns", default=DEFAULT_PATTERNS, help="what the model is made of (%(default)s)"
    )
    parser.add_argument(
        "--recipes",
        default=DEFAULT_RECIPES,
        help="fp32, bf16, a recipe (BF16 activations) or RECIPE:fp32 (%(default)s)",
    )
    parser.add_argument("--gpus", type=int, default=0, help="use so many GPUs (NCCL)")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps (%(default)s)")
    parser.add_argument(
        "--draws", type=int, default=5, help="orders of sums that make a band (%(default)s)"
    )
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds a group of layouts")
    options = parser.parse_args(arguments)
    try:
        return _report(options)
    except ConfigError as error:
        return refused(error)


def _report(options: argparse.Namespace) -> int:
    import torch

    from pretrain.initialize import shut_down
    from pretrain.parity.matrix import Plan, run

    if options.gpus > torch.cuda.device_count():
        raise ConfigError(
            f"--gpus {options.gpus} needs so many GPUs; torch sees {torch.cuda.device_count()}; "
            "leave it out to compare on the CPU"
        )
    torch.set_num_threads(1)
    plan = Plan(
        layouts=_names(options.layouts),
        patterns=_names(options.patterns),
        recipes=with_sharp(_names(options.recipes)),
        gpus=options.gpus,
        steps=options.steps,
        timeout=options.timeout,
        draws=options.draws,
    )
    print(
        _line("layout", "pattern", "recipe", "loss", "grad norm", "weights", "updates", "bound", "")
    )
    began, wrong, passed, names = time.perf_counter(), [], set(), set()
    said: set[str] = set()  # what one rank said is the reason of many rows
    for row in run(plan):
        names.add(row.layout.name)
        wrong += [] if row.passes or row.refused else [row.layout.name]
        passed |= {row.layout.name} if row.passes else set()
        for line in _lines(row):
            if line not in said:
                print(line, flush=True)
            said.add(line)
    shut_down()
    missing = sorted(names - passed)
    if missing:
        print(f"no passing row: {', '.join(missing)}")
    if wrong:
        print(f"{len(wrong)} rows out of bound or failed: {', '.join(sorted(set(wrong)))}")
    print(
        f"{len(passed.difference(wrong))} of {len(names)} layouts agree with one process, "
        f"{time.perf_counter() - began:.0f} s"
    )
    return 1 if wrong or missing else 0


def with_sharp(recipes: list[str]) -> list[str]:
    """The recipes, and the one whose band is narrow if others have codes and BF16 activations."""
    coded = [name for name in recipes if name not in ("fp32", "bf16")]
    if not coded or any(name.endswith(":fp32") for name in coded):
        return recipes
    return [*recipes, SHARP]


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _lines(row) -> list[str]:  # noqa: ANN001 (pretrain is imported after cpu_compat)
    head = (row.layout.name, row.case.pattern, row.case.name)
    if row.refused:
        return [f"{head[0]:16} {head[1]:10} {head[2]:16} refused: {row.refused}"]
    if row.failed:
        return [f"{head[0]:16} {head[1]:10} {head[2]:16} FAILED", row.failed]
    found, bound = row.difference, row.bound
    names = ("loss", "grad_norm", "weight", "update")
    figures = [f"{getattr(found, name):.1e}" for name in names]
    limits = " ".join(f"{getattr(bound, name):.1e}" for name in names) + f" ({row.band})"
    over = found.exceeds(bound)
    verdict = "ok" if not over else f"OUT OF BOUND: {', '.join(over)} (worst: {found.worst})"
    why = [f"{'':16} {row.note}"] if (over or row.band == "flips") and row.note else []
    return [_line(*head, *figures, limits, verdict), *why]


def _line(*cells: str) -> str:
    widths = (16, 10, 16, 9, 9, 9, 9, 44, 0)
    return " ".join(f"{cell:{width}}" if width else cell for cell, width in zip(cells, widths))


if __name__ == "__main__":  # the ranks import this package, not this program
    run_program(main)
