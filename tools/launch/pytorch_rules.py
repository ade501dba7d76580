# SPDX-License-Identifier: Apache-2.0
"""Rules of a PyTorchJob: what Training Operator v1 refuses or misreads, beyond its schema."""

import re
from typing import Any

from tools.launch.documents import Path
from tools.launch.findings import Findings, at, words
from tools.launch.pod_rules import Pod, check_images, check_pod, gpu_count
from tools.launch.run_file_rules import Maps, check_run_file
from tools.launch.start_rules import (
    CARRIED,
    RENDEZVOUS,
    Setting,
    check_reserved,
    check_start,
)

_LABEL = re.compile(r"^[a-z]([-a-z0-9]*[a-z0-9])?$")
_SPECS = ("spec", "pytorchReplicaSpecs")
_INJECTED = {
    *CARRIED.values(),
    "MASTER_ADDR",
    "MASTER_PORT",
    "WORLD_SIZE",
    "RANK",
    "PET_STANDALONE",
}


def check_name(metadata: Any, longest: int, what: str, found: Findings) -> None:
    """A name that pods and their services can be named after."""
    name = at(metadata, "name", kind=str)
    if not name and (beginning := at(metadata, "generateName", kind=str)):
        name = f"{beginning}abcde"  # five letters or digits of the API server
    if not name:
        if isinstance(metadata, dict) and not isinstance(metadata.get("name"), str | None):
            return  # the structure check has said it
        found.error(("metadata", "name"), "must be set; add it")
    elif not _LABEL.match(name):
        found.error(
            ("metadata", "name"),
            f"is lower-case letters, digits and dashes, and starts with a letter; got {name!r}; "
            f"write {_proper(name)!r}",
        )
    elif len(name) > longest:
        found.error(
            ("metadata", "name"),
            f"is at most {longest} characters, {what}; {name!r} has {len(name)}; shorten it",
        )


def _proper(name: str) -> str:
    text = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")
    return text if text[:1].isalpha() else f"run-{text}".rstrip("-")


def check_pytorch_job(job: dict[str, Any], found: Findings, maps: Maps) -> None:
    """Everything that a PyTorchJob's schema does not say. `maps`: ConfigMaps in the same file."""
    replicas = at(job, *_SPECS)
    nodes = sum(_replicas(one) for one in replicas.values())
    check_name(
        job.get("metadata"), 63 - len(f"-worker-{max(nodes - 2, 0)}"), "for its pods' names", found
    )
    if isinstance(at(job, "spec").get("pytorchReplicaSpecs"), dict) and not replicas:
        found.error(_SPECS, "must hold Master, and Worker for more nodes; add Master")
    _check_roles(replicas, at(job, "spec"), found)
    _check_elastic(at(job, "spec"), replicas, found)
    processes = _processes(job, found)
    elastic = bool(at(job, "spec", "elasticPolicy"))
    carried = {**CARRIED, **(RENDEZVOUS if elastic else {})}
    for role, replica in replicas.items():
        path = (*_SPECS, str(role), "template", "spec")
        pod = _pod(replica, path, found)
        if pod is None:
            continue
        check_images(pod, found)
        gpus = gpu_count(pod.resources)
        setting = Setting("PyTorchJob", nodes, processes, gpus, carried)
        start = check_start(pod.container, setting, pod.container_path, found)
        pod.cpu_only = "run.device=cpu" in words(pod.container.get("args")) + start.rest
        check_pod(pod, found)
        check_run_file(start, setting, pod, maps, found)
        _check_gpus(pod, processes, gpus, found)
        reserved_at = (*pod.container_path, "env")
        check_reserved(
            at(pod.container, "env", kind=list), _INJECTED, "PyTorchJob", reserved_at, found
        )
        _check_template(replica, (*_SPECS, str(role), "template"), found)
    _check_alike(replicas, found)


def _replicas(replica: Any) -> int:
    count = replica.get("replicas", 1) if isinstance(replica, dict) else 1
    return count if isinstance(count, int) and not isinstance(count, bool) else 1


def _check_roles(replicas: dict[str, Any], spec: dict[str, Any], found: Findings) -> None:
    for role in map(str, replicas):
        if role not in ("Master", "Worker"):
            proper = role.capitalize() if role.capitalize() in ("Master", "Worker") else ""
            fix = f"write {proper}" if proper else "move its pods to Worker"
            found.error((*_SPECS, role), f"roles are Master and Worker; got {role!r}; {fix}")
    if "Master" in replicas and _replicas(replicas["Master"]) != 1:
        found.error(
            (*_SPECS, "Master", "replicas"),
            f"there is one Master; got {_replicas(replicas['Master'])}; write replicas: 1 and put "
            "the others into Worker",
        )
    if "Worker" in replicas and _replicas(replicas["Worker"]) < 1:
        found.error(
            (*_SPECS, "Worker", "replicas"),
            "must be at least 1; got 0; remove Worker for a job of one node",
        )
    roles = {str(role).capitalize() for role in replicas}
    if replicas and "Master" not in roles and not at(spec, "elasticPolicy"):
        found.error(
            _SPECS,
            "without a Master no pod is told where to meet (MASTER_ADDR, PET_NODE_RANK); add "
            "Master with replicas: 1 and take one from Worker",
        )


