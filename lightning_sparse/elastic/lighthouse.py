"""The members of a round, from torchft's lighthouse.

Each node sends its status with its request, and receives all statuses. Each decision about a round is a function of
this list (see `rounds`), so all members decide alike.
"""

from __future__ import annotations

import html
import os
import re
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from lightning_sparse.elastic.direct import is_loopback, listener, network_name, open_page, own_address
from lightning_sparse.elastic.sampling import SampleProgress
from lightning_sparse.messages import log, log_later

VARIABLE = "TORCHFT_LIGHTHOUSE"
COMMAND = "RUST_LOG=warn torchft_lighthouse --min_replicas 1 --join_timeout_ms 10000"
ANSWER_SECONDS = 5.0
"""Time in which a running lighthouse answers."""
START_SECONDS = 60.0
"""Time in which the lighthouse may start after its nodes."""
BEAT_SECONDS = 0.25
PAUSE_SECONDS = 5.0
"""Pause after a failed request, so that a lost lighthouse does not slow down every step."""


@dataclass(frozen=True)
class NodeStatus:
    """The status of one node, sent as JSON in the lighthouse's request."""

    token: str = ""  # name of its global weights; empty for none yet
    number: int = 0  # of rounds that led to them
    run: str = ""  # name of the node's run; empty for the first node, and for nodes that join
    trains: bool = False  # it was in a quorum with weights of that run
    prepared: str = ""  # token of a round whose messages it has, without knowing whether the round counts
    tries: int = 0  # number of attempted rounds, so that no two have the same token
    group: str = ""  # name of its open group of nodes; empty for none
    observes: bool = True  # it receives, and sends nothing
    flushes: bool = False  # it sends all pending updates
    leaves: bool = False  # after this round
    sampled: bool = False  # its message carries a sample
    exchanges: int = 0  # number of its exchanges, which decides when samples are due
    wants: str = ""  # name of the snapshot that it requests; empty for none
    servers: tuple[str, ...] = ()  # addresses of the snapshots of its devices
    network: str = ""  # in which other nodes reach it by a loopback address
    progress: SampleProgress = SampleProgress()
    facts: Mapping[str, Any] = field(default_factory=dict)  # values that must be equal on all nodes
    trained: str = ""  # description of the exchanged parameters, equal on all nodes that train
    sizes: Sequence[Sequence[int]] = ()  # `Sizes` of each of its devices
    change: str = ""  # description of the parameters that it wants to exchange from now on; empty for none
    impatient: bool = False  # it has waited for the same change of other nodes as long as it may


class Member(NamedTuple):
    """A node of a quorum."""

    name: str  # unique for each start of the node
    store: str  # address of its TCPStore
    status: NodeStatus

    @property
    def is_local(self) -> bool:
        return is_loopback(self.store)


