# SPDX-License-Identifier: Apache-2.0
"""Checks a run before it is started, without a GPU: `python -m tools.preflight CONFIG`.

python -m tools.preflight CONFIG [--world-size N] [--gpu h200] [section.key=value ...]

One screen: every problem with its remedy, where ranks lie, parameters, memory of a rank by part,
and time for the run's tokens, with the source of every rate. Exit status 0, or 2 with problems.
"""

import argparse
import logging
import warnings
from collections.abc import Sequence

from fused_ops.errors import ConfigError
from pretrain import cpu_compat
from pretrain.command_line import refused, run_program


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; returns its exit status."""
    logging.basicConfig(level=logging.ERROR)
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(prog="python -m tools.preflight", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("config", metavar="CONFIG", help="a run file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--world-size", type=int, help="processes (as few as the layout needs)")
    parser.add_argument("--gpu", default="h200", help="h200, b200 or gb300 (%(default)s)")
    options = parser.parse_intermixed_args(arguments)
    cpu_compat.enable()
    from models.throughput import DEVICES
    from pretrain.preflight import preflight
    from pretrain.preflight_text import render

    try:
        problems = []
        if options.gpu not in DEVICES:
            problems.append(f"--gpu is one of {', '.join(DEVICES)}; got {options.gpu!r}")
        if options.world_size is not None and options.world_size < 1:
            problems.append(f"--world-size must be at least 1; got {options.world_size}")
        if problems:
            raise ConfigError(problems)
        device = DEVICES[options.gpu]
        found = preflight(options.config, options.overrides, device, options.world_size)
    except ConfigError as error:
        return refused(error)
    print(render(found))
    return 2 if found.problems else 0


if __name__ == "__main__":
    run_program(main)
