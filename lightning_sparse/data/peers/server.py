"""Serves the samples of this node to other nodes, in a separate process that takes no time from the ranks.

`THREADS` threads read the samples. Another thread handles all messages, so that a server that waits for storage still
answers pings.
"""

import contextlib
import hmac
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import numpy as np

from lightning_sparse.data.child import Child
from lightning_sparse.data.config import CorruptSampleError, DataError
from lightning_sparse.data.decode import Sample, SampleReader
from lightning_sparse.data.peers import Keys, allow_connections

THREADS = 4
MAX_REQUEST_BYTES = 1 << 16
START_S = 60.0
STOP_S = 5.0  # a busy machine writes the last files to the disk cache in this time
IDLE_MS = 2000  # without a request, after which files that wait to be cached are written
REBIND_S = 1.0  # pause before connections are accepted again, at the limit of open files
_ANSWERS = "inproc://answers"


class PeerServer:
    """Handle of the server process of a node, held by the rank that started it.

    Args:
        store: a `SampleStore`; the process opens its own copy.
        ports: first and last port to try; None: any free port.
        clients: processes that connect.

    Raises:
        DataError: if no port is free, or the limit of open files is too low for the clients.
    """

    def __init__(
        self,
        store: SampleReader,
        run: bytes,
        address: str,
        *,
        ports: tuple[int, int] | None = None,
        clients: int = 0,
    ) -> None:
        allow_connections(2 * clients)  # the child inherits the limit; a client that reconnects counts twice
        self._child = Child(f"{__name__}:run_server")
        answer: str | DataError = ""
        watchdog = threading.Timer(START_S, self._child.process.kill)  # the child may hang before it reads
        watchdog.start()
        with contextlib.suppress(OSError, EOFError):  # the child has ended
            self._child.connection.send((store, run, address, ports))
            answer = self._child.connection.recv()
        watchdog.cancel()
        if isinstance(answer, DataError) or not answer:
            self.close()
            raise answer or RuntimeError(f"the sample server of this node did not start on {address}; see its error.")
        self.endpoint = answer

    def stop(self) -> None:
        self._child.hang_up()

    def close(self) -> None:
        self._child.end(STOP_S)
        self._child.connection.close()


def _bind(context: Any, keys: Keys, address: str, ports: tuple[int, int] | None) -> tuple[Any, str]:
    import zmq

    router = context.socket(zmq.ROUTER)
    router.curve_server = True
    router.curve_publickey, router.curve_secretkey = keys.server_public, keys.server_secret
    router.maxmsgsize = MAX_REQUEST_BYTES
    router.ipv6 = ":" in address
    host = f"tcp://[{address}]" if ":" in address else f"tcp://{address}"
    if ports is None:
        return router, f"{host}:{router.bind_to_random_port(host)}"
    for port in range(ports[0], ports[1] + 1):
        with contextlib.suppress(zmq.ZMQError):
            router.bind(f"{host}:{port}")
            return router, f"{host}:{port}"
    raise DataError(
        f"none of the ports {ports[0]} to {ports[1]} of {address} is free. Each run needs one for train and one for "
        "val: give a wider range in peer_ports."
    )


class _Listener:
    def __init__(self, router: Any, endpoint: str) -> None:
        import zmq

        # After a failure, such as at the limit of open files, zmq would try to accept again at once, forever, and
        # occupy a core. So stop accepting for a while. Open connections are not affected.
        self._router, self._endpoint = router, endpoint
        self.failures = router.get_monitor_socket(zmq.EVENT_ACCEPT_FAILED)
        self._accept_at: float | None = None

    def pause(self) -> None:
        if self._accept_at is None:
            self._accept_at = time.monotonic() + REBIND_S
            self._router.unbind(self._endpoint)
        while self.failures.poll(0):  # after that: zmq may report failures faster than they are read
            self.failures.recv_multipart()

    def wait_ms(self) -> int:
        return IDLE_MS if self._accept_at is None else max(0, int(1000 * (self._accept_at - time.monotonic())) + 1)

    def resume(self) -> None:
        import zmq

        if self._accept_at is None or time.monotonic() < self._accept_at:
            return
        try:
            self._router.bind(self._endpoint)
            self._accept_at = None
        except zmq.ZMQError:  # still at the limit
            self._accept_at = time.monotonic() + REBIND_S


