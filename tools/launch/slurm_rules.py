# SPDX-License-Identifier: Apache-2.0
"""Rules of a Slurm batch script: numbers in one place, and what its tasks are given."""

import difflib
import re

from pretrain.redact import holds_secret
from tools.launch.command import Start, commands, program_at, read_command
from tools.launch.documents import Document, Path
from tools.launch.findings import Findings
from tools.launch.slurm_end import check_end
from tools.launch.slurm_meeting import check_by_hand, check_hosts, check_meeting
from tools.launch.slurm_script import LONG, Script, line_of, read_options, read_script
from tools.launch.start_rules import check_program

# They run the script that their next word names, or what it says on another machine.
_SHELLS = {"bash", "sh", "source", ".", "exec", "nohup", "sbatch"}
_REMOTE = {"ssh", "pdsh", "clush"}
_SCRIPT = re.compile(r"\.(sh|bash|sbatch|slurm)$|^\./|^\$\{?\w+\}?$")


def check_slurm(text: str) -> Findings:
    """Everything about a batch script."""
    script = read_script(text.replace("\r", ""))
    lines: dict[Path, int] = {(name,): line for name, (_, line) in script.options.items()}
    found = Findings(Document(None, lines))
    _check_options(script, found)
    _check_values(script, found)
    _check_text(text, script, found)
    start, srun = _started(script)
    if start is None:
        _check_nothing(script, "srun torchrun", found)
        return found
    _check_layout(script, start, srun, found)
    if start.program == "torchrun":
        check_program(start, line_of(script, "torchrun", found), found)
        check_meeting(script, start, srun, found)
    check_end(script, found)
    return found


def check_shell(text: str) -> Findings:
    """A shell script without #SBATCH lines: what it starts, and where its processes meet."""
    script, found = Script(text.replace("\r", "")), Findings(Document(None))
    _check_text(text, script, found)
    start, _ = _started(script)
    if start is None:
        _check_nothing(script, "torchrun", found)
    elif start.program == "torchrun":
        check_program(start, line_of(script, "torchrun", found), found)
        if start.flags.get("nnodes", "1") != "1":
            check_by_hand(script, start, found)
    return found


def _check_nothing(script: Script, launcher: str, found: Findings) -> None:
    """Nothing in the text trains: another script may."""
    for line in commands(script.text):
        word = _elsewhere(line)
        if word:
            found.advise(
                line_of(script, re.escape(word), found),
                f"what trains is started by {word}, which is not checked here; check that file, "
                "too",
            )
            return
    found.error((), f"starts nothing that trains; add {launcher} ... -m pretrain CONFIG")


def _elsewhere(line: list[str]) -> str:
    """The script that a command starts, as far as it names one."""
    names = [word.rsplit("/", 1)[-1] for word in line]
    if names[0] in _REMOTE:
        return next((line[0] for word in line if re.search(r"torchrun|\.sh\b", word)), "")
    words = line[names.index("srun") + 1 :] if "srun" in names else line
    words = words[program_at(words) :]
    while words and (words[0].rsplit("/", 1)[-1] in _SHELLS or words[0].startswith("-")):
        words = words[1:]
    return words[0] if words and _SCRIPT.search(words[0]) else ""


def _check_options(script: Script, found: Findings) -> None:
    if not script.text.startswith("#!"):
        found.error((), "must begin with #!/bin/bash: sbatch refuses it otherwise")
    for line in script.late:
        found.document.lines[(f"#SBATCH on line {line}",)] = line
        found.error(
            (f"#SBATCH on line {line}",),
            "stands after the first command and is ignored; move it above",
        )
    for line in script.comments:
        found.document.lines[(f"line {line}",)] = line
        found.error(
            (f"line {line}",), "is a comment to sbatch; begin the line with #SBATCH, in capitals"
        )
    for name in script.options:
        if name not in LONG:
            near = difflib.get_close_matches(name.lstrip("-"), LONG, n=1)
            hint = f"did you mean --{near[0]}" if near else "remove it"
            found.error((name,), f"is not an option of sbatch; {hint}")
    if not script.value("nodes") and script.value("ntasks") != "1":
        found.error((), "says not how many nodes it needs; add #SBATCH --nodes=N")
    elif not script.value("nodes", "1").isdecimal():
        found.error(
            ("nodes",),
            f"a run has a fixed number of nodes; got {script.value('nodes')}; write one number",
        )


def _check_values(script: Script, found: Findings) -> None:
    for name, (value, _) in script.options.items():
        if "$" in value:
            found.error(
                (name,),
                f"sbatch expands no variable; got {value}; write it out (%x is the job's name, %j "
                "its number)",
            )
    time, memory = script.value("time"), script.value("mem")
    if time and not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}|UNLIMITED|INFINITE|-1|.*\$.*", time, re.I):
        found.error(("time",), f"must be minutes or [days-]hours:minutes:seconds; got {time}")
    if memory and not re.fullmatch(r"\d+[KMGT]?|.*\$.*", memory, re.IGNORECASE):
        found.error(
            ("mem",), f"must be a number and K, M, G or T (powers of 1024); got {memory}; write 64G"
        )
    in_turn = script.value("array").endswith("%1")  # each goes on where the one before ended
    if "array" in script.options and not in_turn and "SLURM_ARRAY_TASK_ID" not in script.text:
        found.error(
            ("array",),
            "each task of the array would continue the same run; put $SLURM_ARRAY_TASK_ID into "
            "run.name, or let one run after the other (%1)",
        )


