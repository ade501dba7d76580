# SPDX-License-Identifier: Apache-2.0
"""A run folder as a run leaves it, made without a run: for tests of what reads one."""

import json
from pathlib import Path

import yaml

from pretrain.history import encode_row


def training_row(step: int, **changes) -> dict:
    row = {
        "step": step,
        "loss": 8.0 - 0.05 * step,
        "lr": 1e-3 * min(1.0, step / 10),
        "grad_norm": 1.0 + 1.0 / step,
        "tokens": 2048 * step,
        "tokens_per_s": 2300.0,
        "seconds": 0.89,
        "skipped": 0,
    }
    return {**row, **changes}


def write_run(folder: Path, steps: int = 60, name: str = "quickstart") -> Path:
    """Curves, two validation points, a resume, a skipped step, precision, environment, config."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"step": 0, "val_loss": 8.25}]
    for step in range(1, steps + 1):
        skipped = {"loss": float("nan"), "skipped": 1} if step == 20 else {}
        rows.append(training_row(step, **skipped))
        if step == 30:
            rows.append({"step": 30, "event": "resume", "checkpoint": "step_00000030"})
    rows.append({"step": steps, "val_loss": 5.125})
    (folder / "metrics.jsonl").write_bytes(b"".join(map(encode_row, rows)))
    config = {
        "run": {"name": name, "seed": 1234},
        "model": {"pattern": "M-*E"},
        "train": {"steps": steps},
        "precision": {"recipe": "nvfp4"},
        "log": {"wandb_api_key": "do-not-print-me"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "environment.json").write_text(
        json.dumps({"python": "3.12.1", "packages": {"torch": "2.11.0"}, "gpus": []})
    )
    (folder / "precision.json").write_text(json.dumps(precision()))
    return folder


def precision() -> list[dict]:
    """Rows of the table of GEMMs, as `PrecisionPlan.table` gives them."""

    def gemms(fprop: str, wgrad: str) -> dict:
        return {
            "fprop": {"x": f"{fprop}", "w": f"{fprop}"},
            "dgrad": {"dy": f"{fprop}", "w": f"{fprop}"},
            "wgrad": {"dy": f"{wgrad} hadamard16", "x": wgrad},
        }

    return [
        {"name": "layers.0.mixer.in_proj", "shape": "64 x 32", "rule": "precision.recipe"}
        | {"flops_share": 0.6, **gemms("nvfp4", "nvfp4")},
        {"name": "layers.3.mlp.experts.linear_fc1", "shape": "4 of 64 x 32", "rule": "last 15%"}
        | {"flops_share": 0.3, **gemms("bf16", "nvfp4")},
        {"name": "norms", "shape": "", "reason": "elementwise", "flops_share": 0.0},
        {"name": "output_layer", "shape": "", "reason": "logits decide", "flops_share": 0.1}
        | gemms("bf16", "bf16"),
    ]
