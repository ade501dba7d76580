# SPDX-License-Identifier: Apache-2.0
"""Document boundaries inside a sample: how layers are told not to look across them.

megatron-core passes one object through the stack to attention and to the Mamba mixer. Its own kind
of packing ("thd") needs kernels of Transformer Engine; here the object says only which document
each token belongs to, and the tensors keep their usual shape.
"""

from itertools import pairwise

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from fused_ops.attention import DocumentBounds


class Documents(PackedSeqParams):
    """The document of each token of the whole sequence, and where documents start."""

    def __init__(self, bounds: DocumentBounds) -> None:
        # Rotary embeddings take their length from here.
        length = bounds.ids.shape[1]
        super().__init__(qkv_format="sbhd", max_seqlen_q=length, max_seqlen_kv=length)
        self.bounds = bounds


def document_boundaries(
    cu_seqlens: Tensor, micro_batch_size: int, seq_length: int, device: torch.device
) -> Documents:
    """From the bounds of documents in a flattened micro-batch.

    Args:
        cu_seqlens: int [documents + 1], rising from 0 to micro_batch_size * seq_length; every
            sample starts a document. On a CPU, since it is read: elsewhere this waits for a device.
        micro_batch_size, seq_length: of the whole micro-batch, before context parallelism cuts it.
        device: of the tokens.
    """
    total = micro_batch_size * seq_length
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != total:
        raise ValueError(
            f"cu_seqlens must go from 0 to micro_batch_size * seq_length = {total}, got "
            f"{bounds[0]} to {bounds[-1]}"
        )
    longest = max(end - start for start, end in pairwise(bounds))
    cu_seqlens = cu_seqlens.int().to(device, non_blocking=True)
    position = torch.arange(total, device=device)
    number = torch.bucketize(position, cu_seqlens[1:-1].long(), right=True)
    ids = number.view(micro_batch_size, seq_length)
    return Documents(DocumentBounds(ids, cu_seqlens, longest))


def document_ids(packed: PackedSeqParams | None) -> Tensor | None:
    """The ids in the object that megatron-core passed on, or None without boundaries.

    Raises:
        ValueError: megatron-core's own packing, which these layers do not read.
    """
    if packed is None:
        return None
    if not isinstance(packed, Documents):
        raise ValueError(
            "packed sequences of megatron-core (thd) are not supported here; pass cu_seqlens to "
            "the model instead"
        )
    return packed.bounds.ids
