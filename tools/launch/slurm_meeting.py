# SPDX-License-Identifier: Apache-2.0
"""Rules of where the nodes of a script meet: one place, one id, a rank each."""

import re

from tools.launch.command import Start
from tools.launch.documents import Path
from tools.launch.findings import Findings
from tools.launch.slurm_script import Script, line_of

_OWN_HOST = re.compile(r"\$\(\s*hostname|\$\{?HOSTNAME|^localhost|^127\.")


def check_by_hand(script: Script, start: Start, found: Findings) -> None:
    """torchrun on several machines, started on each by a person or a loop."""
    flags, place = start.flags, line_of(script, "torchrun|rdzv|master", found)
    endpoint = flags.get("rdzv_endpoint") or flags.get("master_addr", "")
    if not start.hidden and (not endpoint or _OWN_HOST.search(endpoint)):
        found.error(
            place,
            f"all nodes must meet at one place; got {endpoint or 'none'}; give --rdzv_endpoint "
            "the name of one of them, the same on each",
        )
    if "standalone" in flags:
        found.error(place, "--standalone makes every node a run of its own; remove it")
    static = flags.get("rdzv_backend", "static") == "static"
    if endpoint and static and "node_rank" not in flags and not start.hidden:
        found.error(
            place,
            "every node would be node 0; add --node_rank, another on each, or --rdzv_backend c10d "
            "with --rdzv_endpoint, which numbers the nodes itself",
        )


def check_hosts(script: Script, found: Findings) -> None:
    code = "\n".join(line for line in script.text.split("\n") if not line.lstrip().startswith("#"))
    if re.search(r"hostname\s+(--ip-address|--all-ip-addresses|-i|-I)\b", code):
        found.error(
            line_of(script, r"hostname\s+-", found),
            "hostname --ip-address may give 127.0.1.1; take the name: head=$(scontrol show "
            'hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        )
    if re.search(r"=[\"']?\$\{?SLURM_(JOB_)?NODELIST\}?[\"']?\s*$", code, re.M):
        found.error(
            line_of(script, r"=[\"']?\$\{?SLURM_(JOB_)?NODELIST", found),
            "SLURM_JOB_NODELIST is a list such as node-[0-15], no host; take head=$(scontrol show "
            'hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        )
    if "SLURM_LAUNCH_NODE_IPADDR" in code:
        found.error(
            line_of(script, "SLURM_LAUNCH_NODE_IPADDR", found),
            "SLURM_LAUNCH_NODE_IPADDR is the node that submitted, not one of the job; take "
            'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        )


def check_meeting(script: Script, start: Start, srun: list[str] | None, found: Findings) -> None:
    place = line_of(script, "torchrun|nnodes|rdzv", found)
    nnodes, several = start.flags.get("nnodes", ""), script.value("nodes") not in ("", "1")
    if nnodes.isdecimal() and (several or nnodes != "1"):
        same = nnodes == script.value("nodes")
        (found.advise if same else found.error)(
            place,
            f"--nnodes {nnodes} stands in a second place and gets out of step with --nodes="
            f'{script.value("nodes") or "?"}; write --nnodes "$SLURM_NNODES"',
        )
    if not several:
        return
    if re.fullmatch(r"\d+:\d+", nnodes):
        found.advise(
            place,
            f"--nnodes {nnodes} may begin without the nodes that are late, and Slurm gives all at "
            'once; write --nnodes "$SLURM_NNODES"',
        )
    if "standalone" in start.flags:
        found.error(place, "--standalone makes every node a run of its own; remove it")
        return
    if start.hidden:
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
