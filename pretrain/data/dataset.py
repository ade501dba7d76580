# SPDX-License-Identifier: Apache-2.0
"""The sequence of samples of a run: sample i from (seed, i, manifests) and nothing else."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from fused_ops.errors import ConfigError
from pretrain.data.blend import RESOLUTION, resolve_weights
from pretrain.data.changes import Segment, SourceState, follow, notes, parse_segments
from pretrain.data.config import DataConfig, SourceConfig
from pretrain.data.manifest import DataError, Manifest
from pretrain.data.order import ORDER_VERSION, Order, SourceOrder
from pretrain.data.remote import Remote, RemoteShardSet, open_manifest, open_shards
from pretrain.data.shards import ShardSet

# Positions are located this many at a time: the arithmetic is on arrays. Fewer where epochs are
# short, since each epoch has keys of its own.
_BLOCK = 8192
_SMALL_BLOCK = 64


class Dataset:
    """An endless sequence of windows of seq_length + 1 tokens, blended from sources.

    Attributes:
        fingerprint: digest of everything that decides the sequence. With the number of consumed
            samples it is the whole state of the data.
        segments: what decides the sequence; one, unless the run's data changed midway.
        first_sample: of the last segment: the first one that this object gives.
        changes: what the change that this opening made does; empty without one.
        vocab_size, eod_id: of the manifests.
        weights: units of 2**-20 of each source, at `first_sample`.
    """

    def __init__(self, shards: list[ShardSet], segments: list[Segment]) -> None:
        """Raises ValueError when a source holds less than a window."""
        readings, _ = follow(segments)
        self.shards, self.segments = shards, segments
        self.orders: list[Order] = [reading.order for reading in readings]
        self._bases = np.array([reading.index for reading in readings], dtype=np.int64)
        self.blend = segments[-1].blend()
        self.first_sample, self.seq_length = segments[-1].first_sample, segments[-1].seq_length
        self.changes: list[str] = []
        self.fingerprint = fingerprint_of(segments)
        self.vocab_size = shards[0].manifest.vocab_size
        self.eod_id = shards[0].manifest.eod_id
        self.weights = self.blend.phases[0][1].resolved
        shortest = min(order.samples_per_epoch for order in self.orders)
        self._block = min(_BLOCK, max(_SMALL_BLOCK, shortest))
        self._blocks: OrderedDict[int, tuple[list[int], list[int]]] = OrderedDict()

    def locate(self, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64[n] samples -> (source int64[n], first token of the window in it int64[n])."""
        source, index = self.blend.locate(position - self.first_sample)
        index += self._bases[source]
        start = np.empty_like(index)
        for number in np.unique(source):
            members = np.flatnonzero(source == number)
            start[members] = self.orders[number].starts(index[members])
        return source, start

    def place(self, sample: int) -> tuple[int, int]:
        """(source, first token) of one sample."""
        assert sample >= self.first_sample, f"sample {sample} is of an earlier segment"
        block, offset = divmod(sample - self.first_sample, self._block)
        found = self._blocks.get(block)
        if found is None:
            first = self.first_sample + block * self._block
            source, start = self.locate(np.arange(first, first + self._block))
            found = (source.tolist(), start.tolist())
            self._blocks[block] = found
            while len(self._blocks) > 4:
                self._blocks.popitem(last=False)
        return found[0][offset], found[1][offset]

    def window(self, sample: int) -> np.ndarray:
        """Tokens [seq_length + 1] of a sample in the shards' own integer type."""
        source, start = self.place(sample)
        return self.shards[source].window(start, self.seq_length + 1)

    def sample(self, sample: int) -> np.ndarray:
        """int64[seq_length + 1] tokens of a sample."""
        return self.window(sample).astype(np.int64)

    def document_starts(self, sample: int) -> np.ndarray:
        """int64[k]: positions in [0, seq_length) of a sample where a document starts."""
        source, start = self.place(sample)
        return self.shards[source].document_starts(start, self.seq_length)

    def fetch(self, samples: list[int], *, until_here: bool) -> None:
        """Starts to bring samples here where their source is in an object store.

        `until_here`: and waits. Errors are raised where the samples are read.
        """
        windows: dict[int, list[tuple[int, int]]] = {}
        for sample in samples:
            source, start = self.place(sample)
            windows.setdefault(source, []).append((start, self.seq_length + 1))
        for source, places in windows.items():
            self.shards[source].fetch(places, until_here=until_here)

    @property
    def is_remote(self) -> bool:
        """Whether some source is in an object store."""
        return any(isinstance(shards, RemoteShardSet) for shards in self.shards)

    def close(self) -> None:
        """Ends what fetches ahead."""
        for shards in self.shards:
            shards.close()

    def consumed(self, consumed_samples: int) -> list[dict[str, Any]]:
        """Per source: path, share in 2**-20, samples and epochs after `consumed_samples`."""
        counts = self._bases + self.blend.counts(consumed_samples - self.first_sample)
        return [
            {
                "path": str(shards.directory),
                "share": self.weights[number] / RESOLUTION,
                "samples": int(counts[number]),
                "epochs": order.epochs(int(counts[number])),
            }
            for number, (shards, order) in enumerate(zip(self.shards, self.orders))
        ]

    def state_dict(self, consumed_samples: int) -> dict[str, Any]:
        """The state of the data: one integer, and what it counts."""
        return {
            "consumed_samples": consumed_samples,
            "fingerprint": self.fingerprint,
            "segments": [segment.model_dump(mode="json") for segment in self.segments],
        }

    def division(self) -> str:
        """Digest of where the documents of all sources begin, for runs that keep them apart."""
        text = "|".join(shards.manifest.division() for shards in self.shards)
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"

    def check_state(self, state: dict[str, Any]) -> int:
        """Consumed samples of a saved state. Raises DataError when the sequence is another one."""
        if state["fingerprint"] != self.fingerprint:
            raise DataError(
                "a resumed run must read the same sequence of samples: seed, model.seq_length, "
                "sources, weights and shards decide it; the checkpoint was made with "
                f"{state['fingerprint']}, this data is {self.fingerprint}: restore those "
                "settings, set data.on_change=continue to go on with other data, or start a new "
                "run from the weights"
            )
        return int(state["consumed_samples"])


