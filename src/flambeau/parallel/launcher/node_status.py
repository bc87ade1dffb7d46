"""What the launchers of a job tell each other through the store of their rendezvous, in one round of it."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.rendezvous import RendezvousError

_SILENT_S = 30.0  # a node that has not been heard of for so long is lost; twice torch's own limit
_LOOK_S = 0.5  # between two looks at the store
_BEAT_LOOKS = 4  # every so many looks, say that this node is alive and see who else is
_GOODBYE_S = 5.0  # the node that holds the store stays so long for the others to read it
_FAILURE, _OVER = "flambeau/failure", "flambeau/over"
_DONE, _GONE = "flambeau/done", "flambeau/gone"


@dataclass(frozen=True)
class NodeFailure:
    """Why ranks have ended, as it is told to the user and to the other nodes.

    Attributes:
        line: says who failed and how.
        code: exit code of the rank, negative for a signal.
        weight: the lower, the nearer to the root of the matter.
    """

    line: str
    code: int
    weight: int


def introduce(store: Store, rank: int, text: str) -> None:
    """Tell the other nodes about this one."""
    store.set(f"flambeau/beat/{rank}", "")
    store.set(f"flambeau/node/{rank}", text)


def introductions(store: Store, num_nodes: int) -> list[str]:
    """What all nodes have told; waits for them. From then on each has its beat in the store."""
    texts = store.multi_get([f"flambeau/node/{rank}" for rank in range(num_nodes)])
    return [bytes(text).decode() for text in texts]


class News(threading.Thread):
    """Looks at the store twice a second, because a store whose host stands still blocks who asks it.

    Attributes:
        num_nodes: in this round.
        num_waiting: for the next round.
        num_done: whose ranks are through.
        is_done: set from outside: those of this node are.
        failure: of any node.
        is_over: because of a failure, for all nodes: one of them will not start its ranks again.
        silent_node: in words, one that has said nothing for a while.
    """

    def __init__(
        self, num_waiting: Callable[[], int], store: Store, rank: int, nodes: list[str]
    ) -> None:
        super().__init__(name="news", daemon=True)
        self.num_nodes, self.num_waiting, self.num_done = len(nodes), 0, 0
        self.is_done = False
        self.failure: NodeFailure | None = None
        self.is_over = False
        self.silent_node: str | None = None
        self._ask_waiting, self._store, self._rank, self._nodes = num_waiting, store, rank, nodes
        self._wake, self._ended = threading.Event(), threading.Event()
        self._num_looks, self._looked_at, self._is_lost = 0, time.monotonic(), False
        self._outbox: tuple[NodeFailure, bool] | None = None
        self._is_leaving, self._num_gone = False, 0
        self._told: set[str] = set()
        self._beats = [(b"", time.monotonic())] * len(nodes)

    @property
    def is_cut_off(self) -> bool:
        """The store is gone, or has not answered for long."""
        return self._is_lost or time.monotonic() - self._looked_at > _SILENT_S

    def run(self) -> None:
        """Look at the store until `end`, or until it is gone."""
        try:
            while not self._ended.is_set():
                self._look()
                self._num_looks += 1
                self._looked_at = time.monotonic()
                self._wake.wait(_LOOK_S)
                self._wake.clear()
        except (RuntimeError, ValueError, RendezvousError):  # torch catches as much around its own
            self._is_lost = True

    def _look(self) -> None:
        self.is_over = self._store.check([_OVER])
        if self._store.check([_FAILURE]):
            self.failure = NodeFailure(**json.loads(self._store.get(_FAILURE)))
        self._tell()
        self.num_waiting = self._ask_waiting()
        self.num_done = self._store.add(_DONE, 0)
        self._num_gone = self._store.add(_GONE, 0)
        if self._num_looks % _BEAT_LOOKS == 0:
            self._beat()

    def _tell(self) -> None:
        if self._outbox is not None:
            (mine, is_final), self._outbox = self._outbox, None
            # Of two alike the earlier one is the cause of the other.
            if self.failure is None or mine.weight < self.failure.weight:
                self._store.set(_FAILURE, json.dumps(asdict(mine)))
                self.failure = mine
            if is_final:
                self._store.set(_OVER, "")
                self.is_over = True
        for key, is_so in ((_DONE, self.is_done), (_GONE, self._is_leaving)):
            if is_so and key not in self._told:
                self._store.add(key, 1)
                self._told.add(key)

    def _beat(self) -> None:
        """Say something new, and see who else has, by the clock of this machine."""
        self._store.set(f"flambeau/beat/{self._rank}", str(self._num_looks))
        keys = [f"flambeau/beat/{rank}" for rank in range(self.num_nodes)]
        now = time.monotonic()
        for rank, beat in enumerate(self._store.multi_get(keys)):
            if beat != self._beats[rank][0]:
                self._beats[rank] = (beat, now)
            elif now - self._beats[rank][1] > _SILENT_S:
                name = self._nodes[rank]
                self.silent_node = f"the node at {name} has been silent for {_SILENT_S:.0f} s"

    def publish(self, failure: NodeFailure, *, is_final: bool) -> None:
        """Tell it with the next look, which is now."""
        self._outbox = (failure, is_final)
        self._wake.set()

    def refresh(self) -> None:
        """Wait until a look that begins now is over, for a second at most."""
        enough = self._num_looks + 2  # the one under way has perhaps read already
        deadline = time.monotonic() + 1.0
        while self._num_looks < enough and self.is_alive() and time.monotonic() < deadline:
            self._wake.set()
            time.sleep(0.01)

    def say_goodbye(self) -> None:
        """Let the node that holds the store know that this one needs it no more."""
        self._is_leaving = True
        self.refresh()

    def wait_for_goodbyes(self) -> None:
        """Until the other nodes have read what there was, for a few seconds at most."""
        deadline = time.monotonic() + _GOODBYE_S
        while self._num_gone < self.num_nodes and time.monotonic() < deadline:
            time.sleep(0.05)

    def end(self) -> None:
        """Look no more; waits for the look under way, unless the store does not answer."""
        self._ended.set()
        self._wake.set()
        while self.is_alive() and not self.is_cut_off:
            self.join(0.05)
