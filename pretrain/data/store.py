# SPDX-License-Identifier: Apache-2.0
"""Folders in object stores: objects and parts of them, with retries, by fsspec or megatron-core.

A URL is anything with `://`. fsspec opens it with the package of its protocol (s3fs for s3://,
gcsfs for gs://; memory:// and http:// need none). Where that package is absent, s3:// goes through
megatron-core's own S3 reader (boto3) and msc:// through its multi-storage-client reader.
"""

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pretrain.data.manifest import DataError

log = logging.getLogger(__name__)

Options = dict[str, dict[str, Any]]
"""{protocol: keyword arguments of its fsspec file system}."""

# Errors of configuration: asking again does not help.
_FINAL = (
    *(FileNotFoundError, PermissionError, IsADirectoryError, NotImplementedError),
    *(ImportError, NameError, TypeError, AttributeError, ValueError),
)
_FINAL_NAMES = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "NoSuchBucket")


def is_url(path: str | Path) -> bool:
    """Whether a folder is in an object store; file:// is a path of this machine."""
    return "://" in str(path) and not str(path).startswith("file://")


def local_path(path: str | Path) -> Path:
    """A folder of this machine, without file://."""
    return Path(str(path).removeprefix("file://"))


def join(folder: str | Path, name: str) -> str:
    """`name` under a folder or URL, as text for messages and for requests."""
    return f"{str(folder).rstrip('/')}/{name}"


class DamagedError(OSError):
    """Bytes that arrived are not those that were asked for; asking again may help."""


class Backend(Protocol):
    """What a way into an object store must do. Paths are URLs; errors are its own."""

    def read(self, url: str, first: int, count: int) -> bytes:
        """Bytes [first, first + count)."""

    def read_all(self, url: str) -> bytes:
        """A whole small object."""

    def sizes(self, url: str) -> dict[str, int]:
        """{name under the folder: bytes} of everything in it."""


class FsspecBackend:
    """Through the fsspec file system of a protocol."""

    def __init__(self, url: str, options: Options) -> None:
        import fsspec

        protocol = url.split("://", maxsplit=1)[0].split("::")[-1]
        given = dict(options.get(protocol, {}))
        if protocol in ("s3", "s3a"):
            # Retries are ours; a connection that hangs is given up and tried again.
            given.setdefault(
                "config_kwargs",
                {"connect_timeout": 10, "read_timeout": 20, "retries": {"max_attempts": 0}},
            )
        self._fs, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False, **given)
        self._prefix = url.rstrip("/")
        if protocol in ("s3", "s3a"):
            self._fs.retries = 1

    def _path(self, url: str) -> str:
        return str(self._root).rstrip("/") + url.removeprefix(self._prefix)

    def read(self, url: str, first: int, count: int) -> bytes:
        """Signature: `Backend.read`."""
        return bytes(self._fs.cat_file(self._path(url), start=first, end=first + count))

    def read_all(self, url: str) -> bytes:
        """Signature: `Backend.read_all`."""
        return bytes(self._fs.cat_file(self._path(url)))

    def sizes(self, url: str) -> dict[str, int]:
        """Signature: `Backend.sizes`."""
        root = self._path(url).rstrip("/") + "/"
        found = self._fs.find(root, detail=True)
        return {
            str(name).removeprefix(root).lstrip("/"): int(about["size"])
            for name, about in found.items()
        }


@dataclass(frozen=True)
class Retries:
    """How often a request is made, and how long it is waited between: doubling, with jitter."""

    attempts: int = 8
    first_wait: float = 0.1
    longest_wait: float = 20.0


