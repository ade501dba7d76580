# SPDX-License-Identifier: Apache-2.0
"""Global batch sizes of a run: one, or a schedule in samples; from consumed samples alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fused_ops.errors import ConfigError


@dataclass(frozen=True)
class BatchSizes:
    """From which sample on which global batch size holds.

    A step takes the size that holds where it starts, so a change that falls inside a step comes
    with the next one.

    Attributes:
        phases: (first sample, global batch size), ascending from sample 0.
    """

    phases: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, size: int, schedule: Sequence[Sequence[int]] = ()) -> "BatchSizes":
        """`size` throughout, or the schedule, which ends with it.

        Raises ConfigError for one that does not start at 0, ascend and end with `size`.
        """
        phases = tuple((int(first), int(batch)) for first, batch in schedule) or ((0, size),)
        name = f"train.step_batch_size_schedule={[list(phase) for phase in phases]}"
        problems = []
        if phases[0][0] != 0 or any(a[0] >= b[0] for a, b in pairwise(phases)):
            problems.append(f"{name} must start at sample 0 and then ascend")
        if any(batch < 1 for _, batch in phases):
            problems.append(f"{name} must have sizes of at least 1")
        if phases[-1][1] != size:
            problems.append(
                f"{name} must end with train.global_batch_size={size}; set that to {phases[-1][1]}"
            )
        if problems:
            raise ConfigError(problems)
        return cls(phases)

    @property
    def sizes(self) -> list[int]:
        """Every size that occurs, in order."""
        return [size for _, size in self.phases]

    def at(self, consumed_samples: int) -> int:
        """Size of the step that follows `consumed_samples` samples."""
        return [size for first, size in self.phases if first <= consumed_samples][-1]

    def consumed_after(self, steps: int) -> int:
        """Samples of the first `steps` steps of a run that never changed its sizes."""
        consumed = 0
        for number, (_, size) in enumerate(self.phases):
            following = self.phases[number + 1 :]
            wanted = -(-(following[0][0] - consumed) // size) if following else steps
            taken = min(steps, max(0, wanted))
            consumed, steps = consumed + taken * size, steps - taken
        return consumed


def check_batch_sizes(global_batch_size: int, micro_batch_size: int, dp_size: int) -> int:
    """Micro-batches a rank takes in a step. Raises ConfigError with the nearest valid sizes."""
    unit = micro_batch_size * dp_size
    if micro_batch_size < 1 or global_batch_size < 1:
        raise ConfigError(
            "train.global_batch_size and train.micro_batch_size must be at least 1; "
            f"got {global_batch_size} and {micro_batch_size}"
        )
    if global_batch_size % unit:
        below, above = global_batch_size // unit * unit, -(-global_batch_size // unit) * unit
        nearest = f"sizes are {below} and {above}" if below else f"size is {above}"
        raise ConfigError(
            "train.global_batch_size must be a multiple of micro_batch_size * data-parallel ranks "
            f"= {micro_batch_size} * {dp_size}; got {global_batch_size}; the nearest valid "
            f"{nearest}"
        )
    return global_batch_size // unit
