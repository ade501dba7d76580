# SPDX-License-Identifier: Apache-2.0
"""Which class fills which slot of a layer."""

from functools import partial
from typing import Any

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules

from models.attention import CoreAttention
from models.experts import GroupedLinear, GroupedMLP, RowGroupedLinear
from models.norm import Norm
from models.parallel_linear import ColumnParallelLinear, RowParallelLinear


class SpecProvider(LocalSpecProvider):
    """Our modules, for every slot that megatron-core asks a provider about."""

    def column_parallel_linear(self) -> type:
        """Layers whose output features are cut over ranks."""
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """Layers whose input features are cut over ranks."""
        return RowParallelLinear

    def layer_norm(
        self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False
    ) -> type:
        """One class for both norms and every place."""
        return Norm

    def core_attention(self) -> type:
        """Between the projections of attention."""
        return CoreAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        """Experts; there is no ungrouped form."""
        assert moe_use_grouped_gemm, "experts are grouped: set moe_grouped_gemm"
        projections = GroupedMLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=RowGroupedLinear)
        return partial(GroupedMLP, submodules=projections)
