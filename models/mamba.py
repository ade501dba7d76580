# SPDX-License-Identifier: Apache-2.0
"""The Mamba-2 mixer: megatron-core's parameters and layout, with our own scan.

megatron-core builds a mixer only where the package mamba-ssm is installed, and then calls its fused
kernel. `without_mamba_ssm` holds the two module attributes it looks at; it is the only place that
touches them. On a GPU with mamba-ssm and causal-conv1d the fused kernel is used as upstream does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm import mamba_mixer
from torch import Tensor

from fused_ops.mamba2_scan import causal_conv1d, chosen, mamba2_scan, mamba2_scan_from
from models.documents import document_ids
from models.generation.cache import CacheStep
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


def takes_fused(x: Tensor) -> bool:
    """Whether mamba-ssm's kernel of convolution, scan and gate can take the output of in_proj.

    It calls the package causal-conv1d, which mamba-ssm does without until then.
    """
    there = mamba_mixer.HAVE_MAMBA_SSM and mamba_mixer.causal_conv1d_fn is not None
    return there and x.is_cuda and chosen(x) == "mamba_ssm"


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
        if isinstance(packed_seq_params, CacheStep):
            return self._ssm_cached(zxBCdt, packed_seq_params)
        documents = document_ids(packed_seq_params)
        if documents is None and takes_fused(zxBCdt):
            return super()._ssm_training(zxBCdt)
        cp = self.cp
        z, xBC, dt = self._parts(zxBCdt.transpose(0, 1))
        xBC = causal_conv1d(
            xBC, cp.get_conv1d_weight().squeeze(1), cp.get_conv1d_bias(), document_ids=documents
        )
        y = mamba2_scan(*self._scan_inputs(xBC, dt), D=cp.get_D(), document_ids=documents)
        y = (y.flatten(-2) * F.silu(z)).transpose(0, 1).contiguous()
        y = cp.post_conv_ssm(y)
        return self.norm(y)

    def _ssm_cached(self, zxBCdt: Tensor, step: CacheStep) -> Tensor:
        """As `_ssm_training`, of new tokens of several sequences: [tokens, 1, features]."""
        cp = self.cp
        weight = cp.get_conv1d_weight().squeeze(1)
        z, xBC, dt = self._parts(zxBCdt[:, 0])
        out = torch.empty_like(z)
        for group in step.groups:
            new, new_dt = (t[group.rows].transpose(0, 1) for t in (xBC, dt))  # [b, new, ...]
            before, state = step.cache.states(
                self.layer_number,
                group,
                ((weight.shape[1] - 1, weight.shape[0]), new.dtype),
                ((cp.nheads_local_tpcp, self.headdim, self.d_state), torch.float32),
            )
            conv = causal_conv1d(new, weight, cp.get_conv1d_bias(), before=before)
            y, state = mamba2_scan_from(state, *self._scan_inputs(conv, new_dt), D=cp.get_D())
            after = torch.cat([before, new], 1)[:, new.shape[1] :]
            step.cache.set_states(self.layer_number, group, after, state)
            out[group.rows] = y.flatten(-2).transpose(0, 1)
        return self.norm((out * F.silu(z)).unsqueeze(1))

    def _parts(self, zxBCdt: Tensor) -> tuple[Tensor, ...]:
        """[..., features of in_proj] -> z, the input of the convolution, dt."""
        cp = self.cp
        mixed = cp.d_inner_local_tpcp + 2 * cp.ngroups_local_tpcp * self.d_state
        return zxBCdt.split([cp.d_inner_local_tpcp, mixed, cp.nheads_local_tpcp], -1)

    def _scan_inputs(self, xBC: Tensor, dt: Tensor) -> tuple[Tensor, ...]:
        """The output of the convolution [b, length, x + B + C] and dt -> x, dt, A, B, C."""
        cp, state = self.cp, self.d_state
        heads, groups = cp.nheads_local_tpcp, cp.ngroups_local_tpcp
        sizes = [cp.d_inner_local_tpcp, groups * state, groups * state]
        x, B, C = F.silu(xBC).split(sizes, -1)
        return (
            x.unflatten(-1, (heads, self.headdim)),
            F.softplus(dt.float() + cp.get_dt_bias().float()),
            -torch.exp(cp.get_A_log().float()),
            B.unflatten(-1, (groups, state)),
            C.unflatten(-1, (groups, state)),
        )

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
