# SPDX-License-Identifier: Apache-2.0
"""Ranks meet before anything is built, and compare what they are: one mistake, one message.

Each rank puts a record of itself into the store where they meet: its host, what is wrong with it,
and digests of its config, code and packages. Whoever comes says what it found; whoever waits longer
than `START_SECONDS` says for whom, and goes on waiting. Where records differ every rank fails with
the same message, which names the host and the remedy.
"""

import hashlib
import json
import logging
import os
import platform
import socket
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fused_ops.errors import ConfigError
from pretrain.checkpoint.compare import flatten
from pretrain.environment import NEEDED, package_version, sources_digest

log = logging.getLogger(__name__)

START_SECONDS = 20.0
"""After this a rank says what it waits for, or that it reaches nobody."""
_kept: list[Any] = []  # a store's server lives as long as its object


@dataclass
class Record:
    """What a rank is."""

    rank: int
    host: str
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    """Of its config, flat; values as JSON."""
    code: str = ""
    """Digest of the sources."""
    packages: dict[str, str | None] = field(default_factory=dict)
    device: str = ""
    """cpu or cuda: what run.device came to on this host."""
    loopback: bool = False
    """Whether the host's own name leads to itself alone."""

    @property
    def name(self) -> str:
        """`rank 3 (node-b)`."""
        return f"rank {self.rank} ({self.host})"


def own_record(
    problems: Sequence[str],
    warnings: Sequence[str],
    config: Mapping[str, Any] | None,
    device: str = "",
) -> Record:
    """The record of this process."""
    return Record(
        rank=int(os.environ.get("RANK", "0")),
        host=socket.gethostname(),
        problems=list(problems),
        warnings=list(warnings),
        settings={key: json.dumps(value) for key, value in flatten(config or {}).items()},
        code=code_digest(),
        packages={"python": platform.python_version(), **{n: package_version(n) for n in NEEDED}},
        device=device,
        loopback=_is_loopback(socket.gethostname()),
    )


def meet(own: Record) -> Any:
    """Meets the other ranks, where there are others, and compares.

    Returns:
        A store that only the processes of this start share, or None for a run of one process.

    Raises:
        ConfigError: something is wrong on some rank; the same on all of them.
    """
    problems = environment_problems(os.environ)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if problems or world == 1 or "RANK" not in os.environ:
        problems += own.problems
        if problems:
            raise ConfigError(dict.fromkeys(problems))
        for text in own.warnings:
            log.warning("%s", text)
        return None
    store = _reach(own.rank, world)
    start, records = _gather(store, world, own)
    found = disagreements(records)
    if own.rank == 0:
        for text in _by_host(records, "warnings"):
            log.warning("%s", text)
    shared = dist.PrefixStore(f"start/{start}", store)
    if found:
        shared.set(f"left/{own.rank}", "")
        if own.rank == 0:  # its process may hold the store: others must have read it
            _wait_until_read(shared, world)
        raise ConfigError(found)
    return shared


def said_by_first(rank: str, texts: Sequence[str]) -> set[str]:
    """Which of these texts rank 0 says too; it tells the others, who wait a moment for it."""
    if not _kept:
        return set()
    keys = {text: f"said/{hashlib.sha256(text.encode()).hexdigest()}" for text in texts}
    try:
        if rank == "0":
            for key in keys.values():
                _kept[0].set(key, "")
            return set(texts)
        end = time.monotonic() + 3.0
        while time.monotonic() < end and not _kept[0].check(list(keys.values())):
            time.sleep(0.05)
        return {text for text, key in keys.items() if _kept[0].check([key])}
    except (RuntimeError, dist.DistError):
        return set()


