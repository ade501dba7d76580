# SPDX-License-Identifier: Apache-2.0
"""The Slurm batch script of a job: one torchrun a node, saved before the time is over, requeued."""

import math
import re
import shlex

from fused_ops.errors import ConfigError
from tools.launch.job import Job
from tools.launch.structure import as_number

BODY = """
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))
@BEFORE@

# The time is nearly over, or the job is preempted: ask the run to save and stop.
soon=no
trap 'soon=yes; touch "$RUN_DIR/$RUN_NAME/stop"' USR1

srun @SRUN@torchrun \\
    --nnodes "$SLURM_NNODES" \\
    --nproc_per_node "@PROCESSES@" \\
    --rdzv_id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \\
    --rdzv_backend c10d \\
    --rdzv_endpoint "$head:$port" \\
    --max_restarts "$RESTARTS" \\
    -m pretrain "$CONFIG" run.dir="$RUN_DIR" run.name="$RUN_NAME" @MORE@ &
step=$!

# A trap interrupts `wait`, so wait again until the step itself has ended.
status=0
wait "$step" || status=$?
while kill -0 "$step" 2>/dev/null; do
    status=0
    wait "$step" || status=$?
done

if [ "$soon" = yes ] && [ "$status" = 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def render_slurm(job: Job) -> str:
    """The text of a batch script for `sbatch`."""
    options = job.options
    directives = {
        "job-name": job.name,
        "nodes": options.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": options.gpus_per_node or None,
        "cpus-per-task": _whole(options.cpus),
        "mem": _memory(options.memory),
        "exclusive": True,
        "partition": options.partition,
        "account": options.account,
        "time": options.time,
        "signal": "B:USR1@300",
        "requeue": True,
        "open-mode": "append",
        "output": "%x-%j.out",
    }
    head = ["#!/bin/bash"]
    for name, value in directives.items():
        if value is not None:
            head.append(f"#SBATCH --{name}" + ("" if value is True else f"={value}"))
    more = [*job.overrides, *(["run.device=cpu"] if job.cpu else [])]
    settings = {
        "CONFIG": job.config_path,
        "RUN_DIR": job.config.run.dir,
        "RUN_NAME": job.config.run.name,
        "RESTARTS": str(options.restarts),
    }
    lines = [
        "",
        "set -euo pipefail",
        "",
        *(f"{name}={shlex.quote(value)}" for name, value in settings.items()),
    ]
    before = 'python -m tools.launch reach "$head" "$port"'
    if options.image:  # nibble is in the image, and what is mounted must be there
        before = 'mkdir -p "$RUN_DIR"'
    body = (
        BODY.replace("@SRUN@", _container(job))
        .replace("@BEFORE@", before)
        .replace("@PROCESSES@", "$SLURM_GPUS_ON_NODE" if not job.cpu else str(job.processes))
        .replace("@MORE@", " ".join(map(shlex.quote, more)))
        .replace(' "$RUN_NAME"  &', ' "$RUN_NAME" &')
    )
    return "\n".join([*head, *lines]) + body.replace(" \n", "\n").replace("  &", " &")


def _container(job: Job) -> str:
    """srun's options for pyxis; "" without an image."""
    image = job.options.image
    if not image:
        return ""
    if "@" in image:
        raise ConfigError(f"--image must name a tag for slurm: enroot reads no digest; got {image}")
    registry, slash, rest = image.partition("/")
    if slash and (re.search(r"[.:]", registry) or registry == "localhost"):
        image = f"{registry}#{rest}"  # enroot's way to write it; it asks Docker's hub otherwise
    mounts = ['"$PWD:$PWD"', *(shlex.quote(f"{folder}:{folder}") for folder in job.folders)]
    return (
        f"--container-image={shlex.quote(image)} --container-mounts={','.join(mounts)} "
        '--container-workdir="$PWD" '
    )


def _memory(quantity: str | None) -> str | None:
    """A quantity of Kubernetes as Slurm writes it: whole units that are powers of 1024."""
    amount = as_number(quantity) if quantity else None
    if amount is None:
        return None
    for unit, size in (("G", 2**30), ("M", 2**20)):
        if amount % size == 0:
            return f"{int(amount // size)}{unit}"
    return f"{math.ceil(amount / 2**10)}K"


def _whole(quantity: str | None) -> int | None:
    """CPUs, of which Slurm gives whole ones."""
    amount = as_number(quantity) if quantity else None
    return None if amount is None else math.ceil(amount)
