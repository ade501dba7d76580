# SPDX-License-Identifier: Apache-2.0
"""What a container's command, or a line of a shell script, starts: torchrun with its flags?"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

# Flags of torchrun that take no value; every other one takes the next word, or `=value`.
_SWITCHES = {"standalone", "module", "no_python", "run_path", "m", "virtual_local_rank"}
_SHELLS = {"sh", "bash", "dash", "ash", "zsh"}
_PREFIXES = {"exec", "env", "nohup", "time", "command", "--"}
# They start what stands behind their own options.
_WRAPPERS = {"srun", "apptainer", "singularity", "enroot", "podman", "docker", "timeout"}
_WRAPPERS |= {"uv", "poetry", "pixi", "conda", "mamba", "micromamba"}
_WRAPPERS |= {"numactl", "nice", "stdbuf", "tini", "dumb-init"}
_PYTHON = re.compile(r"^python(\d+(\.\d+)?)?$")
_ASSIGNMENT = re.compile(r"^[A-Za-z_]\w*=")
_MOST_LINES = 60  # of one quoted text
_SEPARATORS = {"&&", "||", ";", "|", "&", "then", "do", "else", "{", "("}
_SEPARATORS |= {"if", "elif", "while", "until", "!", "}", "fi", "done"}
_INNER_HASH, _HASH = re.compile(r"(?<=[^\s;|&(])#"), "\ue000"
# $(...) and $((...)): of one word, whatever they hold.
_SUBSTITUTION = re.compile(r"\$\((?:\([^()]*\)|[^()]*)\)")
_HIDDEN = {ord(char): 0xE100 + ord(char) for char in "();|&<>#'\" \t\n"}
_SHOWN = {hidden: char for char, hidden in _HIDDEN.items()}
_HERE_DOCUMENT = re.compile(r"<<-?[ ]*(['\"]?)(\w+)\1([^\n]*)\n.*?^\s*\2[ ]*$", re.M | re.S)
# NAME="..." or NAME=(...), where the text is options or begins with what starts something.
_KEPT_WORDS = re.compile(
    r"^[ \t]*(?:(?:export|readonly|local|declare(?: -\w+)*)[ ]+)?(\w+)(\+?)="
    r"(?:\(([^()]*)\)|\"([^\"]*)\"|'([^']*)')",
    re.M,
)
_USE = re.compile(r'"\$\{(\w+)\[@\]\}"|\$\{(\w+)(?:\[[@*]\])?\}|\$(\w+)')
_WORDS_OF_A_START = re.compile(r"\s*(-|(\S*/)?(torchrun|srun|python[\d.]*)(\s|$))")


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

    @property
    def hidden(self) -> bool:
        """Whether torchrun's flags may stand in a variable that the text does not set."""
        return self.rest[:1] != [] and re.match(r"\$\{?\w", self.rest[0]) is not None


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
    return [words for words, _ in statements(text)]


def statements(text: str) -> list[tuple[list[str], str]]:
    """The simple commands of a shell text, each with the separator behind it: `;`, `|`, `&`, ...

    Texts of here-documents are left out, and variables that hold options or a start are put in.
    """
    text = _HERE_DOCUMENT.sub(r"\3", re.sub(r"\\\n", " ", text))
    while _SUBSTITUTION.search(text):  # the inner ones first
        text = _SUBSTITUTION.sub(lambda match: match[0].translate(_HIDDEN), text)
    lines = re.sub(r"[<>]&|&>", ">", _put_in(text)).split("\n")
    found: list[tuple[list[str], str]] = []
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
                    found.append((current, word))
                elif found and word == "&":  # behind a group: ( ... ) &, { ...; } &
                    found[-1] = (found[-1][0], word)
                current = []
            else:
                current.append(word)
    return found


def _put_in(text: str) -> str:
    """A shell text with the variables that hold options, or what to start, replaced by them."""
    kept: dict[str, str] = {}

    def keep(match: re.Match[str]) -> str:
        name, more, *parts = match.groups()
        parts[0] = parts[0] and re.sub(r"(?m)(^|\s)#.*", "", parts[0])
        value = " ".join(_USE.sub(use, next(part for part in parts if part is not None)).split())
        if name not in kept and not _WORDS_OF_A_START.match(value):
            return match[0]
        kept[name] = f"{kept.get(name, '')} {value}" if more else value
        return ""

    def use(match: re.Match[str]) -> str:
        return kept.get(match[1] or match[2] or match[3], match[0])

    return _USE.sub(use, _KEPT_WORDS.sub(keep, text))


def _words(text: str) -> list[str] | None:
    """The words of a shell line; None where a quote is open and the text goes on."""
    # A comment begins a word, to a shell; shlex begins it anywhere.
    reader = shlex.shlex(_INNER_HASH.sub(_HASH, text), posix=True, punctuation_chars="();|&")
    reader.whitespace_split = True
    reader.commenters = "#"
    try:
        return [word.replace(_HASH, "#").translate(_SHOWN) for word in reader]
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
    if name in _SHELLS:
        return read_command(words)
    if name in _WRAPPERS:
        return read_command(words[1:][program_at(words[1:]) :])
    if name == "torchrun":
        return _torchrun(words[1:])
    if _PYTHON.match(name) or name.startswith("$"):
        return _python(words[1:], "python" if _PYTHON.match(name) else name)
    return Start(program=name, rest=words[1:])


def program_at(words: Sequence[str]) -> int:
    """Where the own options of a wrapper such as srun end, and what it starts begins."""
    known = {"torchrun", *_SHELLS, *_WRAPPERS}
    for index, word in enumerate(words):
        name = word.rsplit("/", 1)[-1]
        if not word.startswith("-") and (name in known or _PYTHON.match(name)):
            return index
    return next((i for i, word in enumerate(words) if not word.startswith("-")), len(words))


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
