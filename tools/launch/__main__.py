# SPDX-License-Identifier: Apache-2.0
"""Starts runs on many machines: `python -m tools.launch render KIND CONFIG`, `... check FILE`.

`render` writes what starts the run of CONFIG on a cluster: a PyTorchJob, a TrainJob or a Slurm
batch script. Nodes, processes and sizes are checked against the run file and stand in one place.
`check` looks for mistakes in such a file without a cluster; each line says where, what and how to
mend it. `reach`, on each machine before torchrun, says whether they can meet at a place. Exit
status: 0 when there is no error, 1 when `check` found one, 2 for a mistake on the command line, in
CONFIG, or on this machine.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from fused_ops.errors import ConfigError
from pretrain.command_line import prepare
from tools.launch.check import check_file, check_text
from tools.launch.reach import reach_problems

_USAGE = (
    "usage: python -m tools.launch render pytorchjob|trainjob|slurm CONFIG --nodes N ...\n"
    "       python -m tools.launch check FILE...\n"
    "       python -m tools.launch reach HOST PORT"
)
_STOCK = "torch-distributed"
_PODS = ("pytorchjob", "trainjob")
# Options that not every kind of manifest has a place for: the kinds that have.
_PLACES = {
    **dict.fromkeys(("secret", "host_network"), ("pytorchjob",)),
    **dict.fromkeys(("namespace", "rdma", "shm_size", "data_claim", "runs_claim"), _PODS),
    **dict.fromkeys(("storage", "storage_class", "workdir", "config_folder"), _PODS),
    "runtime": ("trainjob",),
    **dict.fromkeys(("partition", "account", "time"), ("slurm",)),
}


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    command, rest = (arguments[0] if arguments else ""), list(arguments[1:])
    if command not in ("check", "render", "reach"):
        asked = command in ("-h", "--help")
        print(f"{_USAGE}\n\n{__doc__}".rstrip(), file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    try:
        if command == "check":
            return _check(_checker().parse_args(rest).files)
        if command == "reach":
            place = _reacher().parse_args(rest)
            return _say(reach_problems(place.host, place.port))
        return _render(_renderer().parse_intermixed_args(rest))
    except ConfigError as error:
        return _say(error.problems)


def _say(problems: Sequence[str]) -> int:
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 2 if problems else 0


def _checker() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.launch check",
        description="Look for mistakes in manifests and batch scripts; exit status 1 on any.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE")
    return parser


def _reacher() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.launch reach",
        description="Can this machine meet the others at HOST:PORT? What torchrun would find out "
        "late, and without naming the machine.",
    )
    parser.add_argument("host", metavar="HOST")
    parser.add_argument("port", metavar="PORT")
    return parser


def _renderer() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.launch render",
        description="Write what starts the run of CONFIG on a cluster.",
    )
    parser.add_argument("kind", choices=("pytorchjob", "trainjob", "slurm"))
    parser.add_argument("config", metavar="CONFIG", help="the run file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    _add_options(parser)
    return parser


def _add_options(render: argparse.ArgumentParser) -> None:
    def option(name: str, text: str, kind: type = str, default: object = None) -> None:
        render.add_argument(name, type=kind, default=default, help=text)

    render.add_argument("--nodes", type=int, required=True, help="machines of the run")
    option("--image", "container image; needed but for slurm, where pyxis starts it (or a .sqsh)")
    option("--gpus-per-node", "GPUs of a machine; 0: a run on CPUs", int, 8)
    option("--processes-per-node", "with --gpus-per-node 0: processes of a machine", int)
    option("--name", "name of the job (run.name as a DNS label)")
    option("--namespace", "namespace of everything rendered")
    option("--shm-size", "size of /dev/shm (64Gi)", str, "64Gi")
    option("--cpus", "CPUs of a node's container or task")
    option("--memory", "memory of a node's container or task")
    option("--rdma", "the cluster's RDMA resource, RESOURCE or RESOURCE=COUNT, such as rdma/ib=1")
    render.add_argument(
        "--host-network", action="store_true", help="pytorchjob: use the host's network"
    )
    option("--data-claim", "volume claim with the data (data)")
    option("--runs-claim", "volume claim for run folders (one is rendered)")
    option("--storage", "size of the rendered claim (1Ti)", str, "1Ti")
    option("--storage-class", "storage class of the rendered claim; must allow ReadWriteMany")
    option("--secret", "pytorchjob: Secret whose entries become variables, such as WANDB_API_KEY")
    option("--runtime", "trainjob: the training runtime (torch-distributed)", str, _STOCK)
    option("--workdir", "the image's working directory (/nibble)", str, "/nibble")
    option("--config-folder", "where the run file lies in a container (/cfg)", str, "/cfg")
    option("--restarts", "how often torchrun starts a failed run again (3)", int, 3)
    option("--time", "slurm: time limit (24:00:00)", str, "24:00:00")
    option("--partition", "slurm: partition")
    option("--account", "slurm: account")
    option("--output", "file to write; standard output without it")


def _render(chosen: argparse.Namespace) -> int:
    prepare()
    from tools.launch.batch_script import render_slurm
    from tools.launch.job import Options, read_job
    from tools.launch.manifests import render_pytorch_job, render_train_job

    no_image = chosen.kind != "slurm" and not chosen.image
    problems = ["--image must name the container image; there is no default; add it"] * no_image
    options = Options(**{f.name: getattr(chosen, f.name) for f in fields(Options)})
    problems += [
        f"--{f.name.replace('_', '-')} has no place in what starts a {chosen.kind}, only in that "
        f"of a {' or '.join(_PLACES[f.name])}; remove it"
        for f in fields(Options)
        if chosen.kind not in _PLACES.get(f.name, (chosen.kind,))
        and getattr(options, f.name) != f.default
    ]
    try:
        job = read_job(chosen.config, chosen.overrides, options)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    writers = {
        "pytorchjob": render_pytorch_job,
        "trainjob": render_train_job,
        "slurm": render_slurm,
    }
    text = writers[chosen.kind](job)
    wrong = [finding.text for finding in check_text(text, chosen.kind) if finding.rank == 0]
    if wrong:
        raise ConfigError([f"what these options make is wrong: {text}" for text in wrong])
    if not chosen.output:
        print(text, end="")
        return 0
    try:
        Path(chosen.output).write_text(text)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"--output must be writable; got {chosen.output} ({reason})") from None
    return 0


def _check(files: Sequence[str]) -> int:
    errors = 0
    for name in files:
        found = check_file(Path(name))
        for finding in found:
            print(finding.render(name))
        wrong = sum(finding.rank == 0 for finding in found)
        errors += wrong
        print(f"{name}: {wrong} error{'s' * (wrong != 1)}")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
