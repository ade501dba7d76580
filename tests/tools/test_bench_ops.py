# SPDX-License-Identifier: Apache-2.0
"""The benchmark of ops without a clock: what is kept for backward, what is refused, what is left
out. Times need a GPU."""

import pytest
import torch

from tools.bench_ops import quantizers
from tools.bench_ops.__main__ import _rest, main
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--op", "pair", "--cols", "0"], "--cols of --op pair must be multiples of 16 above 0"),
        (["--op", "quantize", "--rows", "8191"], "--rows of --op quantize must be multiples of 16"),
        (["--op", "linear", "--cols", "5120", "-16"], "multiples of 16 above 0, got [5120, -16]"),
        (["--op", "attention", "--rows", "30"], "--rows of --op attention must be multiples of 4"),
        (["--op", "rmsnorm", "--rows", "0"], "--rows of --op rmsnorm must be multiples of 1"),
    ],
)
def test_sizes_that_cannot_be_timed(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert message in capsys.readouterr().err


def test_a_weight_of_as_many_features_as_rows_is_not_cut():
    """`--op rmsnorm --rows 4096`; labels and factors have one entry a row."""
    rows = 512
    x, weight = torch.zeros(rows, rows), torch.zeros(rows)
    labels, factors = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, 1)
    sizes = [tuple(t.shape) for t in _rest([x, weight, labels, factors])]
    assert sizes == [(rows,), (256,), (256, 1)]


def test_without_nvcc_the_pair_of_triton_is_timed(monkeypatch, capsys):
    """The reason stands where the times of the CUDA source would."""
    made = []
    monkeypatch.setattr(
        quantizers.cuda_backend, "pair_supports", lambda *_: "nvcc is not installed"
    )
    monkeypatch.setattr(quantizers, "_check_pair", lambda *arguments: made.append(arguments[-1]))
    monkeypatch.setattr(quantizers, "_pair", lambda *arguments: None)
    monkeypatch.setattr(quantizers, "median_us", lambda run: 2.0)
    quantizers.time_pairs(torch.zeros(16, 16).bfloat16(), 4.0)
    lines = capsys.readouterr().out.splitlines()
    assert made == ["triton"] * len(quantizers.PAIRS)
    assert len(lines) == 2 * len(made)
    assert all(line.endswith("cuda: left out, nvcc is not installed") for line in lines[1::2])
