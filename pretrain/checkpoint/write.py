# SPDX-License-Identifier: Apache-2.0
"""Writes the shards of one checkpoint through megatron-core, in this process or in a forked one.

megatron-core plans the save and hands back a request: a function that writes, and functions that
finish on all ranks together. Here the writing function is ours: it keeps the true cause of an error
(upstream's reports only its type), takes the checksum of each shard where it was written, and sends
both home by a pipe (upstream starts a server process for that, which outlives a killed run).

Memory: a GPU's tensors are copied to the host once; a CPU's are shared with the forked process,
page by page until training changes them. At most one save is in flight, so that is the bound.
"""

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import queue
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint import CheckpointException

from pretrain.checkpoint.agree import on_all
from pretrain.checkpoint.io import CheckpointError, explain, file_entry

_PR_SET_PDEATHSIG = 1


class _Results:
    """Carries what the writing function returns to the rank that planned it.

    Stands in for upstream's queue, of which only `put` and `get_nowait` are used.
    """

    def __init__(self, folder: Path, forked: bool) -> None:
        self.folder = folder
        self.forked = forked
        self.files: dict[str, Any] = {}
        self.error: str | None = None
        self._value: Any = None
        self._arrived = False
        if forked:
            self._reader, self._writer = multiprocessing.Pipe(duplex=False)
            self._drain = threading.Thread(target=self._receive, daemon=True)
            self._parent = os.getpid()

    def started(self) -> None:
        """In the parent, after the fork: only the child may write, so that its end is seen."""
        if self.forked:
            self._writer.close()
            self._drain.start()

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            self._take(pickle.loads(self._reader.recv_bytes()))  # from our own fork, not a file

    def _take(self, message: tuple[Any, dict[str, Any], str | None]) -> None:
        self._value, self.files, self.error = message
        self._arrived = True

    def put(self, message: tuple[Any, dict[str, Any], str | None]) -> None:
        """Called by the writing function, once."""
        if self.forked:
            self._writer.send_bytes(pickle.dumps(message))
        else:
            self._take(message)

    def get_nowait(self) -> Any:
        """Called by upstream's finalisation once the writing process has ended."""
        if self.forked:
            self._drain.join()
            self._reader.close()
        if not self._arrived:
            self.error = f"the process that wrote {self.folder} died"
            raise queue.Empty
        return self._value


def _bind_to_parent(parent: int) -> None:
    """In the forked process: die with the run, and leave Ctrl-C and SIGTERM to it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _write(
    transforms: list[Any],
    _rank: int,
    buckets: list[Any],
    results: _Results,
) -> None:
    """Write and fsync this rank's shards, then read them back for their checksums."""
    if results.forked and os.getpid() != results._parent:
        _bind_to_parent(results._parent)
    written: dict[int, Any] = {}
    files: dict[str, Any] = {}
    try:
        for index, bucket in enumerate(buckets):
            _, outcome = filesystem_async.FileSystemWriterAsync.write_preloaded_data(
                transforms,
                local_proc_idx=index,
                write_bucket=bucket,
                results_queue=None,
                count_queue=None,
                use_fsync=True,
            )
            if isinstance(outcome, Exception):
                raise outcome
            written[index] = outcome
            files[bucket[1]] = file_entry(Path(bucket[0]))
    except Exception as error:
        reason = explain(error, results.folder)
        results.put((RuntimeError(reason), {}, reason))
        return
    results.put((written, files, None))


def _shared_by(replicas: Any) -> Any:
    """How megatron-core splits the writing: evenly over the ranks with the same weights."""
    strategy = TorchDistSaveShardedStrategy()
    if replicas.size() == 1:
        return strategy
    return FullyParallelSaveStrategyWrapper(strategy, replicas)


class ShardWriter:
    """One checkpoint's shards on their way to the disk. Collective."""

    def __init__(self, folder: Path, state: dict[str, Any], *, forked: bool, replicas: Any) -> None:
        """Plan, copy to the host, and write (or start to). CheckpointError.

        `replicas`: the group of ranks that hold the same weights; they share the writing.
        """
        self.folder = folder
        self._results = _Results(folder, forked)
        self._calls = AsyncCallsQueue()
        self._finish: Callable[[], None] | None = None
        filesystem_async._results_queue = self._results  # a new one for every save
        try:
            request = dist_checkpointing.save(
                state,
                str(folder),
                sharded_strategy=_shared_by(replicas),
                async_sharded_save=True,
                async_strategy="mcore",
            )
        finally:
            filesystem_async._results_queue = None
        if request.async_fn is not None:
            transforms = request.async_fn.args[0]
            request = request._replace(async_fn=partial(_write, transforms))
        if forked:
            self._calls.schedule_async_request(request)
            self._results.started()
        else:
            self._finish = partial(self._write_here, request)

    @staticmethod
    def _write_here(request: AsyncRequest) -> None:
        request.execute_sync()

    def done(self, *, wait: bool) -> bool:
        """Whether all ranks have written; the index is written then. CheckpointError."""
        try:
            if self._finish is not None:
                self._finish()
                self._finish = None
                return True
            if self._calls.get_num_unfinalized_calls() == 0:
                return True
            return bool(self._calls.maybe_finalize_async_calls(blocking=wait))
        # torch's is no Exception; raised on every rank, with the cause on one
        except (Exception, CheckpointException) as error:
            self._finish = None
            causes = [cause for cause in on_all(lambda: self._results.error) if cause]
            raise CheckpointError(
                f"checkpoint {self.folder.name} was not written:"
                f" {causes[0] if causes else explain(error, self.folder)}"
            ) from error

    def files(self) -> dict[str, Any]:
        """{name: manifest entry} of this rank's shards, once `done`."""
        return self._results.files

    def abort(self) -> None:
        """Kill the writing process of this rank; nothing is finished. Not collective."""
        for call in self._calls.async_calls:
            call.async_caller.close(abort=True)
        self._calls.async_calls.clear()
