# SPDX-License-Identifier: Apache-2.0
"""A mistake in a run file is said, and a program starts, before anything slow is imported."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

_PROGRAM = """
import json, sys

import torch

true = torch.cuda.current_device
from pretrain.__main__ import main
from tools.preflight import main as preflight

wrong = ["examples/quickstart.yaml", "parallel.pipeline_model_parallel_size=3"]
said = {"status": [main(wrong), preflight(wrong)]}
import pretrain.evaluate, pretrain.trainer, tools.convert, tools.generate, tools.mismatch

slow = ("wandb", "torch.utils.tensorboard", "torch._dynamo", "torch._inductor")
said["loaded"] = [name for name in slow if name in sys.modules]
compiled = torch.compile(lambda x: x + 1)  # loads the compiler: now, and no earlier
said["result"] = compiled(torch.ones(2)).tolist()
from torch._dynamo import config, device_interface

said["disabled"] = config.disable
said["true functions"] = device_interface.CudaInterface.current_device is true
said["replaced"] = str(torch.cuda.current_device())
import wandb

from torch.utils.tensorboard import SummaryWriter

said["wandb"] = hasattr(wandb, "init")
json.dump(said, open(sys.argv[1], "w"))
"""


def test_neither_a_refusal_nor_a_start_loads_wandb_or_the_compiler(tmp_path):
    """Both are there when something asks for them, and then as `cpu_compat` promises."""
    found = tmp_path / "said.json"
    command = [sys.executable, "-c", _PROGRAM, str(found)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "3 pipeline stages do not divide" in ran.stderr
    assert "problem: model.pattern has 8 layers" in ran.stdout
    assert json.loads(found.read_text()) == {
        "status": [2, 2],
        "loaded": [],
        "result": [2.0, 2.0],
        "disabled": True,
        "true functions": True,
        "replaced": "cpu",
        "wandb": True,
    }
