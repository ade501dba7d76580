# SPDX-License-Identifier: Apache-2.0
"""Ranks linear layers by the damage that 4 bits do in each alone, and writes a precision plan.

    python -m tools.rank_layers CONFIG CKPT_DIR --bf16-share 0.16 --output plan.yaml

On one real batch of the run's validation data: every GEMM in 16 bits, then the run's recipe in one
layer at a time (and in one GEMM of it at a time), everything else in 16 bits. Layers are ranked by
loss change, gradient error or both, each for its FLOPs. The plan keeps the worst ones in BF16: in
a share of the linear layers' FLOPs, or as many as a gap allows. It is then compared, on other
batches, with the same share spent on the last layers; the tool says so where it is not better. This
is the damage at this checkpoint, not that of training with the plan. Of a run with
precision.schedule the recipes are those that it begins with, whatever step the checkpoint is of.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fused_ops.errors import ConfigError
from pretrain.command_line import output_problems, prepare, refused, run_program

if TYPE_CHECKING:
    from pretrain.engine import Engine
    from pretrain.train_step import MicroBatch


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; returns its exit status."""
    prepare()
    parser = argparse.ArgumentParser(prog="python -m tools.rank_layers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("config", help="the run file, with the recipe to be judged")
    parser.add_argument("checkpoint", type=Path, help="a step, or a run's checkpoints folder")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--bf16-share", type=float, help="of the linears' FLOPs (0.16)")
    budget.add_argument("--max-gap", type=float, help="per cent of the loss that may be lost")
    parser.add_argument("--by", choices=("both", "loss", "gradient"), default="both")
    parser.add_argument("--no-gemms", action="store_true", help="rank layers only, in a quarter")
    parser.add_argument("--verify", type=int, default=2, help="other batches to judge on")
    parser.add_argument("--output", type=Path, default=Path("plan.yaml"), help="(%(default)s)")
    options = parser.parse_intermixed_args(arguments)
    from pretrain.checkpoint.io import CheckpointError

    try:
        return _rank(options)
    except (ConfigError, CheckpointError) as error:
        return refused(error)


def _rank(options: argparse.Namespace) -> int:
    from pretrain.config import load_config
    from pretrain.conversion.progress import Bar
    from pretrain.ranking import choose
    from pretrain.ranking.measure import (
        begin_scales,
        damage,
        each_alone,
        measure,
        quantized_modules,
    )
    from pretrain.ranking.opened import open_engine, read_batches
    from pretrain.ranking.plan import plan_section, write_plan

    _check(options)
    config = load_config(options.config, options.overrides)
    engine, step = open_engine(config, options.checkpoint)
    names = quantized_modules(engine)
    if not names:
        raise ConfigError("nothing is quantized by this run's precision; set precision.recipe")
    budget = 0.16 if options.bf16_share is None else options.bf16_share
    if options.max_gap is None:
        choose.check_room(budget, names, engine.plan.modules)
    first, *others = read_batches(config, 1 + options.verify)
    begin_scales(engine, first)
    exact = measure(engine, first, {})
    whole = damage(measure(engine, first, engine.plan.recipes()), exact)
    print(f"step {step}; {len(exact.losses)} samples; loss with 16-bit GEMMs {exact.loss:.4f}")
    found = {}
    with Bar("layers", len(names)) as bar:
        for name, gemm, one in each_alone(engine, first, exact, gemms=not options.no_gemms):
            found[name, gemm] = one
            if gemm == "all":
                bar.step()
    layers = {name: one for (name, gemm), one in found.items() if gemm == "all"}
    scores = choose.scores(layers, options.by)
    modules = engine.plan.modules
    allowed: float | None = None
    if options.max_gap is None:
        chosen = choose.within_share(scores, modules, budget)
    else:
        allowed = options.max_gap / 100 * exact.loss
        chosen = choose.within_gap(scores, layers, modules, whole.loss_change, allowed)
    print(choose.render(found, scores, whole, chosen, modules))
    share = choose.flops_of(chosen, modules)
    high = choose.flops_of([module.name for module in modules if module.name not in names], modules)
    last = choose.last_layers(names, modules, share)
    said = [
        f"{len(chosen)} linear layers in BF16, {share:.3f} of the linear layers' FLOPs; "
        f"{share + high:.3f} with those that the run keeps high already; the last layers, of which "
        f"{len(last)} fit into that share, have {choose.flops_of(last, modules):.3f}",
        *_verdict(options, (engine, others), chosen, last, allowed),
    ]  # fmt: skip
    section = plan_section(config, chosen)
    head = f"python -m tools.rank_layers {options.config} {options.checkpoint}: step {step}"
    write_plan(options.output, section, [head, *said])
    print("", *said, f"{options.output}", sep="\n")
    return 0


def _verdict(
    options: argparse.Namespace,
    judge: "tuple[Engine, Sequence[Sequence[MicroBatch]]]",
    chosen: Sequence[str],
    last: Sequence[str],
    allowed: float | None,
) -> list[str]:
    """What other batches say of the plan."""
    from pretrain.ranking import choose

    if not options.verify:
        return ["not judged on other batches (--verify 0)"]
    judged = choose.verify(*judge, chosen, last)
    found = [judged.text] if chosen else ["no layer needs BF16"]
    if allowed is not None:
        found.append(judged.gap(allowed))
    return [*found, f"without any of these layers in BF16: loss {judged.none.loss_change:+.2e}"]


def _check(options: argparse.Namespace) -> None:
    problems = []
    if options.bf16_share is not None and not 0 < options.bf16_share < 1:
        problems.append(f"--bf16-share must be between 0 and 1; got {options.bf16_share:g}")
    if options.max_gap is not None and not 0 <= options.max_gap < math.inf:
        problems.append(f"--max-gap must be at least 0 per cent; got {options.max_gap:g}")
    if options.verify < 0:
        problems.append(f"--verify must be at least 0 batches; got {options.verify}")
    problems += output_problems("--output", options.output)
    if problems:
        raise ConfigError(problems)


if __name__ == "__main__":
    run_program(main)
