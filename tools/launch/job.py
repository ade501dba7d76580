# SPDX-License-Identifier: Apache-2.0
"""One run on many machines, from its run file and a few numbers: what every manifest is made of."""

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fused_ops.errors import ConfigError
from pretrain.config import PretrainConfig, layout_start_problems, make_config
from pretrain.config_file import apply_overrides, parse_overrides, read_yaml
from pretrain.redact import holds_secret, mask_secrets, mask_text
from tools.launch.documents import write_documents
from tools.launch.pod_rules import IMAGE, MIN_SHM
from tools.launch.structure import as_number

# A file that pyxis starts; no pod does, and the check of a manifest says so.
_SQUASHED = re.compile(r"/[\w./+-]+\.sqsh")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a cluster must be told besides the run file; each is an option of `render`."""

    nodes: int
    image: str | None
    gpus_per_node: int = 8
    processes_per_node: int | None = None
    name: str | None = None
    namespace: str | None = None
    shm_size: str = "64Gi"
    cpus: str | None = None
    memory: str | None = None
    rdma: str | None = None
    host_network: bool = False
    data_claim: str | None = None
    runs_claim: str | None = None
    storage: str = "1Ti"
    storage_class: str | None = None
    secret: str | None = None
    runtime: str = "torch-distributed"
    workdir: str = "/nibble"
    config_folder: str = "/cfg"
    restarts: int = 3
    time: str = "24:00:00"
    partition: str | None = None
    account: str | None = None


@dataclass(frozen=True)
class Job:
    """A run to be started: checked, with every number in one place."""

    options: Options
    config: PretrainConfig
    config_path: str
    config_text: str
    """The run file with its overrides, as YAML."""
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        """Of the job: the option, else run.name as a DNS label."""
        return self.options.name or label(self.config.run.name)

    @property
    def processes(self) -> int:
        """A node's."""
        return self.options.processes_per_node or self.options.gpus_per_node or 1

    @property
    def cpu(self) -> bool:
        """Whether it runs without GPUs."""
        return self.options.gpus_per_node == 0

    @property
    def runs_claim(self) -> str:
        """The volume claim of run folders."""
        return self.options.runs_claim or f"{self.name}-runs"

    @property
    def runs_mount(self) -> str:
        """Where run folders lie inside a container."""
        return self._absolute(self.config.run.dir)

    @property
    def data_mount(self) -> str | None:
        """The folder of all data inside a container; None where it lies in no folder."""
        paths = [self._absolute(path) for path in _data_paths(self.config) if "://" not in path]
        if not paths:
            return None
        return posixpath.commonpath([posixpath.dirname(path) for path in paths])

    @property
    def folders(self) -> list[str]:
        """Folders with absolute paths that the run file names, and its own; none within another."""
        files = [path for path in _data_paths(self.config) if "://" not in path]
        named = {posixpath.dirname(path) for path in [*files, self.config_path]}
        found: list[str] = []
        for path in sorted(map(posixpath.normpath, {*named, self.config.run.dir})):
            if path.startswith("/") and not any(_overlap(path, other) for other in found):
                found.append(path)
        return found

    def _absolute(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self.options.workdir, path))

    def arguments(self) -> list[str]:
        """What follows `torchrun`."""
        found = ["-m", "pretrain", f"{self.options.config_folder}/run.yaml"]
        if self.cpu:
            found.append("run.device=cpu")
        if self.options.restarts:
            found.insert(0, f"--max_restarts={self.options.restarts}")
        return found


def read_job(path: str, overrides: Sequence[str], options: Options) -> Job:
    """The run of a run file on the machines of `options`.

    Raises:
        ConfigError: everything that would make it fail on the cluster and can be seen here.
    """
    data = read_yaml(path)
    apply_overrides(data, parse_overrides(overrides))
    config = make_config(data)
    job = Job(options, config, path, _text(path, data, overrides), tuple(overrides))
    world = options.nodes * job.processes
    problems = [
        *_option_problems(options, job),
        *(layout_start_problems(config, world) if world > 0 else []),
        *_secret_problems(job, data),
    ]
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return job


def label(name: str) -> str:
    """`name` as a DNS label: lower-case letters, digits, dashes."""
    text = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")
    return (text if text[:1].isalpha() else f"run-{text}")[:45].strip("-")


def _text(path: str, data: dict[str, Any], overrides: Sequence[str]) -> str:
    """The file as it is, comments and all, unless overrides changed it."""
    if overrides:
        return write_documents([data])
    lines = Path(path).read_text().split("\n")
    return "\n".join(line.rstrip().replace("\t", "    ") for line in lines).rstrip("\n") + "\n"


def _data_paths(config: PretrainConfig) -> list[str]:
    train, valid = config.data.train, config.data.valid
    found = [train] if isinstance(train, str) else [source.path for source in train]
    if isinstance(valid, str):
        found.append(valid)
    elif valid:
        found.extend(valid.values())
    return found


class _Rules(list[str]):
    """Problems, as rules are asked one after the other."""

    def ask(self, holds: object, text: str) -> None:
        """Adds `text` unless the rule holds."""
        if not holds:
            self.append(text)


