# SPDX-License-Identifier: Apache-2.0
"""Rules of a Slurm batch script: numbers in one place, and a run that survives its time limit."""

import difflib
import re

from pretrain.redact import holds_secret
from tools.launch.command import Start, commands, read_command
from tools.launch.documents import Document, Path
from tools.launch.findings import Findings
from tools.launch.slurm_script import LONG, Script, read_options, read_script

_OWN_HOST = re.compile(r"\$\(\s*hostname|\$\{?HOSTNAME|^localhost|^127\.")


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
        found.error((), "starts nothing that trains; add srun torchrun ... -m pretrain CONFIG")
        return found
    _check_layout(script, start, srun, found)
    if start.program == "torchrun":
        _check_meeting(script, start, srun, found)
    _check_end(script, found)
    return found


def check_shell(text: str) -> Findings:
    """A shell script without #SBATCH lines: what it starts, and where its processes meet."""
    script, found = Script(text.replace("\r", "")), Findings(Document(None))
    _check_text(text, script, found)
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
    if not script.value("nodes"):
        found.error((), "says not how many nodes it needs; add #SBATCH --nodes=N")
    elif not script.value("nodes").isdecimal():
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
    if time and not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}|UNLIMITED|INFINITE|.*\$.*", time):
        found.error(("time",), f"must be minutes or [days-]hours:minutes:seconds; got {time}")
    if memory and not re.fullmatch(r"\d+[KMGT]?|.*\$.*", memory, re.IGNORECASE):
        found.error(
            ("mem",), f"must be a number and K, M, G or T (powers of 1024); got {memory}; write 64G"
        )
    if "array" in script.options and "SLURM_ARRAY_TASK_ID" not in script.text:
        found.error(
            ("array",),
            "each task of the array would continue the same run; put $SLURM_ARRAY_TASK_ID into "
            "run.name, or remove it",
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
    _check_hosts(script, found)


def _check_hosts(script: Script, found: Findings) -> None:
    code = "\n".join(line for line in script.text.split("\n") if not line.lstrip().startswith("#"))
    if re.search(r"hostname\s+(--ip-address|--all-ip-addresses|-i|-I)\b", code):
        found.error(
            _line_of(script, r"hostname\s+-", found),
            "hostname --ip-address may give 127.0.1.1; take the name: head=$(scontrol show "
            'hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        )
    if re.search(r"=[\"']?\$\{?SLURM_(JOB_)?NODELIST\}?[\"']?\s*$", code, re.M):
        found.error(
            _line_of(script, r"=[\"']?\$\{?SLURM_(JOB_)?NODELIST", found),
            "SLURM_JOB_NODELIST is a list such as node-[0-15], no host; take head=$(scontrol show "
            'hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        )
    if "SLURM_LAUNCH_NODE_IPADDR" in code:
        found.error(
            _line_of(script, "SLURM_LAUNCH_NODE_IPADDR", found),
            "SLURM_LAUNCH_NODE_IPADDR is the node that submitted, not one of the job; take "
            'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        )


def _started(script: Script) -> tuple[Start | None, list[str] | None]:
    """(what trains, srun's own options); None for these where it is started without srun."""
    fallback: tuple[Start | None, list[str] | None] = (None, None)
    for line in commands(script.text):
        names = [word.rsplit("/", 1)[-1] for word in line]
        begin = names.index("srun") if "srun" in names else 0
        srun = line[begin + 1 :] if "srun" in names else None
        own = None if srun is None else _leading_options(srun)
        if srun is not None and "torchrun" in names:
            own = line[begin + 1 : names.index("torchrun")]
        start = read_command(line[begin:])
        if start.program == "torchrun":
            return start, own
        helps = start.module and start.rest[:1] and start.rest[0].startswith("tools.")
        if start.program == "python" and start.rest and not helps and fallback[0] is None:
            fallback = (start, srun)
        nested = re.search(r"\btorchrun\b", " ".join(line[begin:]))
        if srun is not None and nested:
            inner = " ".join(line[begin:])[nested.start() :]
            started = read_command(["sh", "-c", inner])
            if "torchrun" not in names:
                started.shell = inner
            return started, own
    return fallback


def _leading_options(words: list[str]) -> list[str]:
    """srun's own words, as far as they are options of one word."""
    count = 0
    while count < len(words) and words[count].startswith("-"):
        count += 1
    return words[:count]


def _gpus(script: Script) -> str:
    for name in ("gpus-per-node", "gres", "gpus-per-task"):
        if value := script.value(name):
            return value.rsplit(":", 1)[-1]
    return ""


def _check_layout(script: Script, start: Start, srun: list[str] | None, found: Findings) -> None:
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
    if several and srun is None:
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
    _check_tasks(script, srun or [], found)
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
            _line_of(script, "nproc.per.node", found),
            f"starts {count} processes on {_gpus(script)} GPUs; write --nproc_per_node "
            '"$SLURM_GPUS_ON_NODE"',
        )
    if not count:
        found.error(
            _line_of(script, "torchrun", found),
            'torchrun starts one process without it; add --nproc_per_node "$SLURM_GPUS_ON_NODE"',
        )


def _check_tasks(script: Script, srun: list[str], found: Findings) -> None:
    """srun starts one task on every node, unless its own options say otherwise."""
    nodes = script.value("nodes")
    for name, value in read_options(srun):
        wrong = name in ("nodes", "ntasks") and value.isdecimal() and value != nodes
        if nodes and (wrong or (name == "ntasks-per-node" and value not in ("", "1"))):
            found.error(
                _line_of(script, r"\bsrun\b", found),
                f"srun --{name} {value} starts another number of tasks than one on each of the "
                f"{nodes} nodes; remove it",
            )


def _check_meeting(script: Script, start: Start, srun: list[str] | None, found: Findings) -> None:
    place = _line_of(script, "torchrun|nnodes|rdzv", found)
    nnodes, several = start.flags.get("nnodes", ""), script.value("nodes") not in ("", "1")
    if nnodes.isdecimal():
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
    _check_node_rank(start, srun, place, found)
    _check_port(script, endpoint, start, place, found)
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


def _check_node_rank(start: Start, srun: list[str] | None, place: Path, found: Findings) -> None:
    """A static rendezvous needs each node's own rank, which the batch script does not know."""
    rank = start.flags.get("node_rank")
    if "master_addr" in start.flags and "rdzv_endpoint" not in start.flags and rank is None:
        found.error(
            place,
            "every node would be node 0; add --node_rank, or use --rdzv_backend c10d "
            '--rdzv_endpoint "$head:$port", which numbers the nodes itself',
        )
    elif rank and srun is not None and start.shell is None and "SLURM_" in rank:
        found.error(
            place,
            f"{rank} is expanded once, on the first node, so that every node is node 0; write "
            "srun bash -c 'torchrun --node_rank \"$SLURM_NODEID\" ...', in single quotes, or use "
            "--rdzv_backend c10d",
        )


def _check_port(script: Script, endpoint: str, start: Start, place: Path, found: Findings) -> None:
    port = start.flags.get("master_port") or endpoint.rpartition(":")[2]
    name = re.fullmatch(r"\$\{?(\w+)\}?", port)
    if name:
        given = re.search(rf"^\s*(?:export\s+)?{name[1]}=[\"']?(\w+)[\"']?\s*$", script.text, re.M)
        port = given[1] if given else port
    if port.isdecimal() and "exclusive" not in script.options:
        found.error(
            place,
            f"two jobs that share a node must not share port {port}; write "
            "port=$((20000 + SLURM_JOB_ID % 10000)), or ask for --exclusive",
        )


def _check_end(script: Script, found: Findings) -> None:
    signal, text = script.value("signal"), script.text
    traps = re.findall(r"^\s*trap\s+.*?((?:\s(?:SIG)?[A-Z]+[12]?)+)\s*$", text, re.M)
    trapped = {name.removeprefix("SIG") for names in traps for name in names.split()}
    sent = signal.removeprefix("B:").removeprefix("R:").partition("@")[0].removeprefix("SIG")
    if signal and not signal.startswith("B:") and re.search(r"USR", signal):
        found.error(
            ("signal",),
            f"{signal} goes to torchrun, which dies of it; write --signal=B:{signal} and trap it",
        )
    elif signal.startswith("B:") and sent not in trapped:
        found.error(
            ("signal",),
            f"nothing in the script traps {sent}, so that it kills the script; add trap 'touch "
            f"RUN/stop' {sent}, which stops the run and saves",
        )
    if trapped and not _waits(script):
        found.error(
            _line_of(script, r"\btrap\b", found),
            "a trap waits for the command in the foreground; start srun with & and wait for it",
        )
    if not signal:
        found.advise((), "add #SBATCH --signal=B:USR1@300 and a trap, so that the end is saved")
    if "requeue" in script.options and script.value("open-mode") != "append":
        found.advise(("requeue",), "add #SBATCH --open-mode=append, or a requeue empties the log")


def _waits(script: Script) -> bool:
    """Whether what trains runs in the background, and the script waits for it."""
    joined = re.sub(r"\\\n", " ", script.text)
    lines = [line for line in joined.split("\n") if not line.lstrip().startswith("#")]
    trains = [line for line in lines if re.search(r"\b(torchrun|torch\.distributed\.run)\b", line)]
    waits = any(re.match(r"\s*wait\b", line) for line in lines)
    return waits and all(re.search(r"&\s*(#.*)?$", line) for line in trains)
