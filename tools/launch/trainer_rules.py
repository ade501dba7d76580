# SPDX-License-Identifier: Apache-2.0
"""Rules of the trainer v2's kinds and of JobSet, beyond their schemas."""

from typing import Any

from tools.launch.documents import Path
from tools.launch.findings import Findings, at, words
from tools.launch.pod_rules import (
    Pod,
    check_containers,
    check_env,
    check_fabric,
    check_grace,
    check_image,
    check_images,
    check_network,
    check_resources,
    check_shared_memory,
    check_volumes,
    gpu_count,
)
from tools.launch.pytorch_rules import check_name
from tools.launch.run_file_rules import Maps, check_run_file
from tools.launch.start_rules import CARRIED, Setting, check_reserved, check_start

_RESERVED = set(CARRIED.values())
_STOCK = "torch-distributed"
_STEP = "trainer.kubeflow.org/trainjob-ancestor-step"


def check_train_job(
    job: dict[str, Any],
    found: Findings,
    runtimes: dict[str, dict[str, Any]],
    maps: Maps,
) -> None:
    """Everything that a TrainJob's schema does not say.

    `runtimes` and `maps`: the runtimes and ConfigMaps of the same file.
    """
    spec, trainer = at(job, "spec"), at(job, "spec", "trainer")
    path: Path = ("spec", "trainer")
    reference = at(spec, "runtimeRef", "name", kind=str)
    group = spec.get("runtimeRef", {}).get("apiGroup") if at(spec, "runtimeRef") else None
    if group not in (None, "trainer.kubeflow.org"):
        found.error(
            ("spec", "runtimeRef", "apiGroup"),
            f"must be trainer.kubeflow.org; got {group!r}; remove it",
        )
    node = _node_job(runtimes.get(reference, {}))
    pod = _train_pod(spec, trainer, node, found)
    nodes = trainer.get("numNodes")
    nodes = nodes if isinstance(nodes, int) else 1
    check_name(job.get("metadata"), _longest_name("node", nodes), "for its pods' names", found)
    processes = trainer.get("numProcPerNode")
    processes = processes if isinstance(processes, int) and processes > 0 else None
    pod.whole = bool(node) or reference == _STOCK
    own = "command" in trainer or "args" in trainer
    if own or reference == _STOCK:
        gpus = gpu_count(pod.resources)
        setting = Setting("TrainJob", nodes, processes, gpus)
        start = check_start(trainer, setting, path, found)
        pod.cpu_only = "run.device=cpu" in words(trainer.get("args")) + start.rest
        check_run_file(start, setting, pod, maps, found)
    if "image" in trainer:
        check_image(trainer, path, found)
    elif reference == _STOCK:
        found.error(path, "the stock runtime's image is bare PyTorch; set trainer.image")
    environment = at(trainer, "env", kind=list)
    check_env(environment, (*path, "env"), found)
    check_reserved(environment, _RESERVED, "TrainJob", (*path, "env"), found)
    check_resources(pod, found)
    _check_node_gpus(pod, processes, reference, bool(node), found)
    _check_node_memory(pod, reference, bool(node), found)


def _train_pod(
    spec: dict[str, Any], trainer: dict[str, Any], node: dict[str, Any], found: Findings
) -> Pod:
    """The training pod as far as this file describes it: the runtime's, and patches over it."""
    base = at(node, "template", "spec", "template", "spec")
    container: dict[str, Any] = next(
        (c for c in at(base, "containers", kind=list) if at(c, "name", kind=str) == "node"), {}
    )
    own = at(trainer, "resourcesPerNode")
    pod = Pod(
        spec={**base, "volumes": list(at(base, "volumes", kind=list))},
        path=("spec", "runtimePatches"),
        container={**container, "volumeMounts": list(at(container, "volumeMounts", kind=list))},
        container_path=("spec", "runtimePatches"),
        resources=own or at(container, "resources"),
        resources_path=("spec", "trainer", "resourcesPerNode"),
    )
    managers: set[str] = set()
    for index, patch in enumerate(at(spec, "runtimePatches", kind=list)):
        manager = at(patch, "manager", kind=str)
        if manager and manager in managers:
            found.error(
                ("spec", "runtimePatches", index, "manager"),
                f"{manager!r} has two patches, and the API server refuses that; join them",
            )
        managers.add(manager)
        jobs: Path = ("trainingRuntimeSpec", "template", "spec", "replicatedJobs")
        for number, one in enumerate(at(patch, *jobs, kind=list)):
            path = ("spec", "runtimePatches", index, *jobs, number)
            _apply_patch(one, path, pod, found)
    return pod


