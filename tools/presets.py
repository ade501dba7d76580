# SPDX-License-Identifier: Apache-2.0
"""Prints the model presets: total and active parameters, and FLOPs a token.

python -m tools.presets          all of them
python -m tools.presets NAME     one, with its parts and its `model` section
"""

import argparse
from collections.abc import Sequence

import yaml

from fused_ops.errors import ConfigError
from pretrain.command_line import prepare, refused, run_program

DEFAULT_VOCAB = 32768


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.presets", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("name", nargs="?", metavar="NAME", help="a preset; all without it")
    parser.add_argument(
        "--vocab-size",
        type=int,
        default=DEFAULT_VOCAB,
        help="rows of the embedding where the preset leaves it to the data (%(default)s)",
    )
    options = parser.parse_args(arguments)
    prepare()
    try:
        print(describe(options.name, options.vocab_size) if options.name else overview(options))
    except ConfigError as error:
        return refused(error)
    return 0


def overview(options: argparse.Namespace) -> str:
    """One line a preset."""
    from models.flops import count_parameters, flops_per_token
    from models.presets import get_preset, preset_names

    lines = [
        f"{'preset':26} {'layers':>6} {'hidden':>6} {'sequence':>8} {'vocabulary':>10} "
        f"{'total':>9} {'active':>9} {'GFLOPs a token':>14}"
    ]
    for name in preset_names():
        shape, preset = _shape(name, options.vocab_size), get_preset(name)
        count = count_parameters(shape)
        layers = len(preset["pattern"].split("/")[0].replace("|", ""))
        flops = sum(flops_per_token(shape).values())
        vocab = str(shape.vocab_size) if "vocab_size" in preset else "data"
        lines.append(
            f"{name:26} {layers:6} {shape.config.hidden_size:6} {shape.seq_length:8} {vocab:>10} "
            f"{_billions(count.without_mtp):>9} {_billions(count.active):>9} {flops / 1e9:14.2f}"
        )
    lines += [
        "",
        "Parameters without multi-token prediction; active: those that one token meets, embedding "
        "and head included.",
        "FLOPs of training (forward and backward) at the sequence length, causal, with multi-token "
        f"prediction. 'data': counted with {options.vocab_size} entries.",
    ]
    return "\n".join(lines)


def describe(name: str, vocab_size: int) -> str:
    """One preset with its parts."""
    from models.flops import count_parameters, flops_per_token
    from models.presets import get_preset

    shape = _shape(name, vocab_size)
    count, flops = count_parameters(shape), flops_per_token(shape)
    total = sum(flops.values())
    lines = [
        f"{name}: {_billions(count.without_mtp)} parameters, {_billions(count.active)} active"
        + (f", and {_billions(count.mtp)} of multi-token prediction" if count.mtp else ""),
        f"{total / 1e9:.3f} GFLOPs a token (forward and backward, sequences of {shape.seq_length})",
        "",
        f"{'part':16} {'parameters':>16} {'GFLOPs a token':>15} {'share':>7}",
    ]
    for part in dict.fromkeys([*count.parts, *flops]):
        spent = flops.get(part, 0.0)
        lines.append(
            f"{part:16} {count.parts.get(part, 0):16,d} {spent / 1e9:15.4f} {spent / total:7.1%}"
        )
    section = yaml.safe_dump({"model": get_preset(name)}, sort_keys=False, width=90)
    return "\n".join([*lines, "", section.rstrip()])


def _shape(name: str, vocab_size: int):  # noqa: ANN202 (models is imported after cpu_compat)
    from models.config import ModelConfig
    from models.precision import model_shape
    from models.presets import get_preset

    get_preset(name)  # an unknown name is a ConfigError here, not one of pydantic
    model = ModelConfig(preset=name)
    return model_shape(model, vocab_size=model.vocab_size or vocab_size)


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


if __name__ == "__main__":
    run_program(main)
