# SPDX-License-Identifier: Apache-2.0
"""What must hold for a pod that trains and that no schema can see: resources, volumes, secrets."""

import re
from dataclasses import dataclass, field
from typing import Any

from pretrain.redact import holds_secret, is_secret_name, mask_text
from tools.launch.documents import Path
from tools.launch.findings import Findings, at, words
from tools.launch.pod_facts import VOLUME_SOURCES
from tools.launch.structure import as_number

_GPU = re.compile(
    r"^(nvidia\.com/(gpu(\.shared)?|mig-[\w.]+)|amd\.com/gpu|gpu\.intel\.com/\w+|habana\.ai/gaudi)$"
)
_RDMA = re.compile(r"rdma|infiniband|hostdev|(^|[/_-])(ib|roce|sriov)|efa", re.IGNORECASE)
_NATIVE = re.compile(r"^(cpu|memory|ephemeral-storage|hugepages-\w+)$")
MIN_SHM = 2**30
# What torchrun allows its workers to save after SIGTERM.
SAVE_SECONDS = 30

# Host and port, folders in lower case, a tag, a digest.
IMAGE = re.compile(
    r"^([A-Za-z0-9.-]+(:\d+)?/)?[a-z0-9._-]+(/[a-z0-9._-]+)*(:[\w.-]+)?(@[\w+.-]+:[0-9a-f]{32,})?$"
)


@dataclass
class Pod:
    """A pod template and its training container.

    Attributes:
        spec: the pod's spec, and the path to it.
        container: the training container, and the path to it; empty when there is none.
        resources: its resources, and the path to them (a TrainJob keeps them elsewhere).
        cpu_only: the program is told to run on the CPU.
        whole: all of its volumes are known, none comes from what is not in the file.
    """

    spec: dict[str, Any]
    path: Path
    container: dict[str, Any] = field(default_factory=dict)
    container_path: Path = ()
    resources: dict[str, Any] = field(default_factory=dict)
    resources_path: Path = ()
    cpu_only: bool = False
    whole: bool = True


def gpu_count(resources: dict[str, Any]) -> int:
    """GPUs that a container gets."""
    total = 0.0
    for group in ("limits", "requests"):
        amounts = at(resources, group)
        total = sum(as_number(v) or 0 for k, v in amounts.items() if _GPU.match(str(k)))
        if total:
            break
    return int(total)


def check_pod(pod: Pod, found: Findings) -> None:
    """Everything about a pod that does not depend on who starts it."""
    check_containers(pod, found)
    check_volumes(pod.spec, pod.path, found)
    if pod.container:
        check_resources(pod, found)
        check_shared_memory(pod, found)
        check_fabric(pod, found)
    check_network(pod, found)
    check_grace(pod, found)


def check_grace(pod: Pod, found: Findings) -> None:
    """A stop must leave the time of a save."""
    seconds = pod.spec.get("terminationGracePeriodSeconds", SAVE_SECONDS)
    hook = at(pod.container, "lifecycle", "preStop")
    asleep = re.search(r"\bsleep (\d+)", " ".join(words(at(hook, "exec", "command", kind=list))))
    before = int(asleep[1]) if asleep else at(hook, "sleep", "seconds", kind=int)
    if isinstance(seconds, int) and seconds - before < SAVE_SECONDS:
        behind = f" less the {before} s of preStop" if before else ""
        found.error(
            (*pod.path, "terminationGracePeriodSeconds"),
            f"a stopped run needs time to save; got {seconds} s{behind}; write at least "
            f"{SAVE_SECONDS + before}",
        )


def check_containers(pod: Pod, found: Findings) -> None:
    """Names, images, environment."""
    for group in ("initContainers", "containers"):
        names: list[Any] = []
        for index, container in enumerate(at(pod.spec, group, kind=list)):
            path = (*pod.path, group, index)
            name = at(container, "name", kind=str)
            if name in names:
                found.error((*path, "name"), f"{name!r} is there twice; rename one")
            names.append(name)
            check_env(at(container, "env", kind=list), (*path, "env"), found)
            ends = (
                group == "initContainers" and at(container, "restartPolicy", kind=str) != "Always"
            )
            if pod.container and container is not pod.container and not ends:
                _check_no_gpu(container, path, found)
            for part in ("command", "args"):
                for number, word in enumerate(at(container, part, kind=list)):
                    _check_no_secret(word, (*path, part, number), found)


def _check_no_gpu(container: Any, path: Path, found: Findings) -> None:
    gpus = gpu_count(at(container, "resources"))
    if gpus:
        found.error(
            (*path, "resources"),
            f"takes {gpus} GPUs of its own, beside those of the container that trains; remove them",
        )


def check_images(pod: Pod, found: Findings) -> None:
    """Every container has an image, and one that cannot change between two pulls."""
    for group in ("initContainers", "containers"):
        for index, container in enumerate(at(pod.spec, group, kind=list)):
            check_image(container, (*pod.path, group, index), found)


