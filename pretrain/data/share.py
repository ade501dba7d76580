# SPDX-License-Identifier: Apache-2.0
"""Micro-batches are read once for each model replica, and broadcast to the ranks that hold it.

The reader is the first of the replica's tensor-, pipeline- and context-parallel ranks. It prepares
the next step in a thread, on a GPU as far as the device; at the step itself megatron-core's
`get_batch_on_this_tp_rank` broadcasts over the context-parallel group and then over the group of
tensor- and pipeline-parallel ranks. What the reader cannot read becomes the same error everywhere.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_batch_on_this_tp_rank

from fused_ops.errors import ConfigError
from pretrain.data.batch_sizes import BatchSizes
from pretrain.data.loader import MicroBatch, TrainLoader, ValidLoader
from pretrain.data.manifest import DataError

_TENSORS = ("tokens", "labels", "loss_mask", "position_ids")


class DeviceTransfer:
    """Copies micro-batches to a GPU on a stream of its own, beside what is computed there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)

    def start(self, batches: list[MicroBatch]) -> tuple[list[MicroBatch], Any]:
        """Called in the thread that reads ahead: the copies, and the event of their end."""
        moved: list[Any] = [dict(batch) for batch in batches]
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            for batch in moved:
                for name, value in batch.items():
                    if isinstance(value, torch.Tensor):
                        batch[name] = value.pin_memory().to(self.device, non_blocking=True)
            return moved, self._stream.record_event()

    def finish(self, started: tuple[list[MicroBatch], Any]) -> list[MicroBatch]:
        """Called where the batches are used: work that follows waits for the copies."""
        batches, event = started
        current = torch.cuda.current_stream(self.device)
        current.wait_event(event)
        for batch in batches:
            for value in batch.values():
                if isinstance(value, torch.Tensor):
                    # The allocator must not give the memory away while this stream uses it.
                    value.record_stream(current)
        return batches


class Share:
    """Broadcasts micro-batches within a model replica.

    Args:
        groups: megatron-core's process groups (`cp`, `mp`).
        device: where the batches go.
        micro_batch_size, seq_length: the shape of a micro-batch.
    """

    def __init__(
        self,
        groups: ProcessGroupCollection,
        device: torch.device,
        micro_batch_size: int,
        seq_length: int,
    ) -> None:
        self._device, self._shape = device, (micro_batch_size, seq_length)
        first = groups.mp.rank() == 0
        self.reads = first and groups.cp.rank() == 0
        """Whether this rank reads for its replica."""
        # Over the context-parallel ranks first, each of which then serves its own model ranks.
        hops = [(groups.cp, first), (groups.mp, True)]
        self._hops = [group for group, takes_part in hops if takes_part and group.size() > 1]

    def __call__(
        self, read: Callable[[], list[MicroBatch]], mine: list[tuple[int, list[int]]]
    ) -> list[MicroBatch]:
        """What `read` gives on the reader, on every rank of the replica. Collective.

        `mine`: (number in the global batch, samples) of each micro-batch. Raises DataError on
        every rank of the replica where `read` raises a ConfigError on its reader.
        """
        if not self._hops:
            return read()
        batches: list[Any] = [{} for _ in mine]
        problems: list[str] = []
        if self.reads:
            try:
                batches = [self._moved(batch) for batch in read()]
            except ConfigError as error:
                problems = error.problems
        for group in self._hops:
            problems = self._hop(group, batches, problems)
        if problems:
            raise DataError(problems)
        for batch, (index, sample_ids) in zip(batches, mine):
            batch["index"], batch["sample_ids"] = index, sample_ids
        return batches

    def _moved(self, batch: MicroBatch) -> dict[str, Any]:
        found: dict[str, Any] = {
            name: batch[name].to(self._device)  # type: ignore[literal-required]
            for name in _TENSORS
        }
        bounds = batch["cu_seqlens"]
        found["cu_seqlens"] = None if bounds is None else bounds.to(self._device)
        return found

    def _hop(self, group: Any, batches: list[Any], problems: list[str]) -> list[str]:
        """From the first rank of a group to the others: problems, or every tensor."""
        source, first = dist.get_process_group_ranks(group)[0], group.rank() == 0
        sizes = [len(problems)] + [0] * len(batches)
        if first and not problems:
            bounds = [batch["cu_seqlens"] for batch in batches]
            sizes[1:] = [0 if b is None else int(b.numel()) for b in bounds]
        header = torch.tensor(sizes, dtype=torch.int64, device=self._device)
        dist.broadcast(header, source, group=group)
        sizes = header.tolist()
        if sizes[0]:
            said: list[Any] = [problems]
            dist.broadcast_object_list(said, source, group=group, device=self._device)
            return list(said[0])
        for batch, size in zip(batches, sizes[1:]):
            shared = get_batch_on_this_tp_rank(
                dict(batch),
                has_cu_seqlens=False,
                is_hybrid_cp=False,
                create_attention_mask_in_dataloader=False,
                broadcast_src_rank=source,
                broadcast_group=group,
                cp_size=1,
                tp_rank=group.rank(),
                micro_batch_size=self._shape[0],
                seq_length=self._shape[1],
                mtp_on_this_rank=False,
            )
            batch |= {name: shared[name] for name in _TENSORS}
            bounds_ = batch.get("cu_seqlens")
            if size and bounds_ is None:
                bounds_ = torch.empty(size, dtype=torch.int32, device=self._device)
            if bounds_ is not None:
                dist.broadcast(bounds_, source, group=group)
            batch["cu_seqlens"] = bounds_
        return []


class SharedTrainLoader:
    """A TrainLoader that only the reader of a replica asks; all its ranks get the batches."""

    def __init__(self, loader: TrainLoader, share: Share, device: torch.device) -> None:
        self._loader, self._share = loader, share
        if device.type == "cuda" and share.reads:
            loader.transfer = DeviceTransfer(device)

    @property
    def sizes(self) -> BatchSizes:
        """Global batch sizes by consumed samples."""
        return self._loader.sizes

    def prepare(self, consumed_samples: int) -> None:
        """Begins to read the step that follows, on the rank that reads."""
        if self._share.reads:
            self._loader.prepare(consumed_samples)

    def step(self, consumed_samples: int) -> list[MicroBatch]:
        """Micro-batches of this rank in the step that follows `consumed_samples` samples."""
        size = self.sizes.at(consumed_samples)
        mine = self._loader.samples(consumed_samples, size)
        return self._share(lambda: self._loader.step(consumed_samples), mine)

    def step_samples(self, consumed_samples: int) -> list[int]:
        """All samples of the step that follows position `consumed_samples`, on all ranks."""
        return self._loader.step_samples(consumed_samples)

    def leave_out(self, ranges: Sequence[tuple[int, int]]) -> None:
        """From the next step on, steps over the samples in `ranges`, [first, last] each."""
        self._loader.leave_out(ranges)

    def close(self) -> None:
        """Ends the threads that read ahead."""
        self._loader.close()


class SharedValidLoader:
    """A ValidLoader that only the reader of a replica asks."""

    def __init__(self, loader: ValidLoader, share: Share) -> None:
        self._loader, self._share = loader, share

    def batches(self, count: int | None = None) -> Iterator[list[MicroBatch]]:
        """This rank's micro-batches of each of the first `count` global batches (None: all)."""
        total = len(self._loader)
        for number in range(total if count is None else min(count, total)):
            yield self._share(partial(self._loader.read, number), self._loader.samples(number))
