# SPDX-License-Identifier: Apache-2.0
"""Rules of a Slurm batch script: numbers in one place, and a run that survives its time limit."""

import difflib
import re
from dataclasses import dataclass, field

from tools.launch.command import Start, commands, read_command
from tools.launch.documents import Document, Path
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
_LONG = {*_SHORT.values(), *_WORDS.split()}
_OWN_HOST = re.compile(r"\$\(\s*hostname|\$\{?HOSTNAME|^localhost|^127\.")
_SWITCHES = {"exclusive", "requeue", "no-requeue", "hold", "contiguous", "overcommit", "no-kill"}


@dataclass
class Script:
    """A batch script: its directives with their lines, and its text."""

    text: str
    options: dict[str, tuple[str, int]] = field(default_factory=dict)
    late: list[int] = field(default_factory=list)

    def value(self, name: str) -> str:
        """A directive's value, or ""."""
        return self.options.get(name, ("", 0))[0]


def read_script(text: str) -> Script:
    """The directives of a script; those after its first command count for nothing."""
    script, begun = Script(text), False
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith("#SBATCH"):
            if begun:
                script.late.append(number)
                continue
            for name, value in _options(line.removeprefix("#SBATCH").split(" #")[0].split()):
                script.options[name] = (value, number)
        elif line.strip() and not line.lstrip().startswith("#"):
            begun = True
    return script


def _options(words: list[str]) -> list[tuple[str, str]]:
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


def check_slurm(text: str) -> Findings:
    """Everything about a batch script."""
    script = read_script(text)
    lines: dict[Path, int] = {(name,): line for name, (_, line) in script.options.items()}
    found = Findings(Document(None, lines))
    _check_options(script, found)
    _check_hosts(script, found)
    start, srun = _started(script)
    if start is None:
        found.error((), "starts nothing that trains; add srun torchrun ... -m pretrain CONFIG")
        return found
    _check_layout(script, start, srun, found)
    if start.program == "torchrun":
        _check_meeting(script, start, found)
    _check_end(script, found)
    return found


def check_shell(text: str) -> Findings:
    """A shell script without #SBATCH lines: what it starts, and where its processes meet."""
    script, found = Script(text), Findings(Document(None))
    _check_hosts(script, found)
    start, _ = _started(script)
    if start is None:
        found.error((), "starts nothing that trains; add torchrun ... -m pretrain CONFIG")
    elif start.program == "torchrun" and start.flags.get("nnodes", "1") != "1":
        endpoint = start.flags.get("rdzv_endpoint") or start.flags.get("master_addr", "")
        if not endpoint or _OWN_HOST.search(endpoint):
            found.error(
                _line_of(script, "torchrun|rdzv|master", found),
                f"all nodes must meet at one place; got {endpoint or 'none'}; give --rdzv_endpoint "
                "the name of one of them, the same on each",
            )
    return found


def _line_of(script: Script, words: str, found: Findings) -> tuple[str, ...]:
    """A path that stands for the line of the first match in the script."""
    for number, line in enumerate(script.text.split("\n"), 1):
        if re.search(words, line) and not line.lstrip().startswith("#"):
            found.document.lines[("the script",)] = number
            return ("the script",)
    return ()


def _check_options(script: Script, found: Findings) -> None:
    if not script.text.startswith("#!"):
        found.error((), "must begin with #!/bin/bash: sbatch refuses it otherwise")
    for line in script.late:
        found.document.lines[(f"#SBATCH on line {line}",)] = line
        found.error(
            (f"#SBATCH on line {line}",),
            "stands after the first command and is ignored; move it above",
        )
    for name in script.options:
        if name not in _LONG:
            near = difflib.get_close_matches(name.lstrip("-"), _LONG, n=1)
            hint = f"did you mean --{near[0]}" if near else "remove it"
            found.error((name,), f"is not an option of sbatch; {hint}")
    if not script.value("nodes"):
        found.error((), "says not how many nodes it needs; add #SBATCH --nodes=N")
    elif not script.value("nodes").isdigit():
        found.error(
            ("nodes",),
            f"a run has a fixed number of nodes; got {script.value('nodes')}; write one number",
        )


