# SPDX-License-Identifier: Apache-2.0
"""The chunked scan against the recurrence it stands for, step by step."""

import itertools
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from fused_ops.mamba2_scan import (
    causal_conv1d,
    mamba2_scan,
    mamba2_scan_from,
    mamba_ssm_backend,
    prefer,
    reference,
)
from fused_ops.mamba2_scan.self_check import scan_problem


def recurrence(x, dt, A, B, C, D=None, document_ids=None):
    """One token at a time, in the inputs' dtype (FP64 here)."""
    batch, length, heads, head_dim = x.shape
    B, C = (t.repeat_interleave(heads // t.shape[2], 2) for t in (B, C))
    state = x.new_zeros(batch, heads, head_dim, B.shape[-1])
    out = []
    for t in range(length):
        decay = (dt[:, t] * A).exp()
        if document_ids is not None and t:
            decay = decay * (document_ids[:, t] == document_ids[:, t - 1]).unsqueeze(-1)
        add = torch.einsum("bh,bhp,bhn->bhpn", dt[:, t], x[:, t], B[:, t])
        state = state * decay[..., None, None] + add
        out.append(torch.einsum("bhpn,bhn->bhp", state, C[:, t]))
    y = torch.stack(out, 1)
    return y if D is None else y + x * D.unsqueeze(-1)


def make(length, heads=4, groups=2, head_dim=8, state=5, dtype=torch.float32):
    x = torch.randn(2, length, heads, head_dim)
    dt, A, D = torch.rand(2, length, heads), -4 * torch.rand(heads), torch.randn(heads)
    B, C = torch.randn(2, length, groups, state), torch.randn(2, length, groups, state)
    return [t.to(dtype).requires_grad_() for t in (x, dt, A, B, C, D)]


def value_and_gradients(function, inputs, weight):
    y = function(*inputs)
    return y, torch.autograd.grad((y.double() * weight).sum(), inputs)


@pytest.mark.parametrize("length", [1, 7, 64, 65, 150])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_equals_the_recurrence(length, groups):
    inputs = make(length, groups=groups)
    weight = torch.randn(2, length, 4, 8).double()
    y, gradients = value_and_gradients(lambda *t: mamba2_scan(*t[:5], D=t[5]), inputs, weight)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    expected, exact_gradients = value_and_gradients(recurrence, exact, weight)
    # FP32 sums of up to 64 products a chunk against FP64.
    bound = 2e-5 * float(expected.abs().max())
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=bound)
    for name, got, want in zip(["x", "dt", "A", "B", "C", "D"], gradients, exact_gradients):
        bound = 2e-5 * want.abs().max()
        assert (got.double() - want).abs().max() <= bound, f"gradient of {name}"


def test_does_not_depend_on_the_chunk():
    x, dt, A, B, C, D = make(100)
    y = [reference.scan(x, dt, A, B, C, D, chunk=chunk) for chunk in (1, 3, 16, 64, 100, 128)]
    for other in y[1:]:
        torch.testing.assert_close(other, y[0], rtol=1e-4, atol=2e-5)


def test_documents_equal_separate_sequences():
    x, dt, A, B, C, D = make(90)
    cuts = [0, 1, 40, 75, 90]
    ids = torch.bucketize(torch.arange(90), torch.tensor(cuts[1:-1]), right=True).expand(2, -1)
    together = mamba2_scan(x, dt, A, B, C, D=D, document_ids=ids)
    for start, end in itertools.pairwise(cuts):
        part = slice(start, end)
        alone = mamba2_scan(x[:, part], dt[:, part], A, B[:, part], C[:, part], D=D)
        torch.testing.assert_close(together[:, part], alone, rtol=1e-4, atol=2e-5)
    exact = [t.detach().double() for t in (x, dt, A, B, C, D)]
    expected = recurrence(*exact, document_ids=ids)
    torch.testing.assert_close(together.double(), expected, rtol=1e-4, atol=5e-5)


def test_an_earlier_document_does_not_touch_a_later_one_by_one_bit():
    x, dt, A, B, C, D = (t.detach() for t in make(90))
    ids = (torch.arange(90) >= 40).long().expand(2, -1)
    before = mamba2_scan(x, dt, A, B, C, D=D, document_ids=ids)
    x, dt, B = x.clone(), dt.clone(), B.clone()
    x[:, :40], dt[:, :40], B[:, :40] = 50.0, 3.0, -7.0
    after = mamba2_scan(x, dt, A, B, C, D=D, document_ids=ids)
    assert not torch.equal(before[:, :40], after[:, :40])
    assert torch.equal(before[:, 40:], after[:, 40:])


def test_fast_decay_across_a_boundary_gives_no_nan():
    x, _, A, B, C, D = make(64)
    dt = torch.full((2, 64, 4), 60.0, requires_grad=True)
    ids = (torch.arange(64) >= 32).long().expand(2, -1)
    y = mamba2_scan(x, dt, A - 4, B, C, D=D, document_ids=ids)
    y.sum().backward()
    assert all(t.isfinite().all() for t in (y, dt.grad, x.grad, A.grad, B.grad, C.grad))


def test_bf16_in_bf16_out_with_fp32_sums():
    inputs = [t.detach() for t in make(64)]
    rounded = [t.bfloat16() for t in inputs]
    y = mamba2_scan(*rounded[:5], D=rounded[5])
    assert y.dtype is torch.bfloat16
    exact = mamba2_scan(*(t.float() for t in rounded[:5]), D=rounded[5].float())
    assert torch.equal(y, exact.bfloat16())


def test_conv_equals_torch_conv1d():
    x, weight, bias = torch.randn(2, 20, 6), torch.randn(6, 4), torch.randn(6)
    tensors = [t.requires_grad_() for t in (x, weight, bias)]
    y = causal_conv1d(*tensors)
    expected = F.conv1d(x.transpose(1, 2), weight.unsqueeze(1), bias, padding=3, groups=6)
    expected = expected[..., :20].transpose(1, 2)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    g = torch.randn_like(y)
    for got, want in zip(
        torch.autograd.grad(y, tensors, g), torch.autograd.grad(expected, tensors, g)
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)


def test_conv_keeps_to_documents_and_short_sequences():
    x, weight = torch.randn(1, 9, 3), torch.randn(3, 4)
    ids = torch.tensor([[0, 0, 1, 1, 1, 1, 2, 3, 3]])
    y = causal_conv1d(x, weight, document_ids=ids)
    for document in range(4):
        part = ids[0] == document
        torch.testing.assert_close(y[:, part], causal_conv1d(x[:, part], weight))


def test_wrong_shapes_are_named():
    x, dt, A, B, C, _ = make(8)
    with pytest.raises(ValueError, match=r"dt must have shape \(2, 8, 4\)"):
        mamba2_scan(x, dt[:, :4], A, B, C)
    with pytest.raises(ValueError, match="groups dividing 4 heads"):
        mamba2_scan(x, dt, A, B.repeat(1, 1, 2, 1)[:, :, :3], C.repeat(1, 1, 2, 1)[:, :, :3])
    with pytest.raises(ValueError, match=r"\[channels, width\]"):
        causal_conv1d(torch.randn(1, 4, 3), torch.randn(3, 1, 4))


def test_forced_implementation_does_not_fall_back():
    with pytest.raises(ValueError, match="CUDA"):
        mamba2_scan(*make(8)[:5], implementation="mamba_ssm")
    with pytest.raises(ValueError, match="not one of"):
        mamba2_scan(*make(8)[:5], implementation="cuda")


def test_what_a_process_prefers(monkeypatch):
    monkeypatch.setattr(mamba_ssm_backend, "supports", lambda x: None)
    monkeypatch.setattr(mamba_ssm_backend, "scan", lambda x, *_: x + 1)
    inputs = [t.detach() for t in make(8)[:5]]
    kernel, plain = inputs[0] + 1, mamba2_scan(*inputs, implementation="reference")
    try:
        prefer("reference")
        assert torch.equal(mamba2_scan(*inputs), plain)
        assert torch.equal(mamba2_scan(*inputs, implementation="mamba_ssm"), kernel)
    finally:
        prefer(None)
    assert torch.equal(mamba2_scan(*inputs), kernel)
    with pytest.raises(ValueError, match="not one of"):
        prefer("cuda")


@pytest.mark.parametrize("cuts", [[1], [64], [3, 70, 71], [63, 65, 129]])
def test_pieces_of_a_sequence_equal_the_whole(cuts):
    """Pieces longer than a chunk and no multiple of it, from state to state."""
    x, dt, A, B, C, D = (t.detach() for t in make(150))
    whole = mamba2_scan(x, dt, A, B, C, D=D)
    state = torch.zeros(2, 4, 8, 5)
    pieces = []
    for start, end in itertools.pairwise([0, *cuts, 150]):
        part = slice(start, end)
        y, state = mamba2_scan_from(state, x[:, part], dt[:, part], A, B[:, part], C[:, part], D=D)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-4, atol=5e-5)
    # The state itself, from its definition.
    exact = torch.zeros(2, 4, 8, 5, dtype=torch.float64)
    wide = B.double().repeat_interleave(2, 2)
    for t in range(150):
        add = torch.einsum("bh,bhp,bhn->bhpn", dt[:, t].double(), x[:, t].double(), wide[:, t])
        exact = exact * (dt[:, t] * A).double().exp()[..., None, None] + add
    torch.testing.assert_close(state.double(), exact, rtol=1e-4, atol=2e-5)