def _check_elastic(spec: dict[str, Any], replicas: dict[str, Any], found: Findings) -> None:
    elastic = at(spec, "elasticPolicy")
    if not elastic:
        return
    path = ("spec", "elasticPolicy")
    if "Worker" not in replicas:
        found.error(path, "an elastic job needs Worker replicas; add Worker, or remove it")
    if "nProcPerNode" in elastic:
        both = " and may not stand beside spec.nprocPerNode" if "nprocPerNode" in spec else ""
        found.error((*path, "nProcPerNode"), f"is deprecated{both}; set spec.nprocPerNode alone")
    least, most = elastic.get("minReplicas"), elastic.get("maxReplicas")
    if isinstance(least, int) and isinstance(most, int) and least > most:
        found.error(
            (*path, "minReplicas"),
            f"may not exceed maxReplicas={most}; got {least}; lower it",
        )
    workers = _replicas(replicas.get("Worker"))
    low = isinstance(least, int) and workers < least
    high = isinstance(most, int) and workers > most
    if "Worker" in replicas and (low or high):
        found.error(
            (*_SPECS, "Worker", "replicas"),
            f"must lie between minReplicas={least} and maxReplicas={most}; got {workers}",
        )
    if isinstance(least, int) and isinstance(most, int) and least < most:
        found.advise(
            path,
            f"the run starts as soon as {least} pods are there and the last-call time-out is over; "
            "a change of their number restarts all",
        )


def _processes(job: dict[str, Any], found: Findings) -> int | None:
    """nprocPerNode as a number; None for auto."""
    value = at(job, "spec").get("nprocPerNode", "auto")
    if not isinstance(value, str):
        return value if isinstance(value, int) and not isinstance(value, bool) else None
    if value.isdecimal() and int(value) > 0:
        return int(value)
    if value not in ("auto", "gpu", "cpu"):
        found.error(
            ("spec", "nprocPerNode"),
            f'must be a number in quotes, auto, gpu or cpu; got {value!r}; write "8"',
        )
    return None


def _pod(replica: Any, path: Path, found: Findings) -> Pod | None:
    spec = at(replica, "template", "spec")
    if not spec:
        found.error(path, "must be set; add the pod's containers")
        return None
    containers = at(spec, "containers", kind=list)
    names = [at(container, "name", kind=str) for container in containers]
    pod = Pod(spec, path)
    if "pytorch" not in names:
        got = ", ".join(repr(name) for name in names) or "none"
        found.error(
            (*path, "containers", 0, "name") if names else (*path, "containers"),
            f"one container must be called pytorch, or the operator gives it no environment; got "
            f"{got}; rename the one that trains",
        )
        index = 0 if len(names) == 1 else None
    else:
        index = names.index("pytorch")
    if index is not None:
        pod.container = at(containers, index)
        pod.container_path = (*path, "containers", index)
        pod.resources = at(pod.container, "resources")
        pod.resources_path = (*pod.container_path, "resources")
    return pod


def _check_gpus(pod: Pod, processes: int | None, gpus: int, found: Findings) -> None:
    if not pod.container or pod.cpu_only:
        return
    claims = at(pod.resources, "claims", kind=list)
    if not gpus and not claims:
        found.error(
            (*pod.container_path, "resources"),
            "names no GPU, so that none is given to the pod"
            + ("" if processes else " and one process starts")
            + "; add limits: {nvidia.com/gpu: 8} (a run on CPUs says run.device=cpu in args)",
        )
    elif processes and not claims and processes != gpus:
        found.error(
            (*pod.container_path, "resources"),
            f"gives {gpus} GPUs to {processes} processes (nprocPerNode); make them equal",
        )


def _check_template(replica: Any, path: Path, found: Findings) -> None:
    if at(replica, "restartPolicy", kind=str) == "ExitCode":
        found.advise(
            (*path[:-1], "restartPolicy"),
            "ExitCode starts a pod again after a status of 128 or more only, and torchrun ends "
            "with 1 whatever has failed; write OnFailure",
        )
    if "restartPolicy" in at(replica, "template", "spec"):
        found.advise(
            (*path, "spec", "restartPolicy"),
            "is overwritten by the operator; set restartPolicy beside replicas",
        )
    if "sidecar.istio.io/inject" not in at(replica, "template", "metadata", "annotations"):
        found.advise(
            path,
            'where istio injects a sidecar, add the annotation sidecar.istio.io/inject: "false": '
            "it breaks the ranks' connections and keeps finished pods alive",
        )


def _check_alike(replicas: dict[str, Any], found: Findings) -> None:
    """Master and Worker run the same program with as many GPUs."""
    pods = {role: at(replicas, role, "template", "spec") for role in ("Master", "Worker")}
    if not all(pods.values()):
        return
    chosen = {}
    for role, spec in pods.items():
        for container in at(spec, "containers", kind=list):
            if at(container, "name", kind=str) == "pytorch":
                chosen[role] = container
    if len(chosen) < 2:
        return
    master, worker = chosen["Master"], chosen["Worker"]
    for key in ("image", "command", "args"):
        if master.get(key) != worker.get(key):
            found.error(
                (*_SPECS, "Worker", "template", "spec", "containers"),
                f"Master and Worker are ranks of one run, and their {key} differs: "
                f"{master.get(key)!r:.80} and {worker.get(key)!r:.80}; make them equal",
            )
    counts = gpu_count(at(master, "resources")), gpu_count(at(worker, "resources"))
    if counts[0] != counts[1]:
        found.error(
            (*_SPECS, "Worker", "template", "spec", "containers"),
            f"Master has {counts[0]} GPUs and Worker {counts[1]}; make them equal",
        )
