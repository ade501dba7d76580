# SPDX-License-Identifier: Apache-2.0
"""Compares runs: relative loss gaps over training and at the end, paired by seed.

    python -m tools.compare_runs BASE RUN...        run folders, or folders of run folders

Runs whose settings differ in nothing but the seed are one row. The first row is the base, or the
one that --base names. Both validations are reported: with the run's own, quantized forward, and
with GEMMs in 16 bits, where the run has made it (train.eval_also_bf16). Prints a table; writes
compare.png, where there is a gap to draw, and compare.html (self-contained) into --output.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from fused_ops.errors import ConfigError
from pretrain.command_line import folder_problems, prepare, refused, run_program

REFERENCE = Path(__file__).resolve().parent.parent / "examples" / "study" / "reference"


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; returns its exit status."""
    prepare()
    parser = argparse.ArgumentParser(prog="python -m tools.compare_runs", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder, or one of several")
    parser.add_argument("--base", help="label of the base row; the first row otherwise")
    parser.add_argument("--ratio-to", metavar="ROW", help="also print gaps over this row's gap")
    parser.add_argument(
        "--diverged", type=float, default=0.1, help="share above the base that counts (%(default)s)"
    )
    parser.add_argument(
        "--against", metavar="reference|DIR", help="is the gap normal? beside shipped references"
    )
    parser.add_argument(
        "--write-reference", metavar="DIR", help="write the rows as reference files, --name first"
    )
    parser.add_argument("--name", default="model", help="model in reference names (%(default)s)")
    parser.add_argument("--output", default=".", help="where the pictures go (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    options = parser.parse_args(arguments)
    try:
        return _compare(options)
    except ConfigError as error:
        return refused(error)


def _compare(options: argparse.Namespace) -> int:
    from pretrain.comparison.compare import base_row, load_rows, tokens_per_parameter
    from pretrain.comparison.picture import write_html, write_png
    from pretrain.comparison.reference import judge, read_references, write_reference
    from pretrain.comparison.summary import as_data, between_rows, ratios, summarize, table

    output = Path(options.output)
    _check(options, output)
    rows = load_rows(options.runs)
    base = base_row(rows, options.base)
    if (options.against or options.write_reference) and not base.is_high:
        raise ConfigError(
            f"references hold gaps against runs in 16 bits; the base is {base.label}, which "
            "computes in other formats; name a 16-bit row with --base"
        )
    others = [row for row in rows if row is not base]
    if not others and (options.against or options.write_reference or options.ratio_to):
        raise ConfigError(
            "--against, --write-reference and --ratio-to are about gaps of rows to the base; "
            f"{base.label} is the only row; name runs with other settings too"
        )
    lines = summarize(rows, base, options.diverged)
    said = between_rows(rows, base)
    if options.ratio_to:
        said += ratios(rows, base_row(rows, options.ratio_to), base)
    if options.against:
        folder = REFERENCE if options.against == "reference" else Path(options.against)
        references = read_references(folder)
        for row in others:
            said += judge(row, base, tokens_per_parameter(row), references)
    pictures = [output / "compare.png", output / "compare.html"]
    if not write_png(rows, base, pictures[0]):
        pictures = pictures[1:]
        said.append(
            f"{base.label} is the only row: there is nothing to compare it with; name runs with "
            "other settings too (report.html in a run's folder has its own curves)"
            if not others
            else f"no row shares a seed and a step with {base.label}: there is no gap to draw"
        )
    write_html(rows, base, lines, said, output / "compare.html")
    if options.json:
        print(json.dumps({"lines": as_data(lines), "said": said}, indent=1))
    else:
        print("\n".join([table(lines), *([""] if said else []), *said]))
        print(f"\n{', '.join(map(str, pictures))}")
    if options.write_reference:
        for row in others:
            name = f"{options.name}/{row.label}"
            folder = Path(options.write_reference)
            path = write_reference(row, base, name, tokens_per_parameter(row), folder)
            text = path or f"{row.label}: no seed has finished, no reference written"
            print(text, file=sys.stderr if options.json else sys.stdout)
    return 0


def _check(options: argparse.Namespace, output: Path) -> None:
    problems = folder_problems("--output", output)
    if options.write_reference:
        problems += folder_problems("--write-reference", Path(options.write_reference))
    if not 0 < options.diverged < math.inf:
        problems.append(
            f"--diverged must be a share above 0, as 0.1 for 10 %; got {options.diverged:g}"
        )
    if problems:
        raise ConfigError(problems)


if __name__ == "__main__":
    run_program(main)