def check_image(container: Any, path: Path, found: Findings) -> None:
    """One container's image."""
    image = at(container, "image", kind=str)
    if not image.strip():
        found.error(
            (*path, "image"), "must be set in every container; add image: REGISTRY/NAME:TAG"
        )
    elif not IMAGE.match(image):
        hint = "nothing expands a variable here; " if "$" in image else ""
        found.error(
            (*path, "image"),
            f"must be REGISTRY/NAME:TAG, folders and name in lower case; got {image!r}; {hint}"
            "write it out",
        )
    elif "@" not in image and (":" not in image.rsplit("/", 1)[-1] or image.endswith(":latest")):
        found.advise(
            (*path, "image"),
            f"{image!r} may be another image on each node and at each restart; name a tag that "
            "does not move, or a digest",
        )


def check_env(env: list[Any], path: Path, found: Findings) -> None:
    """Variables: none twice, one source each, no secret in plain text."""
    names: set[str] = set()
    for index, entry in enumerate(env):
        name, here = at(entry, "name", kind=str), (*path, index)
        if name in names:
            found.error(here, f"{name!r} is set twice; remove one")
        names.add(name)
        value = at(entry, "value", kind=str)
        if value and at(entry, "valueFrom"):
            found.error(here, f"{name!r} has a value and a valueFrom; remove one")
        if is_secret_name(name) and value and not re.fullmatch(r"\$\(\w+\)", value):
            found.error(
                here,
                f"{name!r} holds a secret in plain text; put it into a Secret and refer to it by "
                "valueFrom.secretKeyRef",
            )
        else:
            _check_no_secret(value, here, found)


def _check_no_secret(text: Any, path: Path, found: Findings) -> None:
    if isinstance(text, str) and holds_secret(text):
        found.error(
            path,
            f"holds a secret in plain text ({mask_text(text)[:60]!r}); put it into a Secret and "
            "refer to it by valueFrom.secretKeyRef",
        )


def check_volumes(spec: dict[str, Any], path: Path, found: Findings) -> None:
    """Volumes have one source each; mounts name a volume, and no place twice."""
    names: set[str] = set()
    for index, volume in enumerate(at(spec, "volumes", kind=list)):
        name, here = at(volume, "name", kind=str), (*path, "volumes", index)
        if name in names:
            found.error(here, f"the volume {name!r} is there twice; rename one")
        names.add(name)
        sources = [k for k in volume if k in VOLUME_SOURCES] if isinstance(volume, dict) else []
        if len(sources) != 1:
            got = ", ".join(sources) or "none"
            found.error(here, f"a volume has exactly one source; got {got}; keep one")
    for group in ("initContainers", "containers"):
        for index, container in enumerate(at(spec, group, kind=list)):
            check_mounts(container, names, (*path, group, index), found)


def check_mounts(container: Any, names: set[str], path: Path, found: Findings) -> None:
    """The mounts of one container."""
    places: set[str] = set()
    for number, mount in enumerate(at(container, "volumeMounts", kind=list)):
        here, name = (*path, "volumeMounts", number), at(mount, "name", kind=str)
        place = at(mount, "mountPath", kind=str).rstrip("/")
        if name and name not in names:
            found.error(
                here,
                f"mounts the volume {name!r}, which the pod does not have; add it to volumes"
                + (f" (there are {', '.join(sorted(names))})" if names else ""),
            )
        if place and place in places:
            found.error(here, f"{place} is mounted twice; remove one")
        places.add(place)


def check_resources(pod: Pod, found: Findings) -> None:
    """GPUs are limits, whole, and equal to the requests; names are a cluster's."""
    limits, requests = at(pod.resources, "limits"), at(pod.resources, "requests")
    for group, amounts in (("limits", limits), ("requests", requests)):
        for name, amount in amounts.items():
            check_resource_name(str(name), (*pod.resources_path, group, str(name)), found)
            number = as_number(amount)
            if _GPU.match(str(name)) and number is not None and (number != int(number)):
                found.error(
                    (*pod.resources_path, group, str(name)),
                    f"GPUs are whole; got {amount}; write {max(1, round(number))}",
                )
    for name, amount in requests.items():
        if "/" not in str(name):
            wanted, most = as_number(amount), as_number(limits.get(name, amount))
            if wanted is not None and most is not None and wanted > most:
                found.error(
                    (*pod.resources_path, "requests", name),
                    f"a request may not exceed its limit; got {amount} over {limits[name]}; raise "
                    "the limit",
                )
        elif name not in limits:
            found.error(
                (*pod.resources_path, "requests", name),
                f"must also stand under limits; add {name}: {amount} there",
            )
        elif as_number(limits[name]) != as_number(amount):
            found.error(
                (*pod.resources_path, "requests", name),
                f"must equal its limit; got {amount} and {limits[name]}; write the same",
            )


def check_resource_name(name: str, path: Path, found: Findings) -> None:
    """A resource that no scheduler knows would keep the pod pending for ever."""
    if _NATIVE.match(name) or _GPU.match(name):
        return
    if "/" not in name:
        found.error(
            path,
            f"is no resource of Kubernetes; got {name!r}; a device has a domain, such as "
            "nvidia.com/gpu",
        )
    elif re.match(r"^(nvidia|amd)\.com/gpu", name) and not name.startswith("nvidia.com/gpu-"):
        found.error(path, f"is not a resource of that vendor; write {name.split('/')[0]}/gpu")


