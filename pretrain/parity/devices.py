# SPDX-License-Identifier: Apache-2.0
"""One run on a CPU and on a GPU from one seed: losses beside the band of other orders of sums.

Losses part as trajectories of rounded numbers do, so no bound is written here: the measure is what
the same device gives when its GEMMs sum in another order (`pretrain.parity.orders`). All start from
the weights of one file, since a device draws random numbers of its own.
"""

import copy
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fused_ops.errors import ConfigError
from pretrain.command_line import each_recipe, recipe_settings
from pretrain.config import make_config
from pretrain.config_file import apply_overrides, parse_overrides
from pretrain.data.manifest import MANIFEST_NAME, Manifest
from pretrain.data.writer import write_shard
from pretrain.environment import ENVIRONMENT_FILE
from pretrain.history import METRICS_FILE, read_metrics
from pretrain.start import code_digest

EOD, VOCAB = 256, 257
MODEL = {
    "hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 4, "num_query_groups": 2,
    "kv_channels": 32, "mamba_num_heads": 8, "mamba_head_dim": 32, "mamba_num_groups": 1,
    "mamba_state_dim": 32,
}  # fmt: skip
ORDERS = (1, 2)
"""Seeds of other orders: the band is the larger of their differences from the plain one."""


@dataclass(frozen=True)
class Gap:
    """|difference of losses| of two runs over their steps."""

    largest: float
    mean: float


@dataclass(frozen=True)
class Comparison:
    """One recipe: two devices, and two orders of sums on one of them."""

    recipe: str
    steps: int
    first: float
    """Loss of the first step, and of the last, on the reference."""
    last: float
    devices: Gap | None
    """None on a machine without a GPU: there is one device."""
    band: Gap

    @property
    def is_within(self) -> bool:
        """Whether the devices lie within the band times `BAND_FACTOR`, as layouts must."""
        from pretrain.parity.matrix import BAND_FACTOR  # loads megatron-core

        return self.devices is None or self.devices.mean <= BAND_FACTOR * self.band.mean


def write_bytes(text: Path, folder: Path, most: int) -> Path:
    """Token shards of JSON lines, one token a byte: the documents that fit into `most` bytes."""
    pieces, total = [], 0
    with open(text) as stream:
        for line in stream:
            content = json.loads(line)["text"].encode("utf-8", "replace")
            if total + len(content) >= most:
                continue
            pieces.append(np.append(np.frombuffer(content, np.uint8).astype(np.uint16), EOD))
            total += len(pieces[-1])
    lengths = np.array([len(piece) for piece in pieces], dtype=np.int32)
    folder.mkdir(parents=True, exist_ok=True)
    shard = write_shard(folder, "shard-000", np.concatenate(pieces).astype(np.uint16), lengths)
    manifest = Manifest(tokenizer_fingerprint=None, vocab_size=VOCAB, eod_id=EOD, shards=[shard])
    (folder / MANIFEST_NAME).write_text(manifest.model_dump_json())
    return folder