class Store:
    """A folder in an object store. Every request is repeated when it fails for a passing reason.

    Attributes:
        counts: "requests", "requests repeated".
    """

    def __init__(self, url: str, backend: Backend, retries: Retries) -> None:
        self.url, self._backend, self._retries = url.rstrip("/"), backend, retries
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def read(
        self, name: str, first: int, count: int, check: Callable[[bytes], None] | None = None
    ) -> bytes:
        """Bytes [first, first + count) of an object; never fewer.

        `check` raises DamagedError for bytes that are to be asked for again. Raises DataError when
        they cannot be had.
        """
        url = join(self.url, name)

        def once() -> bytes:
            content = self._backend.read(url, first, count)
            if len(content) != count:
                raise DamagedError(f"{len(content)} of {count} bytes arrived")
            if check is not None:
                check(content)
            return content

        return self._repeated(f"{url}, bytes {first} to {first + count - 1}", once)

    def read_all(self, name: str, check: Callable[[bytes], None] | None = None) -> bytes:
        """A whole object. Raises FileNotFoundError where there is none, otherwise DataError."""
        url = join(self.url, name)

        def once() -> bytes:
            content = self._backend.read_all(url)
            if check is not None:
                check(content)
            return content

        return self._repeated(url, once, absent=(FileNotFoundError,))

    def read_optional(self, name: str, check: Callable[[bytes], None]) -> bytes | None:
        """A whole object, or None where there is none.

        A store that does not let its folders be listed says "forbidden" for what is absent.
        """
        url = join(self.url, name)

        def once() -> bytes:
            content = self._backend.read_all(url)
            check(content)
            return content

        try:
            return self._repeated(url, once, absent=(FileNotFoundError, PermissionError))
        except (FileNotFoundError, PermissionError):
            return None

    def sizes(self) -> dict[str, int]:
        """{name: bytes} of every object in the folder."""
        return self._repeated(self.url, lambda: self._backend.sizes(self.url))

    def _repeated[T](
        self, what: str, request: Callable[[], T], absent: tuple[type[Exception], ...] = ()
    ) -> T:
        """What `request` returns, tried again after failures that may pass; `absent` ones pass."""
        for attempt in range(1, self._retries.attempts + 1):
            self._count("requests")
            try:
                return request()
            except Exception as error:
                if isinstance(error, absent):
                    raise
                if _is_final(error):
                    raise DataError(f"data must stay readable; {what}: {_said(error)}") from error
                if attempt == self._retries.attempts:
                    raise DataError(
                        f"data must be readable within {attempt} attempts; {what}: {_said(error)}"
                    ) from error
                self._count("requests repeated")
                wait = min(
                    self._retries.longest_wait, self._retries.first_wait * 2 ** (attempt - 1)
                )
                wait *= random.uniform(0.5, 1.0)
                log.info("%s: %s; again in %.2f s", what, _said(error), wait)
                time.sleep(wait)
        raise AssertionError("at least one attempt is made")

    def _count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1


def _is_final(error: Exception) -> bool:
    if isinstance(error, DamagedError):
        return False
    return isinstance(error, _FINAL) or type(error).__name__ in _FINAL_NAMES


def _said(error: Exception) -> str:
    text = str(error).split("\n", maxsplit=1)[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def open_store(
    url: str, options: Options | None = None, reader: str = "auto", retries: Retries | None = None
) -> Store:
    """The folder at a URL. Nothing is asked of the store yet.

    `reader`: fsspec, megatron_core, or auto (fsspec where the protocol's package is installed).
    Raises DataError naming the package that is missing.
    """
    return Store(url, _backend(url, options or {}, reader), retries or Retries())


def _backend(url: str, options: Options, reader: str) -> Backend:
    protocol = url.split("://", maxsplit=1)[0]
    problems = []
    if reader in ("auto", "fsspec"):
        try:
            return FsspecBackend(url, options)
        except (ImportError, ValueError) as error:
            problems.append(f"fsspec: {_said(error)}")
    if reader in ("auto", "megatron_core") and protocol in ("s3", "msc"):
        from pretrain.data.megatron_store import MegatronBackend

        try:
            return MegatronBackend(url)
        except ImportError as error:
            problems.append(f"megatron-core: {_said(error)}")
    package = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "msc": "multi-storage-client"}
    hint = f"install {package[protocol]}" if protocol in package else "install its fsspec package"
    tried = "; ".join(problems) or f"megatron-core reads s3:// and msc:// only, not {protocol}://"
    raise DataError(f"a data URL needs the package of its protocol; {url}: {tried}: {hint}")