def test_pieces_of_a_convolution_equal_the_whole():
    x, weight, bias = torch.randn(2, 20, 6), torch.randn(6, 4), torch.randn(6)
    whole = causal_conv1d(x, weight, bias)
    before, pieces = torch.zeros(2, 3, 6), []
    for start, end in itertools.pairwise([0, 1, 3, 4, 11, 20]):
        piece = x[:, start:end]
        pieces.append(causal_conv1d(piece, weight, bias, before=before))
        before = torch.cat([before, piece], 1)[:, -3:]
    assert torch.equal(torch.cat(pieces, 1), whole)


def test_states_that_do_not_fit_are_refused():
    x, dt, A, B, C, _ = (t.detach() for t in make(3))
    with pytest.raises(ValueError, match=r"state must be fp32 \(2, 4, 8, 5\)"):
        mamba2_scan_from(torch.zeros(2, 4, 5, 8), x, dt, A, B, C)
    with pytest.raises(ValueError, match=r"before must be \(2, 3, 6\)"):
        causal_conv1d(torch.randn(2, 5, 6), torch.randn(6, 4), before=torch.zeros(2, 4, 6))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (None, None),
        ("documents", "with a relative error of"),
        ("last chunk", "gives y with a relative error of"),
        ("gradient", "gives dx with a relative error of"),
        ("nan", "gives y with a relative error of nan"),
    ],
)
def test_a_kernel_that_computes_something_else_is_found(monkeypatch, damage, said):
    """Silent corruption, as a kernel on a GPU that is newer than it: a run does not begin."""

    def kernel(x, dt, A, B, C, chunk_size, D, seq_idx):
        assert chunk_size == mamba_ssm_backend.CHUNK
        y = reference.scan(x, dt, A, B, C, D, None if damage == "documents" else seq_idx)
        if damage == "last chunk":
            y = y * (torch.arange(y.shape[1]) < 2 * chunk_size).view(1, -1, 1, 1)
        elif damage == "gradient":
            y = y.detach() + (y - y.detach()) * 1.5
        elif damage == "nan":
            y = y + float("nan")
        return y

    monkeypatch.setattr(mamba_ssm_backend, "_kernel", lambda: kernel)
    monkeypatch.setattr(mamba_ssm_backend, "supports", lambda x: None)
    found = scan_problem("cpu", head_dim=16, state=16)
    assert (found is None) == (said is None)
    assert said is None or said in found


def test_a_machine_without_the_kernel_has_nothing_to_check():
    assert scan_problem("cpu") is None


def test_fixed_configurations_leave_nothing_to_tune(monkeypatch):
    """A resume in another process must not sum in another order."""
    triton = pytest.importorskip("triton")
    configs = [
        triton.Config({"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": 64}, num_stages=s)
        for m, s in ((128, 1), (32, 3), (64, 1))
    ]

    @triton.autotune(configs=configs, key=["n"])
    @triton.heuristics({"EVEN": lambda arguments: True})
    @triton.jit
    def kernel(x, n, BLOCK_SIZE_M, BLOCK_SIZE_N, EVEN):
        pass

    module = types.ModuleType("mamba_ssm.ops.triton.made_up")
    module.kernel, module.again, module.other = kernel, kernel, len
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert mamba_ssm_backend.fix_configurations() == 1
    assert [c.kwargs["BLOCK_SIZE_M"] for c in kernel.configs] == [64]
    assert mamba_ssm_backend.fix_configurations() == 0
