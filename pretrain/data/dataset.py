# SPDX-License-Identifier: Apache-2.0
"""The sequence of samples of a run: sample i from (seed, i, manifests) and nothing else."""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from fused_ops.errors import ConfigError
from pretrain.data.blend import RESOLUTION, Blend, resolve_weights
from pretrain.data.config import DataConfig, SourceConfig
from pretrain.data.manifest import DataError, Manifest
from pretrain.data.order import ORDER_VERSION, SourceOrder, derive_key
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
        vocab_size, eod_id: of the manifests.
        weights: units of 2**-20 of each source, at sample 0.
    """

    def __init__(
        self,
        shards: list[ShardSet],
        orders: list[SourceOrder],
        blend: Blend,
        fingerprint: str,
    ) -> None:
        self.shards, self.orders, self.blend = shards, orders, blend
        self.fingerprint = fingerprint
        self.seq_length = orders[0].seq_length
        self.vocab_size = shards[0].manifest.vocab_size
        self.eod_id = shards[0].manifest.eod_id
        self.weights = blend.phases[0][1].resolved
        shortest = min(order.samples_per_epoch for order in orders)
        self._block = min(_BLOCK, max(_SMALL_BLOCK, shortest))
        self._blocks: OrderedDict[int, tuple[list[int], list[int]]] = OrderedDict()

    def locate(self, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64[n] samples -> (source int64[n], first token of the window in it int64[n])."""
        source, index = self.blend.locate(position)
        start = np.empty_like(index)
        for number in np.unique(source):
            members = np.flatnonzero(source == number)
            start[members] = self.orders[number].starts(index[members])
        return source, start

    def place(self, sample: int) -> tuple[int, int]:
        """(source, first token) of one sample."""
        block, offset = divmod(sample, self._block)
        found = self._blocks.get(block)
        if found is None:
            first = block * self._block
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
        counts = self.blend.counts(consumed_samples).tolist()
        return [
            {
                "path": str(shards.directory),
                "share": self.weights[number] / RESOLUTION,
                "samples": counts[number],
                "epochs": counts[number] / order.samples_per_epoch,
            }
            for number, (shards, order) in enumerate(zip(self.shards, self.orders))
        ]

    def state_dict(self, consumed_samples: int) -> dict[str, Any]:
        """The state of the data: one integer, and what it counts."""
        return {"consumed_samples": consumed_samples, "fingerprint": self.fingerprint}

    def check_state(self, state: dict[str, Any]) -> int:
        """Consumed samples of a saved state. Raises DataError when the sequence is another one."""
        if state["fingerprint"] != self.fingerprint:
            raise DataError(
                "a resumed run must read the same sequence of samples: seed, model.seq_length, "
                "sources, weights and shards decide it; the checkpoint was made with "
                f"{state['fingerprint']}, this data is {self.fingerprint}: restore those "
                "settings, or start a new run from the weights"
            )
        return int(state["consumed_samples"])


class ValidationSet:
    """Windows of a folder in their order: every token of the stream is a label once.

    Window k covers tokens [k * seq_length, (k + 1) * seq_length]; the last one may be short.
    """

    def __init__(self, shards: ShardSet, seq_length: int) -> None:
        self.shards, self.seq_length = shards, seq_length
        self.vocab_size, self.eod_id = shards.manifest.vocab_size, shards.manifest.eod_id
        self.fingerprint = shards.manifest.fingerprint()
        if shards.tokens < 2:
            raise DataError(
                f"validation data must hold at least 2 tokens; {shards.directory} has 1"
            )

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
    config: DataConfig, seq_length: int, seed: int, vocab_size: int | None = None
) -> Dataset:
    """Opens the training data.

    Args:
        config: sources and order.
        seq_length: inputs of a sample; windows hold one token more.
        seed: of the order, unless `config.seed` names one.
        vocab_size: of the model; None takes the data's.

    Raises:
        ConfigError: all problems at once (missing or damaged folders, weights, vocabularies).
    """
    sources = config.train
    if isinstance(sources, str):
        sources = [SourceConfig(path=sources)]
    seed = seed if config.seed is None else config.seed
    remote = Remote(config)
    manifests = _all([partial(open_manifest, source.path, remote) for source in sources])
    _check_same(manifests, [source.path for source in sources], vocab_size)
    phases = _phases(sources)
    seen: Counter[str] = Counter()
    orders, prints = [], []
    for source, manifest in zip(sources, manifests):
        print_ = manifest.fingerprint()
        # Equal folders named twice are two sources with two orders.
        key = derive_key(seed, print_, seen[print_])
        seen[print_] += 1
        prints.append(print_)
        orders.append(_order(source.path, manifest, seq_length, key, config))
    geometry = (ORDER_VERSION, seed, seq_length, config.chunk_tokens, config.chunks_per_group)
    digest = hashlib.sha256(repr((geometry, prints, phases)).encode()).hexdigest()
    shards = _all([partial(open_shards, s.path, m, remote) for s, m in zip(sources, manifests)])
    return Dataset(shards, orders, Blend(phases), f"sha256:{digest}")


def open_validation(
    config: DataConfig, seq_length: int, vocab_size: int | None = None
) -> dict[str, ValidationSet]:
    """Opens the validation sets by name; a single unnamed one is called ""; none gives {}."""
    if config.valid is None:
        return {}
    paths = {"": config.valid} if isinstance(config.valid, str) else config.valid
    remote = Remote(config)
    manifests = _all([partial(open_manifest, path, remote) for path in paths.values()])
    _check_same(manifests, list(paths.values()), vocab_size)
    shards = _all([partial(open_shards, p, m, remote) for p, m in zip(paths.values(), manifests)])
    return {name: ValidationSet(opened, seq_length) for name, opened in zip(paths, shards)}


def _order(
    path: str, manifest: Manifest, seq_length: int, key: int, config: DataConfig
) -> SourceOrder:
    try:
        return SourceOrder(
            tokens=manifest.tokens,
            seq_length=seq_length,
            key=key,
            chunk_tokens=config.chunk_tokens,
            chunks_per_group=config.chunks_per_group,
        )
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None


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