def serve(
    store: SampleReader, run: bytes, address: str, ports: tuple[int, int] | None, ready: Callable[[str], None]
) -> None:
    """Answer requests forever. `ready` is called with the endpoint."""
    import zmq
    from zmq.auth.thread import ThreadAuthenticator

    context, keys = zmq.Context(), Keys.of(run)
    authenticator = ThreadAuthenticator(context)  # stops when it is collected
    authenticator.start()
    clients = SimpleNamespace(callback=lambda domain, key: hmac.compare_digest(key, keys.client_public))
    authenticator.configure_curve_callback(domain="*", credentials_provider=clients)
    router, endpoint = _bind(context, keys, address, ports)
    answers = context.socket(zmq.PULL)
    answers.bind(_ANSWERS)
    own = threading.local()

    def work(client: bytes, number: bytes, indices: bytes) -> None:
        if not hasattr(own, "socket"):
            own.socket = context.socket(zmq.PUSH)
            own.socket.connect(_ANSWERS)
        own.socket.send_multipart([client, *_answer(store, number, indices)], copy=False)

    listener = _Listener(router, endpoint)
    poller = zmq.Poller()
    for source in (router, answers, listener.failures):
        poller.register(source, zmq.POLLIN)
    ready(endpoint)
    with ThreadPoolExecutor(THREADS) as pool:
        while True:
            listener.resume()
            events = poller.poll(listener.wait_ms())
            if not events:
                pool.submit(store.get, [])  # `SampleStore.get` writes old files that wait
            for socket, _ in events:
                if socket is listener.failures:
                    listener.pause()
                    continue
                if socket is answers:
                    router.send_multipart(answers.recv_multipart(copy=False), copy=False)
                    continue
                client, kind, *arguments = router.recv_multipart()
                if kind == b"ping":
                    router.send_multipart([client, b"pong", b""])
                elif kind == b"get" and len(arguments) == 2 and len(arguments[1]) % 8 == 0:
                    pool.submit(work, client, *arguments)


def _answer(store: SampleReader, number: bytes, requested: bytes) -> list[Any]:
    indices = np.frombuffer(requested, np.int64).tolist()
    try:
        samples = _samples(store, indices)
    except Exception as error:  # storage does not respond, an index out of range: the client reads it elsewhere
        return [b"fail", number, str(error).encode("utf-8", "replace")]
    rows: list[tuple[int, int, int, int]] = []
    frames: list[Any] = []
    for index, sample in zip(indices, samples, strict=True):
        if isinstance(sample, str):
            rows.append((index, index, 0, 0))
            frames.append(sample.encode("utf-8", "replace"))
        else:
            rows.append((index, sample.index, sample.height, sample.width))
            frames.append(sample.data.data)
    return [b"have", number, store.format.encode(), np.array(rows, np.int64).tobytes(), *frames]


def _samples(store: SampleReader, indices: Sequence[int]) -> Sequence[Sample | str]:
    try:
        return store.get(indices)
    except CorruptSampleError as error:
        # one by one, so that only the corrupt sample becomes a reason
        return [error.reason] if len(indices) == 1 else [_samples(store, [index])[0] for index in indices]


def run_server(connection: Connection) -> None:
    store, run, address, ports = connection.recv()
    store.hit_counter = "served"

    def answer_requests() -> None:
        try:
            serve(store, run, address, ports, connection.send)
        except DataError as error:
            connection.send(error)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    threading.Thread(target=answer_requests, daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        connection.recv_bytes()  # nothing comes: this raises when the rank that started this process hangs up
    store.close()
    os._exit(0)  # threads may hang in storage
