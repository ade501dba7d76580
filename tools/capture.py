# SPDX-License-Identifier: Apache-2.0
"""Saves what GEMMs of a real training step multiply: `python -m tools.capture CONFIG OUT.pt`.

python -m tools.capture examples/quickstart.yaml operands.pt --step 20 --layers "layers.1.*"

Trains CONFIG up to a step and keeps X, W and dY of the named layers in one of its micro-batches, as
they are before any quantization (`python -m tools.bench_captured OUT.pt` measures on them). The
run's own folder is left alone: the training here leaves nothing but OUT.pt. `checkpoint.load=...`
starts from the weights of a run; other settings are overridden likewise. One process.
"""

import argparse
import tempfile
from pathlib import Path

from fused_ops.errors import ConfigError
from pretrain.command_line import output_problems, prepare, refused, run_program


def main(arguments: list[str] | None = None) -> int:
    """The program; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.capture",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("output", type=Path, metavar="OUT.pt")
    parser.add_argument("--step", type=int, default=20, help="step to look at (%(default)s)")
    parser.add_argument(
        "--micro-batch", type=int, default=0, help="which of the step's, from 0 (%(default)s)"
    )
    parser.add_argument("--layers", default="*", help="names, with *, between commas (%(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_intermixed_args(arguments)
    prepare()
    try:
        _capture(options)
    except ConfigError as error:
        return refused(error)
    return 0


def _capture(options: argparse.Namespace) -> None:
    import torch

    from pretrain.captured import Capture
    from pretrain.config import load_config
    from pretrain.initialize import shut_down
    from pretrain.trainer import Trainer

    problems = [
        f"{name} must be at least {least}, got {value}"
        for name, value, least in (
            ("--step", options.step, 1),
            ("--micro-batch", options.micro_batch, 0),
        )
        if value < least
    ]
    if problems := [*problems, *output_problems("OUT.pt", options.output)]:
        raise ConfigError(problems)
    layers = [pattern.strip() for pattern in options.layers.split(",")]
    capture = Capture(options.step, options.micro_batch, layers)
    with tempfile.TemporaryDirectory() as folder:
        own = (
            f"run.dir={folder}", f"train.steps={options.step}", "train.eval_interval=0",
            "data.valid=null", "checkpoint.interval=0", "checkpoint.at_end=false",
            "log.report=false",
        )  # fmt: skip
        config = load_config(options.config, [*options.overrides, *own], for_training=True)
        try:
            Trainer(config, callbacks=[capture]).run()
        finally:
            shut_down()
    if not any(capture.layers.values()):
        raise ConfigError(
            f"step {options.step} must be one that is trained; the run starts behind it: choose a "
            "later --step"
        )
    place = {"step": options.step, "micro_batch": options.micro_batch}
    torch.save({"config": options.config, **place, "layers": capture.layers}, options.output)
    for name, layer in capture.layers.items():
        sizes = ", ".join(f"{key} {tuple(tensor.shape)}" for key, tensor in layer.items())
        print(f"{name}: {sizes}")
    print(
        f"{options.output}: step {options.step}, micro-batch {options.micro_batch}, "
        f"{options.output.stat().st_size / 1e6:.1f} MB"
    )


if __name__ == "__main__":  # saving a checkpoint starts processes that import this file
    run_program(main)