def _apply_patch(one: Any, path: Path, pod: Pod, found: Findings) -> None:
    name = at(one, "name", kind=str)
    if name not in ("node", "dataset-initializer", "model-initializer"):
        found.error(
            (*path, "name"),
            f"the runtime's jobs are node, dataset-initializer and model-initializer; got "
            f"{name!r}; write node",
        )
    inner: Path = ("template", "spec", "template", "spec")
    patched = at(one, *inner)
    here = (*path, *inner)
    if name == "node":
        pod.path = here
        pod.spec["volumes"] = [*pod.spec["volumes"], *at(patched, "volumes", kind=list)]
    merged = {**patched, "volumes": pod.spec["volumes"] if name == "node" else []}
    check_volumes({**patched, **merged, "containers": [], "initContainers": []}, here, found)
    check_containers(Pod(patched, here), found)
    check_grace(Pod(patched, here), found)
    for index, container in enumerate(at(patched, "containers", kind=list)):
        where = (*here, "containers", index)
        if at(container, "name", kind=str) != "node" or name != "node":
            if name == "node":
                got = at(container, "name", kind=str)
                found.error(
                    (*where, "name"),
                    f"the training container is called node; got {got!r}; write node",
                )
            continue
        if container.get("env"):
            found.error(
                (*where, "env"),
                "the node container's variables may not be patched; put them into trainer.env",
            )
        pod.container_path = where
        if at(container, "securityContext"):
            pod.container["securityContext"] = container["securityContext"]
        mounts = at(container, "volumeMounts", kind=list)
        pod.container["volumeMounts"] = [*pod.container["volumeMounts"], *mounts]
        _check_patched_mounts(pod, mounts, where, found)


def _check_patched_mounts(pod: Pod, mounts: list[Any], path: Path, found: Findings) -> None:
    names = {at(volume, "name", kind=str) for volume in pod.spec["volumes"]}
    for number, mount in enumerate(mounts):
        name = at(mount, "name", kind=str)
        if name and name not in names:
            found.error(
                (*path, "volumeMounts", number),
                f"mounts the volume {name!r}, which neither this patch nor a runtime in this file "
                "has; add it to volumes",
            )


def _check_node_gpus(
    pod: Pod, processes: int | None, reference: str, known: bool, found: Findings
) -> None:
    gpus, claims = gpu_count(pod.resources), at(pod.resources, "claims", kind=list)
    if pod.cpu_only or claims:
        return
    path = ("spec", "trainer", "resourcesPerNode")
    if not gpus:
        text = (
            "names no GPU, and one process a node would start without a word; add limits: "
            "{nvidia.com/gpu: 8} (a run on CPUs says run.device=cpu in args)"
        )
        (found.error if known or reference == _STOCK or not pod.resources else found.advise)(
            path, text
        )
    elif processes and processes != gpus:
        found.error(
            path,
            f"gives {gpus} GPUs to {processes} processes (numProcPerNode); make the two numbers "
            "equal, or remove numProcPerNode",
        )


def _check_node_memory(pod: Pod, reference: str, known: bool, found: Findings) -> None:
    """Shared memory: certain for the stock runtime and for one in the same file."""
    has = any(
        at(mount, "mountPath", kind=str).rstrip("/") == "/dev/shm"
        for mount in pod.container["volumeMounts"]
    )
    if has or known or reference == _STOCK:
        check_shared_memory(pod, found)
    else:
        found.advise(
            ("spec", "runtimeRef"),
            f"the runtime {reference!r} is not in this file: see that it mounts memory at /dev/shm",
        )
    check_fabric(pod, found)


def _node_job(runtime: dict[str, Any]) -> dict[str, Any]:
    jobs = at(runtime, "spec", "template", "spec", "replicatedJobs", kind=list)
    return next((job for job in jobs if at(job, "name", kind=str) == "node"), {})


def check_runtime(runtime: dict[str, Any], found: Findings) -> None:
    """Rules of a (Cluster)TrainingRuntime."""
    base: Path = ("spec", "template", "spec", "replicatedJobs")
    jobs = at(runtime, *base, kind=list)
    names = [at(job, "name", kind=str) for job in jobs]
    if "node" not in names:
        found.error(
            base,
            f"one job must be called node: it is what a TrainJob scales; got {names}; rename it",
        )
        return
    index = names.index("node")
    path = (*base, index, "template")
    step = at(jobs[index], "template", "metadata", "labels").get(_STEP)
    if step != "trainer":
        found.error(
            (*path, "metadata", "labels"),
            f"without the label {_STEP}: trainer a TrainJob leaves these pods as they are; add it",
        )
    here = (*path, "spec", "template", "spec")
    spec = at(runtime, *here)
    containers = at(spec, "containers", kind=list)
    pod = Pod(spec, here)
    inner = [at(container, "name", kind=str) for container in containers]
    if "node" not in inner:
        found.error(
            (*here, "containers"),
            f"the training container must be called node; got {inner}; rename it",
        )
    else:
        pod.container = containers[inner.index("node")]
        pod.container_path = (*here, "containers", inner.index("node"))
        check_shared_memory(pod, found)
        pod.resources = at(pod.container, "resources")
        pod.resources_path = (*pod.container_path, "resources")
        check_resources(pod, found)
        check_fabric(pod, found)
        check_reserved(
            at(pod.container, "env", kind=list),
            _RESERVED,
            "TrainJob",
            (*pod.container_path, "env"),
            found,
        )
    check_images(pod, found)
    check_containers(pod, found)
    check_volumes(spec, here, found)
    check_network(pod, found)
    check_grace(pod, found)
    for number, job in enumerate(jobs):
        if job.get("replicas", 1) != 1:
            found.error(
                (*base, number, "replicas"),
                f"must be 1: nodes are completions of one job; got {job['replicas']}; remove it",
            )


