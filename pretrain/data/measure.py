# SPDX-License-Identifier: Apache-2.0
"""Speed and start of the data pipeline, beside megatron-core's own on the same files."""

import importlib
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.data.config import DataConfig
from pretrain.data.dataset import Dataset, open_dataset
from pretrain.data.loader import TrainLoader
from pretrain.data.manifest import Manifest, ShardInfo, load_manifest, save_manifest
from pretrain.data.shards import bin_path, idx_path
from pretrain.data.writer import index_bytes, write_shard

VOCAB, EOD = 32_768, 0

# What a start needs, loaded before its clock starts.
_MODULES = (
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.datasets.helpers_cpp",
    "pretrain.data.remote",
)

# Documents of the synthetic files: lengths from 64 to 959 tokens, 512 on average.
_SHORTEST, _LONGEST = 64, 960
_SHARD_DOCUMENTS = 2_500_000


def synthetic_folder(folder: Path, tokens: int, shards: int = 2) -> Path:
    """A folder of shards of random ids, about `tokens` of them."""
    folder.mkdir(parents=True, exist_ok=True)
    random, infos = np.random.default_rng(0), []
    for number in range(shards):
        count = tokens // shards // ((_SHORTEST + _LONGEST) // 2)
        lengths = random.integers(_SHORTEST, _LONGEST, count)
        ids = random.integers(1, VOCAB, int(lengths.sum())).astype(np.uint16)
        ids[np.cumsum(lengths) - 1] = EOD
        infos.append(write_shard(folder, f"shard_{number:05d}", ids, lengths))
    save_manifest(
        folder, Manifest(tokenizer_fingerprint=None, vocab_size=VOCAB, eod_id=EOD, shards=infos)
    )
    return folder


class _Tokenizer:
    """What megatron-core's builder asks of a tokenizer."""

    unique_identifiers = {"class": "none"}  # noqa: RUF012 (a constant)

    def __init__(self, manifest: Manifest) -> None:
        self.vocab_size = manifest.vocab_size
        self.eod = self.eos_id = manifest.eod_id or 0
        self.pad = -1


def megatron_dataset(folder: Path, seq_length: int, samples: int, cache: Path) -> Any:
    """megatron-core's GPTDataset (or a blend of them) over the shards of a folder."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    manifest = load_manifest(folder)
    # With weights a blend may take several epochs.
    prefixes = [str(folder / info.name) for info in manifest.shards]
    weights = [float(info.tokens) for info in manifest.shards]
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=seq_length,
        blend=(prefixes, weights if len(weights) > 1 else None),
        split="1,0,0",
        path_to_cache=str(cache),
        tokenizer=_Tokenizer(manifest),  # type: ignore[arg-type]
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config)
    return builder.build()[0]


def megatron_batches(dataset: Any, micro_batch_size: int) -> Iterator[dict[str, Any]]:
    """Micro-batches as megatron's training loop gets them: its sampler, torch's DataLoader."""
    from megatron.training.datasets.data_samplers import MegatronPretrainingSampler
    from torch.utils.data import DataLoader

    sampler = MegatronPretrainingSampler(len(dataset), 0, micro_batch_size, 0, 1)
    return iter(DataLoader(dataset, batch_sampler=sampler, num_workers=0))


def our_batches(dataset: Dataset, micro_batch_size: int) -> Iterator[Any]:
    """Micro-batches of one rank, without a thread beside it."""
    loader, consumed = TrainLoader(dataset, micro_batch_size, micro_batch_size), 0
    while True:
        yield from loader.step(consumed)
        consumed += micro_batch_size


@dataclass
class Speed:
    """Million tokens a second, of each round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """By the processor time of the process: what a busy machine does not change."""

    def median(self, name: str) -> float:
        """Of "wall" or "cpu"."""
        return float(np.median(getattr(self, name)))


