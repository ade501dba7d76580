# SPDX-License-Identifier: Apache-2.0
"""The training program with a fault in it: `torchrun tests/faulty.py FAULT FOLDER CONFIG ...`.

FAULT is KIND:RANK:STEP[:TIMES]. The fault happens on that rank (any: -1) at that step, at most
TIMES times (1) over all starts of the run; FOLDER remembers how often it has. Kinds: kill, hang
(sleeps for ever), kill-save, kill-evaluate, error; none. For kill-fetch (while a block is read from
the object store) and kill-fill (when it is on the node's disk and has no name yet) STEP is the
number of blocks that the data cache holds by then.
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
from pretrain.data.cache import BlockCache  # noqa: E402


class Fault(Callback):
    def __init__(self, text: str, folder: str) -> None:
        kind, rank, step, *times = text.split(":")
        self.kind, self.rank, self.step = kind, int(rank), int(step)
        self.times, self.folder = int(times[0]) if times else 1, Path(folder)

    def _now(self, *kinds: str) -> bool:
        if self.kind not in kinds or self.rank not in (-1, int(os.environ["RANK"])):
            return False
        done = len(list(self.folder.glob("fault-*")))
        if done >= self.times:
            return False
        (self.folder / f"fault-{done}").touch()
        return True

    def watch_cache(self) -> None:
        """Dies when the cache is filled."""
        fill, replace = BlockCache._fill, os.replace

        def die(folder: Path, kind: str) -> None:
            blocks = [path for path in folder.rglob("*") if path.is_file() and not path.suffix]
            if len(blocks) == self.step and self._now(kind):
                os.kill(os.getpid(), signal.SIGKILL)

        def filling(cache, name, fetch):
            def fetched():
                content = fetch()
                die(cache.folder / "blocks", "kill-fetch")
                return content

            return fill(cache, name, fetched)

        def naming(source, target):
            if Path(target).parent.parent.name == "blocks":
                die(Path(target).parent.parent, "kill-fill")
            replace(source, target)

        BlockCache._fill, os.replace = filling, naming

    def before_step(self, trainer, step):
        if step == self.step and self._now("kill", "hang", "error"):
            if self.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.kind == "error":
                raise RuntimeError("an error of this rank")
            hang_here()

    def on_phase(self, trainer, phase):
        if trainer.state.step == self.step and self._now(f"kill-{phase}"):
            # In the middle of it: collectives and writes have begun.
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGKILL)).start()


def hang_here() -> None:
    while True:
        time.sleep(1.0)


if __name__ == "__main__":
    fault = Fault(*sys.argv[1:3])
    if fault.kind in ("kill-fetch", "kill-fill"):
        fault.watch_cache()
    trainer = pretrain.trainer.Trainer
    pretrain.trainer.Trainer = lambda config, store: trainer(config, [fault], store)
    sys.exit(main(sys.argv[3:]))
