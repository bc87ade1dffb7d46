"""What the launchers of a job exchange, in the store that torch's rendezvous also uses.

Torch's rendezvous only brings the nodes together; this exchanges why ranks have ended, whether all are done,
and who is lost. A job has attempts: each is one rendezvous and one start of the ranks.
"""

import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Generic, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from flambeau.errors import InputError
from flambeau.parallel.launcher.rendezvous_address import Rendezvous
from flambeau.parallel.preemption import EXIT_CODE, FAULTY_MACHINE, INTERRUPTED

NEVER_AGAIN = (2, FAULTY_MACHINE, EXIT_CODE, INTERRUPTED)
"""Exit codes of ranks after which none is started again here; 2 means wrong input."""
STORE_S = 20  # timeout of a call to the store
_SILENT_S = 30.0  # a node that is silent for this time is lost; twice torch's own limit
_POLL_S = 0.5
_POLLS_PER_BEAT = 4
_LEFT_BEHIND_S = 5.0  # nodes of an attempt start their ranks within a second of each other
_GOODBYE_S = 5.0  # for which the node that serves the store waits for the others to read it
_T = TypeVar("_T")


class Background(threading.Thread, Generic[_T]):
    """A thread for a call that may block forever; the main thread handles signals and watches the ranks.

    Torch's store calls block while their host is stopped or cut off, whatever their timeout (measured, torch
    2.11 and 2.15).
    """

    def __init__(self, work: Callable[[], _T]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._values = list[_T]()
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._values.append(self._work())
        except Exception as error:
            self.error = error

    def result(self) -> _T:
        if self.error is not None:
            raise self.error
        return self._values[0]


@dataclass(frozen=True)
class Ending:
    """Why ranks have ended, for the user and other nodes.

    Attributes:
        line: says who failed and how.
        weight: the lower, the closer to the cause.
        is_final: the ranks are not started again.
        is_failure: False if they restart because a node joins, or for smaller micro-batches.
    """

    line: str
    code: int
    weight: int
    is_final: bool = False
    is_failure: bool = True

    @property
    def final_code(self) -> int:
        return self.code if self.code in NEVER_AGAIN else 1


def open_store(rendezvous: Rendezvous, most_nodes: int, job_id: str) -> tuple[Store, bool]:
    """Serve the job's store, or connect to it, and whether it is served here; may block forever.

    InputError: another program has the port.
    """
    is_host = rendezvous.is_here
    try:
        store = _tcp_store(rendezvous, is_host=is_host)
    except RuntimeError as error:
        if not is_host:
            raise InputError(not_ours(rendezvous)) from error
        if most_nodes == 1:
            raise InputError(
                f"{rendezvous} cannot be the rendezvous: another program has that port"
            ) from error
        is_host = False  # probably another launcher on this machine serves it
        store = _tcp_store(rendezvous, is_host=False)
    return PrefixStore(f"flambeau/{job_id}", store), is_host


def not_ours(rendezvous: Rendezvous) -> str:
    return (
        f"what answers at {rendezvous} is no rendezvous: another program has that port; "
        "name another one, on all nodes"
    )


def _tcp_store(rendezvous: Rendezvous, *, is_host: bool) -> TCPStore:
    return TCPStore(
        rendezvous.host,
        rendezvous.port,
        is_master=is_host,
        multi_tenant=True,  # torch's rendezvous in this process uses the same server
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_S),
    )


def join_attempt(store: Store, most_nodes: int, node_rank: int | None) -> int | None:
    """The attempt that this node can join, waited for while the job is full; None at its end."""
    number = int(store.compare_set("round", "", "0"))
    if store.check([f"{number}/nodes"]):  # its ranks run
        if int(store.get(f"{number}/nodes")) < most_nodes:
            joins = Ending("another node has joined", 0, 0, is_failure=False)
            store.compare_set(f"{number}/ending", "", json.dumps(asdict(joins)))
            store.set("round", str(number + 1))
        try:
            while int(store.get("round")) == number:
                if store.check(["over"]):
                    return None
                time.sleep(_POLL_S)
        except RuntimeError:  # the node that serves the store has ended
            return None
        return join_attempt(store, most_nodes, node_rank)
    _claim(store, number, node_rank)
    return number


def _claim(store: Store, number: int, node_rank: int | None) -> None:
    """Claim a rank among the nodes; on a conflict the attempt ends for all."""
    way = "torch's order" if node_rank is None else "--node-rank"
    wrong = ""
    if store.compare_set(f"{number}/order", "", way).decode() != way:
        wrong = "give --node-rank to all nodes, or to none"
    elif node_rank is not None and store.add(f"{number}/claim/{node_rank}", 1) > 1:
        wrong = f"two nodes have the same --node-rank: {node_rank}"
    if wrong:
        store.set(f"{number}/ending", json.dumps(asdict(Ending(wrong, 2, 0, is_final=True))))


