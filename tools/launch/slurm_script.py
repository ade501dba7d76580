# SPDX-License-Identifier: Apache-2.0
"""A Slurm batch script: its directives with their lines, and sbatch's options."""

import re
import shlex
from dataclasses import dataclass, field

from tools.launch.findings import Findings

_SHORT = {
    "N": "nodes",
    "n": "ntasks",
    "c": "cpus-per-task",
    "G": "gpus",
    "t": "time",
    "p": "partition",
    "A": "account",
    "J": "job-name",
    "o": "output",
    "e": "error",
    "w": "nodelist",
    "x": "exclude",
    "C": "constraint",
    "d": "dependency",
    "q": "qos",
    "D": "chdir",
    "a": "array",
    "L": "licenses",
    "s": "oversubscribe",
    "H": "hold",
    "B": "extra-node-info",
    "S": "core-spec",
    "M": "clusters",
    "W": "wait",
    "Q": "quiet",
    "v": "verbose",
    "b": "begin",
    "k": "no-kill",
    "O": "overcommit",
    "m": "distribution",
}
_WORDS = """
ntasks-per-node ntasks-per-gpu ntasks-per-socket ntasks-per-core gpus-per-node gpus-per-task
gpus-per-socket cpus-per-gpu gres gres-flags mem mem-per-cpu mem-per-gpu mem-bind exclusive signal
requeue no-requeue open-mode mail-type mail-user comment reservation export export-file
get-user-env gid uid hint input nice priority profile propagate reboot sockets-per-node
cores-per-socket threads-per-core switches thread-spec time-min tmp tres-bind tres-per-task
use-min-nodes wait-all-nodes wckey contiguous cpu-freq deadline delay-boot kill-on-invalid-dep
nodefile network parsable power prefer spread-job test-only wrap bb bbf acctg-freq
cluster-constraint container container-id gpu-bind gpu-freq ignore-pbs oom-kill-step resv-ports
segment stepmgr container-image container-mounts container-workdir container-name container-env
"""
LONG = {*_SHORT.values(), *_WORDS.split()}
_SWITCHES = {"exclusive", "requeue", "no-requeue", "hold", "contiguous", "overcommit", "no-kill"}


@dataclass
class Script:
    """A batch script: its directives with their lines, and its text."""

    text: str
    options: dict[str, tuple[str, int]] = field(default_factory=dict)
    late: list[int] = field(default_factory=list)
    """Lines of directives behind the first command."""
    comments: list[int] = field(default_factory=list)
    """Lines that look like directives and are comments."""

    def value(self, name: str, otherwise: str = "") -> str:
        """A directive's value, or `otherwise`."""
        return self.options.get(name, (otherwise, 0))[0]


def read_script(text: str) -> Script:
    """The directives of a script; those after its first command count for nothing."""
    script, begun = Script(text), False
    for number, line in enumerate(text.split("\n"), 1):
        if looks_like_directive(line) and not line.startswith("#SBATCH"):
            script.comments.append(number)
            line = "#SBATCH" + line[line.upper().index("SBATCH") + 6 :]
        if line.startswith("#SBATCH"):
            if begun:
                script.late.append(number)
                continue
            words = _words(line.removeprefix("#SBATCH"))
            if words[:1] in (["hetjob"], ["packjob"]):
                break  # srun starts on the first part of the job
            for name, value in read_options(words):
                script.options[name] = (value, number)
        elif line.strip() and not line.lstrip().startswith("#"):
            begun = True
    return script


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # a quote that nothing closes
        return text.split(" #")[0].split()


def read_options(words: list[str]) -> list[tuple[str, str]]:
    """(long name, value) of options of sbatch or srun."""
    found, index = [], 0
    while index < len(words):
        word = words[index]
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            name = name[2:]
            following = index + 1 < len(words) and not words[index + 1].startswith("-")
            if not equals and following and name not in _SWITCHES:
                index, value = index + 1, words[index + 1]
        else:
            letter, value = word[1:2], word[2:].lstrip("=")
            name = _SHORT.get(letter, word)
            if not value and index + 1 < len(words) and not words[index + 1].startswith("-"):
                index, value = index + 1, words[index + 1]
        found.append((name, value))
        index += 1
    return found


def line_of(script: Script, words: str, found: Findings) -> tuple[str, ...]:
    """A path that stands for the line of the first match in the script."""
    for number, line in enumerate(script.text.split("\n"), 1):
        if re.search(words, line) and not line.lstrip().startswith("#"):
            found.document.lines[("the script",)] = number
            return ("the script",)
    return ()


def looks_like_directive(line: str) -> bool:
    """Whether a line is a directive, or is meant to be one; `##SBATCH` is put out on purpose."""
    return re.match(r"\s*#(\s*SBATCH|(?i:sbatch))\s+-", line) is not None or line.startswith(
        "#SBATCH"
    )
