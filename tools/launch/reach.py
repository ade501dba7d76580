# SPDX-License-Identifier: Apache-2.0
"""Can this machine meet the others at a place? Asked before torchrun, which finds out late."""

import errno
import socket


def reach_problems(host: str, port: str) -> list[str]:
    """What keeps this machine from meeting others at `host:port`; each names this machine.

    On the machine that `host` is, the port must be free; on others the name must resolve.
    """
    me = socket.gethostname()
    if not port.isdecimal() or not 0 < int(port) < 65536:
        return [f"{me}: the port must be a number from 1 to 65535; got {port!r}; choose a free one"]
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        return [
            f"{me}: the name {host} does not resolve on this machine ({error.strerror or error}); "
            "correct it, or add it to /etc/hosts here"
        ]
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return [
                        f"{me}: port {port} is taken by another program on this machine, which is "
                        f"{host}; end that program, or choose another port"
                    ]
                continue  # an address of another machine: there is nothing to bind here
    return []
