# SPDX-License-Identifier: Apache-2.0
"""Lets megatron-core run on a machine without CUDA. On a GPU machine it replaces nothing.

megatron-core asks `torch.cuda` for streams, memory counters, the current device and a generator,
and passes `device="cuda"` in a dozen places. `enable()` answers those questions with the CPU's:
about twenty functions of `torch.cuda` are replaced, and a torch function mode reads
`device="cuda"` as `device="cpu"`. It costs about 1.4 us per operation.

It acts on the whole process, and must run before `megatron.core` is imported: entry points and
conftest.py call it, libraries do not. Known to fit torch 2.11 and megatron-core 0.19.2; the places
in megatron-core that need each piece are named beside it.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

try:
    import torch
    from torch.overrides import TorchFunctionMode
except ModuleNotFoundError:
    sys.stderr.write(
        f"error: the packages of requirements.txt must be installed; {sys.executable} has no "
        "torch: make .venv, then source .venv/bin/activate\n"
    )
    sys.exit(2)

from pretrain import light_imports

_CPU = torch.device("cpu")
# Where they are installed, megatron-core sums gradient norms and updates weights with them.
_CUDA_ONLY = ("transformer_engine", "apex")
_mode: "_CudaMeansCpu | None" = None


def enable() -> bool:
    """Make megatron-core usable on this CPU. Returns whether anything is, or was, replaced.

    May be called any number of times. Where CUDA is available it returns False, and does no more
    than what it does everywhere: megatron-core is imported without what no start needs
    (`light_imports`).
    """
    global _mode
    on_gpu = torch.cuda.is_available()
    light_imports.install(compiled=on_gpu)
    if on_gpu:
        return False
    if _mode is not None:
        return True
    for name in _CUDA_ONLY:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # its import fails
    _replace_cuda_functions()
    if compiler := sys.modules.get("torch._dynamo"):
        compiler.config.disable = True
    else:
        light_imports.import_within("torch._dynamo", _loading_compiler)
    _mode = _CudaMeansCpu()
    _mode.__enter__()
    _keep_mode_in_backward(_mode)
    # "CPU RNG state changed": on a CPU it is meant to.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    # "No CUDA runtime is found": where nvcc is there without a GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    return True


def is_enabled() -> bool:
    """Whether this process runs megatron-core through the replacements."""
    return _mode is not None


def _is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _called_from_megatron() -> bool:
    return sys._getframe(2).f_globals.get("__name__", "").startswith("megatron.")


class _CudaMeansCpu(TorchFunctionMode):
    """Reads `device="cuda"`, `.cuda()`, `.to("cuda")` and pinned memory as the CPU's."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if func is torch.Tensor.type and len(args) == 1 and not kwargs and _called_from_megatron():
            # optimizer.py and distrib_optimizer.py compare with 'torch.cuda.BFloat16Tensor'.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        if not kwargs:
            return func(*args)
        kwargs = dict(kwargs)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if getattr(func, "__name__", "") == "all_to_all_single":
            # The token dispatcher leaves the split sizes as tensors where no stream copies them.
            for name in ("output_split_sizes", "input_split_sizes"):
                if torch.is_tensor(kwargs.get(name)):
                    kwargs[name] = kwargs[name].tolist()
        if (uneven := _UNEVEN.get(getattr(func, "__name__", ""))) and len(args) == 2:
            assert not kwargs.get("async_op"), "uneven collectives of gloo are waited for"
            return uneven(func, *args, **kwargs)
        return func(*args, **kwargs)


def _gather_uneven(
    func: Callable[..., Any], parts: list[torch.Tensor], own: torch.Tensor, **kwargs: Any
) -> Any:
    """all_gather of tensors of different lengths, which NCCL takes and gloo does not."""
    longest = max(len(part) for part in parts)
    if all(len(part) == longest for part in parts):
        return func(parts, own, **kwargs)
    padded = own.new_zeros(longest, *own.shape[1:])
    padded[: len(own)] = own
    received = [torch.empty_like(padded) for _ in parts]
    work = func(received, padded, **kwargs)
    for part, whole in zip(parts, received):
        part.copy_(whole[: len(part)])
    return work


