# SPDX-License-Identifier: Apache-2.0
"""Object stores through megatron-core's own readers: s3:// with boto3, msc:// with its client."""

import importlib
import threading
from typing import Any

import numpy as np


class MegatronBackend:
    """The `.bin` readers that megatron-core gives its IndexedDataset, used for every object.

    They keep one chunk and are made for one thread, so each thread has its own.
    """

    def __init__(self, url: str) -> None:
        """Raises ImportError where boto3, or multi-storage-client, is not installed."""
        from megatron.core.datasets.indexed_dataset import OBJECT_STORAGE_BIN_READERS
        from megatron.core.datasets.object_storage_utils import (
            ObjectStorageConfig,
            get_object_storage_access,
        )
        from megatron.core.msc_utils import MultiStorageClientFeature

        self._access = get_object_storage_access(url)
        if self._access == "msc":
            importlib.import_module("multistorageclient")
            MultiStorageClientFeature.enable()
        else:
            importlib.import_module("boto3")
        self._reader = OBJECT_STORAGE_BIN_READERS[self._access]
        # A chunk of one byte: each request is exactly what was asked for.
        self._config = ObjectStorageConfig(path_to_idx_cache="", bin_chunk_nbytes=1)
        self._local = threading.local()

    def read(self, url: str, first: int, count: int) -> bytes:
        """Bytes [first, first + count)."""
        readers: dict[str, Any] = self._local.__dict__.setdefault("readers", {})
        if url not in readers:
            readers.clear()
            readers[url] = self._reader(url, self._config)
        try:
            return bytes(readers[url].read(np.uint8, count, first))
        except Exception as error:
            del readers[url]
            raise self._translated(error, url) from error

    def read_all(self, url: str) -> bytes:
        """A whole small object."""
        size = self._size(url)
        return self.read(url, 0, size) if size else b""

    def sizes(self, url: str) -> dict[str, int]:
        """{name under the folder: bytes} of everything in it."""
        root = url.rstrip("/") + "/"
        if self._access == "msc":
            msc = importlib.import_module("multistorageclient")
            found = {str(item.key): int(item.content_length) for item in msc.list(root)}
            return {name.removeprefix(root): size for name, size in found.items()}
        import boto3
        from megatron.core.datasets.object_storage_utils import parse_s3_path

        bucket, prefix = parse_s3_path(root)
        pages = boto3.client("s3").get_paginator("list_objects_v2")
        return {
            item["Key"].removeprefix(prefix): int(item["Size"])
            for page in pages.paginate(Bucket=bucket, Prefix=prefix)
            for item in page.get("Contents", ())
        }

    def _size(self, url: str) -> int:
        try:
            if self._access == "msc":
                msc = importlib.import_module("multistorageclient")
                client, path = msc.resolve_storage_client(url)
                return int(client.info(path).content_length)
            import boto3
            from megatron.core.datasets.object_storage_utils import parse_s3_path

            bucket, key = parse_s3_path(url)
            return int(boto3.client("s3").head_object(Bucket=bucket, Key=key)["ContentLength"])
        except Exception as error:
            raise self._translated(error, url) from error

    @staticmethod
    def _translated(error: Exception, url: str) -> Exception:
        """botocore's answer 404 or 403 as the exception that Python has for it."""
        if isinstance(error, FileNotFoundError | PermissionError):
            return error
        response = getattr(error, "response", None) or {}
        code = str(response.get("Error", {}).get("Code", ""))
        if code in ("404", "NoSuchKey", "NoSuchBucket"):
            return FileNotFoundError(f"there is no {url}")
        if code in ("403", "AccessDenied"):
            return PermissionError(f"{url}: {error}")
        # boto3 gives fewer bytes than were asked for: megatron-core's reader then asserts.
        return OSError(str(error) or "fewer bytes arrived than were asked for")
