# SPDX-License-Identifier: Apache-2.0
"""An S3 server on loopback (moto's), and a proxy before it that misbehaves as networks do.

with s3_server() as server:
    server.upload(folder, "bucket/corpus")
    with FaultProxy(server.port, latency=0.05, failures=0.01) as proxy:
        options = server.options(proxy.port)      # of s3fs, for data.storage
"""

import contextlib
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

KEYS = {"key": "testing", "secret": "testing"}
_ERROR = (
    b"HTTP/1.1 500 Internal Server Error\r\nContent-Type: application/xml\r\n"
    b"Content-Length: 71\r\nConnection: close\r\n\r\n"
    b"<Error><Code>InternalError</Code><Message>injected    </Message></Error>"
)[:-1]


class Server:
    """A running server; objects live in this process."""

    def __init__(self, port: int) -> None:
        self.port = port

    def options(self, port: int | None = None) -> dict:
        """Options of s3fs for the server, or for a proxy before it."""
        return {**KEYS, "endpoint_url": f"http://127.0.0.1:{port or self.port}"}

    def client(self):
        """A boto3 client."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            aws_access_key_id=KEYS["key"],
            aws_secret_access_key=KEYS["secret"],
            region_name="us-east-1",
        )

    def upload(self, folder: Path, target: str) -> None:
        """Puts the files of a folder under BUCKET/PREFIX."""
        bucket, _, prefix = target.partition("/")
        client = self.client()
        client.create_bucket(Bucket=bucket)
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                key = f"{prefix}/{path.relative_to(folder)}".lstrip("/")
                client.put_object(Bucket=bucket, Key=key, Body=path.read_bytes())


@contextlib.contextmanager
def s3_server() -> Iterator[Server]:
    """moto's S3 server in threads of this process."""
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        yield Server(server.get_host_and_port()[1])
    finally:
        server.stop()


class FaultProxy:
    """Hands connections on, late, and spoils a share of the responses.

    Args:
        port: of the server behind it.
        latency: seconds that each response waits.
        failures: share of the requests that fail, a third each: an answer 500, an answer that
            ends early, a connection that is reset.
        seed: of which requests those are.

    Attributes:
        counts: "requests", "500", "truncated", "reset".
    """

    def __init__(self, port: int, latency: float = 0.0, failures: float = 0.0, seed: int = 0):
        self._target, self.latency, self.failures = port, latency, failures
        self.counts: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> "FaultProxy":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _draw(self) -> str:
        with self._lock:
            self.counts["requests"] += 1
            if self._random.random() >= self.failures:
                return ""
            fault = self._random.choice(("500", "truncated", "reset"))
            self.counts[fault] += 1
            return fault

    def _serve(self, client: socket.socket) -> None:
        """Requests of one connection, one after the other, each on a connection of its own."""
        with contextlib.suppress(OSError), client, client.makefile("rb") as stream:
            while True:
                request = _message(stream)
                if not request:
                    return
                fault = self._draw()
                time.sleep(self.latency)
                if fault == "reset":
                    # Closing with zero linger sends a reset.
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    return
                if fault == "500":
                    client.sendall(_ERROR)
                    return
                with socket.create_connection(("127.0.0.1", self._target)) as server:
                    server.sendall(request)
                    with server.makefile("rb") as answers:
                        head = request.startswith(b"HEAD")
                        answer = _message(answers, body=not head)
                if fault == "truncated":
                    client.sendall(answer[: max(1, len(answer) - max(1, len(answer) // 3))])
                    return
                client.sendall(answer)


def _message(stream, body: bool = True) -> bytes:
    """One HTTP message with its body, as bytes; empty at the end of the connection."""
    lines = []
    while True:
        line = stream.readline()
        if not line:
            return b""
        lines.append(line)
        if line == b"\r\n":
            break
    headers = dict(line.lower().split(b":", 1) for line in lines[1:-1])
    if not body:
        return b"".join(lines)
    if b"chunked" in headers.get(b"transfer-encoding", b""):
        while True:
            size = stream.readline()
            lines += [size, stream.read(int(size, 16) + 2)]
            if int(size, 16) == 0:
                return b"".join(lines)
    return b"".join(lines) + stream.read(int(headers.get(b"content-length", b"0")))
