# SPDX-License-Identifier: Apache-2.0
"""Launches as a CUDA graph: recorded on all ranks or on none, and freed before the communicators.

Recording a collective of NCCL waits for nobody, once its communicator has been used and unless
NCCL registers buffers with the other ranks (`pretrain.initialize` turns that off). So each rank
records, and then all tell each other how it went, through the store at which they met: no rank
replays a collective that another one does not have.
"""

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker, random as random_states

ANSWER_SECONDS = 120.0
"""How long ranks wait for each other to have recorded."""

_alive: "weakref.WeakSet[torch.cuda.CUDAGraph]" = weakref.WeakSet()
_numbers = itertools.count()


class NotRecordedError(RuntimeError):
    """The launches of some rank could not be recorded: which, and why. The same on all of them."""


def record[Result](work: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Records the launches of `work`, which are not run yet, and gives its result's place.

    All ranks record at the same time, after they have done the same work at least once.

    Raises:
        NotRecordedError: something in it waits for the device, the stream is the default one, or
            another rank has such a reason.
    """
    graph = torch.cuda.CUDAGraph()
    results: list[Result] = []
    cause: Exception | None = None
    try:
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        # Other threads (the loader, NCCL's watchdog) may allocate, or ask for events, meanwhile.
        recording = torch.cuda.graph(
            graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
        )
        with leave_random_states(), recording:
            results.append(work())
    except Exception as error:
        cause = error
    if cause is None:
        _alive.add(graph)  # also if others have failed: it lives in the traceback of that error
    agree(None if cause is None else reason(cause), cause)
    return graph, results[0]


def agree(
    problem: str | None, cause: Exception | None = None, seconds: float = ANSWER_SECONDS
) -> None:
    """Tells the other ranks how this one has fared, and hears of them.

    Neither the device nor a collective has a part in it: both may be in no state to. What the first
    rank finds holds for all: one that comes after others have given it up does not go on alone.

    Args:
        problem: why this rank could not record, or None.
        cause: what to raise the error from.
        seconds: how long to wait for each answer.

    Raises:
        NotRecordedError: some rank has a problem, or does not answer in time.
    """
    number, size = next(_numbers), dist.get_world_size() if dist.is_initialized() else 1
    if size == 1:
        if problem is not None:
            raise NotRecordedError(problem) from cause
        return
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    keys = [f"recorded {number} by rank {each}" for each in range(size)]
    store.set(keys[rank], f"not recorded: {problem}" if problem else "recorded")
    found = []
    for each, key in enumerate(keys):
        try:
            store.wait([key], timedelta(seconds=seconds))
            said = store.get(key).decode()
        except RuntimeError:
            said = f"it has not answered in {seconds:g} s"
        if said != "recorded":
            found.append(f"rank {each}: {said.removeprefix('not recorded: ')}")
    verdict = f"record {number}"
    agreed = store.compare_set(verdict, "", "; ".join(found) or "recorded").decode()
    if agreed != "recorded":
        raise NotRecordedError(agreed) from cause


def reason(error: BaseException) -> str:
    """One line of what went wrong first: ending a recording that has failed is an error too."""
    while error.__context__ is not None:
        error = error.__context__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no text'}"[:400]


@contextlib.contextmanager
def leave_random_states() -> Iterator[None]:
    """Meanwhile megatron-core neither reads nor sets the state of the GPU's generator.

    It does so around dropout (with sequence parallelism) and recomputed regions, even where nothing
    is drawn, and a stream that is recorded forbids it. `cuda_graph_problems` refuses draws.
    """
    tracker = get_cuda_rng_tracker()
    read, write = random_states._get_cuda_rng_state, random_states._set_cuda_rng_state
    tracker.fork = lambda *name, **names: contextlib.nullcontext()
    random_states._get_cuda_rng_state = lambda *args, **kwargs: torch.empty(0, dtype=torch.uint8)
    random_states._set_cuda_rng_state = lambda *args, **kwargs: None
    try:
        yield
    finally:
        random_states._get_cuda_rng_state, random_states._set_cuda_rng_state = read, write
        del tracker.fork


def free_graphs() -> None:
    """Ends all graphs of this process: communicators that graphs know can never be destroyed."""
    if _alive:
        torch.cuda.synchronize()
    for graph in list(_alive):
        graph.reset()
    _alive.clear()