def _check_hosts(script: Script, found: Findings) -> None:
    code = "\n".join(line for line in script.text.split("\n") if not line.lstrip().startswith("#"))
    if re.search(r"hostname\s+(--ip-address|--all-ip-addresses|-i|-I)\b", code):
        found.error(
            _line_of(script, r"hostname\s+-", found),
            "hostname --ip-address may give 127.0.1.1; take the name: head=$(scontrol show "
            'hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        )
    if "SLURM_LAUNCH_NODE_IPADDR" in code:
        found.error(
            _line_of(script, "SLURM_LAUNCH_NODE_IPADDR", found),
            "SLURM_LAUNCH_NODE_IPADDR is the node that submitted, not one of the job; take "
            'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        )


def _started(script: Script) -> tuple[Start | None, bool]:
    """What trains, and whether srun starts it on every node."""
    fallback: tuple[Start | None, bool] = (None, False)
    for line in commands(script.text):
        names = [word.rsplit("/", 1)[-1] for word in line]
        srun = "srun" in names
        begin = names.index("srun") if srun else 0
        start = read_command(line[begin:])
        if start.program == "torchrun":
            return start, srun
        helps = start.module and start.rest[:1] and start.rest[0].startswith("tools.")
        if start.program == "python" and start.rest and not helps and fallback[0] is None:
            fallback = (start, srun)
        nested = re.search(r"\btorchrun\b", " ".join(line[begin:]))
        if srun and nested:
            inner = " ".join(line[begin:])[nested.start() :]
            return read_command(["sh", "-c", inner]), True
    return fallback


def _gpus(script: Script) -> str:
    for name in ("gpus-per-node", "gres", "gpus-per-task"):
        if value := script.value(name):
            return value.rsplit(":", 1)[-1]
    return ""


def _check_layout(script: Script, start: Start, srun: bool, found: Findings) -> None:
    nodes = script.value("nodes")
    several = nodes not in ("", "1")
    tasks = script.value("ntasks-per-node")
    if start.program != "torchrun":
        found.error(
            _line_of(script, r"\bpython", found),
            "srun gives Python no RANK, MASTER_ADDR or LOCAL_WORLD_SIZE, so every task would be a "
            "run of its own; write srun torchrun ... -m pretrain CONFIG, one task a node",
        )
        return
    if several and not srun:
        found.error(
            _line_of(script, "torchrun", found),
            f"torchrun starts on the first of {nodes} nodes only; put srun before it",
        )
    if tasks not in ("", "1"):
        found.error(
            ("ntasks-per-node",),
            f"one torchrun a node starts that node's processes; got {tasks}; write 1",
        )
    if not tasks and script.value("ntasks") not in ("", nodes):
        found.error(
            ("ntasks",),
            f"there is one task a node; got {script.value('ntasks')} on {nodes or 1} nodes; write "
            "--ntasks-per-node=1 instead",
        )
    if not _gpus(script) and "run.device=cpu" not in script.text:
        found.error(
            (), "asks for no GPU; add #SBATCH --gpus-per-node=8 (a run on CPUs says run.device=cpu)"
        )
    count = start.flags.get("nproc_per_node", "")
    if count.isdigit() and _gpus(script).isdigit() and count != _gpus(script):
        found.error(
            _line_of(script, "nproc.per.node", found),
            f"starts {count} processes on {_gpus(script)} GPUs; write --nproc_per_node "
            '"$SLURM_GPUS_ON_NODE"',
        )
    if not count:
        found.error(
            _line_of(script, "torchrun", found),
            'torchrun starts one process without it; add --nproc_per_node "$SLURM_GPUS_ON_NODE"',
        )


def _check_meeting(script: Script, start: Start, found: Findings) -> None:
    place = _line_of(script, "torchrun|nnodes|rdzv", found)
    nnodes, several = start.flags.get("nnodes", ""), script.value("nodes") not in ("", "1")
    if nnodes.isdigit():
        found.error(
            place,
            f"--nnodes {nnodes} stands in a second place and gets out of step with --nodes="
            f'{script.value("nodes") or "?"}; write --nnodes "$SLURM_NNODES"',
        )
    if not several:
        return
    if not nnodes:
        found.error(
            place, 'torchrun does not know how many nodes meet; add --nnodes "$SLURM_NNODES"'
        )
    endpoint = start.flags.get("rdzv_endpoint") or start.flags.get("master_addr", "")
    if not endpoint:
        found.error(
            place,
            "torchrun does not know where to meet; add --rdzv_backend c10d --rdzv_endpoint "
            '"$head:$port"',
        )
    elif _OWN_HOST.search(endpoint):
        found.error(
            place,
            f"{endpoint} is another place on every node; take head=$(scontrol show hostnames "
            '"$SLURM_JOB_NODELIST" | head -n 1)',
        )
    if "rdzv_endpoint" in start.flags:
        backend, run_id = start.flags.get("rdzv_backend", ""), start.flags.get("rdzv_id", "")
        if backend != "c10d":
            found.error(place, "an endpoint alone meets nobody; add --rdzv_backend c10d")
        if "$" not in run_id:
            got = f"got {run_id}; " if run_id else ""
            found.error(
                place,
                f"two jobs that share a node must not share an id; {got}write --rdzv_id "
                '"$SLURM_JOB_ID"',
            )


def _check_end(script: Script, found: Findings) -> None:
    signal, text = script.value("signal"), script.text
    traps = re.search(r"^\s*trap\s+.*\b(USR1|USR2|SIGUSR1|SIGUSR2|TERM|SIGTERM)\b", text, re.M)
    if signal and not signal.startswith("B:") and re.search(r"USR", signal):
        found.error(
            ("signal",),
            f"{signal} goes to torchrun, which dies of it; write --signal=B:{signal} and trap it",
        )
    elif signal and not traps:
        found.error(
            ("signal",),
            f"nothing in the script traps {signal}, so that it kills the script; add a trap that "
            "stops the step with TERM and requeues",
        )
    if traps and not re.search(r"^\s*wait\b", text, re.M):
        found.error(
            _line_of(script, r"\btrap\b", found),
            "a trap waits for the command in the foreground; start srun with & and wait for it",
        )
    if not signal:
        found.advise((), "add #SBATCH --signal=B:USR1@300 and a trap, so that the end is saved")
    if "requeue" in script.options and script.value("open-mode") != "append":
        found.advise(("requeue",), "add #SBATCH --open-mode=append, or a requeue empties the log")
