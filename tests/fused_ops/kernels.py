# SPDX-License-Identifier: Apache-2.0
"""Kernels against references: on a GPU, and on a CPU through Triton's interpreter.

The interpreter sees fp32 data only: it truncates conversions to bf16.
"""

import importlib.util
import sys
from itertools import chain

import pytest
import torch

from fused_ops import triton_support
from fused_ops.testing import assert_bitwise_equal, assert_close

# Where a kernel runs, on which type, and how its results compare.
PLACES = [
    pytest.param(("cpu", torch.float32, "fp32_approximate"), id="interpreted"),
    pytest.param(("cuda", torch.float32, "fp32_approximate"), id="gpu-fp32", marks=pytest.mark.gpu),
    pytest.param(("cuda", torch.bfloat16, "bf16_output"), id="gpu-bf16", marks=pytest.mark.gpu),
]


def interpret(monkeypatch, package):
    """Until the test ends, `package`'s Triton kernels run on a CPU; skips without Triton."""
    triton = pytest.importorskip("triton")
    import triton.language as tl
    from triton.runtime import interpreter

    # Triton's own functions (sum, max) were compiled ones when it was imported.
    for name, member in list(vars(tl.standard).items()):
        if isinstance(member, triton.JITFunction):
            interpreted = interpreter.InterpretedFunction(member.fn)
            monkeypatch.setattr(tl.standard, name, interpreted)
            if getattr(tl, name, None) is member:
                monkeypatch.setattr(tl, name, interpreted)

    # numpy no longer turns arrays of one element into numbers, which bounds of loops are.
    patch = interpreter._patch_lang_tensor

    def patch_and_index(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_and_index)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    monkeypatch.setattr(triton_support, "device_reason", lambda x: None)
    name = f"{package.__name__}.triton_kernels"
    spec = importlib.util.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(package, "triton_kernels", module, raising=False)


def poison(monkeypatch):
    """New tensors of back ends are full of NaN."""
    empty, empty_like = torch.empty, torch.empty_like

    def filled(make):
        def full(*args, **kwargs):
            out = make(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() else out

        return full

    monkeypatch.setattr(torch, "empty", filled(empty))
    monkeypatch.setattr(torch, "empty_like", filled(empty_like))


def run(op, inputs, seed=0):
    """Outputs of op(*inputs), and the gradients of its floating-point inputs."""
    inputs = [
        x.detach().clone().requires_grad_() if x is not None and x.is_floating_point() else x
        for x in inputs
    ]
    out = op(*inputs)
    outputs = out if isinstance(out, tuple) else (out,)
    generator = torch.Generator().manual_seed(seed)
    upstream = [torch.randn(y.shape, generator=generator).to(y.device, y.dtype) for y in outputs]
    leaves = [x for x in inputs if x is not None and x.requires_grad]
    # Values are copied first: a backward pass may write over an input, and outputs may be one.
    values = [y.detach().clone() for y in outputs]
    return values, torch.autograd.grad(outputs, leaves, upstream)


def compare(op, inputs, place, what=""):
    """op(*inputs, implementation=...): the kernels against the reference, values and gradients."""
    device, dtype, tolerance = place
    inputs = [
        x if x is None else x.to(device, dtype if x.is_floating_point() else x.dtype)
        for x in inputs
    ]
    got = run(lambda *args: op(*args, implementation="triton"), inputs)
    want = run(lambda *args: op(*args, implementation="reference"), inputs)
    for kind, left, right in zip(("value", "gradient"), got, want):
        for number, (a, b) in enumerate(zip(left, right)):
            assert a.dtype is b.dtype
            bound = "fp32_approximate" if a.dtype is torch.float32 else tolerance
            assert_close(a, b, bound, f"{what} {kind} {number}")


def twice_the_same(op, inputs):
    """Two runs of the kernels give the same bits, and nothing waits for the device."""
    inputs = [x if x is None else x.cuda() for x in inputs]

    def once():
        return run(lambda *args: op(*args, implementation="triton"), inputs)

    first = once()
    leaves = [x.requires_grad_() if x is not None and x.is_floating_point() else x for x in inputs]
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = op(*leaves, implementation="triton")
        torch.autograd.backward(out, [torch.ones_like(y) for y in _tuple(out)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for left, right in zip(chain(*first), chain(*once())):
        assert_bitwise_equal(left, right, "a second run")


def _tuple(out):
    return out if isinstance(out, tuple) else (out,)
