# SPDX-License-Identifier: Apache-2.0
"""A small program beside each rank: speaks for it when it cannot, and ends it.

A process that was stopped (SIGSTOP), or whose interpreter is held by native code, runs none of its
threads, so somebody else must say so. The rank writes what it does to this program's standard
input, a JSON object a line; when the lines cease for longer than the last one allowed, the program
names the rank with its last stack and collective, and kills it, so that the launcher starts again.
It ends with its rank, and imports nothing but the standard library.
"""

import json
import os
import select
import signal
import sys
import time

# What a rank's peers need to say their own word before its connections break.
GRACE_SECONDS = 4.0
_POLL_SECONDS = 0.25
_STATES = {"T": "stopped (SIGSTOP)", "t": "stopped by a debugger", "D": "waiting for a disk or NFS"}


def state_of(pid: int) -> str:
    """What the kernel says a process does."""
    try:
        with open(f"/proc/{pid}/stat") as stream:
            letter = stream.read().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    return _STATES.get(letter, "its interpreter does not run (held by native code?)")


def describe(beat: dict[str, object], seconds: float, why: str) -> str:
    """The message about a rank, from its last beat."""
    stack = beat.get("stack")
    frames = stack if isinstance(stack, list) else []
    who = f"rank {beat.get('rank')} ({beat.get('host')}, process {beat.get('pid')})"
    lines = [
        f"watchdog: {who} has made no progress for {seconds:.0f} s: {why}",
        f"  last seen in step {beat.get('step')}, {beat.get('phase')}",
        f"  last collective: {beat.get('collective') or 'none yet'}",
        "  stack, innermost last:",
        *(f"    {frame}" for frame in frames),
    ]
    return "\n".join(lines) + "\n"


def _say(text: str) -> None:
    try:
        os.write(2, text.encode())
    except OSError:
        return  # nobody listens


def main() -> int:
    """Watches the parent until its pipe closes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the rank
    parent, beat = os.getppid(), {}
    silent, checked, told, pending = 0.0, time.monotonic(), False, b""
    while True:
        ready, _, _ = select.select([0], [], [], _POLL_SECONDS)
        now = time.monotonic()
        # Time that this program did not run either (a suspended machine) counts against nobody.
        silent += min(now - checked, 4 * _POLL_SECONDS)
        checked = now
        if ready:
            data = os.read(0, 65536)
            if not data:
                return 0
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                beat = json.loads(line)
                silent, told = 0.0, False
            continue
        limit = float(beat.get("limit") or 0.0)
        if limit <= 0 or silent < limit:
            continue
        if not told:
            told = True
            _say(describe(beat, silent, state_of(parent)))
        if silent > limit + GRACE_SECONDS and os.getppid() == parent:
            _say(f"watchdog: killing process {parent}, so that the run can be started again\n")
            os.kill(parent, signal.SIGKILL)
            return 0


if __name__ == "__main__":
    sys.exit(main())
