# SPDX-License-Identifier: Apache-2.0
"""Checks a file that starts a run: Kubernetes manifests, or a Slurm batch script. No cluster."""

import difflib
from pathlib import Path
from typing import Any

from fused_ops.errors import ConfigError
from pretrain.redact import holds_secret
from tools.launch.documents import Document, read_documents
from tools.launch.findings import Finding, Findings, at
from tools.launch.job_facts import JOB_KINDS, KINDS, MOVED
from tools.launch.pytorch_rules import check_pytorch_job
from tools.launch.run_file_rules import Maps, config_maps
from tools.launch.slurm_rules import check_shell, check_slurm
from tools.launch.slurm_script import looks_like_directive
from tools.launch.structure import check_structure, shown
from tools.launch.together import check_together
from tools.launch.trainer_rules import check_job_set, check_runtime, check_train_job

_GROUPS = ("kubeflow.org/", "trainer.kubeflow.org/", "jobset.x-k8s.io/")


def check_file(path: Path) -> list[Finding]:
    """Everything that is wrong with a file, and advice, by line.

    Raises:
        ConfigError: the file cannot be read, or is neither YAML nor a batch script.
    """
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"the manifest must be a readable file; got {path} ({reason})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} must be UTF-8 text; byte {error.start} is not") from None
    return check_text(text, str(path))


def check_text(text: str, where: str) -> list[Finding]:
    """`check_file` of a text; `where` names it in errors."""
    if any(looks_like_directive(line) for line in text.split("\n")):
        return sorted(check_slurm(text).found)
    if text.startswith("#!") or where.endswith((".sh", ".sbatch", ".slurm")):
        return sorted(check_shell(text).found)
    documents = read_documents(text, where)
    everything = [part for document in documents for part in _unlisted(document)]
    if not everything:
        raise ConfigError(f"{where} must hold a manifest; it is empty")
    runtimes = {
        at(part.value, "metadata", "name", kind=str): part.value
        for part in everything
        if at(part.value, "kind", kind=str) in ("TrainingRuntime", "ClusterTrainingRuntime")
    }
    maps = config_maps(everything)
    places = [_check(part, runtimes, maps) for part in everything]
    check_together(everything, places)
    found = [finding for place in places for finding in place.found]
    kinds = [at(part.value, "kind", kind=str) for part in everything]
    if not any(kind in JOB_KINDS for kind in kinds) and not any(f.rank == 0 for f in found):
        text = f"the file starts nothing: it holds {', '.join(kinds)}; add one of "
        found.append(Finding(1, 0, text + ", ".join(JOB_KINDS)))
    return sorted(found)


def _unlisted(document: Document) -> list[Document]:
    """The members of a `kind: List`, or the document itself."""
    if at(document.value, "kind", kind=str) != "List":
        return [document]
    members = []
    for index, value in enumerate(at(document.value, "items", kind=list)):
        start = ("items", index)
        lines = {path[2:]: n for path, n in document.lines.items() if path[:2] == start}
        repeated = [(path[2:], n) for path, n in document.repeated if path[:2] == start]
        members.append(Document(value, lines, repeated))
    return members


def _check(document: Document, runtimes: dict[str, Any], maps: Maps) -> Findings:
    found, value = Findings(document), document.value
    for path, line in document.repeated:
        found.document.lines[path] = line
        found.error(path, "stands twice in its mapping, and one of the two is lost; keep one")
    if not isinstance(value, dict):
        found.error((), f"must be a mapping with apiVersion and kind; got {value!r:.60}")
        return found
    kind, version = at(value, "kind", kind=str), at(value, "apiVersion", kind=str)
    if not _known(kind, version, value, found):
        return found
    _check_fields(kind, value, found)
    if kind == "PyTorchJob":
        check_pytorch_job(value, found, maps)
    elif kind == "TrainJob":
        check_train_job(value, found, runtimes, maps)
    elif kind in ("TrainingRuntime", "ClusterTrainingRuntime"):
        check_runtime(value, found)
    elif kind == "JobSet":
        check_job_set(value, found, maps)
    elif kind == "ConfigMap":
        _check_config_map(value, found)
    return found


def _known(kind: str, version: str, value: dict[str, Any], found: Findings) -> bool:
    if kind in KINDS:
        wanted = KINDS[kind][0]
        if version != wanted:
            found.error(
                ("apiVersion",),
                f"of a {kind} must be {wanted}; got {version or 'none'}; write {wanted}",
            )
        return True
    near = difflib.get_close_matches(kind, KINDS, n=1, cutoff=0.75)
    ours = version.startswith(_GROUPS)
    if near or ours or not kind or not version:
        hint = f"did you mean {near[0]}" if near else f"the kinds are {', '.join(JOB_KINDS)}"
        what = f"got {kind!r} of {version!r}" if kind or version else "got neither"
        found.error(("kind",), f"names a kind of manifest; {what}; {hint}")
    else:
        found.advise(("kind",), f"{kind} is not checked; a server-side dry run can check it")
    return False


def _check_fields(kind: str, value: dict[str, Any], found: Findings) -> None:
    def report(path: tuple[str | int, ...], text: str) -> None:
        moved = MOVED.get((kind, shown(path)))
        if moved and "is not a field" in text:
            text = f"is not a field here; {moved}"
        found.error(path, text)

    check_structure(value, KINDS[kind][1], report)


def _check_config_map(value: dict[str, Any], found: Findings) -> None:
    for name, text in at(value, "data").items():
        if isinstance(text, str) and holds_secret(text):
            found.error(
                ("data", name),
                "holds a secret, and whoever may list pods may read a ConfigMap; move it into a "
                "Secret",
            )