def check_job_set(job_set: dict[str, Any], found: Findings, maps: Maps) -> None:
    """Rules of a JobSet that trains: nobody injects anything, so it must say it all.

    `maps`: the ConfigMaps of the same file.
    """
    jobs = at(job_set, "spec", "replicatedJobs", kind=list)
    longest = min((_longest_name(*_size(job)) for job in jobs), default=63)
    check_name(job_set.get("metadata"), longest, "for its pods' names", found)
    if at(job_set, "spec", "network").get("publishNotReadyAddresses") is False:
        found.error(
            ("spec", "network", "publishNotReadyAddresses"),
            "pods must find each other before they are ready; remove it",
        )
    base: Path = ("spec", "replicatedJobs")
    for index, job in enumerate(at(job_set, *base, kind=list)):
        _check_set_job(job, (*base, index), found, maps)


def _size(job: Any) -> tuple[str, int]:
    """(name, pods) of a JobSet's job."""
    return at(job, "name", kind=str), at(job, "template", "spec", "parallelism", kind=int) or 1


def _longest_name(job: str, pods: int) -> int:
    """Of a JobSet whose pods are NAME-JOB-0-POD-abcde; its webhook refuses longer ones."""
    return 63 - len(f"-{job}-0-{max(pods - 1, 0)}-abcde")


def _check_set_job(job: Any, path: Path, found: Findings, maps: Maps) -> None:
    spec, here = at(job, "template", "spec"), (*path, "template", "spec")
    pods = at(spec, "parallelism", kind=int) or 1
    done = at(spec, "completions", kind=int) or pods
    if pods != done:
        found.error(
            (*here, "parallelism"),
            f"all nodes run at once: parallelism={pods} must equal completions={done}",
        )
    if spec.get("backoffLimit") != 0:
        found.advise(
            here, "set backoffLimit: 0 and restart all nodes through failurePolicy.maxRestarts"
        )
    inner = (*here, "template", "spec")
    pod = Pod(at(spec, "template", "spec"), inner)
    containers = at(pod.spec, "containers", kind=list)
    check_images(pod, found)
    if containers:
        pod.container, pod.container_path = at(containers, 0), (*inner, "containers", 0)
        pod.resources = at(pod.container, "resources")
        pod.resources_path = (*pod.container_path, "resources")
        setting = Setting("JobSet", pods, None, gpu_count(pod.resources), carried={})
        start = check_start(pod.container, setting, pod.container_path, found)
        pod.cpu_only = "run.device=cpu" in words(pod.container.get("args"))
        check_run_file(start, setting, pod, maps, found)
        names = {at(e, "name", kind=str) for e in at(pod.container, "env", kind=list)}
        if start.program == "torchrun" and pods > 1:
            _check_meeting(start.flags, names, pod.container_path, found)
        if not (setting.gpus or pod.cpu_only or at(pod.resources, "claims", kind=list)):
            found.error(
                (*pod.container_path, "resources"),
                "names no GPU; add limits: {nvidia.com/gpu: 8}",
            )
        check_resources(pod, found)
        check_shared_memory(pod, found)
        check_fabric(pod, found)
    check_containers(pod, found)
    check_volumes(pod.spec, pod.path, found)
    check_network(pod, found)
    check_grace(pod, found)


def _check_meeting(flags: dict[str, str], names: set[str], path: Path, found: Findings) -> None:
    def given(flag: str) -> bool:
        return flag in flags or f"PET_{flag.upper()}" in names

    wanted = ["nnodes"]
    wanted += ["rdzv_endpoint"] if given("rdzv_backend") else ["node_rank", "master_addr"]
    missing = [f"--{flag}" for flag in wanted if not given(flag)]
    if missing:
        found.error(
            path,
            f"a JobSet injects nothing, and torchrun lacks {', '.join(missing)}; add PET_NNODES, "
            "PET_NODE_RANK (from the annotation batch.kubernetes.io/job-completion-index) and "
            "PET_MASTER_ADDR to env",
        )
