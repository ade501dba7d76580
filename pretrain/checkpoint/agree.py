# SPDX-License-Identifier: Apache-2.0
"""Ranks that succeed or fail together: an error on one becomes the same error on all.

Without it the rank that failed leaves, and the others wait for it until a time-out hides the cause.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fused_ops.errors import ConfigError
from pretrain.checkpoint.io import CheckpointError
from pretrain.checkpoint.safe import UnsafeCheckpoint

_KINDS: dict[str, type[Exception]] = {
    "ConfigError": ConfigError,
    "CheckpointError": CheckpointError,
    "UnsafeCheckpoint": UnsafeCheckpoint,
}


def _attempt(work: Callable[[], Any]) -> tuple[str | None, Any]:
    try:
        return None, work()
    except ConfigError as error:
        return "ConfigError", error.problems
    except UnsafeCheckpoint as error:
        return "UnsafeCheckpoint", str(error)
    except (CheckpointError, OSError) as error:
        return "CheckpointError", str(error)


def on_first(work: Callable[[], Any], shared: bool = True) -> Any:
    """Run `work` on rank 0; every rank gets its result, or raises its error.

    Not `shared`: rank 0 keeps the result, the others get None.
    """
    kind, value = _attempt(work) if dist.get_rank() == 0 else (None, None)
    box = [(kind, value if shared or kind else None) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    if dist.get_rank() > 0 or kind is not None:
        kind, value = box[0] or ("CheckpointError", "rank 0 said nothing")
    if kind is not None:
        raise _KINDS[kind](value)
    return value


def on_all(work: Callable[[], Any]) -> list[Any]:
    """Run `work` on every rank; every rank gets all results in order, or raises the first error."""
    boxes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(boxes, _attempt(work))
    for rank, (kind, value) in enumerate(boxes):
        if kind is not None:
            where = f" (rank {rank})" if len(boxes) > 1 and isinstance(value, str) else ""
            raise _KINDS[kind](value + where if isinstance(value, str) else value)
    return [value for _, value in boxes]
