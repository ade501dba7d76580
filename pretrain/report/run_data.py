# SPDX-License-Identifier: Apache-2.0
"""What a report is made of: all that can be read of a run folder."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pretrain.data.manifest import load_manifest
from pretrain.data.stats import unigram_entropy
from pretrain.environment import ENVIRONMENT_FILE
from pretrain.history import METRICS_FILE, NUMERICS_FILE, Row, read_metrics, split_lines
from pretrain.redact import mask_secrets, mask_text

_COUNTED_TOKENS = 20_000_000


@dataclass
class Run:
    """What could be read of a run folder."""

    name: str
    training: list[Row] = field(default_factory=list)
    validation: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    events: list[Row] = field(default_factory=list)
    config: dict[str, Any] | None = None
    config_text: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    precision: dict[str, Any] = field(default_factory=dict)
    numerics: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    updated: float | None = None
    unigram_entropy: float | None = None


def load_run(run_dir: Path | str) -> Run:
    """Reads a run folder; what is missing or damaged goes to `problems`."""
    folder = Path(run_dir).resolve()
    run = Run(name=folder.name)
    _load_metrics(run, folder / METRICS_FILE)
    config = _text(run, folder / "config.yaml")
    run.config_text = mask_text(config)
    run.config = _parsed(run, "config.yaml", config, yaml.safe_load)
    section = (run.config or {}).get("run")
    if isinstance(section, dict):
        run.name = str(section.get("name") or run.name)
    environment = _text(run, folder / ENVIRONMENT_FILE)
    run.environment = _parsed(run, ENVIRONMENT_FILE, environment, json.loads) or {}
    precision = _text(run, folder / "precision.json")
    found = _parsed(run, "precision.json", precision, _precision)
    run.precision = found or {}
    if (folder / NUMERICS_FILE).exists():
        run.numerics = read_metrics(folder / NUMERICS_FILE)
    run.unigram_entropy = _unigram_entropy(run.config or {})
    return run


def _load_metrics(run: Run, path: Path) -> None:
    try:
        data = path.read_bytes()
        run.updated = path.stat().st_mtime
    except OSError as error:
        run.problems.append(f"{METRICS_FILE} cannot be read ({error.strerror}): no curves.")
        return
    rows, damaged = split_lines(data)
    if damaged:
        run.problems.append(f"Damaged lines of {METRICS_FILE} are left out: {len(damaged)}.")
    for row in rows:
        if "event" in row:
            run.events.append(row)
            continue
        for key, value in row.items():
            if key.split("/")[0] in ("val_loss", "val_loss_bf16"):
                forward, _, name = key.partition("/")
                name = f"{name} (BF16 forward)".strip() if forward != "val_loss" else name
                run.validation.setdefault(name, []).append((row["step"], _float(value)))
        if "loss" in row:
            run.training.append({k: _float(v) if k != "step" else v for k, v in row.items()})
    run.training.sort(key=lambda r: r["step"])
    for points in run.validation.values():
        points.sort()


def _unigram_entropy(config: dict[str, Any]) -> float | None:
    """Of the run's validation data, in nats, where that is one small folder that is still there."""
    section = config.get("data")
    folder = section.get("valid") if isinstance(section, dict) else None
    if not isinstance(folder, str):
        return None
    try:
        small = load_manifest(folder).tokens <= _COUNTED_TOKENS
        return unigram_entropy(folder) if small else None
    except (OSError, ValueError):
        return None


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


def _text(run: Run, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        run.problems.append(f"{path.name} cannot be read ({error.strerror}).")
        return ""


def _parsed(run: Run, name: str, text: str, parse: Callable[[str], Any]) -> dict[str, Any] | None:
    if not text:
        return None
    try:
        found = parse(text)
    except (ValueError, yaml.YAMLError, RecursionError):
        found = None
    if not isinstance(found, dict):
        run.problems.append(f"{name} is damaged.")
        return None
    return mask_secrets(found)


def _precision(text: str) -> Any:
    found = json.loads(text)
    return {"rows": found} if isinstance(found, list) else found
