# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of a whole linear layer says of memory; its times need a GPU."""

import pytest
import torch

from tools.bench_ops.whole_linear import CHECKED, check, layer, saved_bytes


@pytest.mark.parametrize(
    ("label", "share"),
    [("bf16", 1), ("nvfp4", 9 / 32), ("nvfp4_fast:fp8", 9 / 32), ("mxfp8", 33 / 64)],
)
def test_bytes_kept_for_backward(label, share):
    """Codes of half a byte and a scale byte of 16: 9 bits where BF16 has 32 in two elements."""
    rows, inner = 256, 512
    kept = saved_bytes(label, rows, 128, inner, "cpu")
    extra = kept - share * 2 * rows * inner
    assert 0 <= extra <= 16, "only a tensor scale or two beside the codes and scales of X"


@pytest.mark.gpu
@pytest.mark.parametrize("label", ["nvfp4", "nvfp4_fast:fp8", "mxfp8"])
def test_the_layer_that_is_timed(label):
    torch.manual_seed(0)
    check(label)
    tokens, out, inner = CHECKED
    x, w, dy = (
        torch.randn(shape, device="cuda").bfloat16()
        for shape in ((tokens, inner), (out, inner), (tokens, out))
    )
    run = layer(label, x, w, dy)
    y, dx = run()
    exact = (x.double() @ w.double().t(), dy.double() @ w.double(), dy.double().t() @ x.double())
    for got, want in zip((y, dx, run.weight.main_grad), exact):
        assert float((got - want).norm() / want.norm()) < 0.3, "quantized, and not something else"
