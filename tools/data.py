# SPDX-License-Identifier: Apache-2.0
"""Looks at token shards and at what a run reads: `python -m tools.data verify|stats|show|bench`.

    python -m tools.data verify DIR                   # exit 1 on any finding
    python -m tools.data stats DIR|CONFIG.yaml        # what a folder, or a run's blend, holds
    python -m tools.data show CONFIG.yaml --step N    # the documents that each rank reads
    python -m tools.data bench [DIR]                  # speed, beside megatron-core's
    python -m tools.data bench --start                # time and memory of a start over 10 T tokens

verify reads everything: checksums, index against .bin, token ids against the vocabulary, document
ends, the tokenizer's fingerprint. CONFIG may be followed by section.key=value.
"""

import argparse
import json
import tempfile
from pathlib import Path

from fused_ops.errors import ConfigError
from pretrain.command_line import prepare, refused, run_program
from pretrain.data.manifest import DataError, load_manifest
from pretrain.data.stats import (
    bits,
    document_lengths,
    draw_lengths,
    length_lines,
    unigram_entropy,
)
from pretrain.data.store import is_url
from pretrain.data.verify import findings, folders


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.data",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    one = commands.add_parser("verify", help="find what is damaged")
    one.add_argument("directory", metavar="DIR")
    one = commands.add_parser("stats", help="what a folder, or the blend of a run, holds")
    one.add_argument("directory", metavar="DIR|CONFIG")
    one.add_argument("overrides", nargs="*", metavar="key=value")
    one.add_argument(
        "--picture", type=Path, default=Path("lengths.png"), metavar="FILE", help="of the lengths"
    )
    one = commands.add_parser("show", help="the documents that a step reads")
    one.add_argument("config", type=Path, metavar="CONFIG")
    one.add_argument("overrides", nargs="*", metavar="key=value")
    one.add_argument("--step", type=int, required=True, help="from 1")
    one.add_argument("--rank", type=int, help="only this data-parallel rank's samples")
    one.add_argument("--ranks", type=int, help="data-parallel ranks (default: the run's)")
    one.add_argument("--tokenizer", type=Path, metavar="FILE", help="default: beside the shards")
    one.add_argument("--json", action="store_true", help="a JSON object a sample, with the ids")
    one = commands.add_parser("bench", help="speed, or --start, beside megatron-core's")
    one.add_argument("directory", nargs="?", type=Path, metavar="DIR", help="default: random ids")
    one.add_argument("--seq-length", type=int, default=8192)
    one.add_argument("--micro-batch-size", type=int, default=4)
    one.add_argument("--tokens", type=int, default=1 << 26, help="of a round")
    one.add_argument("--rounds", type=int, default=5)
    one.add_argument("--start", action="store_true", help="measure starts instead")
    one.add_argument(
        "--documents", type=int, default=40_000_000, help="of the largest index for megatron-core"
    )
    one.add_argument("--shards", type=int, default=100_000, help="of the largest manifest")
    one.add_argument("--picture", type=Path, default=Path("starts.png"), metavar="FILE")
    return parser


def _local(directory: str) -> Path:
    if is_url(directory):
        raise DataError(f"this command reads folders of this machine; got {directory}: copy it")
    return Path(directory.removeprefix("file://"))


def verify(options: argparse.Namespace) -> int:
    """Prints every finding; 0 when there is none."""
    total, directory = 0, _local(options.directory)
    for folder in folders(directory):
        for finding in findings(folder):
            total += 1
            print(f"{finding}")
    print(f"{directory}: {total or 'no'} finding{'' if total == 1 else 's'}")
    return 1 if total else 0


def stats(options: argparse.Namespace) -> int:
    """Prints what each folder holds, or how a run blends its sources."""
    if options.directory.endswith((".yaml", ".yml")):
        return _blend(options)
    named = []
    for folder in folders(_local(options.directory)):
        manifest = load_manifest(folder)
        entropy, lengths = unigram_entropy(folder), document_lengths(folder)
        print(
            f"{folder}: {manifest.tokens} tokens, {manifest.documents} documents, "
            f"{len(manifest.shards)} shards, vocabulary {manifest.vocab_size}, "
            f"{manifest.tokens / max(1, manifest.documents):.1f} tokens a document, "
            f"unigram entropy {entropy:.4f} nats ({bits(entropy):.4f} bits) a token"
        )
        for name, count in manifest.counts.items():
            print(f"  {count} {name}")
        print(f"  documents by length in tokens, {lengths.shortest} to {lengths.longest}")
        print("\n".join(length_lines(lengths)))
        named.append((folder.name, lengths))
    draw_lengths(named, options.picture)
    print(f"picture: {options.picture}")
    return 0


def _config(path: Path, overrides: list[str]):  # noqa: ANN202 (only known once megatron may load)
    prepare()
    from pretrain.config import load_config

    return load_config(path, overrides)


def _blend(options: argparse.Namespace) -> int:
    config = _config(Path(options.directory), options.overrides)
    from pretrain.data.blend import RESOLUTION
    from pretrain.data.dataset import open_dataset

    model, samples = config.model, config.train.total_samples
    dataset = open_dataset(config.data, model.seq_length, config.run.seed, model.vocab_size)
    print(f"{samples} samples of {model.seq_length} tokens in {config.train.steps} steps")
    for first, mixture in dataset.blend.phases:
        print(f"from sample {first}")
        for units, shards in zip(mixture.resolved, dataset.shards):
            share = f"{units / RESOLUTION:.6f} ({units}/{RESOLUTION})"
            print(f"  {share}  {shards.directory}: {shards.tokens} tokens")
    print("after the last step")
    for row in dataset.consumed(samples):
        print(f"  {row['samples']} samples, {row['epochs']:.4f} epochs of {row['path']}")
    return 0


