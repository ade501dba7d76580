# SPDX-License-Identifier: Apache-2.0
"""The training program with a fault in it: `torchrun tests/faulty.py FAULT FOLDER CONFIG ...`.

FAULT is KIND:RANK:STEP[:TIMES]. The fault happens on that rank at that step, at most TIMES times
(1) over all starts of the run; FOLDER remembers how often it has. Kinds: kill, hang (sleeps for
ever), kill-save, kill-evaluate, error; none.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from pretrain import cpu_compat  # noqa: E402  (the repository's root comes first)

cpu_compat.enable()

import pretrain.trainer  # noqa: E402
from pretrain.__main__ import main  # noqa: E402
from pretrain.callbacks import Callback  # noqa: E402


class Fault(Callback):
    def __init__(self, text: str, folder: str) -> None:
        kind, rank, step, *times = text.split(":")
        self.kind, self.rank, self.step = kind, int(rank), int(step)
        self.times, self.folder = int(times[0]) if times else 1, Path(folder)

    def _now(self, trainer, *kinds: str) -> bool:
        if self.kind not in kinds or trainer.world.rank != self.rank:
            return False
        done = len(list(self.folder.glob("fault-*")))
        if done >= self.times:
            return False
        (self.folder / f"fault-{done}").touch()
        return True

    def before_step(self, trainer, step):
        if step == self.step and self._now(trainer, "kill", "hang", "error"):
            if self.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.kind == "error":
                raise RuntimeError("an error of this rank")
            hang_here()

    def on_phase(self, trainer, phase):
        if trainer.state.step == self.step and self._now(trainer, f"kill-{phase}"):
            # In the middle of it: collectives and writes have begun.
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGKILL)).start()


def hang_here() -> None:
    while True:
        time.sleep(1.0)


if __name__ == "__main__":
    fault = Fault(*sys.argv[1:3])
    trainer = pretrain.trainer.Trainer
    pretrain.trainer.Trainer = lambda config, store: trainer(config, [fault], store)
    sys.exit(main(sys.argv[3:]))
