# SPDX-License-Identifier: Apache-2.0
"""The run file in a ConfigMap of the same file: it is read where it lies, and can be run so."""

import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fused_ops.errors import ConfigError
from tools.launch.command import Start
from tools.launch.documents import Document
from tools.launch.findings import Findings, at
from tools.launch.pod_rules import Pod
from tools.launch.start_rules import Setting

if TYPE_CHECKING:
    from pretrain.config import PretrainConfig

Maps = Mapping[str, Mapping[str, Any]]
"""{ConfigMap of the file: {key: text}}."""

# They end with the pod, and another pod has one of its own.
_OF_THE_POD = ("emptyDir", "ephemeral")


def config_maps(documents: Sequence[Document]) -> Maps:
    """The ConfigMaps among documents."""
    return {
        at(value, "metadata", "name", kind=str): {
            **{str(key): None for key in at(value, "binaryData")},
            **{str(key): text for key, text in at(value, "data").items()},
        }
        for value in (document.value for document in documents)
        if at(value, "kind", kind=str) == "ConfigMap"
    }


def check_run_file(start: Start, setting: Setting, pod: Pod, maps: Maps, found: Findings) -> None:
    """The run file that the command names lies there, and can be laid out on the job's pods."""
    if not start.module or start.rest[:1] != ["pretrain"] or len(start.rest) < 2:
        return
    text = _run_file(start.rest[1], pod, maps, found)
    overrides = [word for word in start.rest[2:] if re.match(r"[\w.]+=", word)]
    if text is None or any("$" in word for word in overrides):
        return
    processes = setting.processes or setting.gpus or None
    try:
        config, problems = _read(
            text, start.rest[1], overrides, processes and setting.nodes * processes
        )
    except ConfigError as error:
        problems = error.problems
    else:
        _check_folder(config.run.dir, setting.nodes, pod, found)
    for problem in problems:
        found.error(pod.container_path, f"the run would not start: {problem}")


def _read(
    text: str, where: str, overrides: list[str], world: int | None
) -> "tuple[PretrainConfig, list[str]]":
    """(the run, what keeps it from being laid out on `world` processes)."""
    from pretrain.command_line import prepare

    prepare()  # before torch, which takes seconds: only files that hold a run file need it
    from pretrain.config import layout_start_problems, make_config
    from pretrain.config_file import apply_overrides, parse_overrides, parse_sections

    data = parse_sections(text, where)
    apply_overrides(data, parse_overrides(overrides))
    config = make_config(data)
    return config, layout_start_problems(config, world) if world else []


def _check_folder(folder: str, nodes: int, pod: Pod, found: Findings) -> None:
    """Checkpoints outlive the pod, and all pods write into one folder."""
    folder = posixpath.join(at(pod.container, "workingDir", kind=str), folder)
    if not folder.startswith("/") or not pod.whole:
        return
    mounts = [
        (at(mount, "mountPath", kind=str).rstrip("/"), mount)
        for mount in at(pod.container, "volumeMounts", kind=list)
    ]
    holding = [one for one in mounts if f"{posixpath.normpath(folder)}/".startswith(f"{one[0]}/")]
    place, mount = max(holding, key=lambda one: len(one[0]), default=("", {}))
    volume: dict[str, Any] = next(
        (
            one
            for one in at(pod.spec, "volumes", kind=list)
            if at(one, "name", kind=str) == at(mount, "name", kind=str)
        ),
        {},
    )
    kind = next((kind for kind in _OF_THE_POD if kind in volume), "")
    if place and at(mount, "readOnly", kind=bool):
        found.error(
            pod.container_path,
            f"run.dir={folder} lies on a volume that is readOnly; remove readOnly",
        )
    elif not place or kind:
        where = f"in an {kind}" if kind else "on no volume"
        many = f", and {nodes} nodes do not see each other's" if nodes > 1 else ""
        found.error(
            pod.container_path,
            f"run.dir={folder} lies {where}, so that checkpoints go with the pod{many}; mount a "
            "persistentVolumeClaim there, or set run.dir to where one is",
        )


def _run_file(path: str, pod: Pod, maps: Maps, found: Findings) -> str | None:
    """The text of the run file, where a ConfigMap of this file has it."""
    if not path.startswith("/") or "$" in path:
        return None
    sources = {
        at(volume, "name", kind=str): at(volume, "configMap")
        for volume in at(pod.spec, "volumes", kind=list)
    }
    there: list[str] = []
    for number, mount in enumerate(at(pod.container, "volumeMounts", kind=list)):
        place = at(mount, "mountPath", kind=str).rstrip("/")
        source = sources.get(at(mount, "name", kind=str)) or {}
        keys = maps.get(at(source, "name", kind=str))
        within = path == place or path.startswith(f"{place}/")
        if keys is None or at(mount, "subPath", kind=str):
            if within:
                return None  # another volume: what it holds is not in this file
            continue
        if items := at(source, "items", kind=list):
            keys = {
                at(item, "path", kind=str): keys.get(at(item, "key", kind=str)) for item in items
            }
        files = {f"{place}/{key}": keys[key] for key in sorted(keys)}
        if path in files:
            text = files[path]
            return text if isinstance(text, str) else None
        there += files
        if within:
            found.error(
                (*pod.container_path, "volumeMounts", number),
                f"{path} is not in the ConfigMap {source['name']!r}, which holds "
                f"{', '.join(sorted(keys)) or 'nothing'}; write {' or '.join(files) or 'it there'}",
            )
            return None
    same = [file for file in there if file.rsplit("/", 1)[-1] == path.rsplit("/", 1)[-1]]
    if same:
        found.error(
            pod.container_path,
            f"the run file is mounted as {same[0]}, and the command reads {path}; write {same[0]}",
        )
    return None
