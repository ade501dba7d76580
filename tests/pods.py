# SPDX-License-Identifier: Apache-2.0
"""Pods of a rendered manifest on this machine: own network, own host name, the manifest's command.

    with Cluster(pytorch_job_pods(text), folder) as cluster:
        cluster.start()
        cluster.wait(120)

Each pod gets a network namespace with an address on a bridge, a host name, an /etc/hosts that knows
all pods, and the environment that the operator would inject. That needs root and `ip`:
`no_namespaces` says why it cannot be. Without them `Cluster(..., isolated=False)` gives each pod a
loopback address instead, and no names.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.distributed import ROOT

_ENTER = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'


def no_namespaces() -> str | None:
    """Why pods cannot have a network of their own here; None when they can."""
    missing = [name for name in ("ip", "unshare", "mount") if shutil.which(name) is None]
    if missing:
        return f"network namespaces need {', '.join(missing)}, which this machine lacks"
    name = f"nb{os.getpid()}probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=20)
    if made.returncode:
        return f"network namespaces are not permitted here ({made.stderr.strip()})"
    inside = ["ip", "netns", "exec", name, "unshare", "--mount", "--uts", "true"]
    tried = subprocess.run(inside, capture_output=True, text=True, timeout=20)
    subprocess.run(["ip", "netns", "del", name], timeout=20)
    return (
        f"namespaces are not permitted here ({tried.stderr.strip()})" if tried.returncode else None
    )


@dataclass
class Pod:
    """One pod: what it runs, and where."""

    name: str
    command: list[str]
    env: dict[str, str]
    files: dict[str, str] = field(default_factory=dict)
    """Text by absolute path: what a ConfigMap puts there."""
    address: str = ""
    process: subprocess.Popen[bytes] | None = None
    log: Path = Path()
    starts: int = 0

    def output(self) -> str:
        """Everything it has said."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class Cluster:
    """The pods of a job, side by side on this machine.

    Args:
        pods: what to run.
        folder: for logs and host files.
        isolated: namespaces; else loopback addresses.
    """

    def __init__(self, pods: list[Pod], folder: Path, *, isolated: bool = True) -> None:
        self.pods, self.folder, self.isolated = pods, folder, isolated
        self._prefix = f"nb{os.getpid() % 100000}{id(self) % 997}"
        folder.mkdir(parents=True, exist_ok=True)
        for number, pod in enumerate(pods, 1):
            pod.address = f"10.199.7.{number}" if isolated else f"127.0.7.{number}"
            pod.log = folder / f"{pod.name}.log"
            for path, text in pod.files.items():
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(path).write_text(text)
        addresses = {pod.name: pod.address for pod in pods}
        for pod in pods:
            if not isolated:
                for name, value in pod.env.items():
                    pod.env[name] = addresses.get(value, value)
            hosts = ["127.0.0.1 localhost"]
            hosts += [
                f"{address} {name} {name.split('.')[0]}" for name, address in addresses.items()
            ]
            (folder / f"{pod.name}.hosts").write_text("\n".join(hosts) + "\n")

    def __enter__(self) -> "Cluster":
        if self.isolated:
            self._ip("netns", "add", self._switch)
            self._in(self._switch, "ip", "link", "add", "br0", "type", "bridge")
            self._in(self._switch, "ip", "link", "set", "br0", "up")
            for number in range(len(self.pods)):
                self._plug(number)
        return self

    def __exit__(self, *_: Any) -> None:
        for pod in self.pods:
            self.kill(pod)
        if self.isolated:
            for number in range(len(self.pods)):
                subprocess.run(["ip", "netns", "del", self._space(number)], capture_output=True)
            subprocess.run(["ip", "netns", "del", self._switch], capture_output=True)

    @property
    def _switch(self) -> str:
        return f"{self._prefix}s"

    def _space(self, number: int) -> str:
        return f"{self._prefix}p{number}"

    def _plug(self, number: int) -> None:
        space, pod = self._space(number), self.pods[number]
        self._ip("netns", "add", space)
        port = f"p{number}"
        self._in(
            self._switch,
            *f"ip link add {port} type veth peer name eth0 netns {space}".split(),
        )
        for words in (f"link set {port} master br0", f"link set {port} up"):
            self._in(self._switch, "ip", *words.split())
        for words in ("link set lo up", f"addr add {pod.address}/24 dev eth0", "link set eth0 up"):
            self._in(space, "ip", *words.split())

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, timeout=20)

    def _in(self, space: str, *words: str) -> None:
        self._ip("netns", "exec", space, *words)

    def entry(self, pod: Pod) -> list[str]:
        """The words before a command that is to run inside of a pod."""
        enter = self.folder / "enter.sh"
        enter.write_text(_ENTER + "\n")
        hosts = str(self.folder / f"{pod.name}.hosts")
        space = self._space(self.pods.index(pod))
        inner = ["unshare", "--mount", "--uts", "sh", str(enter), hosts, pod.name.split(".")[0]]
        return ["ip", "netns", "exec", space, *inner]

    def start(self, *pods: Pod) -> None:
        """Starts the given pods, or all, each for the first time or again."""
        for pod in pods or self.pods:
            command = pod.command
            if self.isolated:
                command = [*self.entry(pod), *command]
            tools = f"{ROOT / '.venv' / 'bin'}:{os.environ.get('PATH', '')}"
            inherited = {k: v for k, v in os.environ.items() if not k.startswith("PET_")}
            env = {**inherited, "PATH": tools, "OMP_NUM_THREADS": "1", **pod.env}
            env["HOSTNAME"] = pod.name
            with pod.log.open("ab") as out:
                pod.process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=env,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            pod.starts += 1

    def wait(self, timeout: float, restarts: int = 0) -> None:
        """Until every pod has ended well. A failed one is started again as a kubelet would.

        Raises:
            AssertionError: one failed more than `restarts` times, or the time is over.
        """
        end = time.monotonic() + timeout
        while True:
            codes = [pod.process.poll() if pod.process else None for pod in self.pods]
            for pod, code in zip(self.pods, codes):
                if code:
                    assert pod.starts <= restarts, f"{pod.name} ended with {code}\n{self.report()}"
                    self.start(pod)
            if not any(code is None or code for code in codes):
                return
            assert time.monotonic() < end, f"still running after {timeout} s\n{self.report()}"
            time.sleep(0.1)

    def until(self, happened: Callable[[], bool], timeout: float) -> None:
        """Until `happened()`; AssertionError with all output when a pod fails or time is over."""
        end = time.monotonic() + timeout
        while not happened():
            failed = [p.name for p in self.pods if p.process and p.process.poll()]
            assert not failed, f"{failed} failed\n{self.report()}"
            assert time.monotonic() < end, f"not within {timeout} s\n{self.report()}"
            time.sleep(0.02)

    def kill(self, pod: Pod) -> None:
        """SIGKILL to everything in the pod, as when its machine dies."""
        if pod.process is None:
            return
        for pid in self.processes(pod):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pod.process.pid, signal.SIGKILL)
        pod.process.wait(timeout=30)

    def processes(self, pod: Pod) -> list[int]:
        """Every process of the pod, oldest first."""
        assert pod.process is not None, f"{pod.name} was not started"
        return sorted(descendants(pod.process.pid))

    def workers(self, pod: Pod) -> dict[int, int]:
        """The training processes of a pod: rank -> process."""
        assert pod.process is not None, f"{pod.name} was not started"
        return rank_processes(pod.process.pid)

    def cut(self, pod: Pod, whole: bool = False) -> None:
        """The pod's network cable is pulled; with `whole` it is put back."""
        port = f"p{self.pods.index(pod)}"
        self._in(self._switch, "ip", "link", "set", port, "up" if whole else "down")

    def report(self) -> str:
        """The end of what every pod said, each line with its pod."""
        return "\n".join(
            f"[{pod.name}] {line}" for pod in self.pods for line in pod.output().splitlines()[-50:]
        )