def check_shared_memory(pod: Pod, found: Findings) -> None:
    """Workers pass batches through /dev/shm, of which a pod has 64 MiB unless a volume is there."""
    if pod.spec.get("hostIPC") is True:
        return
    fix = (
        "add a volume {name: shm, emptyDir: {medium: Memory, sizeLimit: 64Gi}} and mount it at "
        "/dev/shm"
    )
    mounts = at(pod.container, "volumeMounts", kind=list)
    for number, mount in enumerate(mounts):
        if at(mount, "mountPath", kind=str).rstrip("/") != "/dev/shm":
            continue
        path = (*pod.container_path, "volumeMounts", number)
        if mount.get("readOnly") is True:
            found.error(path, "/dev/shm must be writable; remove readOnly")
        _check_shm_volume(pod, at(mount, "name", kind=str), path, found)
        return
    found.error(
        pod.container_path,
        f"/dev/shm is 64 MiB without a volume there, and workers then die of a bus error; {fix}",
    )


def _check_shm_volume(pod: Pod, name: str, path: Path, found: Findings) -> None:
    for index, volume in enumerate(at(pod.spec, "volumes", kind=list)):
        if at(volume, "name", kind=str) != name:
            continue
        here = (*pod.path, "volumes", index)
        if at(volume, "hostPath", "path", kind=str).rstrip("/") == "/dev/shm":
            return  # the machine's own shared memory
        empty_dir = volume.get("emptyDir") if isinstance(volume, dict) else None
        if not isinstance(empty_dir, dict) or empty_dir.get("medium") != "Memory":
            found.error(
                here,
                "the volume at /dev/shm must be memory; write emptyDir: {medium: Memory, "
                "sizeLimit: 64Gi}",
            )
            return
        size = as_number(empty_dir.get("sizeLimit", "64Gi"))
        memory = as_number(at(pod.resources, "limits").get("memory", "1E"))
        if size is not None and size < MIN_SHM:
            found.error(
                (*here, "emptyDir", "sizeLimit"),
                f"/dev/shm needs at least 1Gi; got {empty_dir['sizeLimit']}; raise it",
            )
        elif size is not None and memory is not None and size > memory:
            found.error(
                (*here, "emptyDir", "sizeLimit"),
                f"counts as the container's memory, whose limit is "
                f"{at(pod.resources, 'limits')['memory']}; lower it, or raise the limit",
            )
        return


def check_fabric(pod: Pod, found: Findings) -> None:
    """RDMA pins memory, which a container may only do with IPC_LOCK."""
    devices = [name for name in at(pod.resources, "limits") if "/" in str(name)]
    rdma = [name for name in devices if _RDMA.search(str(name)) and not _GPU.match(str(name))]
    host = [
        index
        for index, volume in enumerate(at(pod.spec, "volumes", kind=list))
        if at(volume, "hostPath", "path", kind=str).startswith("/dev/infiniband")
    ]
    security = at(pod.container, "securityContext")
    opens = security.get("privileged") is True  # every device of the machine
    opens |= any(not _GPU.match(str(name)) for name in devices)
    if not (rdma or host):
        if not opens and any(
            at(entry, "name", kind=str).startswith("NCCL_IB_HCA")
            for entry in at(pod.container, "env", kind=list)
        ):
            found.error(
                pod.container_path,
                "NCCL_IB_HCA names RDMA devices but the pod asks for none; add the cluster's RDMA "
                "resource to resources.limits, such as rdma/ib: 1",
            )
        return
    added = [
        str(one).removeprefix("CAP_") for one in at(security, "capabilities", "add", kind=list)
    ]
    if "IPC_LOCK" not in added and "ALL" not in added and security.get("privileged") is not True:
        found.error(
            pod.container_path,
            f"uses RDMA ({rdma[0] if rdma else '/dev/infiniband'}) without IPC_LOCK, so memory "
            "cannot be pinned; add securityContext: {capabilities: {add: [IPC_LOCK]}}",
        )
    if host and security.get("privileged") is not True:
        found.error(
            (*pod.path, "volumes", host[0]),
            "a container opens devices of a hostPath only when privileged; ask for the cluster's "
            "RDMA resource instead, such as rdma/ib: 1",
        )


def check_network(pod: Pod, found: Findings) -> None:
    """Names of other pods must resolve."""
    policy = pod.spec.get("dnsPolicy", "ClusterFirst")
    if pod.spec.get("hostNetwork") is True and policy != "ClusterFirstWithHostNet":
        found.error(
            (*pod.path, "hostNetwork"),
            f"with dnsPolicy {policy} the master's name does not resolve; set dnsPolicy: "
            "ClusterFirstWithHostNet",
        )
    if policy in ("Default", "None") and not at(pod.spec, "dnsConfig"):
        found.error(
            (*pod.path, "dnsPolicy"),
            f"{policy} does not know the cluster's names, such as the master's; remove it",
        )
