# SPDX-License-Identifier: Apache-2.0
"""Checkpoints to and from model folders of transformers, each conversion proven.

    python -m tools.convert import HF_DIR CKPT_DIR     a folder becomes CKPT_DIR/step_00000000
    python -m tools.convert export CKPT_DIR HF_DIR     the newest checkpoint becomes a folder
    python -m tools.convert verify CKPT_DIR HF_DIR     whether the two are one model
    python -m tools.convert inspect DIR [--verify]     what either holds
    python -m tools.convert average NEW CHECKPOINT...             the mean of their weights
    python -m tools.convert upcycle CKPT_DIR NEW --experts N      dense MLPs become experts

Every import and export ends with a proof: each tensor used once and made once, values equal, and
logits in FP32 equal to those of transformers behind every layer. Exit status 1 when it fails, 2
when the request is wrong. Works on one CPU, with a layer in memory at a time; a checkpoint of any
parallel layout is read, and what is written loads in any.
"""

import sys
from pathlib import Path

if __name__ == "__main__" and not __package__:  # python tools/convert.py: as with -m
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import errno
import logging
import os
from collections.abc import Sequence
from typing import Any

from fused_ops.errors import ConfigError
from pretrain.command_line import prepare, refused, run_program


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; returns its exit status."""
    options = _parser().parse_args(arguments)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # megatron-core takes a GPU wherever it sees one
    logging.getLogger("transformers").setLevel(logging.ERROR)
    prepare()
    from models.conversion.plan import ProofError
    from pretrain.checkpoint.io import CheckpointError
    from pretrain.initialize import shut_down

    try:
        return options.run(options)
    except ProofError as error:
        print("\n".join(f"FAILED: {problem}" for problem in error.problems), file=sys.stderr)
        return 1
    except (ConfigError, CheckpointError) as error:
        return refused(error)
    except OSError as error:
        print(f"error: {_failed(error, options)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        shut_down()


def _failed(error: OSError, options: argparse.Namespace) -> str:
    """What the machine refused, where, and what to do."""
    # A full disk is reported without a name: it is that of what is being written.
    where = error.filename or getattr(options, "target", options.source)
    remedies = {
        errno.ENOSPC: "free some space, or give a folder on another disk",
        errno.EDQUOT: "free some space, or give a folder on another disk",
        errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
        errno.EACCES: "make it accessible, or give another folder",
        errno.EROFS: "give another folder",
    }
    remedy = remedies.get(error.errno or 0, "check the path")
    what = (error.strerror or str(error)).lower()
    return f"{where}: {what}; {remedy}; what was there before is unchanged"


_DTYPES = ("fp32", "bf16", "fp16")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    bring = commands.add_parser("import", help="a model folder becomes a checkpoint")
    bring.add_argument("source", type=Path, metavar="HF_DIR")
    bring.add_argument("target", type=Path, metavar="CKPT_DIR")
    bring.add_argument("--dtype", choices=_DTYPES, help="of the weights; default: the folder's")
    bring.add_argument("--decode", action="store_true", help="take packed weights, decoded")
    bring.add_argument("--no-verify", action="store_true", help="go without the proof")
    bring.set_defaults(run=_import)
    _add_export(commands.add_parser("export", help="a checkpoint becomes a model folder"))
    check = commands.add_parser("verify", help="whether a checkpoint and a folder are one model")
    check.add_argument("source", type=Path, metavar="CKPT_DIR")
    check.add_argument("target", type=Path, metavar="HF_DIR")
    kinds = ("trained", "ema")
    check.add_argument("--weights", choices=kinds, default="trained", help="or their average")
    check.add_argument("--vocab-size", type=int, help="where the checkpoint does not say it")
    check.add_argument("--decode", action="store_true", help="compare packed weights, decoded")
    check.add_argument("--recipe", help="of a packed folder, where it was exported with one")
    check.set_defaults(run=_verify)
    _add_combining(commands)
    look = commands.add_parser("inspect", help="what a checkpoint or a model folder holds")
    look.add_argument("source", type=Path, metavar="DIR")
    look.add_argument("--verify", action="store_true", help="read every byte and check it")
    look.set_defaults(run=_inspect)
    return parser


def _add_export(send: argparse.ArgumentParser) -> None:
    add = send.add_argument
    add("source", type=Path, metavar="CKPT_DIR")
    add("target", type=Path, metavar="HF_DIR")
    add("--weights", choices=("trained", "ema"), default="trained", help="or their moving average")
    add("--family", help="model_type to write; default: the first that fits")
    add("--dtype", choices=_DTYPES, help="of the weights; default: the checkpoint's")
    add("--vocab-size", type=int, help="where the checkpoint does not say it")
    kinds = ("plain", "nvfp4", "mxfp8", "fp8")
    about = "plain keeps the values; others write the codes that the run trained with"
    add("--format", choices=kinds, default="plain", help=about)
    add("--layout", choices=("modelopt", "compressed-tensors"), default="modelopt")
    add("--recipe", help="quantize by this recipe instead of as the run did")
    about = "validation data for scales of activations; default: the run's"
    add("--calibrate", type=Path, metavar="SHARDS", help=about)
    add("--tokenizer", type=Path, metavar="PATH", help="a file or folder to take")
    add("--no-verify", action="store_true", help="go without the proof")
    send.set_defaults(run=_export)


def _add_combining(commands: Any) -> None:
    mean = commands.add_parser("average", help="the mean of several checkpoints' weights")
    mean.add_argument("target", type=Path, metavar="CKPT_DIR")
    mean.add_argument("sources", type=Path, nargs="+", metavar="CHECKPOINT")
    mean.add_argument("--last", type=int, help="take the newest N of one checkpoints folder")
    mean.set_defaults(run=_average)
    grow = commands.add_parser("upcycle", help="a dense model's MLPs become equal experts")
    grow.add_argument("source", type=Path, metavar="CKPT_DIR")
    grow.add_argument("target", type=Path, metavar="NEW_CKPT_DIR")
    grow.add_argument("--experts", type=int, required=True)
    grow.add_argument("--topk", type=int, default=2)
    grow.add_argument("--pattern", help="the new pattern; default: every '-' becomes 'E'")
    grow.add_argument("--vocab-size", type=int, help="where the checkpoint does not say it")
    grow.set_defaults(run=_upcycle)


def _inspect(options: argparse.Namespace) -> int:
    from pretrain.conversion.inspecting import inspect

    lines, problems = inspect(options.source, check=options.verify)
    print("\n".join(lines))
    if options.verify:
        print("\n".join(f"FAILED: {problem}" for problem in problems) or "verified: whole")
    return 1 if problems else 0


def _import(options: argparse.Namespace) -> int:
    import yaml

    from pretrain.conversion.importing import ImportOptions, import_folder, model_yaml

    asked = ImportOptions(dtype=options.dtype, decode=options.decode, verify=not options.no_verify)
    done = import_folder(options.source, options.target, asked)
    status = _report(done.notes, done.verdict)
    if status == 0:
        print(f"wrote {done.path}; a run file that starts from it:\n")
        about = {
            "model": model_yaml(done.section),
            "checkpoint": {"load": str(options.target), "load_parts": "model"},
        }
        print(yaml.safe_dump(about, sort_keys=False, width=100).rstrip())
    return status


def _export(options: argparse.Namespace) -> int:
    from pretrain.conversion.exporting import ExportOptions, export_checkpoint
    from pretrain.conversion.opened import open_checkpoint

    checkpoint = open_checkpoint(options.source, options.vocab_size, options.weights)
    common = {
        "family": options.family,
        "dtype": options.dtype,
        "tokenizer": options.tokenizer,
        "verify": not options.no_verify,
    }
    if options.format == "plain":
        done = export_checkpoint(checkpoint, options.target, ExportOptions(**common))
    else:
        from pretrain.conversion.packing import PackOptions, export_packed

        asked = PackOptions(
            **common,
            format=options.format,
            layout=options.layout,
            recipe=options.recipe,
            calibrate=options.calibrate,
        )
        done = export_packed(checkpoint, options.target, asked)
    status = _report(done.notes, done.verdict)
    print(f"wrote {done.path}: {done.family}, from {checkpoint.path.name}")
    return status


def _verify(options: argparse.Namespace) -> int:
    from pretrain.conversion.exporting import make_pair
    from pretrain.conversion.opened import open_checkpoint
    from pretrain.conversion.verifying import open_folder, read_hf_config, verify_pair

    checkpoint = open_checkpoint(options.source, options.vocab_size, options.weights)
    hf_config = read_hf_config(options.target)
    if "config_groups" in hf_config.get("quantization_config", {}) and not options.decode:
        from pretrain.conversion.packing import PackOptions, open_packing

        asked = PackOptions(recipe=options.recipe)
        packing = open_packing(checkpoint, options.target, hf_config, asked)
        return _report(packing.choice.notes, packing.verify(options.target, hf_config))
    source, hf_config = open_folder(options.target, options.decode)
    verdict = verify_pair(make_pair(checkpoint, options.target, hf_config, source))
    return _report([], verdict)


def _average(options: argparse.Namespace) -> int:
    from pretrain.checkpoint.layout import candidates
    from pretrain.conversion.combining import average
    from pretrain.conversion.opened import open_checkpoint

    sources = options.sources
    if options.last is not None:
        if len(sources) != 1:
            raise ConfigError(f"--last takes one checkpoints folder; got {len(sources)} paths")
        if options.last < 2:
            raise ConfigError(f"--last must be at least 2; got {options.last}")
        sources = candidates(options.sources[0])[: options.last]
        if len(sources) < 2:
            raise ConfigError(
                f"--last takes the newest of a run's checkpoints folder, at least 2; "
                f"{options.sources[0]} holds {len(sources)}; it comes second, after the new folder"
            )
    done = average([open_checkpoint(path) for path in sources], options.target)
    print(f"wrote {done}: the mean of {', '.join(path.name for path in sources)}")
    return 0


def _upcycle(options: argparse.Namespace) -> int:
    from pretrain.conversion.combining import upcycle
    from pretrain.conversion.opened import open_checkpoint

    dense = open_checkpoint(options.source, options.vocab_size)
    done, gap = upcycle(
        dense,
        options.target,
        experts=options.experts,
        topk=options.topk,
        pattern=options.pattern,
    )
    print(f"wrote {done}; its logits equal the dense model's, relative difference {gap:.2g}")
    return 0


def _report(notes: list[str], verdict: Any) -> int:
    for note in notes:
        print(f"note: {note}")
    if verdict is None:
        print("not verified, as asked")
        return 0
    print("\n".join(verdict.lines()))
    print("verified: one model" if verdict.ok else "NOT VERIFIED: do not use the result")
    return 0 if verdict.ok else 1


if __name__ == "__main__":
    run_program(main)