def show(options: argparse.Namespace) -> int:
    """Prints the samples of a step with their documents and text."""
    config = _config(options.config, options.overrides)
    from pretrain.data.changes import parse_segments
    from pretrain.data.dataset import open_dataset, open_earlier
    from pretrain.data.show import as_json, as_lines, find_step, show_step

    model, train = config.model, config.train
    saved = _saved_state(config.run.path)
    state = saved.get("data")
    skipped = [*config.data.skip_samples, *saved.get("train_state", {}).get("skip", [])]
    step = find_step(options.step, train.batch_sizes, skipped, config.run.path)
    segments = parse_segments(state)
    if len(segments) > 1:
        dataset = open_earlier(config.data, segments, step.samples[0])
    else:
        dataset = open_dataset(config.data, model.seq_length, config.run.seed, model.vocab_size)
        if state is not None:
            dataset.check_state(state)
    ranks = options.ranks or _ranks(config)
    first, last = step.samples[0], step.samples[-1]
    if not options.json:
        left_out = last - first + 1 - len(step.samples)
        without = f" without {left_out} that are stepped over" if left_out else ""
        print(
            f"step {step.number} reads samples {first} to {last}{without}: "
            f"{ranks} data-parallel ranks, micro-batches of {train.micro_batch_size}"
        )
    for shown in show_step(dataset, step, train.micro_batch_size, ranks, options.tokenizer):
        if options.rank is None or shown.rank == options.rank:
            print(as_json(shown) if options.json else "\n".join(as_lines(shown)))
    dataset.close()
    return 0


def _saved_state(run_dir: Path) -> dict:
    """What the run's newest checkpoint says besides tensors; empty where there is none."""
    from pretrain.checkpoint.io import load_json
    from pretrain.checkpoint.layout import STATE
    from pretrain.checkpoint.manager import find_latest

    checkpoints = run_dir / "checkpoints"
    found = find_latest(checkpoints) if checkpoints.is_dir() else None
    state: dict = load_json(found.path / STATE)["extra"] if found else {}
    return state


def _ranks(config) -> int:  # noqa: ANN001 (a PretrainConfig, which megatron-core must be loaded for)
    """Data-parallel ranks of the run's last start; 1 where it has not started."""
    record, parallel = config.run.path / "environment.json", config.parallel
    if not record.exists():
        return 1
    world = json.loads(record.read_text()).get("world_size", 1)
    return max(1, int(parallel.data_parallel_size(int(world))))


def bench(options: argparse.Namespace) -> int:
    """Prints speeds, or draws what a start costs."""
    import torch

    torch.set_num_threads(1)
    return _bench_start(options) if options.start else _bench_speed(options)


def _bench_speed(options: argparse.Namespace) -> int:
    from pretrain.data.measure import measure_speed, synthetic_folder

    with tempfile.TemporaryDirectory() as scratch:
        folder = options.directory or synthetic_folder(Path(scratch), 1 << 26)
        ours, theirs = measure_speed(
            folder, options.seq_length, options.micro_batch_size, options.tokens, options.rounds
        )
    print(
        f"{options.rounds} rounds of {options.tokens} tokens, samples of {options.seq_length}, "
        f"micro-batches of {options.micro_batch_size}, one process, warm; medians"
    )
    for name, what in (("wall", "by the clock"), ("cpu", "by processor time")):
        one, two = ours.median(name), theirs.median(name)
        print(
            f"{what:>17}: {one:7.1f} M tokens/s, megatron-core's GPTDataset and sampler "
            f"{two:7.1f} M tokens/s, ratio {one / two:.2f}"
        )
    return 0


def _bench_start(options: argparse.Namespace) -> int:
    from pretrain.data.measure import (
        draw_starts,
        fake_manifest,
        measure_start,
        sparse_folder,
        start_megatron,
        start_ours,
    )

    ours, theirs = [], []
    sizes = [options.documents >> shift for shift in range(6, -1, -1)]
    for documents in sizes:
        with tempfile.TemporaryDirectory() as scratch:
            folder = sparse_folder(Path(scratch), documents)
            ours.append(measure_start(folder, options.seq_length, start_ours))
            theirs.append(measure_start(folder, options.seq_length, start_megatron))
        for name, start in (("nibble", ours[-1]), ("megatron-core", theirs[-1])):
            print(_start_line(name, start), flush=True)
    for shards in (options.shards // 100, options.shards // 10, options.shards):
        with tempfile.TemporaryDirectory() as scratch:
            folder = fake_manifest(Path(scratch), max(1, shards))
            # Files that are not there cannot be looked at: as for any manifest of so many shards.
            ours.append(measure_start(folder, options.seq_length, _start_unchecked))
        print(_start_line("nibble", ours[-1]), flush=True)
    draw_starts(ours, theirs, options.picture)
    print(f"picture: {options.picture}")
    return 0


def _start_unchecked(folder: Path, seq_length: int) -> None:
    from pretrain.data import measure, shards

    shards._CHECK_AT_START = 0
    measure.start_ours(folder, seq_length)


def _start_line(name: str, start) -> str:  # noqa: ANN001 (measure.Start)
    return (
        f"{name:>13}: {start.tokens / 1e9:9.1f} G tokens, {start.documents} documents: "
        f"{start.seconds:7.3f} s, {start.megabytes:8.1f} MB"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    # argparse does not find values that follow an option.
    strange = [word for word in rest if word.startswith("-") or "=" not in word]
    if strange or (rest and not hasattr(options, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(strange or rest)}")
    if rest:
        options.overrides += rest
    try:
        return {"verify": verify, "stats": stats, "show": show, "bench": bench}[options.command](
            options
        )
    except ConfigError as error:
        return refused(error)


if __name__ == "__main__":
    run_program(main)
