# SPDX-License-Identifier: Apache-2.0
"""report.html: one page that shows a run; `python -m pretrain.report RUN_DIR` rewrites it.

The page is self-contained (no script, no request) and is made from whatever the run folder holds:
a missing or damaged file becomes a sentence on the page, never an exception. Everything that
comes from the run is escaped, and secrets are masked.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

import yaml

from pretrain.data.manifest import load_manifest
from pretrain.data.stats import unigram_entropy
from pretrain.environment import ENVIRONMENT_FILE
from pretrain.history import METRICS_FILE, NUMERICS_FILE, Row, read_metrics, split_lines
from pretrain.redact import mask_secrets, mask_text
from pretrain.report import numerics, sections

REPORT_FILE = "report.html"
_COUNTED_TOKENS = 20_000_000

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


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


def write_report(run_dir: Path | str) -> Path:
    """Writes RUN/report.html (temporary name, then rename) and returns its path.

    Raises:
        OSError: the folder cannot be written.
    """
    path = Path(run_dir) / REPORT_FILE
    page = render_page(load_run(path.parent))
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(page, encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return path


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


def render_page(run: Run) -> str:
    """The whole page as text."""
    body = [
        sections.header(run),
        sections.tiles(run),
        sections.curves(run),
        sections.precision(run),
        numerics.section(run.numerics, run.training),
        sections.events(run),
        sections.environment(run),
        sections.configuration(run),
        f"<footer>nibble, {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}</footer>",
    ]
    return page_of(f"{run.name}: nibble run", "\n".join(filter(None, body)))


def page_of(title: str, body: str, style: str = "") -> str:
    """A self-contained page around `body` (HTML); `style` is added to the style sheet."""
    sheet = Path(__file__).with_name("page.css").read_text(encoding="utf-8") + style
    return _PAGE.format(policy=_POLICY, title=escape(title), style=sheet, body=body)


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


def main(arguments: list[str] | None = None) -> int:
    """`python -m pretrain.report RUN_DIR...`."""
    folders = sys.argv[1:] if arguments is None else arguments
    if not folders or any(f.startswith("-") for f in folders):
        print("usage: python -m pretrain.report RUN_DIR [RUN_DIR ...]", file=sys.stderr)
        return 2
    status = 0
    for folder in folders:
        if not Path(folder).is_dir():
            print(f"{folder} is not a folder; give a run's folder: runs/NAME", file=sys.stderr)
            status = 2
            continue
        try:
            print(write_report(folder))
        except OSError as error:
            print(f"{folder}/{REPORT_FILE} cannot be written: {error.strerror}", file=sys.stderr)
            status = 2
    return status
