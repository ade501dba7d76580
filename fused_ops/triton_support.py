# SPDX-License-Identifier: Apache-2.0
"""What back ends in Triton share: which devices they run on, and how kernels find the right one.

Triton itself is imported by the first call of a kernel, never by importing a back end.
"""

import functools
import importlib.util
from typing import Any

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


_COMPILED: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""Compiled kernels and the values of their constants, by all that Triton compiles for."""


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, on: torch.device, warps: int, **constants: Any
) -> None:
    """kernel[grid](*args, **constants), without fusing multiplications and additions.

    Triton's own launch looks at every argument and constant anew, which takes the host longer than
    many of these kernels take the device. Here a kernel that was launched before with arguments of
    the same kinds is found by one key. The interpreter and a first launch go Triton's way.

    Args:
        args: the kernel's arguments in order, constants among them or not.
        on: the device of the tensors.
        constants: those constants that are not in args.
    """
    if not hasattr(kernel, "device_caches"):
        kernel[grid](*args, **constants, num_warps=warps, enable_fp_fusion=False)
        return
    if torch.cuda.current_device() != on.index:
        with torch.cuda.device(on):
            return launch(kernel, grid, *args, on=on, warps=warps, **constants)
    is_constant = _constant_places(kernel)
    kinds = tuple([_kind(a, fixed) for a, fixed in zip(args, is_constant)])
    key = (kernel, on.index, warps, kinds, *constants.values())
    found = _COMPILED.get(key)
    if found is None:
        compiled = kernel[grid](*args, **constants, num_warps=warps, enable_fp_fusion=False)
        rest = tuple(constants[name] for name in kernel.arg_names[len(args) :])
        _COMPILED[key] = compiled, rest
        return
    compiled, rest = found
    x, y = (grid[0], 1) if len(grid) == 1 else grid
    compiled.run(
        x, y, 1, raw_stream(on), compiled.function,
        compiled.packed_metadata, None, None, None, *args, *rest,
    )  # fmt: skip


def raw_stream(device: torch.device) -> int:
    """The handle of the current stream, without the object that torch would make around it."""
    handle: int = torch._C._cuda_getCurrentRawStream(device.index)
    return handle


@functools.cache
def _constant_places(kernel: Any) -> tuple[bool, ...]:
    return tuple(parameter.is_constexpr for parameter in kernel.params)


def _kind(argument: Any, is_constant: bool) -> Any:
    """What Triton compiles for: of a tensor its type and alignment, of a number what divides it."""
    if is_constant:
        return argument
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, float):
        return float
    return argument == 1, argument % 16 == 0, -(1 << 31) <= argument < 1 << 31


def float_reason(x: Tensor) -> str | None:
    """As device_reason, of an input of any float type that is not empty."""
    if x.dtype not in FLOATS:
        return f"inputs are bf16, fp16 or fp32, got {x.dtype}"
    if x.numel() == 0:
        return "the tensor is empty"
    return device_reason(x)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
