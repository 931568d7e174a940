"""Serves the samples that this node owns to other nodes. A process beside the ranks, so that it never takes their time.

It is given a store through its standard input, prints the endpoint it listens on, and ends when that input does, which
is when the rank that started it closes its store or dies in whatever way.

One thread talks: it takes requests, answers pings at once, and sends what the others found. `THREADS` threads read the
tiers. So a server that waits for storage is still seen to be alive.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import pickle
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_sparse.data.config import CorruptSampleError
from lightning_sparse.data.peers import Keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_sparse.data.store import Sample, SampleStore

THREADS = 4
MAX_REQUEST_BYTES = 1 << 16
START_S = 60.0
_ANSWERS = "inproc://answers"


class PeerServer:
    """The server process of a node, as the rank that started it sees it.

    Raises:
        RuntimeError: when it does not start; its own words are on standard error.
    """

    def __init__(self, store: SampleStore, run: bytes, address: str) -> None:
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lightning_sparse.data.peer_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths},
            start_new_session=True,  # Ctrl-C is for the ranks; the server ends with the one that started it
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        watchdog = threading.Timer(START_S, self._process.kill)
        watchdog.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                pickle.dump((store, run, address), self._process.stdin)
                self._process.stdin.flush()
            self.endpoint = self._process.stdout.readline().decode().strip()
        finally:
            watchdog.cancel()
        if not self.endpoint:
            self.close()
            raise RuntimeError(f"the server of this node's samples did not start on {address}; its error is above.")

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class _Known:
    """Who may connect: holders of the run's client key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return hmac.compare_digest(key, self._public)


def serve(get: Callable[[Sequence[int]], list[Sample]], format: str, run: bytes, address: str, ready: Any) -> None:
    """Answer requests for ever. `ready` is called with the endpoint."""
    import zmq
    from zmq.auth.thread import ThreadAuthenticator

    keys = Keys.of(run)
    context = zmq.Context()
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain="*", credentials_provider=_Known(keys.client_public))
    router = context.socket(zmq.ROUTER)
    router.curve_server = True
    router.curve_publickey, router.curve_secretkey = keys.server_public, keys.server_secret
    router.maxmsgsize = MAX_REQUEST_BYTES
    router.ipv6 = ":" in address
    port = router.bind_to_random_port(f"tcp://[{address}]" if ":" in address else f"tcp://{address}")
    answers = context.socket(zmq.PULL)
    answers.bind(_ANSWERS)
    own = threading.local()

    def work(client: bytes, number: bytes, indices: bytes) -> None:
        if not hasattr(own, "socket"):
            own.socket = context.socket(zmq.PUSH)
            own.socket.connect(_ANSWERS)
        own.socket.send_multipart([client, *_answer(get, format, number, indices)], copy=False)

    poller = zmq.Poller()
    poller.register(router, zmq.POLLIN)
    poller.register(answers, zmq.POLLIN)
    ready(f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}")
    with ThreadPoolExecutor(THREADS) as pool:
        while True:
            for socket, _ in poller.poll():
                if socket is answers:
                    router.send_multipart(answers.recv_multipart(copy=False), copy=False)
                    continue
                client, what, *rest = router.recv_multipart()
                if what == b"ping":
                    router.send_multipart([client, b"pong", b""])
                elif what == b"get" and len(rest) == 2 and len(rest[1]) % 8 == 0:
                    pool.submit(work, client, *rest)


def _answer(get: Callable[[Sequence[int]], list[Sample]], format: str, number: bytes, indices: bytes) -> list[Any]:
    asked = np.frombuffer(indices, np.int64).tolist()
    try:
        try:
            samples: list[Sample | str] = list(get(asked))
        except CorruptSampleError:
            samples = [_one(get, index) for index in asked]
    except Exception as error:  # storage away, an index out of range: the client looks elsewhere
        return [b"fail", number, str(error).encode("utf-8", "replace")]
    about: list[tuple[int, int, int, int]] = []
    frames: list[Any] = []
    for index, sample in zip(asked, samples, strict=True):
        if isinstance(sample, str):
            about.append((index, index, 0, 0))
            frames.append(sample.encode("utf-8", "replace"))
        else:
            about.append((index, sample.index, sample.height, sample.width))
            frames.append(sample.data.data)
    return [b"have", number, format.encode(), np.array(about, np.int64).tobytes(), *frames]


def _one(get: Callable[[Sequence[int]], list[Sample]], index: int) -> Sample | str:
    try:
        return get([index])[0]
    except CorruptSampleError as error:
        return error.reason


def main() -> None:
    store, run, address = pickle.load(sys.stdin.buffer)
    store.hits_count_as = "served"

    def run_server() -> None:
        try:
            serve(store.get, store.format, run, address, lambda endpoint: print(endpoint, flush=True))
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    threading.Thread(target=run_server, daemon=True).start()
    sys.stdin.buffer.read()  # until the rank that started this process closes its end
    store.close()
    os._exit(0)  # threads may hang in storage


if __name__ == "__main__":
    main()
