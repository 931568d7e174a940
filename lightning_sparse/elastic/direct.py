"""Connections between nodes, on each node's own address and without a proxy."""

from __future__ import annotations

import http.client
import ipaddress
import os
import socket
import threading
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

LIGHTHOUSE_PORT = 29510
RESOLVE_SECONDS = 4.0


def own_address(address: str) -> str:
    """Return the address of this machine in the network of a URL, for other nodes.

    Raises:
        ValueError: if the URL has no host, or its host name does not resolve in time.
    """
    host, port = place_of(address)
    family, *_, target = _resolved(address, host, port)
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ValueError(
            f"{address} cannot be reached from this machine ({error}). Use an address in a network of this machine."
        ) from error


def place_of(address: str) -> tuple[str, int]:
    """Return the host and port of a URL.

    Raises:
        ValueError: if the URL has no host, or an invalid port.
    """
    try:
        place = urlsplit(address)
        port = place.port
    except ValueError as error:
        raise ValueError(
            f"{address} is not a valid address ({error}). Use an address such as http://host:{LIGHTHOUSE_PORT}."
        ) from error
    if not place.hostname:
        raise ValueError(f"{address} has no host. Use an address such as http://host:{LIGHTHOUSE_PORT}.")
    return place.hostname, port or LIGHTHOUSE_PORT


def _resolved(address: str, host: str, port: int) -> Any:
    # In a thread, because the resolver has no timeout.
    answers: list[Any] = []

    def look_up() -> None:
        try:
            answers.append(socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0])
        except (OSError, UnicodeError) as error:
            answers.append(error)

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(RESOLVE_SECONDS)
    answer = answers[0] if answers else TimeoutError(f"no answer in {RESOLVE_SECONDS:.0f} s")
    if isinstance(answer, Exception):
        raise ValueError(
            f"{address}: the name {host!r} does not resolve ({answer}). Correct it, or give an IP address."
        ) from answer
    return answer


def listener(host: str) -> socket.socket:
    """Return a socket that listens on a free port of that address only."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family)


def is_loopback(place: str) -> bool:
    """Return whether other machines cannot reach ``host:port``."""
    try:
        address = ipaddress.ip_address(place.rpartition(":")[0].strip("[]"))
    except ValueError:
        return False
    # IPv6 sockets show 127.0.0.1 as ::ffff:127.0.0.1.
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_loopback or (mapped is not None and mapped.is_loopback)


def network_name() -> str:
    """Return a name of the machine or container within which loopback addresses work."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/net")
    except OSError:
        return f"{socket.gethostname()} {uuid.getnode()}"


def open_page(url: str, timeout: float) -> Any:
    # The empty handler ignores http_proxy: nodes reach each other directly.
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=timeout)


@contextmanager
def answer_of(url: str, timeout: float, pause: float, headers: dict[str, str]) -> Iterator[http.client.HTTPResponse]:
    """Yield a node's answer to a GET request.

    Args:
        timeout: of the connection, in seconds.
        pause: seconds without a byte after which the request fails.
    """
    host, port = place_of(url)
    with closing(http.client.HTTPConnection(host, port, timeout=timeout)) as connection:
        connection.connect()
        connection.sock.settimeout(pause)
        connection.request("GET", urlsplit(url).path, headers=headers)
        with connection.getresponse() as answer:
            yield answer
