# SPDX-License-Identifier: Apache-2.0
"""What the command of a training container must be, given what its operator injects."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tools.launch.command import Start, read_command, statements
from tools.launch.documents import Path
from tools.launch.findings import Findings, at, words

# torchrun's flag -> the variable that the operator sets, and where to set it instead.
CARRIED = {
    "nnodes": "PET_NNODES",
    "nproc_per_node": "PET_NPROC_PER_NODE",
    "node_rank": "PET_NODE_RANK",
    "master_addr": "PET_MASTER_ADDR",
    "master_port": "PET_MASTER_PORT",
}
RENDEZVOUS = {
    "rdzv_backend": "PET_RDZV_BACKEND",
    "rdzv_endpoint": "PET_RDZV_ENDPOINT",
    "rdzv_id": "PET_RDZV_ID",
}
_NODE_LEVEL = re.compile(r"\$[({]?(WORLD_SIZE|RANK|LOCAL_RANK)\b")
_SHELL_VARIABLE = re.compile(r"\$(\{|[A-Za-z_])")
_OWN_HOST = re.compile(
    r"\$\{?HOSTNAME|\$\(\s*hostname|^localhost\b|^127\.|^\[?::1\]?|^0\.0\.0\.0|\$\(HOSTNAME\)"
)
_NAMES = {
    "PyTorchJob": {"nproc_per_node": "nprocPerNode", "nnodes": "replicas"},
    "TrainJob": {"nproc_per_node": "numProcPerNode", "nnodes": "numNodes"},
}
# They start processes by an environment of their own, and ignore what the operator injects.
_OTHER_LAUNCHERS = {"accelerate", "deepspeed", "horovodrun", "mpiexec", "mpirun", "srun"}


@dataclass
class Setting:
    """What surrounds a command.

    Attributes:
        operator: PyTorchJob, TrainJob or JobSet.
        nodes: how many pods train together.
        processes: processes a node; None for auto.
        gpus: GPUs a pod gets.
        carried: torchrun flags that the operator already sets, with their variables.
    """

    operator: str
    nodes: int
    processes: int | None
    gpus: int
    carried: dict[str, str] = field(default_factory=lambda: dict(CARRIED))

    @property
    def several(self) -> bool:
        """Whether Python alone would start too few processes, or ones that do not find others.

        Only a PyTorchJob gives a pod's first process what it needs to be a rank without torchrun.
        """
        alone = self.operator != "PyTorchJob" and self.nodes > 1
        return (self.processes or self.gpus) > 1 or alone


def check_start(
    container: Mapping[str, Any], setting: Setting, path: Path, found: Findings
) -> Start:
    """Checks the words of a container, which stands at `path`; returns what they start."""
    command = words(container.get("command"))
    line = command + words(container.get("args"))
    start = read_command(line)
    place = (*path, "command") if command else (*path, "args")
    first = line[0] if command else ""
    if " " in first.strip() and start.shell is None:
        found.error(
            place,
            f"the first word is the program, and {first!r} is several; write {first.split()!r}",
        )
        return start
    if not command:
        found.error(
            path,
            "without a command the image decides what runs; write command: [torchrun] and "
            "args: [-m, pretrain, CONFIG]",
        )
        return start
    if start.shell is None:
        _check_expansion(line, place, found)
    text = " ".join(line)
    if _NODE_LEVEL.search(text):
        name = _NODE_LEVEL.search(text)
        assert name is not None, "matched above"
        found.error(
            place,
            f"reads {name[0]}, which counts nodes outside of torchrun, not processes; let torchrun "
            "set it",
        )
    if start.program == "torchrun":
        _check_torchrun(start, setting, place, found)
        if start.shell is not None:
            _check_shell(start.shell, line, place, found)
    elif start.program == "python":
        _check_python(start, setting, place, found)
    elif start.program in _OTHER_LAUNCHERS:
        found.error(
            place,
            f"{start.program} does not read what the operator of a {setting.operator} sets (PET_*) "
            "and starts something else; write command: [torchrun] and args: [-m, pretrain, CONFIG]",
        )
    return start


def _check_expansion(line: list[str], place: Path, found: Findings) -> None:
    for word in line:
        if _SHELL_VARIABLE.search(word):
            found.error(
                place,
                f"no shell expands {word!r} here; write $(NAME), which Kubernetes expands, or "
                'start with ["sh", "-c", ...]',
            )


def _check_torchrun(start: Start, setting: Setting, place: Path, found: Findings) -> None:
    names = _NAMES.get(setting.operator, {})
    for flag, variable in setting.carried.items():
        if flag in start.flags:
            found.error(
                place,
                f"--{flag} overrides {variable}, which the operator sets rightly on every node; "
                "remove it" + (f" and set {names[flag]}" if flag in names else ""),
            )
    endpoint = start.flags.get("rdzv_endpoint", "")
    if _OWN_HOST.search(endpoint) and "rdzv_endpoint" not in setting.carried:
        found.error(
            place,
            f"--rdzv_endpoint {endpoint} is another place on every node, so that none finds the "
            "others; remove it: the operator names the master",
        )
    if start.flags.get("standalone") == "true" and setting.nodes > 1:
        found.error(place, "--standalone makes every node a run of its own; remove it")
    check_program(start, place, found)


def check_program(start: Start, place: Path, found: Findings) -> None:
    """What torchrun is to run."""
    if not start.rest:
        found.error(place, "torchrun is given nothing to run; add -m pretrain CONFIG to args")
        return
    program = start.rest[0]
    if start.hidden:
        return
    if start.module and program.endswith(".py"):
        found.error(place, f"-m takes a module; got {program!r}; remove -m, or the .py")
    elif not start.module and "/" not in program and "." not in program:
        found.error(place, f"torchrun takes a file, and {program!r} is a module; put -m before it")
    elif program == "pretrain" and start.module and len(start.rest) < 2:
        found.error(place, "pretrain is given no run file; add its path to args")


def _check_shell(text: str, line: list[str], place: Path, found: Findings) -> None:
    """A shell between the pod and torchrun: it passes neither SIGTERM nor, always, a status on."""
    steps = statements(text)
    index = max(
        (i for i, (words, _) in enumerate(steps) if "torchrun" in " ".join(words)), default=-1
    )
    if index < 0 or re.search(r"\b(trap|if|while|until)\b[^\n]*", text):
        return
    train, behind = steps[index]
    last, shown = index == len(steps) - 1, " ".join(line)
    stops = re.search(r"\bset -\w*e|\berrexit\b", text) or any(
        re.fullmatch(r"-\w*e\w*", word) for word in line[:-1]
    )
    lost = {"|": "pipefail" not in shown, "||": True, ";": not last and not stops}.get(
        behind, False
    )
    tells = re.search(r"\bexit\b|\$\?|PIPESTATUS", text) or (train[0] == "exec" and behind == ";")
    if lost and not tells:
        found.error(
            place,
            "the pod ends with the status of what stands behind torchrun, so that a failed run "
            "counts as done and is not started again; begin with set -eo pipefail, or put it last",
        )
    taken_over = len(steps) == 1 or (last and any(word.endswith("bash") for word in line[:-1]))
    if "exec" not in train and not (taken_over and behind == ";"):
        found.advise(
            place,
            "the shell keeps SIGTERM to itself, so that a stopped pod is killed before the run "
            "saves; write exec torchrun, as the last command",
        )


def _check_python(start: Start, setting: Setting, place: Path, found: Findings) -> None:
    words_of = (["-m"] if start.module else []) + start.rest
    what = " ".join(words_of[: 2 if start.module else 1])
    if not setting.several:
        return
    count = setting.processes or setting.gpus or 1
    found.error(
        place,
        f"python {what} starts one process a pod, and {count} a pod on {setting.nodes} nodes are "
        f"meant; write command: [torchrun] and args: {words_of}",
    )


def check_reserved(
    env: list[object], reserved: set[str], operator: str, path: Path, found: Findings
) -> None:
    """Variables that the operator sets, set again."""
    for index, entry in enumerate(env):
        name = at(entry, "name", kind=str)
        if name in reserved or name.startswith("PET_RDZV"):
            found.error(
                (*path, index),
                f"{name} is set by the operator of a {operator}; remove it",
            )