def run_file(data: Path, runs: Path, pattern: str, steps: int) -> dict[str, Any]:
    """The run of all comparisons: small enough for a CPU, BF16 activations, real text."""
    return {
        "run": {"name": "one", "dir": str(runs), "seed": 1234},
        "model": {
            "pattern": pattern, "seq_length": 128, "position_embedding": "rope",
            "tie_embeddings": True, "megatron": MODEL,
        },
        "data": {"train": str(data)},
        "train": {"steps": steps, "global_batch_size": 8, "micro_batch_size": 8, "dtype": "bf16"},
        "optimizer": {
            "lr": 2e-3, "min_lr": 2e-4, "schedule": "cosine",
            "warmup_steps": min(max(1, steps // 10), steps - 1),
        },
        "checkpoint": {"interval": 0},
        "log": {"progress": "none", "report": False},
    }  # fmt: skip


def start_weights(config: Path) -> Path:
    """The checkpoint that all runs start from: one step in BF16 on the CPU, if it is not there.

    Raises:
        ConfigError: it could not be trained; with its last words.
    """
    folder = config.parent / "runs" / "start"
    if not (folder / "checkpoints").exists() or len(_read_losses(folder / METRICS_FILE)) != 1:
        settings = ["train.steps=1", "optimizer.warmup_steps=0", "optimizer.lr=1e-6"]
        settings += ["optimizer.min_lr=1e-6", "checkpoint.at_end=true"]
        _train(["pretrain"], config, "start", settings, gpu=False)
    return folder / "checkpoints"


def losses(config: Path, name: str, overrides: Sequence[str], gpu: bool, order: int = 0) -> Any:
    """fp64 losses of every step of a run in a process of its own; of one that has ended, as kept.

    Raises:
        ConfigError: the run failed; with its last words.
    """
    place = config.parent / "runs" / name / METRICS_FILE
    kept, steps = _read_losses(place), yaml.safe_load(config.read_text())["train"]["steps"]
    if len(kept) == steps:
        return kept
    module = ["pretrain.parity.ordered", str(order)] if order else ["pretrain"]
    start = [f"checkpoint.load={start_weights(config)}", "checkpoint.load_parts=model"]
    _train(module, config, name, [*overrides, *start], gpu)
    found = _read_losses(place)
    if len(found) != steps:
        raise ConfigError(
            f"a run must have the losses of all of its {steps} steps; {place} has {len(found)}: "
            f"remove {place.parent}, and it is trained again"
        )
    return found


def _train(
    module: Sequence[str], config: Path, name: str, overrides: Sequence[str], gpu: bool
) -> None:
    settings = [*overrides, f"run.name={name}", f"run.device={'cuda' if gpu else 'cpu'}"]
    command = [sys.executable, "-m", *module, str(config), *settings]
    environment = os.environ if gpu else os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(
            f"a run must end before it can be compared; {name} ended with status "
            f"{done.returncode}: {done.stderr.strip()[-2000:]}"
        )


def _read_losses(path: Path) -> Any:
    rows = read_metrics(path) if path.exists() else []
    return np.array([float(row["loss"]) for row in rows if "loss" in row])


def gap(one: Any, other: Any) -> Gap:
    """Of two series of losses, which must be as long."""
    assert len(one) == len(other) > 0, f"runs of {len(one)} and {len(other)} steps"
    difference = np.abs(one - other)
    return Gap(float(difference.max()), float(difference.mean()))


def _settings(recipe: str) -> tuple[str, list[str]]:
    """A name for its folders, and its settings."""
    name, own = recipe_settings(recipe)
    return re.sub(r"[^\w.-]", "_", recipe), [f"precision.recipe={name}", *own]


def check_run(run: Mapping[str, Any], recipes: Sequence[str]) -> None:
    """ConfigError for a run of `run_file`, or else for its recipes, that cannot be trained."""

    def make(recipe: str, own: list[str]) -> None:
        data = copy.deepcopy(dict(run))
        apply_overrides(data, parse_overrides([f"precision.recipe={recipe}", *own]))
        make_config(data)

    make_config(run)
    each_recipe(recipes, make)


def cpu_losses(config: Path, recipe: str) -> Any:
    """Those of the run on the CPU; arguments of `compare`."""
    label, overrides = _settings(recipe)
    return losses(config, f"{label}-cpu", overrides, False)


def compare(config: Path, recipe: str, gpu: bool) -> Comparison:
    """Trains `config` in one recipe on every device that there is, and in other orders.

    Args:
        config: a run file of `run_file`, in the folder that holds its `runs`.
        recipe: a name, after a colon how Hopper decodes it, after each plus a setting.
        gpu: whether there is one; else the CPU is compared with itself.
    """
    label, overrides = _settings(recipe)
    cpu = cpu_losses(config, recipe)
    base = losses(config, f"{label}-gpu", overrides, True) if gpu else cpu
    where = "gpu" if gpu else "cpu"  # a folder may hold both, from two machines
    others = [
        gap(base, losses(config, f"{label}-{where}-order{seed}", overrides, gpu, seed))
        for seed in ORDERS
    ]
    band = Gap(max(o.largest for o in others), max(o.mean for o in others))
    devices = gap(cpu, base) if gpu else None
    return Comparison(recipe, len(cpu), float(cpu[0]), float(cpu[-1]), devices, band)


def other_code(config: Path, recipe: str, gpu: bool) -> list[str]:
    """A sentence for each run that `compare` takes, was kept, and has other code than this."""
    label, _ = _settings(recipe)
    now, said, runs = code_digest(), [], config.parent / "runs"
    places = {runs / f"{label}-cpu", *runs.glob(f"{label}-{'gpu' if gpu else 'cpu'}*")}
    for place in sorted(places):
        environment = _read_note(place / ENVIRONMENT_FILE) or {}
        code = str((environment.get("code") or {}).get("sources", ""))[: len(now)]
        if code != now and _read_losses(place / METRICS_FILE).size:
            said.append(
                f"{place.name} was trained with other code (sources {code or 'not recorded'}; this "
                f"is {now}): remove {place} to train it again"
            )
    return said


def write_config(folder: Path, text: Path, pattern: str, steps: int) -> Path:
    """The data and the run file of a comparison in `folder`; returns the file.

    Raises:
        ConfigError: `folder` has runs of another comparison.
    """
    data, path, note = folder / "data", folder / "run.yaml", folder / "comparison.json"
    run = run_file(data, folder / "runs", pattern, steps)
    what = {
        "text": hashlib.sha256(text.read_bytes()).hexdigest(),
        "start": "one step in BF16 on the CPU",
        **{key: value for key, value in run.items() if key not in ("run", "data")},
    }
    if note.exists() and _read_note(note) != what:
        raise ConfigError(
            f"a folder keeps the runs of one comparison; {folder} has another text, pattern or "
            "number of steps: give another folder, or what it was made with"
        )
    folder.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps(what))
    if not (data / MANIFEST_NAME).exists():
        write_bytes(text, data, most=8 * 129 * (steps + 8) * 2)
    path.write_text(yaml.safe_dump(run))
    return path


def _read_note(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):  # not there, or cut off as it was written
        return None
