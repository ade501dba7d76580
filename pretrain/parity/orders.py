# SPDX-License-Identifier: Apache-2.0
"""What one process gives when only its sums come in another order: the band of the comparison.

Two layouts that compute the same codes still sum in another order, and then round. Every GEMM of
the linear layers takes its contraction here as the sum of two halves, drawn at random, that are
each rounded to the output's type: what two tensor-parallel ranks do. (Another order of one sum is
no draw: products of codes are so short that FP32 sums of a toy's many are exact.) So are even the
sums of halves where scales are powers of two; the output layer's gradient, whose contraction is the
vocabulary, is cut too: it is in high precision, and what it rounds goes through all layers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fused_ops import grouped_linear, linear
from fused_ops.formats import Operand, QuantizedTensor
from fused_ops.main_grad import Zeros
from fused_ops.scaled_matmul.reference import alpha, values
from models.parallel_linear import OutputLayer


@contextmanager
def summed_in_halves(seed: int) -> Iterator[None]:
    """Inside, the GEMMs of linear layers and experts sum two halves, which `seed` draws."""

    def product(
        a: Operand,
        b: Operand,
        *,
        out_dtype: torch.dtype,
        accumulate: Tensor | Zeros | None = None,
        bias: Tensor | None = None,
        decode: str = "exact",
        row_block: int | None = None,
        implementation: Any = None,
    ) -> Tensor:
        assert row_block is None, "a fixed order of sums has no other one"
        left, right = values(a, decode), values(b, decode)
        generator = torch.Generator().manual_seed(seed)
        index = torch.randperm(left.shape[1], generator=generator).to(left.device)
        factor = alpha(a, b)
        if isinstance(accumulate, Zeros):
            accumulate = accumulate.tensor.zero_()
        total: Tensor | None = accumulate
        for part in index.chunk(2):
            own = left[:, part] @ right[:, part].t()
            own = own if factor is None else own * factor
            if accumulate is not None:
                accumulate.add_(own)
            else:
                own = own.to(out_dtype)
                total = own if total is None else total + own
        assert total is not None, "a contraction over nothing"
        return total if bias is None else (total + bias.to(total.dtype))

    plain = OutputLayer._forward_impl

    def logits(layer: OutputLayer, input: Tensor, weight: Tensor, *args: Any, **kw: Any) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        index = torch.randperm(weight.shape[0], generator=generator).to(weight.device)
        parts = [plain(layer, input, weight[part], *args, **kw) for part in index.chunk(2)]
        return torch.cat(parts, -1)[..., index.argsort()]

    before = linear.scaled_matmul, grouped_linear.scaled_matmul
    OutputLayer._forward_impl = logits  # type: ignore[assignment]
    linear.scaled_matmul = grouped_linear.scaled_matmul = product  # type: ignore[assignment]
    try:
        yield
    finally:
        linear.scaled_matmul, grouped_linear.scaled_matmul = before
        OutputLayer._forward_impl = plain  # type: ignore[method-assign]


@contextmanager
def one_code_flipped(seed: int) -> Iterator[None]:
    """Inside, one code of the first quantized X becomes its neighbour: what a tie does that falls
    the other way. `seed` draws which."""
    plain = linear.scaled_matmul
    done: list[bool] = []

    def product(a: Operand, b: Operand, **options: Any) -> Tensor:
        if isinstance(a, QuantizedTensor) and not done:
            done.append(True)
            codes = a.codes.clone()
            flat = codes.view(-1)
            # The last bit of the low nibble, or of a byte that does not become NaN.
            places = ((flat & 0x7F) < 0x7E).nonzero().flatten()
            generator = torch.Generator().manual_seed(seed)
            draw = int(torch.randint(len(places), (), generator=generator))
            flat[places[draw]] ^= 1
            a = replace(a, codes=codes)
        return plain(a, b, **options)

    linear.scaled_matmul = product  # type: ignore[assignment]
    try:
        yield
    finally:
        linear.scaled_matmul = plain
    assert done, "no operand has codes"
