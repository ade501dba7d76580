# SPDX-License-Identifier: Apache-2.0
"""The micro-batches of a step, from the number of consumed samples alone.

Micro-batch j of a step holds the samples consumed + [j * micro_batch_size, (j + 1) *
micro_batch_size); data-parallel rank r of D takes the micro-batches r, r + D, ... . So the samples
of a step, and which of them share a micro-batch, do not depend on the number of ranks.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

import numpy as np
import torch
from torch import Tensor

from fused_ops.errors import ConfigError
from pretrain.data.batch_sizes import BatchSizes, check_batch_sizes
from pretrain.data.config import DataConfig
from pretrain.data.dataset import Dataset, ValidationSet
from pretrain.data.skips import Skips


class MicroBatch(TypedDict):
    """One micro-batch, on the CPU."""

    tokens: Tensor
    """int64 [micro_batch_size, seq_length]."""
    labels: Tensor
    """int64 [micro_batch_size, seq_length]: the token after each."""
    loss_mask: Tensor
    """float32 [micro_batch_size, seq_length]: 1 where the label counts. Shared: do not write."""
    position_ids: Tensor
    """int64 [micro_batch_size, seq_length]. Shared: do not write."""
    cu_seqlens: Tensor | None
    """int32 [documents + 1]: bounds of documents in the flattened [micro_batch_size * seq_length]
    micro-batch (every sample starts one), ending with its size; None unless documents are
    isolated."""
    index: int
    """Number of the micro-batch in its global batch, whatever the number of ranks."""
    sample_ids: list[int]
    """Numbers of its samples in the run, or in the validation set (-1: padding)."""


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """What a micro-batch says about documents."""

    isolate_documents: bool = False
    reset_position_ids: bool = False
    eod_mask_loss: bool = False

    @classmethod
    def of(cls, config: DataConfig) -> "BatchOptions":
        return cls(
            isolate_documents=config.isolate_documents,
            reset_position_ids=config.reset_position_ids,
            eod_mask_loss=config.eod_mask_loss,
        )


class _Assembler:
    """Puts windows together to micro-batches."""

    def __init__(
        self, source: Dataset | ValidationSet, micro_batch_size: int, options: BatchOptions
    ) -> None:
        self.source, self.options = source, options
        self.shape = (micro_batch_size, source.seq_length)
        self._ones = torch.ones(self.shape, dtype=torch.float32)
        self._positions = torch.arange(self.shape[1]).expand(self.shape).contiguous()
        if options.eod_mask_loss and source.eod_id is None:
            raise ConfigError(
                "data.eod_mask_loss needs data whose documents end with an end-of-document id; "
                "the manifest names none: unset it"
            )

    def micro_batch(self, index: int, sample_ids: list[int]) -> MicroBatch:
        """Reads the samples; -1 stands for padding without loss."""
        seq_length = self.shape[1]
        tokens = np.empty(self.shape, dtype=np.int64)
        labels = np.empty(self.shape, dtype=np.int64)
        short = []
        for row, sample in enumerate(sample_ids):
            window = self.source.window(sample) if sample >= 0 else np.zeros(0, np.int64)
            if window.size == seq_length + 1:
                tokens[row], labels[row] = window[:-1], window[1:]
                continue
            length = max(0, window.size - 1)
            tokens[row], labels[row] = self.source.eod_id or 0, self.source.eod_id or 0
            tokens[row, : window.size], labels[row, :length] = window, window[1:]
            short.append((row, length))
        loss_mask = self._loss_mask(tokens, short)
        starts = self._starts(sample_ids)
        return MicroBatch(
            tokens=torch.from_numpy(tokens),
            labels=torch.from_numpy(labels),
            loss_mask=loss_mask,
            position_ids=self._position_ids(starts),
            cu_seqlens=self._cu_seqlens(starts),
            index=index,
            sample_ids=sample_ids,
        )

    def _loss_mask(self, tokens: np.ndarray, short: list[tuple[int, int]]) -> Tensor:
        if not short and not self.options.eod_mask_loss:
            return self._ones
        mask = self._ones.clone()
        if self.options.eod_mask_loss:
            mask[torch.from_numpy(tokens == self.source.eod_id)] = 0
        for row, length in short:
            mask[row, length:] = 0
        return mask

    def _starts(self, sample_ids: list[int]) -> np.ndarray | None:
        """int64[k]: document starts in the flattened micro-batch, from 0; None if not needed."""
        if not (self.options.isolate_documents or self.options.reset_position_ids):
            return None
        pieces = []
        for row, sample in enumerate(sample_ids):
            inside = self.source.document_starts(sample) if sample >= 0 else np.zeros(0, np.int64)
            pieces.append(row * self.shape[1] + np.union1d(inside, [0]))
        return np.concatenate(pieces)

    def _position_ids(self, starts: np.ndarray | None) -> Tensor:
        if starts is None or not self.options.reset_position_ids:
            return self._positions
        size = self.shape[0] * self.shape[1]
        lengths = np.diff(starts, append=size)
        return torch.from_numpy(np.arange(size) - np.repeat(starts, lengths)).view(self.shape)

    def _cu_seqlens(self, starts: np.ndarray | None) -> Tensor | None:
        if starts is None or not self.options.isolate_documents:
            return None
        bounds = np.append(starts, self.shape[0] * self.shape[1])
        return torch.from_numpy(bounds.astype(np.int32))


class Transfer(Protocol):
    """Moves the batches of a step to where they are used, while the step before is computed."""

    def start(self, batches: list[MicroBatch]) -> Any:
        """In the thread that reads ahead."""

    def finish(self, started: Any) -> list[MicroBatch]:
        """In the thread that uses them."""


class TrainLoader:
    """The micro-batches of this rank. Holds no position: `step` takes it.

    Args:
        dataset: the sequence of samples.
        global_batch_size: samples of a step over all ranks; also a schedule of them.
        micro_batch_size: samples of a micro-batch.
        dp_rank, dp_size: this rank among the data-parallel ranks.
        options: what batches say about documents.
        prefetch: prepare the following step in a thread.
        ahead_samples: of this rank, that are fetched from an object store before they are needed.

    Attributes:
        transfer: None, or what moves the batches to a device.

    Raises:
        ConfigError: a global batch that micro-batch size times ranks does not divide.
    """

    def __init__(
        self,
        dataset: Dataset,
        global_batch_size: int | BatchSizes,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        options: BatchOptions | None = None,
        prefetch: bool = False,
        ahead_samples: int = 256,
    ) -> None:
        sizes = global_batch_size
        self.sizes = BatchSizes.of(sizes) if isinstance(sizes, int) else sizes
        for size in self.sizes.sizes:
            check_batch_sizes(size, micro_batch_size, dp_size)
        self.dataset = dataset
        self.micro_batch_size, self.dp_rank, self.dp_size = micro_batch_size, dp_rank, dp_size
        self._assembler = _Assembler(dataset, micro_batch_size, options or BatchOptions())
        self._ahead_samples = ahead_samples
        self.transfer: Transfer | None = None
        self._pool = ThreadPoolExecutor(1, "data-prefetch") if prefetch else None
        self._ahead: tuple[tuple[int, int], Future[Any]] | None = None
        self.skips = Skips()

    def prepare(self, consumed_samples: int) -> None:
        """Begins to read the step that follows, where there is a thread for it.

        Called when the data is open and the model is not: the first step's reads, from an object
        store its first requests, pass while the run sets up.
        """
        if self._pool is not None:
            wanted = (consumed_samples, self.sizes.at(consumed_samples))
            self._ahead = (wanted, self._pool.submit(self._make, *wanted))

    def step(self, consumed_samples: int, global_batch_size: int | None = None) -> list[MicroBatch]:
        """Micro-batches of this rank in the step that follows `consumed_samples` samples.

        `global_batch_size` overrides what the loader's sizes say.
        """
        size = self.sizes.at(consumed_samples) if global_batch_size is None else global_batch_size
        check_batch_sizes(size, self.micro_batch_size, self.dp_size)
        wanted = (consumed_samples, size)
        if self._pool is None:
            return self._finished(self._make(*wanted))
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == wanted:
            result = ahead[1].result()
        else:
            result = self._pool.submit(self._make, *wanted).result()
        consumed = self.skips.after(consumed_samples, size)
        following = (consumed, self.sizes.at(consumed) if global_batch_size is None else size)
        self._ahead = (following, self._pool.submit(self._make, *following))
        return self._finished(result)

    def step_samples(self, consumed_samples: int) -> list[int]:
        """All samples of the step that follows position `consumed_samples`, on all ranks."""
        return self.skips.samples(consumed_samples, self.sizes.at(consumed_samples))

    def leave_out(self, ranges: Sequence[tuple[int, int]]) -> None:
        """From the next step on, steps over the samples in `ranges`, [first, last] each."""
        skips = Skips(ranges)
        if skips.ranges != self.skips.ranges:
            self.skips, self._ahead = skips, None

    def _finished(self, made: Any) -> list[MicroBatch]:
        batches: list[MicroBatch] = made if self.transfer is None else self.transfer.finish(made)
        return batches

    def _make(self, consumed_samples: int, global_batch_size: int) -> Any:
        mine = self.samples(consumed_samples, global_batch_size)
        if self.dataset.is_remote:
            self.dataset.fetch([i for _, ids in mine for i in ids], until_here=True)
        batches = [self._assembler.micro_batch(index, ids) for index, ids in mine]
        if self.dataset.is_remote:
            after = self.skips.after(consumed_samples, global_batch_size)
            self._fetch_ahead(after, global_batch_size)
        return batches if self.transfer is None else self.transfer.start(batches)

    def samples(self, consumed_samples: int, global_batch_size: int) -> list[tuple[int, list[int]]]:
        """(number in the global batch, samples) of this rank's micro-batches of a step."""
        size = self.micro_batch_size
        numbers = range(self.dp_rank, global_batch_size // size, self.dp_size)
        samples = self.skips.samples(consumed_samples, global_batch_size)
        return [(number, samples[number * size : (number + 1) * size]) for number in numbers]

    def _fetch_ahead(self, consumed_samples: int, global_batch_size: int) -> None:
        found: list[int] = []
        while len(found) < self._ahead_samples:
            mine = self.samples(consumed_samples, global_batch_size)
            found += [sample for _, ids in mine for sample in ids]
            consumed_samples = self.skips.after(consumed_samples, global_batch_size)
        self.dataset.fetch(found, until_here=False)

    def close(self) -> None:
        """Ends the prefetch thread, and the data's own."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        self.dataset.close()


class ValidLoader:
    """Global batches of a validation set, cut over data-parallel ranks as in training."""

    def __init__(
        self,
        dataset: ValidationSet,
        global_batch_size: int,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        options: BatchOptions | None = None,
    ) -> None:
        check_batch_sizes(global_batch_size, micro_batch_size, dp_size)
        self.dataset, self.global_batch_size = dataset, global_batch_size
        self.micro_batch_size, self.dp_rank, self.dp_size = micro_batch_size, dp_rank, dp_size
        self._assembler = _Assembler(dataset, micro_batch_size, options or BatchOptions())

    def __len__(self) -> int:
        """Global batches that hold the whole set."""
        return -(-len(self.dataset) // self.global_batch_size)

    def batches(self, count: int | None = None) -> Iterator[list[MicroBatch]]:
        """This rank's micro-batches of each of the first `count` global batches (None: all).

        All ranks get equally many. Where the set ends, samples are padding (id -1, no loss), so
        the mean weighted with `loss_mask` over all ranks is that of the set's own tokens.
        """
        for number in range(len(self) if count is None else min(count, len(self))):
            yield self.read(number)

    def samples(self, number: int) -> list[tuple[int, list[int]]]:
        """(number in the global batch, samples) of this rank's micro-batches; -1 is padding."""
        size, total, found = self.micro_batch_size, len(self.dataset), []
        for index in range(self.dp_rank, self.global_batch_size // size, self.dp_size):
            first = number * self.global_batch_size + index * size
            found.append((index, [i if i < total else -1 for i in range(first, first + size)]))
        return found

    def read(self, number: int) -> list[MicroBatch]:
        """This rank's micro-batches of global batch `number`."""
        mine = self.samples(number)
        if self.dataset.is_remote:
            self.dataset.fetch([i for _, ids in mine for i in ids], until_here=True)
        return [self._assembler.micro_batch(index, ids) for index, ids in mine]