class AttemptStatus:
    """Polls the store twice a second, in a thread.

    Attributes:
        silent_node: in words, a node silent for too long.
        is_done: set from outside: this node's ranks are done.
    """

    def __init__(self, store: Store, number: int) -> None:
        self.ending: Ending | None = None
        self.everyone_is_done = self.is_done = False
        self.silent_node: str | None = None
        self._store = PrefixStore(f"{number}", store)
        self._number = number
        self._job = store
        self._node = -1
        self.num_nodes = 0
        self._name = ""
        self._outbox: Ending | None = None
        self._others_began_at = math.inf
        self._is_leaving = False
        self._num_gone = 0
        self._reported = set[str]()
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._num_polls = 0
        self._polled_at = time.monotonic()
        self._wake, self._ended = threading.Event(), threading.Event()
        self._thread = Background(self._run)

    @property
    def is_cut_off(self) -> bool:
        """The store is gone, or has not answered for long."""
        return self._thread.error is not None or time.monotonic() - self._polled_at > _SILENT_S

    @property
    def is_left_behind(self) -> bool:
        return self._node < 0 and time.monotonic() - self._others_began_at > _LEFT_BEHIND_S

    def ranks_started(self, node: int, num_nodes: int, name: str) -> None:
        """Set the number of this node in the attempt; from now on it writes heartbeats."""
        self.num_nodes, self._name, self._node = num_nodes, name, node

    def publish(self, ending: Ending) -> None:
        self._outbox = ending
        self.refresh()

    def refresh(self) -> None:
        """Wait until a poll that starts now is over, at most one second."""
        enough = self._num_polls + 2  # the current one may have read already
        deadline = time.monotonic() + 1.0
        while self._num_polls < enough and self._thread.is_alive() and time.monotonic() < deadline:
            self._wake.set()
            time.sleep(0.01)

    def leave(self, *, is_host: bool) -> None:
        """Say goodbye; the node with the store waits some seconds for the others'."""
        if not self.is_cut_off:
            self._is_leaving = True
            self.refresh()
            deadline = time.monotonic() + (_GOODBYE_S if self.num_nodes else 3 * _POLL_S)
            most = self.num_nodes or math.inf
            while is_host and self._num_gone < most and time.monotonic() < deadline:
                time.sleep(0.05)
        self.end()

    def end(self) -> None:
        self._ended.set()
        self._wake.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._poll()
            self._num_polls += 1
            self._polled_at = time.monotonic()
            self._wake.wait(_POLL_S)
            self._wake.clear()

    def _poll(self) -> None:
        store = self._store
        if store.check(["ending"]):
            self.ending = Ending(**json.loads(store.get("ending")))
        if self._outbox is not None:
            mine, self._outbox = self._outbox, None
            # Of two with equal weight the earlier one has caused the other.
            if self.ending is not None:
                is_final = mine.is_final or self.ending.is_final
                mine = replace(min(self.ending, mine, key=lambda e: e.weight), is_final=is_final)
            store.set("ending", json.dumps(asdict(mine)))
            self.ending = mine
        if self.ending is not None:
            key, value = ("over", "") if self.ending.is_final else ("round", f"{self._number + 1}")
            self._job.set(key, value)
        if self._node < 0 and self._others_began_at == math.inf and store.check(["nodes"]):
            self._others_began_at = time.monotonic()
        if self._node >= 0:
            store.set("nodes", str(self.num_nodes))
            self.everyone_is_done = self._count("done", self.is_done) == self.num_nodes
            self._num_gone = self._count("gone", self._is_leaving)
            if self._num_polls % _POLLS_PER_BEAT == 0:
                self._beat()

    def _count(self, key: str, is_so: bool) -> int:
        """How many nodes have reported this."""
        is_new = is_so and key not in self._reported
        if is_new:
            self._reported.add(key)
        return int(self._store.add(key, int(is_new)))

    def _beat(self) -> None:
        """Write a new heartbeat, and check those of the others by the clock of this machine."""
        self._store.set(f"beat/{self._node}", f"{self._num_polls} {self._name}")
        now = time.monotonic()
        for node in range(self.num_nodes):
            key = f"beat/{node}"
            beat = self._store.get(key) if self._store.check([key]) else b""
            if node not in self._beats or beat != self._beats[node][0]:
                self._beats[node] = (beat, now)
            elif now - self._beats[node][1] > _SILENT_S:
                name = beat.decode().partition(" ")[2] or f"number {node}"
                self.silent_node = f"the node {name} has been silent for {_SILENT_S:.0f} s"
