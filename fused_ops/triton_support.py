# SPDX-License-Identifier: Apache-2.0
"""What back ends in Triton share: which devices they run on, and how kernels find the right one.

Triton itself is imported by the first call of a kernel, never by importing a back end.
"""

import functools
import importlib.util
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@functools.cache
def _missing() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return None


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def device_reason(x: Tensor) -> str | None:
    """Why Triton kernels cannot take a tensor, or None."""
    if not x.is_cuda:
        return f"its kernels run on CUDA devices, the tensor is on {x.device.type}"
    if _capability(x.device) < (9, 0):
        return f"compute capability 9.0 is needed, the device has {_capability(x.device)}"
    return _missing()


def float_reason(x: Tensor) -> str | None:
    """As device_reason, of an input of any float type that is not empty."""
    if x.dtype not in FLOATS:
        return f"inputs are bf16, fp16 or fp32, got {x.dtype}"
    if x.numel() == 0:
        return "the tensor is empty"
    return device_reason(x)


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Inside, kernels are launched on the device of x; nothing for Triton's interpreter."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
