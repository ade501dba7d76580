# SPDX-License-Identifier: Apache-2.0
"""The processes of the layouts: `python -m pretrain.parity.ranks FOLDER` is one of them.

FOLDER/request.json lists what is trained; each rank trains all of it, one after the other, and
leaves FOLDER/NAME (weights) and FOLDER/NAME.json (losses and gradient norms).
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from pretrain import cpu_compat

ROOT = Path(__file__).resolve().parent.parent.parent
REQUEST = "request.json"
_PR_SET_PDEATHSIG = 1


class RanksFailed(RuntimeError):
    """A rank ended with an error, or none came to an end in time."""


class Ranks:
    """Processes that train a list of layouts of one size."""

    def __init__(self, folder: Path, processes: int, request: dict[str, Any]) -> None:
        self.folder, self.request = folder, request
        folder.mkdir(parents=True, exist_ok=True)
        (folder / REQUEST).write_text(json.dumps({**request, "parent": os.getpid()}))
        sizes = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        shared = {**os.environ, "OMP_NUM_THREADS": "1", **sizes}
        command = [sys.executable, "-m", "pretrain.parity.ranks", str(folder)]
        self.logs = [folder / f"rank{rank}.log" for rank in range(processes)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            with log.open("wb") as out:
                self.processes.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )

    def wait(self, timeout: float) -> None:
        """Until all have ended.

        Raises:
            RanksFailed: one with an error, or they were still at work after `timeout` seconds.
        """
        end = time.monotonic() + timeout
        try:
            while True:
                codes = [process.poll() for process in self.processes]
                failed = [rank for rank, code in enumerate(codes) if code]
                if failed:
                    time.sleep(0.3)  # let the siblings say what they saw
                    raise RanksFailed(f"rank {failed[0]} of {len(codes)}:\n{self._said(failed[0])}")
                if None not in codes:
                    return
                if time.monotonic() > end:
                    late = codes.index(None)
                    raise RanksFailed(
                        f"rank {late} of {len(codes)} was at work after {timeout:.0f} s; the "
                        f"ranks may wait for each other:\n{self._said(late)}"
                    )
                time.sleep(0.05)
        finally:
            self.stop()

    def stop(self) -> None:
        """Ends those that still run: without a sibling they would wait for ever."""
        for process in self.processes:
            if process.poll() is None:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    process.kill()
            process.wait()

    def _said(self, rank: int) -> str:
        lines = self.logs[rank].read_text(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-25:])


def serve(folder: Path) -> None:
    """What a rank does."""
    import torch.distributed as dist

    from pretrain.initialize import choose_device, shut_down
    from pretrain.parity.layouts import parse_layout
    from pretrain.parity.toy import Case
    from pretrain.parity.trace import Trace
    from pretrain.parity.train import build, save_weights, train

    request = json.loads((folder / REQUEST).read_text())
    choose_device(request["device"])
    # A file, not a port: one that is free now may be taken when the ranks have been imported.
    dist.init_process_group(
        "nccl" if request["device"] == "cuda" else "gloo",
        init_method=f"file://{folder.resolve()}/store",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    for task in request["tasks"]:
        print(f"{time.strftime('%X')} {task['name']}", flush=True)
        case, layout = Case(**task["case"]), parse_layout(task["layout"])
        engine, trace = build(case, layout, request["device"]), Trace()
        if request.get("trace"):
            trace.attach(engine)
        result = train(case, engine, Path(task["start"]))
        if request.get("trace"):
            trace.save(folder / task["name"], dist.get_rank())
        save_weights(engine, folder / task["name"])
        if dist.get_rank() == 0:
            (folder / f"{task['name']}.json").write_text(json.dumps(result.as_dict()))
    shut_down()


def main(arguments: list[str]) -> int:
    """The program of one rank."""
    import torch

    folder = Path(arguments[0])
    _die_with(json.loads((folder / REQUEST).read_text())["parent"])
    cpu_compat.enable()
    torch.set_num_threads(1)
    try:
        serve(folder)
    except Exception:
        traceback.print_exc()
        # Not through the interpreter's own end: the siblings wait in a collective, and so would
        # the process group's destructor.
        sys.stdout.flush()
        os._exit(1)
    return 0


def _die_with(parent: int) -> None:
    """Where the system can: a command that is killed leaves no ranks behind."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
