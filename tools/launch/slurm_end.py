# SPDX-License-Identifier: Apache-2.0
"""Rules of how a Slurm job ends: its signal reaches the script, and the run has time to save."""

import re
import signal

from tools.launch.command import statements
from tools.launch.findings import Findings
from tools.launch.pod_rules import SAVE_SECONDS
from tools.launch.slurm_script import Script, line_of

_NO_SIGNALS = {"EXIT", "ERR", "DEBUG", "RETURN", "0"}


def check_end(script: Script, found: Findings) -> None:
    """The time limit, preemption and the end of the run: what is saved, logged and reported."""
    steps = statements(script.text)
    trapped = _trapped(steps)
    _check_signal(script.value("signal"), trapped, found)
    if trapped and not _waits(steps):
        found.error(
            line_of(script, r"\btrap\b", found),
            "a trap waits for the command in the foreground; start srun with & and wait for it",
        )
    if "requeue" in script.options and script.value("open-mode") != "append":
        found.advise(("requeue",), "add #SBATCH --open-mode=append, or a requeue empties the log")
    if any(_trains(words) and end == "|" for words, end in steps) and "pipefail" not in script.text:
        found.advise(
            line_of(script, r"\|\s*(tee|grep|sed|awk)", found),
            "a pipe has the status of its last command, so that a failed run counts as done; add "
            "set -o pipefail",
        )


def _check_signal(text: str, trapped: set[str], found: Findings) -> None:
    if not text:
        found.advise((), "add #SBATCH --signal=B:USR1@300 and a trap, so that the end is saved")
        return
    target, _, rest = text.rpartition(":")
    name, _, seconds = rest.partition("@")
    sent = _name(name)
    if "B" not in target and sent.startswith("USR"):
        found.error(
            ("signal",),
            f"{text} goes to torchrun, which dies of it; write --signal=B:{rest} and trap it",
        )
    elif "B" in target and sent not in trapped:
        found.error(
            ("signal",),
            f"nothing in the script traps {sent}, so that it kills the script; add trap 'touch "
            f"RUN/stop' {sent}, which stops the run and saves",
        )
    if seconds.isdecimal() and int(seconds) < SAVE_SECONDS:
        found.error(
            ("signal",),
            f"a stopped run needs time to save; got {seconds} s; write {target}{':' * bool(target)}"
            f"{name}@300",
        )


def _name(word: str) -> str:
    """USR1 of SIGUSR1, usr1 or 10."""
    if word.isdecimal() and int(word) in {one.value for one in signal.Signals}:
        word = signal.Signals(int(word)).name
    return word.upper().removeprefix("SIG")


def _trapped(steps: list[tuple[list[str], str]]) -> set[str]:
    """Signals that the script does something at."""
    found: set[str] = set()
    for words, _ in steps:
        action = [word for word in words[1:] if word != "--"]
        if words[0] == "trap" and action[:1] != ["-"]:
            found |= {_name(word) for word in action[1:]}
    return found - _NO_SIGNALS


def _trains(words: list[str]) -> bool:
    return re.search(r"\b(torchrun|torch\.distributed\.run)\b", " ".join(words)) is not None


def _waits(steps: list[tuple[list[str], str]]) -> bool:
    """Whether what trains runs in the background, and the script waits for it."""
    functions = {words[-1] for words, end in steps if end == "()" or words[0] == "function"}
    behind = any(words[0] in functions and end == "&" for words, end in steps)
    waits = any(words[0] == "wait" for words, _ in steps)
    return waits and all(behind or end == "&" for words, end in steps if _trains(words))