def descendants(pid: int) -> Iterator[int]:
    """A process and everything that it has started."""
    yield pid
    try:
        tasks = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return
    for task in tasks:
        with contextlib.suppress(OSError):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                yield from descendants(int(child))


def _environment(pid: int) -> dict[str, str]:
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(part.split("=", 1) for part in raw.split("\0") if "=" in part)


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def rank_processes(pid: int) -> dict[int, int]:
    """Below a launcher, its training processes: rank -> process; not what those have started."""
    found = {}
    for one in descendants(pid):
        env, above = _environment(one), _environment(_parent(one))
        if "LOCAL_RANK" in env and "LOCAL_RANK" not in above:
            found[int(env["RANK"])] = one
    return found


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def pytorch_job_pods(text: str) -> list[Pod]:
    """The pods of a PyTorchJob as Training Operator v1 makes them: names, environment, files."""
    documents = list(yaml.safe_load_all(text))
    job = next(d for d in documents if d["kind"] == "PyTorchJob")
    name, spec = job["metadata"]["name"], job["spec"]
    roles = spec["pytorchReplicaSpecs"]
    nodes = sum(role.get("replicas", 1) for role in roles.values())
    processes = spec.get("nprocPerNode", "auto")
    world = nodes * (int(processes) if processes.isdigit() else 1)
    pods = []
    for role in ("Master", "Worker"):
        for index in range(roles.get(role, {"replicas": 0})["replicas"]):
            rank = index + (role == "Worker")
            env = {
                "PYTHONUNBUFFERED": "1",
                "MASTER_ADDR": f"{name}-master-0",
                "MASTER_PORT": "23456",
                "PET_MASTER_ADDR": f"{name}-master-0",
                "PET_MASTER_PORT": "23456",
                "WORLD_SIZE": str(world),
                "RANK": str(rank),
                "PET_NODE_RANK": str(rank),
                "PET_NPROC_PER_NODE": processes,
                "PET_NNODES": str(nodes),
            }
            pod_spec = roles[role]["template"]["spec"]
            container = next(c for c in pod_spec["containers"] if c["name"] == "pytorch")
            pod_name = f"{name}-{role.lower()}-{index}"
            pods.append(_pod(pod_name, container, pod_spec, documents, env))
    return pods