def _check_text(text: str, script: Script, found: Findings) -> None:
    """What any line of a script may get wrong."""
    if "\r" in text:
        found.error((), "has line ends of DOS, which sbatch and bash refuse; run dos2unix on it")
    for number, line in enumerate(script.text.split("\n"), 1):
        if holds_secret(line):
            found.document.lines[(f"line {number}",)] = number
            found.error(
                (f"line {number}",),
                "holds a secret in plain text; read it from a file that only you can read, or set "
                "it before sbatch, which hands the environment on",
            )
    check_hosts(script, found)


def _started(script: Script) -> tuple[Start | None, list[str] | None]:
    """(what trains, srun's own options); None for these where it is started without srun."""
    fallback: tuple[Start | None, list[str] | None] = (None, None)
    for line in commands(script.text):
        names = [word.rsplit("/", 1)[-1] for word in line]
        begin = names.index("srun") if "srun" in names else 0
        behind = line[begin + 1 :]
        srun = behind[: program_at(behind)] if "srun" in names else None
        start = read_command(line[begin:])
        if start.program == "torchrun":
            return start, srun
        helps = start.module and start.rest[:1] and start.rest[0].startswith("tools.")
        if start.program == "python" and start.rest and not helps and fallback[0] is None:
            fallback = (start, srun)
    return fallback


def _gpus(script: Script) -> str:
    for name in ("gpus-per-node", "gpus-per-task"):
        if value := script.value(name):
            return value.rsplit(":", 1)[-1]
    for one in script.value("gres").split(","):  # gpu:h100:8(S:0-1),nvme:1
        words = one.partition("(")[0].removeprefix("gres/").split(":")
        if words[0] == "gpu":
            return words[-1] if len(words) > 1 else "1"
    return ""


def _check_layout(script: Script, start: Start, srun: list[str] | None, found: Findings) -> None:
    nodes = script.value("nodes")
    several = nodes not in ("", "1")
    tasks = script.value("ntasks-per-node")
    if start.program != "torchrun" and re.search(r"\bRANK=", script.text):
        return  # a task a process, each told its rank by the script
    if start.program != "torchrun":
        found.error(
            line_of(script, r"\bpython", found),
            "srun gives Python no RANK, MASTER_ADDR or LOCAL_WORLD_SIZE, so every task would be a "
            "run of its own; write srun torchrun ... -m pretrain CONFIG, one task a node",
        )
        return
    if several and srun is None:
        found.error(
            line_of(script, "torchrun", found),
            f"torchrun starts on the first of {nodes} nodes only; put srun before it",
        )
    own = dict(read_options(srun or []))
    alone = own.get("ntasks-per-node") == "1" and ("ntasks" in own or "nodes" in own)
    if tasks not in ("", "1") and not alone:
        found.error(
            ("ntasks-per-node",),
            f"one torchrun a node starts that node's processes; got {tasks}; write 1",
        )
    if "ntasks-per-gpu" in script.options and not alone:
        found.error(
            ("ntasks-per-gpu",),
            "one torchrun a node starts that node's processes, not one a GPU; write "
            "--ntasks-per-node=1 instead",
        )
    if not tasks and not alone and script.value("ntasks") not in ("", nodes or "1"):
        found.error(
            ("ntasks",),
            f"there is one task a node; got {script.value('ntasks')} on {nodes or 1} nodes; write "
            "--ntasks-per-node=1 instead",
        )
    _check_tasks(script, srun or [], found)
    _check_given(script, own, srun, found)
    _check_processes(script, start, found)


def _check_processes(script: Script, start: Start, found: Findings) -> None:
    """A process for each GPU of a node."""
    if script.value("gpus") and not _gpus(script):
        found.error(
            ("gpus",),
            f"are the job's, however they fall on its nodes; got {script.value('gpus')}; write "
            "--gpus-per-node=8",
        )
    elif not _gpus(script) and "run.device=cpu" not in script.text:
        found.error(
            (), "asks for no GPU; add #SBATCH --gpus-per-node=8 (a run on CPUs says run.device=cpu)"
        )
    count = start.flags.get("nproc_per_node", "")
    if count.isdecimal() and _gpus(script).isdecimal() and count != _gpus(script):
        found.error(
            line_of(script, "nproc.per.node", found),
            f"starts {count} processes on {_gpus(script)} GPUs; write --nproc_per_node "
            '"$SLURM_GPUS_ON_NODE"',
        )
    if not count and not start.hidden:
        found.error(
            line_of(script, "torchrun", found),
            'torchrun starts one process without it; add --nproc_per_node "$SLURM_GPUS_ON_NODE"',
        )


def _check_given(
    script: Script, own: dict[str, str], srun: list[str] | None, found: Findings
) -> None:
    """What the tasks of a step get: an environment, and CPUs."""
    hidden = script.value("export").upper() in ("NONE", "NIL")
    if (
        srun is not None
        and hidden
        and "export" not in own
        and "SLURM_EXPORT_ENV" not in script.text
    ):
        found.error(
            ("export",),
            "goes on to srun, whose tasks then have no PATH and no variable of this script; add "
            "unset SLURM_EXPORT_ENV before srun, or write srun --export=ALL",
        )
    if not {"exclusive", "cpus-per-task", "cpus-per-gpu"} & {*script.options, *own}:
        found.advise(
            (),
            "asks for no CPUs, and a node's ranks may share one; add #SBATCH --cpus-per-task=N or "
            "--exclusive",
        )


def _check_tasks(script: Script, srun: list[str], found: Findings) -> None:
    """srun starts one task on every node, unless its own options say otherwise."""
    nodes = script.value("nodes")
    for name, value in read_options(srun):
        wrong = name in ("nodes", "ntasks") and value.isdecimal() and value != nodes
        if nodes and (wrong or (name == "ntasks-per-node" and value not in ("", "1"))):
            found.error(
                line_of(script, r"\bsrun\b", found),
                f"srun --{name} {value} starts another number of tasks than one on each of the "
                f"{nodes} nodes; remove it",
            )
