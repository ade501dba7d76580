# SPDX-License-Identifier: Apache-2.0
"""What happens to long runs: disks that fill, sinks that are down, memory that must not grow."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from pretrain.callbacks import Callback
from pretrain.config import make_config
from pretrain.trainer import Trainer
from tests.distributed import ROOT
from tests.toy import make_toy, toy_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy"))


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


class Losses(Callback):
    """Remembers what the run computed, whatever its files say."""

    def __init__(self):
        self.seen = {}

    def after_step(self, trainer, row):
        self.seen[row["step"]] = row["loss"]


def test_a_disk_that_is_full_for_a_while_costs_rows_only(folder, tmp_path, monkeypatch):
    """metrics.jsonl, heartbeat.json and the logs cannot be written in steps 3 to 5 of 8."""
    write, pwrite = os.write, os.pwrite
    losses, full = Losses(), {"now": False}

    class Disk(Callback):
        def before_step(self, trainer, step):
            full["now"] = 3 <= step <= 5

    def failing(call):
        def checked(descriptor, *rest):
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if full["now"] and name.startswith(str(tmp_path)):
                raise OSError(28, "No space left on device")
            return call(descriptor, *rest)

        return checked

    monkeypatch.setattr(os, "write", failing(write))
    monkeypatch.setattr(os, "pwrite", failing(pwrite))
    names = {"full": [Disk(), losses], "free": [free := Losses()]}
    for name, callbacks in names.items():
        data = toy_config(folder, run={"dir": str(tmp_path), "name": name}, train={"steps": 8})
        state = Trainer(make_config(data), callbacks).run()
        assert state.step == 8
        full["now"] = False
    assert losses.seen == free.seen, "bitwise"
    kept = [row["step"] for row in rows(tmp_path / "full") if "loss" in row]
    assert kept == [1, 2, 6, 7, 8]
    assert json.loads((tmp_path / "full" / "heartbeat.json").read_text())["phase"] == "done"


MEMORY = """
import json, os, sys
sys.path[0] = {root!r}
from pretrain import cpu_compat
cpu_compat.enable()
import torch
torch.set_num_threads(1)
from pretrain.callbacks import Callback
from pretrain.config import load_config
from pretrain.trainer import Trainer

class Memory(Callback):
    seen = []
    def after_step(self, trainer, row):
        if row["step"] % 100 == 0:
            text = open("/proc/self/statm").read()
            self.seen.append(int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20)

Trainer(load_config(sys.argv[1], for_training=True), [Memory()]).run()
print(json.dumps(Memory.seen))
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_memory_is_flat_over_2000_steps(folder, tmp_path):
    """Resident memory at step 400 and at step 2000 differ by less than 8 MiB."""
    config = tmp_path / "run.yaml"
    data = toy_config(
        folder,
        "*-",
        run={"dir": str(tmp_path)},
        train={"steps": 2000, "global_batch_size": 4, "eval_interval": 500, "eval_batches": 1},
        checkpoint={"interval": 500, "keep_last": 1},
        log={"progress": "none", "report": False, "tensorboard": True},
    )
    config.write_text(yaml.safe_dump(data))
    done = subprocess.run(
        [sys.executable, "-c", MEMORY.format(root=str(ROOT)), str(config)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert len(seen) == 20
    assert max(seen[4:]) - seen[3] < 8.0, seen
    assert len([row for row in rows(tmp_path / "toy") if "loss" in row]) == 2000
