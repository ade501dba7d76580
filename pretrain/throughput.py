# SPDX-License-Identifier: Apache-2.0
"""Flags a run that has become slower, and the ranks that the others wait for.

A rank's own time in a step is from its start to the moment when it begins to reduce gradients: all
ranks start together, and that reduction is where they wait for each other. Where tensor- or
pipeline-parallel ranks wait for each other before it, those of the slow rank's group stand out
together. megatron-core's and nvidia-resiliency-ext's detectors need CUDA (events and CUPTI).
"""

import socket
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_STRAGGLES = 1.3
"""A rank whose own time is this many times the median of all ranks' is named."""
_SLOWER = 1.25
"""A window of steps is slow when its median is this many times the best window's."""


class OwnTime:
    """This rank's own seconds in each step since they were last taken."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._begun: Any = None
        self._pairs: list[tuple[Any, Any]] = []

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> None:
        """The step starts."""
        self._begun = self._now()

    def wrap(self, finalize: Callable[..., Any]) -> Callable[..., Any]:
        """`finalize`, noting when it is called: the step's own work is done by then."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            if self._begun is not None:
                self._pairs.append((self._begun, self._now()))
                self._begun = None
            return finalize(*args, **kwargs)

        return noted

    def take(self) -> float:
        """Median seconds of the steps since the last call; 0 where there was none."""
        pairs, self._pairs = self._pairs, []
        if self._cuda and pairs:
            torch.cuda.synchronize()
            return statistics.median(a.elapsed_time(b) / 1000.0 for a, b in pairs)
        return statistics.median(b - a for a, b in pairs) if pairs else 0.0


def stragglers(own: float) -> list[dict[str, Any]]:
    """Ranks whose own time stands out, slowest first; the same on every rank. Collective."""
    boxes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(boxes, (own, socket.gethostname()))
    median = statistics.median(seconds for seconds, _ in boxes)
    found = [
        {
            "rank": rank,
            "host": host,
            "seconds": round(seconds, 4),
            "times": round(seconds / median, 2),
        }
        for rank, (seconds, host) in enumerate(boxes)
        if median > 0 and seconds > _STRAGGLES * median
    ]
    return sorted(found, key=lambda one: -one["seconds"])[:16]


class Regression:
    """Compares the step time of a window of steps with the best window of the run so far."""

    def __init__(self, window: int) -> None:
        self.window = window
        self._recent: deque[float] = deque(maxlen=window)
        self._best: float | None = None
        self._slow = False

    def note(self, seconds: float) -> dict[str, float] | None:
        """After each step; what to say when the run has just become slower, or fast again."""
        self._recent.append(seconds)
        if len(self._recent) < self.window:
            return None
        now = statistics.median(self._recent)
        self._recent.clear()
        if self._best is None:
            self._best = now
            return None
        ratio = now / self._best
        slow, was = ratio > _SLOWER, self._slow
        self._best, self._slow = min(self._best, now), slow
        if slow == was:
            return None
        return {"seconds": round(now, 4), "best": round(now / ratio, 4), "times": round(ratio, 2)}
