# SPDX-License-Identifier: Apache-2.0
"""Time from the command to the first step: `python -m tools.bench_start [--processes 2] [CONFIG]`.

Starts torchrun on gloo, on this machine, with the tiny model below or the run of CONFIG, for one
step, and looks for the step's row in metrics.jsonl. The time on the clock depends on what else the
machine does, which its load shows; the CPU time of all processes hardly does.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pretrain.data.manifest import MANIFEST_NAME, Manifest
from pretrain.data.writer import write_shard

_ROOT = Path(__file__).resolve().parent.parent
_VOCABULARY, _TOKENS = 128, 20_000
_MOST_SECONDS = 1200.0


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; returns its exit status: 1 when a start failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench_start", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "config", nargs="?", help="a run file; default: a tiny model, random tokens"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    place = Path(tempfile.mkdtemp(prefix="bench-start-"))
    try:
        config = options.config or str(_tiny(place))
        starts = [_start(place, config, options.processes) for _ in range(options.repeats)]
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if None in starts:
        return 1
    clock = [seconds for seconds, _ in filter(None, starts)]
    used = [seconds for _, seconds in filter(None, starts)]
    print(
        f"{options.processes} processes, start to first step: median "
        f"{statistics.median(clock):.1f} s (best {min(clock):.1f}); CPU time of all processes "
        f"{statistics.median(used):.1f} s; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs"
    )
    return 0


def _tiny(place: Path) -> Path:
    """A run file of a tiny model, and random tokens for it."""
    folder = place / "train"
    folder.mkdir()
    tokens = np.random.default_rng(0).integers(1, _VOCABULARY, _TOKENS).astype(np.uint16)
    tokens[99::100] = 0
    shard = write_shard(folder, "shard-000", tokens, np.full(_TOKENS // 100, 100, np.int32))
    manifest = Manifest(
        tokenizer_fingerprint=None, vocab_size=_VOCABULARY, eod_id=0, shards=[shard]
    )
    (folder / MANIFEST_NAME).write_text(manifest.model_dump_json())
    config: dict[str, Any] = {
        "run": {"name": "start", "dir": str(place / "runs"), "device": "cpu"},
        "model": {
            "pattern": "*-",
            "seq_length": 64,
            "megatron": {"hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128},
        },
        "data": {"train": str(folder)},
        "train": {"steps": 1, "global_batch_size": 8, "micro_batch_size": 1},
        "optimizer": {"lr": 1e-3, "schedule": "constant"},
        "checkpoint": {"interval": 0},
    }
    path = place / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def _start(place: Path, config: str, processes: int) -> tuple[float, float] | None:
    """(seconds to the first step, CPU seconds of all processes to the end of the run)."""
    runs = Path(tempfile.mkdtemp(dir=place))
    words = [f"run.dir={runs}", "run.name=start", "train.steps=1", "log.report=false"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={processes}", "-m", "pretrain", config, *words]
    before, began, first = _cpu(), time.monotonic(), None
    with (runs / "said").open("wb") as said:
        process = subprocess.Popen(
            command,
            cwd=_ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        while process.poll() is None and time.monotonic() - began < _MOST_SECONDS:
            if first is None and _has_stepped(runs / "start" / "metrics.jsonl"):
                first = time.monotonic() - began
            time.sleep(0.02)
    if process.poll() is None:
        process.terminate()
        process.wait()
    if first is None and _has_stepped(runs / "start" / "metrics.jsonl"):
        first = time.monotonic() - began
    if process.returncode or first is None:
        print((runs / "said").read_text(errors="replace")[-4000:], file=sys.stderr)
        return None
    return first, _cpu() - before


def _has_stepped(path: Path) -> bool:
    try:
        return any("loss" in json.loads(line) for line in path.read_text().splitlines())
    except (OSError, ValueError):
        return False


def _cpu() -> float:
    """CPU seconds of the processes that have ended below this one."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