def train_job_pods(text: str) -> list[Pod]:
    """The pods of a TrainJob on the stock runtime, as trainer v2 makes them."""
    documents = list(yaml.safe_load_all(text))
    job = next(d for d in documents if d["kind"] == "TrainJob")
    name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
    patch = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
    pod_spec = patch["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    container = {**pod_spec["containers"][0], **trainer}
    pods = []
    for index in range(trainer["numNodes"]):
        env = {
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer.get("numProcPerNode", "auto")),
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
            "PET_MASTER_PORT": "29500",
            "JOB_COMPLETION_INDEX": str(index),
        }
        pods.append(_pod(f"{name}-node-0-{index}.{name}", container, pod_spec, documents, env))
    return pods


def _pod(
    name: str,
    container: dict[str, Any],
    pod_spec: dict[str, Any],
    documents: list[Any],
    env: dict[str, str],
) -> Pod:
    own = {entry["name"]: entry["value"] for entry in container.get("env", [])}
    environment = {**own, **env}

    def expand(word: str) -> str:
        return re.sub(r"\$\((\w+)\)", lambda m: environment.get(m[1], m[0]), word)

    maps = {d["metadata"]["name"]: d["data"] for d in documents if d["kind"] == "ConfigMap"}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    files = {
        f"{mounts[volume['name']]}/{key}": value
        for volume in pod_spec["volumes"]
        if "configMap" in volume
        for key, value in maps[volume["configMap"]["name"]].items()
    }
    words = [*container["command"], *container.get("args", [])]
    return Pod(name, [expand(word) for word in words], environment, files)