def fingerprint_of(segments: list[Segment]) -> str:
    """Digest of everything that decides the samples; paths do not."""

    def parts(s: Segment) -> tuple[object, ...]:
        geometry = (ORDER_VERSION, s.seed, s.seq_length, s.chunk_tokens, s.chunks_per_group)
        # Where weights change, what a source is owed is carried over; it was not in version 1.
        carried = ("carried",) if len(s.phases) > 1 else ()
        return geometry, [source.fingerprint for source in s.sources], s.phases, *carried

    if len(segments) == 1:
        text = repr(parts(segments[0]))
    else:
        text = repr([(segment.first_sample, parts(segment)) for segment in segments])
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


class ValidationSet:
    """Windows of a folder in their order: every token of the stream is a label once.

    Window k covers tokens [k * seq_length, (k + 1) * seq_length]; the last one may be short.
    """

    def __init__(self, shards: ShardSet, seq_length: int) -> None:
        self.shards, self.seq_length = shards, seq_length
        self.vocab_size, self.eod_id = shards.manifest.vocab_size, shards.manifest.eod_id
        self.fingerprint = shards.manifest.fingerprint()

    def __len__(self) -> int:
        return -(-(self.shards.tokens - 1) // self.seq_length)

    def window(self, sample: int) -> np.ndarray:
        """Tokens [up to seq_length + 1] of window `sample`."""
        start = sample * self.seq_length
        return self.shards.window(start, min(self.seq_length + 1, self.shards.tokens - start))

    @property
    def is_remote(self) -> bool:
        """Whether the set is in an object store."""
        return isinstance(self.shards, RemoteShardSet)

    def fetch(self, samples: list[int], *, until_here: bool) -> None:
        """Starts to bring windows here where the set is in an object store; waits if asked."""
        size = self.seq_length
        starts = [sample * size for sample in samples if 0 <= sample < len(self)]
        places = [(start, min(size + 1, self.shards.tokens - start)) for start in starts]
        self.shards.fetch(places, until_here=until_here)

    def close(self) -> None:
        """Ends what fetches ahead."""
        self.shards.close()

    def document_starts(self, sample: int) -> np.ndarray:
        """int64[k]: positions in [0, seq_length) of a window where a document starts."""
        start = sample * self.seq_length
        return self.shards.document_starts(start, min(self.seq_length, self.shards.tokens - start))


def open_dataset(
    config: DataConfig,
    seq_length: int,
    seed: int,
    vocab_size: int | None = None,
    state: dict[str, Any] | None = None,
) -> Dataset:
    """Opens the training data.

    Args:
        config: sources and order.
        seq_length: inputs of a sample; windows hold one token more.
        seed: of the order, unless `config.seed` names one.
        vocab_size: of the model; None takes the data's.
        state: of the checkpoint that is continued, from `state_dict`. Where the settings make
            another sequence, `config.on_change` decides whether the dataset goes on from it or is
            one that `check_state` refuses.

    Raises:
        ConfigError: all problems at once (missing or damaged folders, weights, vocabularies).
    """
    sources = config.train
    if isinstance(sources, str):
        sources = [SourceConfig(path=sources)]
    remote = Remote(config)
    paths = [source.path for source in sources]
    opening = [partial(_training_manifest, path, remote, seq_length) for path in paths]
    *manifests, phases = _all([*opening, partial(_phases, sources)])
    _check_same(manifests, paths, vocab_size)
    segments = parse_segments(state)
    now = Segment(
        first_sample=0,
        seq_length=seq_length,
        chunk_tokens=config.chunk_tokens,
        chunks_per_group=config.chunks_per_group,
        seed=seed if config.seed is None else config.seed,
        sources=[
            SourceState(path=s.path, fingerprint=m.fingerprint(), tokens=m.tokens)
            for s, m in zip(sources, manifests)
        ],
        phases=phases,
    )
    changed = bool(segments) and not segments[-1].same_as(now)
    if not segments:
        segments = [now]
    elif changed and config.on_change == "continue":
        assert state is not None, "segments come from a state"
        consumed = int(state["consumed_samples"])
        # A change where nothing was read since the last one replaces it.
        kept = [segment for segment in segments if segment.first_sample < consumed]
        segments = [*kept, now.model_copy(update={"first_sample": consumed if kept else 0})]
    elif changed:  # another fingerprint, which `check_state` refuses
        start = {"first_sample": segments[-1].first_sample}
        segments = [*segments[:-1], now.model_copy(update=start)]
    shards = _all([partial(open_shards, s.path, m, remote) for s, m in zip(sources, manifests)])
    dataset = Dataset(shards, segments)
    if changed and config.on_change == "continue" and len(segments) > 1:
        dataset.changes = notes(segments)
    return dataset


def open_earlier(config: DataConfig, segments: list[Segment], sample: int) -> Dataset:
    """The dataset as it was at a sample of the run, to look at; `config` says how to read it.

    Raises DataError where a folder of then is gone or holds other data now.
    """
    then = [segment for segment in segments if segment.first_sample <= sample]
    remote, sources = Remote(config), then[-1].sources
    manifests = _all([partial(open_manifest, source.path, remote) for source in sources])
    problems = [
        f"{source.path} must hold what the run read at sample {sample}: it holds other data now"
        for source, manifest in zip(sources, manifests)
        if manifest.fingerprint() != source.fingerprint
    ]
    if problems:
        raise DataError(problems)
    shards = _all([partial(open_shards, s.path, m, remote) for s, m in zip(sources, manifests)])
    return Dataset(shards, then)


def _training_manifest(path: str, remote: Remote, seq_length: int) -> Manifest:
    """Of a source that holds a window, or DataError."""
    manifest = open_manifest(path, remote)
    try:
        SourceOrder(tokens=manifest.tokens, seq_length=seq_length, key=0)
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None
    return manifest


def _validation_manifest(path: str, remote: Remote) -> Manifest:
    """Of a set that holds an input and its label, or DataError."""
    manifest = open_manifest(path, remote)
    if manifest.tokens < 2:
        raise DataError(
            f"validation data must hold at least 2 tokens; {path} has {manifest.tokens}: give a "
            "larger folder"
        )
    return manifest


def open_validation(
    config: DataConfig, seq_length: int, vocab_size: int | None = None
) -> dict[str, ValidationSet]:
    """Opens the validation sets by name; a single unnamed one is called ""; none gives {}."""
    if config.valid is None:
        return {}
    paths = {"": config.valid} if isinstance(config.valid, str) else config.valid
    remote = Remote(config)
    manifests = _all([partial(_validation_manifest, path, remote) for path in paths.values()])
    _check_same(manifests, list(paths.values()), vocab_size)
    shards = _all([partial(open_shards, p, m, remote) for p, m in zip(paths.values(), manifests)])
    return {name: ValidationSet(opened, seq_length) for name, opened in zip(paths, shards)}


def open_both(
    config: DataConfig,
    seq_length: int,
    seed: int,
    vocab_size: int | None = None,
    state: dict[str, Any] | None = None,
) -> tuple[Dataset, dict[str, ValidationSet]]:
    """(`open_dataset`, `open_validation`) of a run. ConfigError has the problems of both."""
    sizes = [vocab_size]

    def train() -> Dataset:
        dataset = open_dataset(config, seq_length, seed, vocab_size, state)
        sizes.append(dataset.vocab_size)
        return dataset

    dataset, sets = _all([train, lambda: open_validation(config, seq_length, sizes[-1])])
    return dataset, sets


def _phases(sources: list[SourceConfig]) -> list[tuple[int, list[int]]]:
    """(first sample, resolved weights) at each sample where some weight changes."""
    curves = [
        [(0, source.weight)] if isinstance(source.weight, int | float) else list(source.weight)
        for source in sources
    ]
    paths = [source.path for source in sources]
    problems = [
        f"a weight's list must start at sample 0 and ascend; {path} has {curve}"
        for path, curve in zip(paths, curves)
        if not curve or curve[0][0] != 0 or any(a[0] >= b[0] for a, b in pairwise(curve))
    ]
    if problems:
        raise ConfigError(problems)
    phases = []
    for first in sorted({first for curve in curves for first, _ in curve}):
        weights = [[w for at, w in curve if at <= first][-1] for curve in curves]
        phases.append((first, resolve_weights(weights, paths)))
    return phases


def _check_same(manifests: list[Manifest], paths: list[str], vocab_size: int | None) -> None:
    """One tokenizer, one vocabulary, one end-of-document id; inside the model's vocabulary."""
    problems = []
    known = [m.tokenizer_fingerprint for m in manifests if m.tokenizer_fingerprint]
    for path, manifest in zip(paths, manifests):
        if manifest.tokenizer_fingerprint and manifest.tokenizer_fingerprint != known[0]:
            problems.append(
                "sources must be of one tokenizer; "
                f"{path} is of {manifest.tokenizer_fingerprint}, others of {known[0]}"
            )
        same = (manifests[0].vocab_size, manifests[0].eod_id)
        if (manifest.vocab_size, manifest.eod_id) != same:
            problems.append(
                "sources must agree on vocabulary size and end-of-document id; "
                f"{path} has {(manifest.vocab_size, manifest.eod_id)}, {paths[0]} has {same}"
            )
        if vocab_size is not None and manifest.vocab_size > vocab_size:
            problems.append(
                f"model.vocab_size must be at least the data's; it is {vocab_size} and {path} "
                f"has {manifest.vocab_size}: leave model.vocab_size unset to take the data's"
            )
    if problems:
        raise DataError(problems)


def _all(makers: list[Callable[[], Any]]) -> list[Any]:
    """Results of all makers; raises the problems of all that failed together."""
    results, problems = [], []
    for make in makers:
        try:
            results.append(make())
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    return results
