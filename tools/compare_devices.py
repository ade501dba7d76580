# SPDX-License-Identifier: Apache-2.0
"""One run on the CPU reference and on the GPU, from one seed: `python -m tools.compare_devices`.

Trains a small model on text that comes with Python, byte by byte, in each recipe: on the CPU, on
the GPU, and twice on the GPU with its GEMMs summed in other orders (two halves, each rounded to
BF16). Prints max and mean |difference of loss| between the devices beside the band, the larger of
the two differences that the orders make. Without a GPU the orders are compared on the CPU alone.
With `--keep FOLDER --text FILE` its runs stay in FOLDER and are not repeated: those of the CPU can
be trained on another machine first (`--only-cpu`), and the losses of every step looked at; those
that were trained with other code than this are named.
Exit status 1 if the devices lie further apart, in the mean, than three times the band, which is the
rule of tools.parity; 2 for a mistake.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from fused_ops.errors import ConfigError
from pretrain.command_line import prepare, refused, run_program


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.compare_devices", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--recipes",
        default="bf16,nvfp4,nvfp4_fast",
        metavar="RECIPE[:DECODE][+KEY=VALUE...],...",
        help="(%(default)s)",
    )
    parser.add_argument("--pattern", default="M-*-", help="of the model (%(default)s)")
    parser.add_argument("--text", type=Path, help="JSON lines of tools.quickstart_text")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for the runs; needs --text")
    parser.add_argument("--only-cpu", action="store_true", help="train the CPU's runs and stop")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    if options.keep and not options.text:
        parser.error("--keep needs --text: runs that stay are compared with others of one text")
    if options.only_cpu and not options.keep:
        parser.error("--only-cpu needs --keep: its runs are for a comparison to come")
    prepare()
    try:
        if options.keep:
            return _report(options, options.keep.resolve())
        with tempfile.TemporaryDirectory() as folder:
            return _report(options, Path(folder))
    except ConfigError as error:
        return refused(error)


def _report(options: argparse.Namespace, folder: Path) -> int:
    import torch

    from pretrain.parity.devices import (
        check_run,
        compare,
        cpu_losses,
        other_code,
        run_file,
        write_config,
    )

    recipes = [recipe.strip() for recipe in options.recipes.split(",")]
    run = run_file(folder / "data", folder / "runs", options.pattern, options.steps)
    check_run(run, recipes)
    text = options.text
    if text is None:
        text = folder / "text.jsonl"
        command = [sys.executable, "-m", "tools.quickstart_text", "--output", str(text)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    elif not text.is_file():
        raise ConfigError(f"--text must be a file of tools.quickstart_text; {text} is not one")
    config = write_config(folder, text, options.pattern, options.steps)
    if options.only_cpu:
        for recipe in recipes:
            cpu_losses(config, recipe)
            print("".join(f"{line}\n" for line in other_code(config, recipe, False)), end="")
        return 0
    gpu = torch.cuda.is_available()
    where = torch.cuda.get_device_name() if gpu else "no GPU: CPU against CPU in other orders"
    print(f"{where}, torch {torch.__version__}; {options.pattern}, {options.steps} steps")
    print(f"{'':14} {'loss':>15} {'CPU to GPU':>21} {'other orders (band)':>21}")
    print(
        f"{'recipe':14} {'first':>7} {'last':>7} {'max':>10} {'mean':>10} {'max':>10} {'mean':>10}"
    )
    wrong = 0
    for recipe in recipes:
        began = time.perf_counter()
        found = compare(config, recipe, gpu)
        wrong += not found.is_within
        gaps = "".join(
            f" {'-':>10} {'-':>10}" if one is None else f" {one.largest:10.2e} {one.mean:10.2e}"
            for one in (found.devices, found.band)
        )
        verdict = "" if found.is_within else "  FURTHER APART THAN THREE TIMES THE BAND"
        print(
            f"{found.recipe:14} {found.first:7.3f} {found.last:7.3f}{gaps}  "
            f"{time.perf_counter() - began:.0f} s{verdict}",
            *(f"    {line}" for line in other_code(config, recipe, gpu)),
            sep="\n",
            flush=True,
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    run_program(main)
