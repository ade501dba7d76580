# SPDX-License-Identifier: Apache-2.0
"""What a container's command, or a line of a shell script, starts: torchrun with its flags?"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

# Flags of torchrun that take no value; every other one takes the next word, or `=value`.
_SWITCHES = {"standalone", "module", "no_python", "run_path", "m", "event_log_handler_none"}
_SHELLS = {"sh", "bash", "dash", "ash", "zsh"}
_PREFIXES = {"exec", "env", "nohup", "time", "command", "numactl", "nice", "stdbuf", "tini", "--"}
_PYTHON = re.compile(r"^python(\d+(\.\d+)?)?$")
_ASSIGNMENT = re.compile(r"^[A-Za-z_]\w*=")
_MOST_LINES = 60  # of one quoted text
_SEPARATORS = {"&&", "||", ";", "|", "&", "then", "do", "else", "{", "("}


@dataclass
class Start:
    """What is started."""

    program: str = ""
    """torchrun, python, another program's name, or "" where the image or a script decides."""
    flags: dict[str, str] = field(default_factory=dict)
    """torchrun's own flags, names with underscores; a switch has the value "true"."""
    rest: list[str] = field(default_factory=list)
    """What torchrun or Python starts, and its arguments; of a module without the -m."""
    module: bool = False
    """Whether that is a module."""
    shell: str | None = None
    """The shell text, where a shell runs it."""


def read_command(words: Sequence[str]) -> Start:
    """What a container with these words (command and args) starts."""
    if not words:
        return Start()
    name = words[0].rsplit("/", 1)[-1]
    if name in _SHELLS:
        for index, word in enumerate(words[1:], 1):
            if word.startswith("-") and "c" in word.lstrip("-") and not word.startswith("--"):
                text = words[index + 1] if index + 1 < len(words) else ""
                found = read_script(text)
                found.shell = text
                return found
        return Start(program="")  # a script file of the image
    return _simple(list(words))


def read_script(text: str) -> Start:
    """The first training program that a shell text starts."""
    starts = [start for line in commands(text) if (start := _simple(line)).program]
    for wanted in ("torchrun", "python"):
        for start in starts:
            if start.program == wanted:
                return start
    return starts[0] if starts else Start()


def commands(text: str) -> list[list[str]]:
    """The simple commands of a shell text, as words; what cannot be split is left out."""
    lines = re.sub(r"\\\n", " ", text).split("\n")
    found: list[list[str]] = []
    first = 0
    while first < len(lines):
        words: list[str] | None = None
        last = first
        while words is None and last < min(first + _MOST_LINES, len(lines)):
            last += 1
            words = _words("\n".join(lines[first:last]))
        first = first + 1 if words is None else last
        current: list[str] = []
        for word in [*(words or []), ";"]:
            if word in _SEPARATORS or set(word) <= set("();|&"):
                if current:
                    found.append(current)
                current = []
            else:
                current.append(word)
    return found


def _words(text: str) -> list[str] | None:
    """The words of a shell line; None where a quote is open and the text goes on."""
    reader = shlex.shlex(text, posix=True, punctuation_chars="();|&")
    reader.whitespace_split = True
    reader.commenters = "#"
    try:
        return list(reader)
    except ValueError:
        return None


def _simple(words: list[str]) -> Start:
    while words and (
        _ASSIGNMENT.match(words[0])
        or words[0].rsplit("/", 1)[-1] in _PREFIXES
        or (words[0].startswith("-") and len(words) > 1)
    ):
        words = words[1:]
    if not words:
        return Start()
    name = words[0].rsplit("/", 1)[-1]
    if name == "srun":
        return _simple(_after_srun(words[1:]))
    if name == "torchrun":
        return _torchrun(words[1:])
    if _PYTHON.match(name) or name.startswith("$"):
        return _python(words[1:], "python" if _PYTHON.match(name) else name)
    return Start(program=name, rest=words[1:])


def _after_srun(words: list[str]) -> list[str]:
    """The words after srun's own options; options with a separate value are the short ones."""
    while words and words[0].startswith("-"):
        takes_value = re.fullmatch(r"-[A-Za-z]", words[0]) is not None
        words = words[2 if takes_value else 1 :]
    return words


def _python(words: list[str], name: str) -> Start:
    index = 0
    while index < len(words) and words[index].startswith("-") and words[index] not in ("-m", "-c"):
        index += 2 if words[index] in ("-W", "-X") else 1
    rest = words[index:]
    if rest[:1] == ["-m"]:
        module = rest[1] if len(rest) > 1 else ""
        if module in ("torch.distributed.run", "torch.distributed.launch"):
            return _torchrun(rest[2:])
        return Start(program=name, rest=rest[1:], module=True)
    return Start(program=name, rest=rest)


def _torchrun(words: list[str]) -> Start:
    start, index = Start(program="torchrun"), 0
    while index < len(words) and words[index].startswith("-"):
        flag, equals, value = words[index].lstrip("-").partition("=")
        flag = flag.replace("-", "_")
        if flag in ("m", "module"):
            start.module = True
        elif equals:
            start.flags[flag] = value
        elif flag in _SWITCHES:
            start.flags[flag] = "true"
        else:
            index += 1
            start.flags[flag] = words[index] if index < len(words) else ""
        index += 1
    start.rest = words[index:]
    return start
