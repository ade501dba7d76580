# SPDX-License-Identifier: Apache-2.0
"""What a disk may hold after a crash: the calls on files, recorded in order, and their outcomes.

    with Disk(folder) as disk:
        ...                           # code under test, in this process
    for moment in disk.moments: ...   # after each call: what survives a crash right then

Two outcomes bound all others. `seen` is what another process sees at that moment (the program was
killed, the machine lives on). `durable` is what was forced to the disk (the power failed): a file's
bytes at its last fsync, a folder's entries at its last fsync; a file never fsynced is empty.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

Tree = dict[str, bytes | None]  # path under the folder -> bytes; None for a folder


@dataclass
class Moment:
    """One call, and the two outcomes of a crash right after it."""

    call: str
    """mkdir, fsync, rename, unlink, rmdir."""
    path: str
    """Under the folder; "." is the folder itself."""
    seen: Tree = field(repr=False)
    durable: Tree = field(repr=False)


class Disk:
    """Records calls on files under `folder`, which must exist."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.moments: list[Moment] = []
        self._bytes: dict[int, bytes] = {}
        self._entries: dict[int, dict[str, tuple[int, bool]]] = {}
        for path in [self.folder, *self.folder.rglob("*")]:  # what is there is there to stay
            self._sync(path)

    def __enter__(self) -> "Disk":
        self._patches = [
            mock.patch.object(os, name, self._recorded(name, getattr(os, name)))
            for name in ("mkdir", "fsync", "rename", "replace", "unlink", "rmdir")
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: Any) -> None:
        for patch in self._patches:
            patch.stop()

    def _recorded(self, name: str, call: Any) -> Any:
        def recorded(first: Any, *args: Any, **kwargs: Any) -> Any:
            path = self._path(args[0] if name in ("rename", "replace") else first, kwargs)
            if path is None:
                return call(first, *args, **kwargs)
            before = self._look()
            if not self.moments or before != self.moments[-1].seen:  # data written, not yet forced
                self.moments.append(Moment("write", path, before, self._survivors()))
            result = call(first, *args, **kwargs)
            if name == "fsync":
                self._sync(self.folder / path)
            kind = "rename" if name == "replace" else name
            self.moments.append(Moment(kind, path, self._look(), self._survivors()))
            return result

        return recorded

    def _path(self, target: Any, kwargs: dict[str, Any]) -> str | None:
        if isinstance(target, int):
            target = os.readlink(f"/proc/self/fd/{target}")
        elif kwargs.get("dir_fd") is not None:
            target = os.path.join(os.readlink(f"/proc/self/fd/{kwargs['dir_fd']}"), target)
        path = Path(os.path.abspath(target))
        return str(path.relative_to(self.folder)) if path.is_relative_to(self.folder) else None

    def _sync(self, path: Path) -> None:
        inode = path.stat().st_ino
        if path.is_dir():
            self._entries[inode] = {
                entry.name: (entry.stat().st_ino, entry.is_dir()) for entry in os.scandir(path)
            }
        else:
            self._bytes[inode] = path.read_bytes()

    def _look(self) -> Tree:
        return {
            str(path.relative_to(self.folder)): None if path.is_dir() else path.read_bytes()
            for path in sorted(self.folder.rglob("*"))
        }

    def _survivors(self) -> Tree:
        tree: Tree = {}

        def walk(inode: int, prefix: str) -> None:
            for name, (child, is_folder) in self._entries.get(inode, {}).items():
                tree[prefix + name] = None if is_folder else self._bytes.get(child, b"")
                if is_folder:
                    walk(child, prefix + name + "/")

        walk(self.folder.stat().st_ino, "")
        return tree


def lay_out(tree: Tree, folder: Path) -> None:
    """Make the files of a tree in an empty folder."""
    folder.mkdir(parents=True)
    for name, data in sorted(tree.items()):
        if data is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(data)