def environment_problems(environ: Mapping[str, str]) -> list[str]:
    """What launchers leave out, and what would make every process a run of its own."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" not in environ and tasks.isdecimal() and int(tasks) > 1:
        return [
            f"srun started {tasks} tasks, and none is told its rank, so each would be a run of its "
            "own; start one torchrun a node: srun torchrun ... -m pretrain CONFIG "
            "(examples/launch/slurm.sbatch)"
        ]
    world = environ.get("WORLD_SIZE", "1")
    missing = [
        name
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
        if name not in environ
    ]
    if missing and "RANK" in environ and world.isdecimal() and int(world) > 1:
        return [
            f"a process of {world} must know {', '.join(missing)}; not set on "
            f"{socket.gethostname()}; start it with torchrun, which sets all of them"
        ]
    return []


def disagreements(records: Sequence[Record]) -> list[str]:
    """Everything that is wrong on some rank, or differs between ranks; each names its host."""
    found = _by_host(records, "problems")
    if found:
        return found
    first = records[0]
    found += _differences(records, "settings", "setting", "start all ranks with one run file")
    found += _differences(records, "packages", "package", "install the same on every host")
    for record in records[1:]:
        if record.code != first.code:
            found.append(
                f"all ranks must run the same code; {record.name} has {record.code} and "
                f"{first.name} {first.code}; update the checkout or the image on {record.host}"
            )
            break
    without = [record for record in records if record.device == "cpu"]
    if without and len(without) < len(records):
        more = f" and {len(without) - 1} more" if len(without) > 1 else ""
        found.append(
            f"{without[0].name}{more}: torch sees no GPU there, and other ranks have one; see "
            f"nvidia-smi on {without[0].host} and what its pod or task asked for"
        )
    if len({record.host for record in records}) > 1 and "GLOO_SOCKET_IFNAME" not in os.environ:
        found += [
            f"{record.name}: the name {record.host} leads to the host itself (127.0.0.0/8), so "
            "that no other host can reach it by that; correct /etc/hosts, or set "
            "GLOO_SOCKET_IFNAME to the interface between the hosts"
            for record in records
            if record.loopback and '"cpu"' in record.settings.get("run.device", "")
        ]
    return list(dict.fromkeys(found))


def code_digest() -> str:
    """Digest of the sources that train: equal on two hosts where they are the same."""
    return sources_digest(Path(__file__).resolve().parent.parent)[:12]


def _differences(records: Sequence[Record], what: str, word: str, remedy: str) -> list[str]:
    first, found = records[0], []
    values: dict[str, str | None] = getattr(first, what)
    for record in records[1:]:
        others: dict[str, str | None] = getattr(record, what)
        for name in sorted(values.keys() | others.keys()):
            mine, other = values.get(name), others.get(name)
            if mine != other:
                found.append(
                    f"the {word} {name} must be the same on all ranks; {record.name} has {other} "
                    f"and {first.name} {mine}; {remedy}"
                )
        if found:  # one rank tells enough
            break
    return found[:20]


def _by_host(records: Sequence[Record], what: str) -> list[str]:
    """Texts that all ranks have, plainly; others with the ranks that have them."""
    having: dict[str, list[Record]] = {}
    for record in records:
        for text in getattr(record, what):
            having.setdefault(text, []).append(record)
    found = []
    for text, owners in having.items():
        if len(owners) == len(records):
            found.append(text)
        else:
            more = f" and {len(owners) - 1} more" if len(owners) > 1 else ""
            found.append(f"{owners[0].name}{more}: {text}")
    return found


def _reach(rank: int, world: int) -> Any:
    """The store where the ranks meet. Raises ConfigError naming this host and what failed."""
    host, name = socket.gethostname(), os.environ["MASTER_ADDR"]
    port = os.environ["MASTER_PORT"]
    where = f"rank {rank} ({host})"
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{where}: MASTER_PORT must be a port; got {port!r}; set a free one")
    try:
        socket.getaddrinfo(name, int(port))
    except OSError as error:
        raise ConfigError(
            f"{where}: the name {name} (MASTER_ADDR), where the ranks meet, does not resolve on "
            f"{host} ({error.strerror or error}); correct the name, or add it to /etc/hosts there"
        ) from None
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and not agent
    store, failure = _open_store(name, int(port), world, serves)
    if store is None:
        taken = "EADDRINUSE" in str(failure) or "in use" in str(failure)
        raise ConfigError(
            f"{where}: port {port} of {host} is taken by another program; choose another "
            "MASTER_PORT (torchrun: --master_port, --rdzv_endpoint), or end that program"
            if serves and taken
            else f"{where}: rank 0 does not answer at {name}:{port} within {START_SECONDS:.0f} s; "
            "see that it runs and is no other program, that the name is its host's, and that a "
            f"firewall or NetworkPolicy lets {host} through"
        )
    _kept.append(store)
    return dist.PrefixStore("meet", store)


def _open_store(name: str, port: int, world: int, serves: bool) -> tuple[Any, Exception | None]:
    """(the store, None), or (None, why not). In a thread: another program that listens at the port
    and never answers would hold the constructor for ever, whatever its time-out."""
    found: list[tuple[Any, Exception | None]] = []

    def work() -> None:
        try:
            store = dist.TCPStore(
                name,
                port,
                world,
                serves,
                timeout=timedelta(seconds=START_SECONDS),
                wait_for_workers=False,
                multi_tenant=True,
            )
            found.append((store, None))
        except (RuntimeError, dist.DistError) as failure:
            found.append((None, failure))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(START_SECONDS + 3.0)
    return found[0] if found else (None, None)


def _gather(store: Any, world: int, own: Record) -> tuple[str, list[Record]]:
    """(name of this start, records of all ranks).

    torchrun's store outlives the processes that it starts again, so what is found there may be an
    earlier process's word. Each process has a token; rank 0 answers tokens with the name of this
    start, and the start is complete when every rank has put its record under that name.
    """
    try:
        return _handshake(store, world, own)
    except (RuntimeError, dist.DistError):
        raise ConfigError(
            f"{own.name}: rank 0 is gone before all ranks had met; its own log says why"
        ) from None


def _handshake(store: Any, world: int, own: Record) -> tuple[str, list[Record]]:
    token, record = uuid.uuid4().hex, json.dumps(asdict(own))
    mine = uuid.uuid4().hex if own.rank == 0 else ""
    store.set(f"hello/{own.rank}", token)
    started, told, name = time.monotonic(), False, ""
    while True:
        if mine:
            _welcome(store, world, mine)
        if store.check([f"welcome/{token}"]):
            given = store.get(f"welcome/{token}").decode()
            if given != name:
                name = given
                store.set(f"record/{name}/{own.rank}", record)
        keys = [f"record/{name}/{rank}" for rank in range(world)]
        if name and store.check(keys):
            return name, [Record(**json.loads(text)) for text in store.multi_get(keys)]
        waited = time.monotonic() - started
        if waited > START_SECONDS and not told:
            told = True
            missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
            log.warning(
                "%s waits for ranks that have not started: %s of %d; look at their hosts' logs",
                own.name,
                ", ".join(missing[:16]) + (", ..." if len(missing) > 16 else "") if name else "0",
                world,
            )
        if waited > 60 * START_SECONDS:
            raise ConfigError(f"{own.name}: not all ranks have started; see their hosts' logs")
        time.sleep(0.05)


def _welcome(store: Any, world: int, name: str) -> None:
    """Rank 0: tells the processes that have come so far the name of this start."""
    for rank in range(world):
        if not store.check([f"record/{name}/{rank}"]) and store.check([f"hello/{rank}"]):
            store.set(f"welcome/{store.get(f'hello/{rank}').decode()}", name)


def _wait_until_read(store: Any, world: int) -> None:
    end = time.monotonic() + 5.0
    keys = [f"left/{rank}" for rank in range(world)]
    while time.monotonic() < end and not store.check(keys):
        time.sleep(0.05)


def _is_loopback(host: str) -> bool:
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(found) and all(a.startswith("127.") or a == "::1" for a in found)
