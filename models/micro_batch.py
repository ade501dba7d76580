# SPDX-License-Identifier: Apache-2.0
"""Which micro-batch is being computed, right under activation recomputation too.

Dither and Hadamard signs depend on the number of the micro-batch. With pipeline parallelism the
backward pass of one micro-batch, and the recomputation in it, runs between the forward passes of
others, so a counter that the training loop sets would be wrong there. megatron-core saves the
states of its random-number tracker with every recomputed region and brings them back before it
computes the region again, whichever kind of recomputation it is. The number of the micro-batch
travels as one more state of that tracker.
"""

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

_STATE = "micro-batch"


def remember(micro_batch: int) -> None:
    """From now on this is the micro-batch, until the next call or a recomputation."""
    tracker = get_cuda_rng_tracker()
    # A new dictionary: the old one may be what a recomputed region saved.
    tracker.set_states({**tracker.get_states(), _STATE: torch.tensor(micro_batch)})


def current() -> int:
    """The micro-batch whose forward pass is being computed, or computed again; 0 if unknown."""
    state = get_cuda_rng_tracker().get_states().get(_STATE)
    return 0 if state is None else int(state)