class Lighthouse:
    """The connection of one node. A thread sends heartbeats to the lighthouse.

    Args:
        address: such as ``http://host:port``; default: the environment variable TORCHFT_LIGHTHOUSE.
        timeout: seconds that a request waits for other nodes.

    Attributes:
        host: the address from which this machine reaches the lighthouse, for other nodes.

    Raises:
        ValueError: if torchft is not installed, or no lighthouse answers.
    """

    def __init__(self, address: str | None, node: str, timeout: float) -> None:
        address = address or os.environ.get(VARIABLE)
        if not address:
            raise ValueError(
                f"no lighthouse address given. Start a lighthouse (`{COMMAND}`) and pass its address as "
                f"lighthouse='http://host:29510', or set {VARIABLE}."
            )
        self.address = _with_scheme(address)
        self.name = f"{node}:{uuid.uuid4().hex[:12]}"
        self.host = own_address(self.address)
        self._network = network_name()
        # Heartbeats have their own connection, so that they do not wait for a request.
        self._client, beats = _connect(self.address, self.name), _connect(self.address, self.name)
        self._store = _store_on(self.host)
        self._timeout = timedelta(seconds=timeout)
        self._asks_again, self._is_answered = 0.0, True
        self._left = threading.Event()
        self._thread = threading.Thread(
            target=self._send_heartbeats, args=(beats,), name="lightning_sparse", daemon=True
        )
        self._thread.start()

    def quorum(self, status: NodeStatus) -> list[Member] | None:
        """Return the members of the next quorum, sorted by name, or None after the timeout.

        The lighthouse answers once all living nodes of the last quorum have asked.
        """
        if time.monotonic() < self._asks_again:
            return None
        try:
            quorum = self._client.quorum(
                self.name,
                timeout=self._timeout,
                store_address=f"{self.host}:{self._store.port}",
                step=status.number,
                world_size=1,
                data=asdict(replace(status, network=self._network)),
            )
        except (RuntimeError, TimeoutError) as error:
            # Until then, rounds fail at once: a lost lighthouse must not slow down every step.
            self._asks_again = time.monotonic() + min(PAUSE_SECONDS, self._timeout.total_seconds())
            if self._is_answered:
                log.warning(
                    "the lighthouse at %s sent no list of nodes (%s): until it sends one, this node continues alone, "
                    "and soon validates and saves its own weights. If the lighthouse has ended, start it again at the "
                    "same address. If it still runs, another node may hang. The others then continue if they are a "
                    "majority and --join_timeout_ms is below %.0f",
                    self.address,
                    error,
                    1000 * self._timeout.total_seconds(),
                )
            self._is_answered = False
            return None
        if not self._is_answered:
            log.info("the lighthouse at %s sends the list of nodes again", self.address)
        self._is_answered = True
        members = (
            Member(participant.replica_id, participant.store_address, _status_of(participant.data))
            for participant in quorum.participants
        )
        # All nodes get the same order, which decides ranks and the order of sums.
        return sorted(members, key=lambda each: each.name)

    def ask_again(self) -> None:
        """Allow the next request, even if the last one has just failed."""
        self._asks_again = 0.0

    def _send_heartbeats(self, client: Any) -> None:
        is_lost = False
        while not self._left.wait(BEAT_SECONDS):
            try:
                client.heartbeat(self.name)
            except (RuntimeError, TimeoutError):  # the lighthouse may come back
                is_lost = True
                self._left.wait(BEAT_SECONDS)
                continue
            if is_lost:
                # Ask at once: until then, a node that starts finds no other node, and begins a new run.
                is_lost = False
                self.ask_again()

    def leave(self) -> None:
        self._left.set()
        self._thread.join()


def read_quorum(address: str) -> list[tuple[str, int]]:
    """Return the name and the number of rounds of each node in a lighthouse's last quorum.

    Raises:
        OSError, ValueError, http.client.HTTPException: if no lighthouse answers.
    """
    with open_page(f"{_with_scheme(address)}/status", ANSWER_SECONDS) as answer:
        page = answer.read().decode()
    entries = re.findall(r"<b>([^<]*)</b>.*?Step: (\d+)", page, re.DOTALL)
    return [(html.unescape(name).rpartition(":")[0], int(rounds)) for name, rounds in entries]


def _with_scheme(address: str) -> str:
    return address if "://" in address else f"http://{address}"


def _status_of(data: Any) -> NodeStatus:
    # Other programs may use the lighthouse, so ignore values of other types. Ignore fields of other versions: their
    # facts differ anyway, so this node refuses them.
    if not isinstance(data, dict):
        return NodeStatus()
    progress = data.get("progress")
    field_values = _known(SampleProgress, progress) if isinstance(progress, dict) else {}
    return NodeStatus(**_known(NodeStatus, {**data, "progress": SampleProgress(**field_values)}))


def _known(of: type[NodeStatus | SampleProgress], values: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {attribute.name: getattr(of(), attribute.name) for attribute in fields(of)}
    kinds = {name: list if isinstance(value, tuple) else type(value) for name, value in defaults.items()}  # from JSON
    return {name: value for name, value in values.items() if type(value) is kinds.get(name)}


def _connect(address: str, name: str) -> Any:
    try:
        from torchft.coordination import LighthouseClient
    except ModuleNotFoundError as error:
        raise ValueError("elastic nodes need torchft, which is not installed: pip install torchft.") from error
    line = "no lighthouse answers at %s yet: waiting up to %.0f s for it"
    try:
        with log_later(ANSWER_SECONDS, log.info, line, address, START_SECONDS):
            client = LighthouseClient(address, timedelta(seconds=START_SECONDS))
            client.heartbeat(name, timedelta(seconds=START_SECONDS))  # another program may listen there
            return client
    except (RuntimeError, TimeoutError) as error:
        raise ValueError(
            f"no lighthouse answers at {address} (torchft: {error}). Start a lighthouse there (`{COMMAND}`), or "
            f"correct the address."
        ) from error


def _store_on(host: str) -> Any:
    # By default, torch's store listens on all addresses.
    listens = listener(host)
    port = listens.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listens.detach()
    )
