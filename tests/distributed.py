# SPDX-License-Identifier: Apache-2.0
"""Runs a function, or a program, in several gloo processes, and brings back what each rank says.

    def _losses(seed):           # a module-level function, imported by name in every rank
        ...
        return [1.0, 2.0]        # anything torch.save takes

    def test_two_ranks():
        first, second = run_distributed(_losses, 2, timeout=60, args=(7,))

Each rank gets the environment that torchrun would give it (RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR, MASTER_PORT), one thread, and `cpu_compat` enabled before its function is imported. The
process group is left to the function (`torch.distributed.init_process_group("gloo")`). Ranks of a
function are forked from one process that has imported torch and megatron-core once; programs start
by themselves. When a rank
fails or the time is over, its siblings are killed (they would wait for it for ever) and the call
raises RuntimeError with every rank's output, each line with its rank.
"""

import atexit
import contextlib
import functools
import gc
import importlib.util
import json
import multiprocessing.util
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now.

    Below those that the system hands out by itself: gloo takes many of them, and the ranks listen
    only when they have imported torch.
    """
    while True:
        port = random.SystemRandom().randrange(15000, 32000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def run_distributed(
    target: Callable[..., Any] | str | Path | Sequence[str],
    world_size: int,
    timeout: float = 120.0,
    args: Sequence[Any] = (),
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Runs `target` in `world_size` processes.

    `target`: a module-level function (called with `args`; returns its results by rank), the path of
    a script, or a list of arguments for Python such as ["-m", "pretrain", "run.yaml"] (`args`
    follow as strings; returns the output of each rank).
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        place = Path(folder)
        if callable(target):
            request = place / "request.pt"
            file = Path(sys.modules[target.__module__].__file__ or "").resolve()
            torch.save((str(file), target.__qualname__, tuple(args)), request)
            command = [str(request)]
        else:
            words = [str(target)] if isinstance(target, str | Path) else list(target)
            command = [sys.executable, *words, *map(str, args)]
        logs = [place / f"rank{rank}.log" for rank in range(world_size)]
        environments = _environments(world_size, env or {})
        ranks: list[Any] = (
            _server().start(command[0], logs, environments)
            if callable(target)
            else _start(command, logs, environments)
        )
        try:
            failure = _wait(ranks, timeout)
        finally:
            for process in ranks:
                _kill(process)
        texts = [log.read_text(errors="replace") for log in logs]
        if failure:
            raise RuntimeError(failure + "\n" + _prefixed(texts))
        if not callable(target):
            return texts
        return [
            torch.load(place / f"result{rank}.pt", weights_only=False) for rank in range(world_size)
        ]


def _environments(world_size: int, env: Mapping[str, str]) -> list[dict[str, str]]:
    shared = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        **env,
    }
    return [{**shared, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(world_size)]


def _start(
    command: list[str], logs: list[Path], environments: list[dict[str, str]]
) -> list[subprocess.Popen[bytes]]:
    ranks = []
    for log, env in zip(logs, environments):
        with log.open("wb") as out:
            ranks.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=env,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # its own children die with it, see _kill
                )
            )
    return ranks


class _ForkServer:
    """A process that has imported what ranks need, and forks them."""

    def __init__(self) -> None:
        env = _environments(1, {})[0]
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--fork-server"],
            cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip

    def ask(self, **question: Any) -> Any:
        """The answer to one question; both are lines of JSON."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin, "a pipe"
        assert stdout, "a pipe"
        stdin.write(json.dumps(question) + "\n")
        stdin.flush()
        return json.loads(stdout.readline())

    def start(
        self, request: str, logs: list[Path], environments: list[dict[str, str]]
    ) -> list["_Forked"]:
        """One rank for each log and environment."""
        pids = self.ask(request=request, logs=[str(log) for log in logs], env=environments)
        return [_Forked(self, pid) for pid in pids]


class _Forked:
    """A rank that the server has forked, with what is used of subprocess.Popen."""

    def __init__(self, server: _ForkServer, pid: int) -> None:
        self.server, self.pid = server, pid
        self.code: int | None = None

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        if self.code is None:
            self.code = self.server.ask(poll=self.pid)
        return self.code

    def wait(self) -> None:
        """Until it has ended."""
        while self.poll() is None:
            time.sleep(0.01)

    def kill(self) -> None:
        """At once."""
        os.kill(self.pid, signal.SIGKILL)


@functools.cache
def _server() -> _ForkServer:
    server = _ForkServer()
    atexit.register(server.process.kill)
    return server


def _fork_ranks() -> None:
    """The server: forks the ranks of each question, and tells how they ended."""
    sys.path[0] = str(ROOT)
    _prepare()
    with contextlib.suppress(ModuleNotFoundError):
        import pretrain.engine  # noqa: F401 (megatron-core with it: what most ranks import)
    gc.freeze()  # no rank's garbage collection walks through, and so copies, what all share

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a rank prints goes to its log, never among the answers
    for line in sys.stdin:
        question = json.loads(line)
        if "poll" in question:
            pid, status = os.waitpid(question["poll"], os.WNOHANG)
            answer: Any = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = [
                _fork(question["request"], log, env)
                for log, env in zip(question["logs"], question["env"])
            ]
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _fork(request: str, log: str, env: dict[str, str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(out, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(env)
    code = 1
    try:
        _serve(request)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(Exception):  # a save of megatron-core's own starts a server
            multiprocessing.util._exit_function()
        os._exit(code)


def _wait(ranks: list[Any], timeout: float) -> str | None:
    """Until all have ended; what went wrong, or None."""
    end = time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in ranks]
        for rank, code in enumerate(codes):
            if code:
                time.sleep(0.3)  # let the siblings say what they saw
                return f"rank {rank} of {len(ranks)} ended with status {code}"
        if None not in codes:
            return None
        if time.monotonic() > end:
            waiting = [rank for rank, code in enumerate(codes) if code is None]
            return f"ranks {waiting} of {len(ranks)} still run after {timeout} s"
        time.sleep(0.02)


def _kill(process: Any) -> None:
    if process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()
    process.wait()


def _prefixed(texts: list[str]) -> str:
    lines = [
        f"[rank {rank}] {line}"
        for rank, text in enumerate(texts)
        for line in text.splitlines()[-60:]
    ]
    return "\n".join(lines)


def _prepare() -> None:
    torch.set_num_threads(1)
    with contextlib.suppress(ModuleNotFoundError):  # a copy of fused_ops and its tests alone
        from pretrain import cpu_compat

        cpu_compat.enable()


def _serve(request: str) -> None:
    """What each rank of a function runs."""
    sys.path[0] = str(ROOT)  # not the folder of this file
    _prepare()
    file, name, args = torch.load(request, weights_only=False)
    spec = importlib.util.spec_from_file_location("distributed_target", file)
    assert spec, f"cannot import {file}"
    assert spec.loader, f"cannot import {file}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    result = getattr(module, name)(*args)
    torch.save(result, Path(request).with_name(f"result{os.environ['RANK']}.pt"))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _fork_ranks()
