# SPDX-License-Identifier: Apache-2.0
"""The Mamba-2 mixer: megatron-core's parameters and layout, with our own scan.

megatron-core builds a mixer only where the package mamba-ssm is installed, and then calls its fused
kernel. `without_mamba_ssm` holds the two module attributes it looks at; it is the only place that
touches them. On a GPU with mamba-ssm the fused kernel is used as upstream does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm import mamba_mixer
from torch import Tensor

from fused_ops.mamba2_scan import causal_conv1d, mamba2_scan
from models.documents import document_ids
from models.norm import GroupNorm

FP32_PARAMETERS = ("A_log", "D", "dt_bias")


@contextmanager
def without_mamba_ssm() -> Iterator[None]:
    """Inside, a MambaMixer can be built without mamba-ssm, and with our output norm."""
    before = mamba_mixer.HAVE_MAMBA_SSM, mamba_mixer.ExtendedRMSNorm
    mamba_mixer.HAVE_MAMBA_SSM, mamba_mixer.ExtendedRMSNorm = True, GroupNorm
    try:
        yield
    finally:
        mamba_mixer.HAVE_MAMBA_SSM, mamba_mixer.ExtendedRMSNorm = before


class MambaMixer(mamba_mixer.MambaMixer):
    """in_proj, causal convolution, scan, gate, norm, out_proj.

    `A_log`, `D` and `dt_bias` (one number a head) are FP32 whatever the model's dtype: decays near
    one do not survive BF16's eight bits.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with without_mamba_ssm():
            super().__init__(*args, **kwargs)
        self.norm.eps = self.config.layernorm_epsilon  # upstream: 1e-5 whatever the config says
        self._keep_fp32()

    def _apply(self, fn: Any, recurse: bool = True) -> "MambaMixer":
        """Moves and casts of the model, without the casts of FP32_PARAMETERS."""
        kept = {name: getattr(self, name).data for name in FP32_PARAMETERS}
        super()._apply(fn, recurse)
        for name, data in kept.items():
            parameter = getattr(self, name)
            if parameter.dtype is not torch.float32:
                parameter.data = data.to(device=parameter.device, dtype=torch.float32)
        return self

    def _keep_fp32(self) -> None:
        for name in FP32_PARAMETERS:
            parameter = getattr(self, name)
            parameter.data = parameter.data.float()

    def _ssm_training(self, zxBCdt: Tensor, packed_seq_params: Any = None) -> Tensor:
        """[length, batch, z + x + B + C + dt of this rank] -> [length, batch, inner of this rank].

        Under context parallelism the length is the whole sequence here, and the features a part.
        """
        documents = document_ids(packed_seq_params)
        if documents is None and zxBCdt.is_cuda and mamba_mixer.HAVE_MAMBA_SSM:
            return super()._ssm_training(zxBCdt)
        cp, state = self.cp, self.d_state
        inner, heads, groups = cp.d_inner_local_tpcp, cp.nheads_local_tpcp, cp.ngroups_local_tpcp
        z, xBC, dt = zxBCdt.transpose(0, 1).split([inner, inner + 2 * groups * state, heads], -1)
        xBC = causal_conv1d(
            xBC, cp.get_conv1d_weight().squeeze(1), cp.get_conv1d_bias(), document_ids=documents
        )
        x, B, C = F.silu(xBC).split([inner, groups * state, groups * state], -1)
        y = mamba2_scan(
            x.unflatten(-1, (heads, self.headdim)),
            F.softplus(dt.float() + cp.get_dt_bias().float()),
            -torch.exp(cp.get_A_log().float()),
            B.unflatten(-1, (groups, state)),
            C.unflatten(-1, (groups, state)),
            D=cp.get_D(),
            document_ids=documents,
        )
        y = (y.flatten(-2) * F.silu(z)).transpose(0, 1).contiguous()
        y = cp.post_conv_ssm(y)
        return self.norm(y)

    def forward(
        self,
        hidden_states: Tensor,
        inference_context: Any = None,
        *,
        inference_params: Any = None,
        packed_seq_params: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """[s of this rank, batch, hidden] -> the same shape, and megatron-core's bias."""
        if inference_context is not None or inference_params is not None:
            raise ValueError("the mixer keeps no state between calls; pass whole sequences")
        zxBCdt, _ = self.in_proj(hidden_states)
        zxBCdt = self.cp.pre_conv_ssm(zxBCdt)
        return self.out_proj(self._ssm_training(zxBCdt, packed_seq_params))
