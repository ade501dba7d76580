# SPDX-License-Identifier: Apache-2.0
"""Does this machine's scan kernel compute the scan? A few milliseconds before a run trusts it.

Kernels have been seen to give wrong numbers on a GPU that was newer than they were, without an
error (state-spaces/mamba#997).
"""

import torch
from torch import Tensor

from fused_ops.mamba2_scan import api, mamba_ssm_backend

LENGTH = 2 * mamba_ssm_backend.CHUNK + 44
"""Two whole chunks and a part of one."""
BOUND = 0.25
"""Of ||got - exact|| / ||exact||. Rounding of BF16 inputs, of outputs and of what kernels keep in
BF16 between their steps stays below some hundredths; a wrong state or mask gives about one."""


def scan_problem(
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    head_dim: int = 64,
    state: int = 128,
    heads: int = 4,
    groups: int = 2,
    length: int = LENGTH,
    documents: tuple[bool, ...] = (False, True),
) -> str | None:
    """What is wrong with the implementation that `mamba2_scan` would choose, or None.

    Compares outputs and gradients of a sequence of `length`, without and with `documents`, with the
    reference in FP32 on the same device. mamba-ssm's kernels are tuned at the first call of each
    `head_dim`, `state` and presence of documents, whatever its size, for a minute or more: with a
    model's own sizes, and the documents that it has, they are tuned here as it runs them.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    x, dt = random(1, length, heads, head_dim), random(1, length, heads).sigmoid() / 8
    a, skip = -random(heads).exp(), random(heads)
    b, c = (random(1, length, groups, state) * state**-0.25 for _ in range(2))  # b . c is about 1
    rounded = [t.to(dtype) for t in (x, dt, b, c)]
    name = api.chosen(rounded[0])
    if name == "reference":
        return None
    weight = random(1, length, heads, head_dim)
    numbers = (torch.arange(length, device=device) // 20).unsqueeze(0)
    for ids in (numbers if cut else None for cut in documents):
        results = []
        for exact in (False, True):
            inputs = [t.float() if exact else t for t in rounded]
            x, dt, b, c = (t.detach().clone().requires_grad_() for t in inputs)
            chosen = "reference" if exact else None
            y = api.mamba2_scan(x, dt, a, b, c, D=skip, document_ids=ids, implementation=chosen)
            gradients = torch.autograd.grad((y.float() * weight).sum(), (x, dt, b, c))
            results.append((y, *gradients))
        for what, got, want in zip(("y", "dx", "ddt", "dB", "dC"), *results):
            error = float((got.float() - want.float()).norm() / want.float().norm())
            if not error <= BOUND:
                return (
                    f"the scan of {name} gives {what} with a relative error of {error:.2g} on "
                    f"{_name(device)}, and at most {BOUND:g} is its rounding; install a version "
                    "that was built for this GPU, or uninstall it: the reference scan takes over"
                )
    return None


def _name(device: torch.device | str) -> str:
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "a CPU"
