#!/bin/bash
# Starts a run without a cluster manager: on one machine, or by hand on each of several.
#
#   examples/launch/torchrun.sh CONFIG.yaml [section.key=value ...]              one machine
#   NODES=2 HEAD=node-a examples/launch/torchrun.sh CONFIG.yaml ...              on each of two
#
# HEAD is the name or address of one of the machines, the same on all of them, which they reach it
# by. PORT is free there. PROCESSES is a machine's (by default one a GPU). RUN_ID tells this run from
# others on the same machines. LOCAL_ADDR is this machine's own address, where its name does not
# resolve on the others.
set -euo pipefail

if [ $# -lt 1 ]; then
    echo "usage: [NODES=N HEAD=host] $0 CONFIG.yaml [section.key=value ...]" >&2
    exit 2
fi

NODES=${NODES:-1}
PROCESSES=${PROCESSES:-gpu}
RESTARTS=${RESTARTS:-3}

if [ "$NODES" = 1 ]; then
    exec torchrun --standalone --nproc_per_node "$PROCESSES" --max_restarts "$RESTARTS" \
        -m pretrain "$@"
fi

: "${HEAD:?set HEAD to the name of the machine where the others meet, the same on each}"
python -m tools.launch reach "$HEAD" "${PORT:-29500}"
exec torchrun \
    --nnodes "$NODES" \
    --nproc_per_node "$PROCESSES" \
    --rdzv_id "${RUN_ID:-$(basename "$1" .yaml)}" \
    --rdzv_backend c10d \
    --rdzv_endpoint "$HEAD:${PORT:-29500}" \
    ${LOCAL_ADDR:+--local_addr "$LOCAL_ADDR"} \
    --max_restarts "$RESTARTS" \
    -m pretrain "$@"
