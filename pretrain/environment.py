# SPDX-License-Identifier: Apache-2.0
"""What a run ran on: environment.json, one log line per absent package, the cuDNN check."""

import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import re
import resource
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pretrain.redact import mask_secrets, mask_text

log = logging.getLogger(__name__)

ENVIRONMENT_FILE = "environment.json"

NEEDED = ("torch", "megatron-core", "numpy", "pydantic", "tokenizers", "triton")

# package on the index -> (module, what it would do, what does it instead)
OPTIONAL = {
    "transformer-engine": ("transformer_engine", "fused layers", "fused_ops and torch layers"),
    "mamba-ssm": ("mamba_ssm", "the Mamba-2 scan", "the reference scan in PyTorch"),
    "causal-conv1d": (
        "causal_conv1d",
        "mamba-ssm's fused mixer",
        "its scan, and a PyTorch convolution",
    ),
    "apex": ("apex", "fused optimizer kernels", "the optimizer in PyTorch"),
    "wandb": ("wandb", "the wandb sink", "metrics.jsonl"),
    "tensorboard": ("tensorboard", "the TensorBoard sink", "metrics.jsonl"),
}
_DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")
_HEAVY = ("transformer-engine", "mamba-ssm", "causal-conv1d", "apex")


def describe_environment(extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Everything about this process that a later reader of its numbers may ask for.

    Args:
        extra: facts that only the caller knows (seeds, parallel sizes); secrets in it are masked.
    """
    found = {
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in NEEDED},
        "optional_packages": _optional_packages(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        **_gpus(),
        "host": socket.gethostname(),
        "host_count": _host_count(),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "code": code_state(Path(__file__).resolve().parent.parent),
        "command": mask_text(shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]])),
    }
    return {**found, **mask_secrets(dict(extra or {}))}


def write_environment(
    run_dir: Path | str, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Writes RUN/environment.json (temporary name, then rename) and returns what it holds."""
    found = describe_environment(extra)
    path = Path(run_dir) / ENVIRONMENT_FILE
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(found, indent=2) + "\n")
    os.replace(temporary, path)
    return found


def package_version(name: str) -> str | None:
    """Installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def report_absences(logger: logging.Logger | None = None) -> list[str]:
    """Logs one line for each absent heavy package, saying what is used instead; returns them."""
    lines = [
        f"{name} is not installed: {_instead(name)}"
        for name in _HEAVY
        if importlib.util.find_spec(OPTIONAL[name][0]) is None
    ]
    for line in lines:
        (logger or log).info(line)
    return lines


def cudnn_shadow() -> str | None:
    """A message where another cuDNN would win over the environment's, or None.

    torch's wheels bring their own cuDNN. A system copy earlier in the loader's path (usually
    through LD_LIBRARY_PATH) is loaded instead without a word, and attention then takes slower
    kernels.
    """
    own = [p for p in _loaded_or_wheel_cudnn() if _inside_environment(p)]
    if not own:
        return None
    message = (
        f"the system's cuDNN on {socket.gethostname()} shadows the environment's: "
        "{found} comes before {own}; "
        "remove its folder from LD_LIBRARY_PATH (or unset LD_LIBRARY_PATH) and start again"
    )
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        if folder and not _inside_environment(Path(folder)):
            for found in sorted(Path(folder).glob("libcudnn.so*")):
                return message.format(found=found, own=own[0])
    for found in _mapped_libraries("libcudnn"):
        if not _inside_environment(found):
            return message.format(found=found, own=own[0])
    return None


def unseen_gpus(device: str) -> str | None:
    """A message where a run on the CPU was started beside GPUs that torch does not see, or None.

    With `run.device: auto` a driver or a build of torch that does not fit would otherwise make a
    run thousands of times slower without a word. An empty CUDA_VISIBLE_DEVICES asks for that.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")
    if device != "cpu" or hidden:
        return None
    there = sorted(_DRIVER_GPUS.glob("*"))
    if not there:
        return None
    return (
        f"{socket.gethostname()} has {len(there)} GPUs and torch sees none, so this is a run on "
        f"its CPU; see that nvidia-smi works there and that torch {torch.__version__} fits the "
        "driver, or set CUDA_VISIBLE_DEVICES= to mean it"
    )


def code_state(root: Path) -> dict[str, Any]:
    """`git_state`, and `sources`, a digest of the code itself: copies without history have one."""
    return {**(git_state(root) or {}), "sources": sources_digest(root)}


def sources_digest(root: Path) -> str:
    """SHA-256 over paths and bytes of what computes: Python, CUDA and C++ files of the packages."""
    found = hashlib.sha256()
    for package in ("fused_ops", "models", "pretrain"):
        for path in sorted((root / package).rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh", ".cpp", ".h"):
                data = path.read_bytes()
                found.update(f"{path.relative_to(root).as_posix()} {len(data)}\n".encode() + data)
    return found.hexdigest()


def git_state(root: Path) -> dict[str, Any] | None:
    """Commit of the code and whether it was changed since; None outside a git checkout."""
    commit = _output(["git", "-C", str(root), "rev-parse", "HEAD"])
    if not commit:
        return None
    changes = _output(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return {"commit": commit, "dirty": bool(changes)}


def _optional_packages() -> dict[str, str]:
    return {name: package_version(name) or f"absent: {_instead(name)}" for name in OPTIONAL}


def _instead(name: str) -> str:
    _, duty, instead = OPTIONAL[name]
    return f"{instead} instead, for {duty}"


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def peak_memory_gib(device: torch.device) -> float:
    """Most memory that this process has held so far: allocated on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 2**30, 4)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 4)


def _memory_gib() -> float | None:
    try:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
    return round(pages * size / 2**30, 1)


def _gpus() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"gpus": [], "driver": None, "cuda": torch.version.cuda, "cudnn": None}
    count = torch.cuda.device_count()
    driver = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return {
        "gpus": [torch.cuda.get_device_name(i) for i in range(count)],
        "driver": driver.splitlines()[0] if driver else None,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def _host_count() -> int:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return max(1, world // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))))


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _inside_environment(path: Path) -> bool:
    return path.resolve().is_relative_to(Path(sys.prefix).resolve())


def _loaded_or_wheel_cudnn() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    found = [lib for f in folders for lib in sorted(f.glob("cudnn/lib/libcudnn.so*"))]
    return found + _mapped_libraries("libcudnn")


def _mapped_libraries(name: str) -> list[Path]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(None, 5)[5] for line in lines if f"/{name}" in line}
    return [Path(p) for p in sorted(paths)]