def _option_problems(options: Options, job: Job) -> list[str]:
    rules = _Rules()
    rules.ask(options.nodes >= 1, f"--nodes must be at least 1; got {options.nodes}")
    gpus, processes = options.gpus_per_node, options.processes_per_node
    rules.ask(gpus >= 0, f"--gpus-per-node must be >= 0; got {gpus}")
    rules.ask(
        processes is None or processes >= 1,
        f"--processes-per-node must be at least 1; got {processes}",
    )
    rules.ask(
        processes is None or not gpus or processes == gpus,
        f"each process has its own GPU; got --processes-per-node {processes} with --gpus-per-node "
        f"{gpus}; remove --processes-per-node",
    )
    rules.ask(options.restarts >= 0, f"--restarts must be at least 0; got {options.restarts}")
    rules.ask(
        re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", options.time),
        f"--time must be Slurm's, such as 24:00:00; got {options.time!r}",
    )
    return [*rules, *_size_problems(options), *_name_problems(options, job), *_place_problems(job)]


def _size_problems(options: Options) -> list[str]:
    rules = _Rules()
    for name in ("shm_size", "storage", "memory", "cpus"):
        value = getattr(options, name)
        rules.ask(
            value is None or (as_number(value) or 0) > 0,
            f"--{name.replace('_', '-')} must be a quantity such as 64Gi; got {value!r}",
        )
    shm = as_number(options.shm_size)
    rules.ask(
        shm is None or shm >= MIN_SHM,
        f"--shm-size must be at least 1Gi, or workers die of a bus error; got {options.shm_size}",
    )
    rules.ask(
        options.rdma is None or re.fullmatch(r"[\w.\-]+/[\w.\-]+(=[1-9]\d*)?", options.rdma),
        f"--rdma must be RESOURCE or RESOURCE=COUNT, such as rdma/ib=1; got {options.rdma!r}",
    )
    return rules


def _name_problems(options: Options, job: Job) -> list[str]:
    rules, longest = _Rules(), 63 - len(f"-worker-{options.nodes}")
    rules.ask(
        re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job.name) and len(job.name) <= longest,
        f"--name must be lower-case letters, digits and dashes, at most {longest}; got "
        f"{job.name!r}; --name {label(job.name)[:longest]}",
    )
    rules.ask(
        options.image is None or IMAGE.match(options.image) or _SQUASHED.fullmatch(options.image),
        f"--image must be REGISTRY/NAME:TAG, folders and name in lower case; got {options.image!r}",
    )
    named = ("namespace", "secret", "runtime", "storage_class", "data_claim", "runs_claim")
    for name in named:
        value = getattr(options, name)
        rules.ask(
            value is None or re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", value),
            f"--{name.replace('_', '-')} names something in the cluster: lower-case letters, "
            f"digits, dashes and dots; got {value!r}",
        )
    for name in ("partition", "account"):
        value = getattr(options, name)
        rules.ask(
            value is None or re.fullmatch(r"[\w.,@+:/-]+", value),
            f"--{name} must be a name that Slurm knows; got {value!r}",
        )
    return rules


def _place_problems(job: Job) -> list[str]:
    rules, options = _Rules(), job.options
    data, runs, config = job.data_mount, job.runs_mount, options.config_folder.rstrip("/")
    for name, value in (("workdir", options.workdir), ("config-folder", config)):
        rules.ask(value.startswith("/"), f"--{name} must begin with /; got {value!r}")
    rules.ask(
        data != "/",
        f"the data must lie below one folder, where a volume is mounted; got "
        f"{', '.join(_data_paths(job.config))}; put it there, or set data.train and data.valid",
    )
    rules.ask(
        data is None or not data.startswith("/") or not _overlap(data, runs),
        f"run.dir and the data are two volumes, and neither may hold the other; got {runs} and "
        f"{data}; set run.dir",
    )
    for other in (runs, data, "/dev/shm", options.workdir):
        rules.ask(
            not other or not config.startswith("/") or not _overlap(config, other),
            f"--config-folder is a volume of its own, and neither it nor {other} may hold the "
            f"other; got {config}; try /cfg",
        )
    return rules


def _overlap(one: str, other: str) -> bool:
    """Whether one of two folders holds the other."""
    if one.startswith("/") != other.startswith("/"):
        return False
    return posixpath.commonpath([one, other]) in (one.rstrip("/"), other.rstrip("/"))


def _secret_problems(job: Job, data: dict[str, Any]) -> list[str]:
    """A rendered file is shared: nothing secret may get into it."""
    found = [
        f"{name} holds a secret ({mask_text(text)[:60]}), which a rendered file would show; "
        "take it out, and give it to the pods with --secret NAME"
        for name, text in [("the run file", job.config_text)]
        if holds_secret(text)
    ]
    if mask_secrets(data) != data and not found:
        found.append(
            "the run file holds a secret, which a rendered file would show; take it out, and give "
            "it to the pods with --secret NAME"
        )
    given = {
        "--image": job.options.image,
        "--name": job.options.name,
        "--runtime": job.options.runtime,
    }
    found += [
        f"{name} holds a secret, which a rendered file would show; take it out"
        for name, text in given.items()
        if text and holds_secret(text)
    ]
    return found