def measure_speed(
    folder: Path, seq_length: int, micro_batch_size: int, tokens: int, rounds: int
) -> tuple[Speed, Speed]:
    """(ours, megatron-core's) over rounds that alternate, after a warm one of each.

    Raises AssertionError when a batch of either is not what it should be: that is checked first.
    """
    samples = tokens // seq_length
    dataset = open_dataset(DataConfig(train=str(folder)), seq_length, seed=1)
    with tempfile.TemporaryDirectory() as cache:
        theirs_set = megatron_dataset(folder, seq_length, samples * (rounds + 2), Path(cache))
        ours = our_batches(dataset, micro_batch_size)
        theirs = megatron_batches(theirs_set, micro_batch_size)
        first, second = next(ours), next(theirs)
        expected = (micro_batch_size, seq_length)
        for batch in (first, second):
            assert batch["tokens"].shape == expected, "a batch is micro-batch size times length"
            assert (batch["tokens"][:, 1:] == batch["labels"][:, :-1]).all(), "labels are shifted"
        assert (first["tokens"][0].numpy() == dataset.sample(0)[:-1]).all(), "sample 0 comes first"
        speeds = (Speed(), Speed())
        for number in range(rounds + 1):
            for speed, batches in zip(speeds, (ours, theirs)):
                wall, cpu = time.perf_counter(), time.process_time()
                for _ in range(samples // micro_batch_size):
                    next(batches)
                if number:  # the first round warms the page cache
                    speed.wall.append(tokens / (time.perf_counter() - wall) / 1e6)
                    speed.cpu.append(tokens / (time.process_time() - cpu) / 1e6)
    return speeds


# ---- the start


@dataclass(frozen=True)
class Start:
    """What opening a corpus cost one process."""

    tokens: int
    documents: int
    seconds: float
    megabytes: float
    """Memory at its peak, over what the process held before."""


def sparse_folder(folder: Path, documents: int) -> Path:
    """Shards whose indexes are real and whose .bin files are holes: only starts read them."""
    random, infos = np.random.default_rng(0), []
    for number, first in enumerate(range(0, documents, _SHARD_DOCUMENTS)):
        count = min(_SHARD_DOCUMENTS, documents - first)
        lengths, name = random.integers(_SHORTEST, _LONGEST, count), f"shard_{number:05d}"
        idx_path(folder / name).write_bytes(index_bytes(lengths, "uint16"))
        with open(bin_path(folder / name), "wb") as stream:
            stream.truncate(2 * int(lengths.sum()))
        infos.append(
            ShardInfo(
                name=name,
                tokens=int(lengths.sum()),
                documents=count,
                dtype="uint16",
                bin_checksum=f"sha256:{number:064x}",
                idx_checksum=f"sha256:{number:064x}",
            )
        )
    save_manifest(
        folder, Manifest(tokenizer_fingerprint=None, vocab_size=VOCAB, eod_id=EOD, shards=infos)
    )
    return folder


def fake_manifest(folder: Path, shards: int, tokens_each: int = 100_000_000) -> Path:
    """The manifest of a corpus whose files are not there."""
    infos = [
        ShardInfo(
            name=f"part_{i // 1000:03d}/shard_{i:06d}",
            tokens=tokens_each + i,
            documents=120_000,
            dtype="int32",
            bin_checksum=f"sha256:{i:064x}",
            idx_checksum=f"sha256:{i:064x}",
        )
        for i in range(shards)
    ]
    save_manifest(
        folder, Manifest(tokenizer_fingerprint=None, vocab_size=131_072, eod_id=0, shards=infos)
    )
    return folder


def start_ours(folder: Path, seq_length: int) -> None:
    """Opens a folder and places samples at both ends of an epoch."""
    dataset = open_dataset(DataConfig(train=str(folder)), seq_length, seed=1)
    windows = dataset.orders[0].samples_per_epoch
    for sample in (0, windows // 2, windows - 1, windows):
        dataset.place(sample)


def start_megatron(folder: Path, seq_length: int) -> None:
    """Builds megatron-core's indexes for one epoch and asks for both ends."""
    samples = load_manifest(folder).tokens // seq_length
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        dataset = megatron_dataset(folder, seq_length, samples, Path(cache))
        for sample in (0, len(dataset) // 2, len(dataset) - 1):
            dataset[sample]


def measure_start(folder: Path, seq_length: int, start: Callable[[Path, int], None]) -> Start:
    """Time and memory of a start, in a process of its own that has all modules loaded."""
    for module in _MODULES:
        importlib.import_module(module)
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_timed_start, args=(folder, seq_length, start, send))
    child.start()
    send.close()
    try:
        seconds, megabytes = receive.recv()
    except EOFError:
        raise RuntimeError(f"the start over {folder} failed; its output says why") from None
    finally:
        child.join()
    manifest = load_manifest(folder)
    return Start(manifest.tokens, manifest.documents, seconds, megabytes)


def _timed_start(
    folder: Path, seq_length: int, start: Callable[[Path, int], None], send: Any
) -> None:
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now
    before, began = _memory("VmRSS"), time.perf_counter()
    start(folder, seq_length)
    send.send((time.perf_counter() - began, _memory("VmHWM") - before))


def _memory(name: str) -> float:
    """Megabytes of this process, by a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) / 1024
    raise AssertionError(f"/proc/self/status has {name}")


def draw_starts(ours: list[Start], theirs: list[Start], path: Path) -> None:
    """Writes time and memory of the starts over the size of the corpus, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for axis, name, unit in zip(axes, ("seconds", "megabytes"), ("s", "MB over the process")):
        for starts, label, mark in ((theirs, "megatron-core", "s"), (ours, "nibble", "o")):
            points = [(start.tokens, getattr(start, name)) for start in starts]
            axis.plot(*zip(*points), marker=mark, label=label)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("tokens of the corpus")
        axis.set_ylabel(f"start: {name} ({unit})")
        axis.grid(alpha=0.3, which="both")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
