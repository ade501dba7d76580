# SPDX-License-Identifier: Apache-2.0
"""From nothing to a trained model: `python -m tools.quickstart [section.key=value ...]`.

Text of the running Python -> tokenizer and token shards -> examples/quickstart.yaml -> a summary.
Each step is a program of its own that can be run by hand; what is done is kept, and an interrupted
run continues. The key=value settings go to the run.
"""

import argparse
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pretrain.checkpoint.config import find_latest
from pretrain.checkpoint.io import CheckpointError
from pretrain.data.stats import unigram_entropy
from pretrain.history import METRICS_FILE, Row, read_metrics
from pretrain.report.charts import number

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "examples/quickstart.yaml"
VOCAB_SIZE = 4096
VALID_FRACTION = 0.05
PROMPT = "def "


@dataclass(frozen=True)
class Place:
    """Where the quickstart works: its data, and its run."""

    data: Path
    run: Path
    steps: int
    overrides: tuple[str, ...]

    @property
    def shards(self) -> Path:
        return self.data / "shards"

    @property
    def checkpoints(self) -> Path:
        return self.run / "checkpoints"


class StepFailed(Exception):
    """A program that the quickstart runs has failed, and has said why."""

    def __init__(self, status: int) -> None:
        super().__init__(f"exit status {status}")
        self.status = status


def main(arguments: list[str] | None = None) -> int:
    """Runs the steps; returns the exit status of the first that fails, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.quickstart",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, default=Path("data/quickstart"), metavar="DIR")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    place = find_place(options.data, options.overrides)
    try:
        prepare(place)
        train(place)
        print(summary(place, sample(place), time.monotonic() - started))
    except StepFailed as failure:
        return failure.status
    except KeyboardInterrupt:
        return 130
    return 0


def find_place(data: Path, overrides: list[str]) -> Place:
    """The folders that the run file and the overrides name."""
    config = yaml.safe_load((ROOT / CONFIG).read_text())
    given = dict(o.split("=", 1) for o in overrides if "=" in o)
    if data != Path("data/quickstart"):
        given |= {"data.train": f"{data}/shards/train", "data.valid": f"{data}/shards/valid"}
    name = given.get("run.name", config["run"]["name"])
    run = Path(given.get("run.dir", config["run"].get("dir", "runs"))) / name
    steps = str(given.get("train.steps", config["train"]["steps"]))
    # What is no number of steps is for the run to refuse.
    return Place(
        data,
        run,
        int(steps) if steps.isdecimal() else sys.maxsize,
        tuple(f"{k}={v}" for k, v in given.items()),
    )


def prepare(place: Place) -> None:
    """The text and its shards."""
    text = place.data / "text.jsonl"
    _say("1/3 text", "what Python brings: documentation, docstrings, library sources")
    _run("tools.quickstart_text", "--output", text)
    _say("2/3 tokens", f"a tokenizer of {VOCAB_SIZE} entries, token shards, a held-out split")
    sizes = ["--tokenizer", f"train:{VOCAB_SIZE}", "--valid-fraction", VALID_FRACTION]
    _run("tools.preprocess", "--input", text, "--output", place.shards, *sizes)


def train(place: Place) -> None:
    """The run: from the start, from where it was, or not again."""
    step = _completed(place.checkpoints)
    if step >= place.steps:
        _say("3/3 training", f"step {step} of {place.steps} was reached before, kept")
        return
    how = f"continues from step {step}" if step else "starts"
    _say("3/3 training", f"{CONFIG} {how}; {place.steps} steps")
    _run("pretrain", CONFIG, *place.overrides)
    if _completed(place.checkpoints) < place.steps:
        print("\nstopped and saved; the same command continues", flush=True)
        raise StepFailed(130)


def summary(place: Place, text: str, seconds: float) -> str:
    """What the run reached, where it lies, what the model writes, what to try next."""
    rows = read_metrics(place.run / METRICS_FILE)
    valid = [(row["step"], float(row["val_loss"])) for row in rows if "val_loss" in row]
    steps = [row for row in rows if "loss" in row]
    entropy = unigram_entropy(place.shards / "valid")
    python = _shown_python()
    bf16 = f"{python} -m pretrain {CONFIG} run.name=bf16 precision.recipe=bf16"
    lines = [
        "",
        f"Validation loss  {_losses(valid)}; unigram entropy of the text {entropy:.3f}",
        f"Training         {_speed(steps)}",
        f"This start       {seconds / 60:.1f} minutes",
        f"The run          {place.run}/: report.html, {METRICS_FILE}, checkpoints/",
        "",
        "It writes:",
        *(f"    {line}" for line in text.rstrip().splitlines()),
        "",
        "Next:",
        f'    {python} -m tools.generate {place.checkpoints} --prompt "class "',
        f"    {bf16}",
    ]
    return "\n".join(lines)


def sample(place: Place) -> str:
    """Text that the newest checkpoint writes."""
    words = [place.checkpoints, "--prompt", PROMPT, "--tokens", 64]
    return _run("tools.generate", *words, capture=True)


def _losses(valid: list[tuple[int, float]]) -> str:
    if not valid:
        return "none"
    (first_step, first), (last_step, last) = valid[0], valid[-1]
    return f"{first:.3f} at step {first_step}, {last:.3f} at step {last_step}"


def _speed(steps: list[Row]) -> str:
    if not steps:
        return "none"
    speed = statistics.median(float(row["tokens_per_s"]) for row in steps)
    return (
        f"{steps[-1]['step']} steps, {number(steps[-1]['tokens'])} tokens, "
        f"{number(speed, 3)} tokens/s"
    )


def _completed(checkpoints: Path) -> int:
    """Steps of the newest whole checkpoint; 0 where there is none."""
    try:
        found = find_latest(checkpoints)
    except CheckpointError:
        return 0  # the run itself says what is wrong with them
    return 0 if found is None else found.step


def _say(name: str, text: str) -> None:
    print(f"{name}: {text}", flush=True)


def _run(module: str, *arguments: Any, capture: bool = False) -> str:
    """Runs one of this project's programs from the repository root."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    # In a process group of its own, so that a signal reaches it once: from here.
    child = subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE if capture else None, process_group=0
    )
    with _passing_signals_to(child):
        output, _ = child.communicate()
    if child.returncode:
        raise StepFailed(child.returncode)
    return output or ""


@contextmanager
def _passing_signals_to(child: subprocess.Popen) -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM go to the program that runs, which saves and ends by itself."""

    def handle(signum: int, _frame: Any) -> None:
        child.send_signal(signum)

    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _shown_python() -> str:
    python = Path(sys.executable)
    if python.is_relative_to(ROOT):
        python = python.relative_to(ROOT)
    return shlex.quote(os.fspath(python))


if __name__ == "__main__":
    sys.exit(main())