def _scatter_uneven(
    func: Callable[..., Any], own: torch.Tensor, parts: list[torch.Tensor], **kwargs: Any
) -> Any:
    """reduce_scatter of tensors of different lengths."""
    longest = max(len(part) for part in parts)
    if all(len(part) == longest for part in parts):
        return func(own, parts, **kwargs)
    padded = [part.new_zeros(longest, *part.shape[1:]) for part in parts]
    for whole, part in zip(padded, parts):
        whole[: len(part)] = part
    received = own.new_zeros(longest, *own.shape[1:])
    work = func(received, padded, **kwargs)
    own.copy_(received[: len(own)])
    return work


_UNEVEN: dict[str, Callable[..., Any]] = {
    "all_gather": _gather_uneven,
    "reduce_scatter": _scatter_uneven,
}


class _Stream:
    """A stream where everything has already happened."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...
    def wait_stream(self, *args: object) -> None: ...
    def wait_event(self, *args: object) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        return event or _Event()

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


class _Event:
    """An event that has happened."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...
    def record(self, *args: object) -> None: ...
    def wait(self, *args: object) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "_Event") -> float:
        return 0.0


@contextlib.contextmanager
def _loading_compiler() -> Iterator[None]:
    """Its tables are built from the true functions of `torch.cuda`, and it compiles nothing: a bare
    `@torch.compile` runs eagerly."""
    with _true_functions():
        yield
    sys.modules["torch._dynamo"].config.disable = True


def _no_properties(device: object = None) -> Any:
    raise RuntimeError(f"{device or 'this machine'} is no CUDA device: it has no properties")


def _replace_cuda_functions() -> None:
    stream, generator = _Stream(), torch.default_generator
    replacements: dict[str, Any] = {
        "current_device": lambda: _CPU,  # about 150 places pass it as `device=`
        "current_stream": lambda *args, **kwargs: stream,
        "default_stream": lambda *args, **kwargs: stream,
        "stream": lambda *args, **kwargs: contextlib.nullcontext(),
        "Stream": _Stream,
        "Event": _Event,
        "synchronize": lambda *args: None,
        "empty_cache": lambda: None,
        "set_device": lambda device: None,
        "device_count": lambda: 1,
        "get_device_properties": _no_properties,  # torch's compiler asks, and takes this answer
        "is_current_stream_capturing": lambda: False,
        "manual_seed": lambda seed: generator.manual_seed(seed),
        "manual_seed_all": lambda seed: generator.manual_seed(seed),
        "get_rng_state": lambda *args, **kwargs: generator.get_state(),
        "set_rng_state": lambda state, *args, **kwargs: generator.set_state(state),
        "_lazy_call": lambda callback, **kwargs: callback(),
        "_lazy_init": lambda: None,
        "default_generators": {None: generator, _CPU: generator},
        "memory_allocated": lambda *args: 0,
        "max_memory_allocated": lambda *args: 0,
        "memory_reserved": lambda *args: 0,
    }
    for name, replacement in replacements.items():
        assert hasattr(torch.cuda, name), f"torch.cuda.{name} is gone: cpu_compat fits torch 2.11"
        _replace(torch.cuda, name, replacement)
    for name in ("get_rng_state", "set_rng_state"):
        _replace(torch.cuda.random, name, replacements[name])
    for name in ("range_push", "range_pop"):
        _replace(torch.cuda.nvtx, name, lambda *args: None)


_replaced: list[tuple[Any, str, Any, Any]] = []
"""(module, name, what it was, what it is now)."""


def _replace(module: Any, name: str, replacement: Any) -> None:
    _replaced.append((module, name, getattr(module, name), replacement))
    setattr(module, name, replacement)


@contextlib.contextmanager
def _true_functions() -> Iterator[None]:
    """`torch.cuda` as it was before `enable()`."""
    for module, name, before, _ in _replaced:
        setattr(module, name, before)
    try:
        yield
    finally:
        for module, name, _, now in _replaced:
            setattr(module, name, now)


def _keep_mode_in_backward(mode: _CudaMeansCpu) -> None:
    """`torch.autograd.backward` pops the mode; put it back for code that runs inside of it.

    Recomputed forwards and the autograd functions of the collectives are such code.
    """
    import torch.autograd.graph as graph

    run = graph._engine_run_backward

    def run_with_mode(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run(*args, **kwargs)

    graph._engine_run_backward = run_with_mode
    torch.autograd._engine_run_backward = run_with_mode
