# SPDX-License-Identifier: Apache-2.0
"""Time and bytes of checkpoints against megatron-core's own call on the same model.

    python -m tools.bench_checkpoint [--hidden 1024] [--layers 8] [--repeats 3] [--dir DIR]

One process, model and optimizer, on the machine's GPU or CPU. Ours is the trainer's whole save:
shards, generators, state, checksums of every file, manifest, COMPLETE, each flushed to the disk;
megatron-core's is `dist_checkpointing.save`, which flushes its shards. The two take turns; medians
are compared, by the clock and by the processor time of this process and those that it forked, which
says more where other work keeps the machine busy. A load of ours is without and with the checksums
that a start verifies.
"""

import argparse
import logging
import resource
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fused_ops.errors import ConfigError
from pretrain import cpu_compat
from pretrain.command_line import refused, run_program


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench_checkpoint", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8, help="pairs of attention and MLP")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="where to write; default: a temporary folder")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    cpu_compat.enable()
    place = Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=options.dir))
    try:
        _Bench(place, options.hidden, options.layers).report(options.repeats)
    except ConfigError as error:
        return refused(error)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return 0


class _Bench:
    """One engine, saved and loaded both ways."""

    def __init__(self, place: Path, hidden: int, layers: int) -> None:
        from pretrain.config import make_config
        from pretrain.config_file import encode
        from pretrain.engine import build_engine
        from pretrain.initialize import initialize

        sizes = {
            "hidden_size": hidden,
            "ffn_hidden_size": 4 * hidden,
            "num_attention_heads": hidden // 64,
        }
        config = make_config(
            {
                "run": {"dir": str(place)},
                "model": {"pattern": "*-" * layers, "vocab_size": 32768, "megatron": sizes},
                "data": {"train": "none"},
            }
        )
        self.place, self.config = place, encode(config)
        world = initialize(config.parallel)
        self.device = world.device
        self.engine = build_engine(config, world, 32768)
        self.optimizer = self.engine.optimizer
        self.queue: Any = None

    def _seconds(self, work: Callable[[], Any]) -> "_Cost":
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize()
        started = _Cost.now()
        work()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return _Cost.now().since(started)

    def _manager(self, name: str, asynchronous: bool) -> Any:
        from pretrain.checkpoint.manager import CheckpointConfig, CheckpointManager

        run = self.place / name
        run.mkdir()
        return CheckpointManager(CheckpointConfig(async_save=asynchronous), run, lock=False)

    def _save_upstream(self, folder: Path) -> None:
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        from pretrain.checkpoint.state import sharded_state

        # Its server process is started by the first save and kept; ours puts its own in place.
        filesystem_async._results_queue = self.queue
        folder.mkdir()
        state = sharded_state(self.engine.chunks, self.optimizer)
        dist_checkpointing.save(state, str(folder))
        self.queue = filesystem_async._results_queue

    def _load_upstream(self, folder: Path) -> None:
        from megatron.core import dist_checkpointing

        from pretrain.checkpoint.state import sharded_state, unwrap

        state = sharded_state(self.engine.chunks, self.optimizer, loading=True)
        loaded = dist_checkpointing.load(state, str(folder))
        unwrap(self.engine.chunks[0]).load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])

    def _save_ours(self, manager: Any) -> None:
        manager.save(
            1,
            self.engine.chunks,
            self.optimizer,
            self.engine.scheduler,
            extra={},
            resolved_config=self.config,
        )

    def _round(self, number: int) -> dict[str, "_Cost"]:
        from pretrain.checkpoint.layout import check_contents
        from pretrain.checkpoint.state import load_sharded

        upstream, found = self.place / f"upstream{number}", dict[str, _Cost]()
        found["save, megatron-core"] = self._seconds(lambda: self._save_upstream(upstream))
        manager = self._manager(f"sync{number}", False)
        found["save, ours"] = self._seconds(lambda: self._save_ours(manager))
        waiting = self._manager(f"async{number}", True)
        started = _Cost.now()
        self._save_ours(waiting)
        found["save, ours, async: blocked"] = _Cost.now().since(started)
        waiting.wait()
        found["save, ours, async: whole"] = _Cost.now().since(started)
        step = manager.checkpoints / "step_00000001"
        found["load, megatron-core"] = self._seconds(lambda: self._load_upstream(upstream))
        found["load, ours"] = self._seconds(
            lambda: load_sharded(step, self.engine.chunks, self.optimizer)
        )
        found["checksums of a start"] = self._seconds(lambda: check_contents(step))
        self.bytes = {"megatron-core": _size(upstream), "ours": _size(step)}
        for folder in (upstream, self.place / f"sync{number}", self.place / f"async{number}"):
            shutil.rmtree(folder)
        return found

    def report(self, repeats: int) -> None:
        """Measure and print."""
        self._round(0)
        rounds = [self._round(number) for number in range(1, repeats + 1)]
        medians = {name: _Cost.median([r[name] for r in rounds]) for name in rounds[0]}
        whole = self.bytes["megatron-core"]
        print(f"model and optimizer on {self.device}: {whole / 2**20:.0f} MiB in megatron-core's")
        print(f"bytes, ours over megatron-core's: {self.bytes['ours'] / whole:.4f}")
        for name, cost in medians.items():
            base = medians[f"{name.split(',')[0]}, megatron-core"] if "," in name else cost
            text = f"{name:28} {cost.clock:8.3f} s, processor {cost.processor:8.3f} s"
            if base is not cost:
                clock, processor = cost.clock / base.clock, cost.processor / base.processor
                text += f"  {clock:6.2f} and {processor:6.2f} of megatron-core's"
            print(text)


@dataclass(frozen=True)
class _Cost:
    """Seconds."""

    clock: float
    processor: float
    """Of this process, and of its children that have ended."""

    @classmethod
    def now(cls) -> "_Cost":
        """Since some moment."""
        uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return cls(time.perf_counter(), sum(use.ru_utime + use.ru_stime for use in uses))

    def since(self, start: "_Cost") -> "_Cost":
        """The difference."""
        return _Cost(self.clock - start.clock, self.processor - start.processor)

    @classmethod
    def median(cls, costs: Sequence["_Cost"]) -> "_Cost":
        """Of each by itself."""
        middle = statistics.median
        return cls(middle(c.clock for c in costs), middle(c.processor for c in costs))


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    run_program(main)
