"""Where the launchers of a job meet, and how they hear of each other: torch's c10d rendezvous and its store.

Torch's store calls can block for ever when their host stands still (measured, torch 2.11 and 2.15: a `get`
with a timeout of 3 s against a stopped host), so calls to the store of another process run in threads: the
main one has to hear signals and to watch the ranks.
"""

import contextlib
import functools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from flambeau.errors import InputError
from flambeau.parallel.launcher.node_status import News, NodeFailure, introduce, introductions
from flambeau.parallel.launcher.rendezvous_address import Place

_LAST_CALL_S = 10  # for more nodes, once the fewest are there; torch's default is 30
_STORE_S = 20  # of a call to a store that answers
_CLOSE_S = 5.0  # of closing the rendezvous
_CLOSED_S = 1.5  # nodes that wait in it look once a second whether it is closed
_T = TypeVar("_T")


def meet(
    place: Place,
    *,
    nodes: tuple[int, int],
    job_id: str,
    node_rank: int | None,
    join_timeout_s: int,
    say: Callable[[str], None],
) -> "Meeting":
    """Hold the rendezvous, or find the one who does.

    Args:
        place: where it is.
        nodes: the fewest and the most that take part.
        job_id: a name, the same on all nodes.
        node_rank: the place of this node among the others, if that is not left to torch.
        join_timeout_s: how long to wait, first for who holds it and then for the others.
        say: prints a line.

    Raises:
        InputError: the port is taken, or nobody has answered for so long.
    """
    handler = functools.partial(_handler, place, nodes, job_id, join_timeout_s)
    holds = place.is_here
    if holds:
        try:
            inner = handler(is_host=True)
        except RendezvousError as error:
            if nodes[1] == 1:
                raise InputError(
                    f"{place} cannot be the rendezvous: another program has that port"
                ) from error
            holds = False  # probably another launcher on this machine does
    if not holds:
        _wait_for_host(place, join_timeout_s, say)
        try:
            inner = bounded(lambda: handler(is_host=False), _STORE_S / 2)
        except (RendezvousError, TimeoutError) as error:
            raise InputError(
                f"what answers at {place} is no rendezvous: another program has that port; "
                "name another one, on all nodes"
            ) from error
    return Meeting(inner, place, nodes, holds=holds, node_rank=node_rank, say=say)


def _handler(
    place: Place, nodes: tuple[int, int], job_id: str, join_timeout_s: int, *, is_host: bool
) -> Any:
    """Torch's rendezvous."""
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=str(place),
        run_id=job_id,
        min_nodes=nodes[0],
        max_nodes=nodes[1],
        local_addr=place.local_addr,
        is_host=is_host,
        join_timeout=join_timeout_s,
        last_call_timeout=min(_LAST_CALL_S, join_timeout_s),
        read_timeout=_STORE_S,
    )
    backend, store = create_backend(parameters)
    return create_handler(store, backend, parameters)


def _wait_for_host(place: Place, timeout_s: float, say: Callable[[str], None]) -> None:
    """Until somebody listens there; torch's own waiting would not hear a Ctrl-C."""
    deadline = time.monotonic() + timeout_s
    with _told(f"waiting for the node at {place}, for {timeout_s} s at most", say):
        while True:
            try:
                socket.create_connection((place.host, place.port), timeout=2).close()
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise InputError(
                        f"nobody has answered at {place} for {timeout_s} s ({error}): start "
                        "`flambeau launch` there too, with the same --rdzv and --job-id"
                    ) from error
            time.sleep(0.2)


@contextlib.contextmanager
def _told(line: str, say: Callable[[str], None], after_s: float = 5.0) -> Iterator[None]:
    """Say what is waited for, if it takes long."""
    timer = threading.Timer(after_s, say, [f"flambeau: {line}"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def bounded(work: Callable[[], _T], timeout_s: float | None) -> _T:
    """Run something in a thread of its own, so that it ends here when a signal or a timeout says so.

    Raises:
        TimeoutError: it goes on in its thread, and nobody will know what becomes of it.
    """
    answers: list[tuple[_T | None, BaseException | None]] = []

    def run() -> None:
        try:
            answers.append((work(), None))
        except BaseException as error:
            answers.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not answers:
        raise TimeoutError
    value, error = answers[0]
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


class Meeting(RendezvousHandler):
    """Torch's rendezvous, and on several nodes what they have to tell each other after it.

    Attributes:
        place: where it is.
    """

    def __init__(
        self,
        inner: Any,
        place: Place,
        nodes: tuple[int, int],
        *,
        holds: bool,
        node_rank: int | None,
        say: Callable[[str], None],
    ) -> None:
        self.place, self._inner, self._most_nodes = place, inner, nodes[1]
        self._holds, self._node_rank, self._say = holds, node_rank, say
        self._news: News | None = None

    def get_backend(self) -> str:
        """The name of torch's backend."""
        return str(self._inner.get_backend())

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks use a store that a launcher holds, which is there as long as the job."""
        return bool(self._inner.use_agent_store)

    def get_run_id(self) -> str:
        """The name of the job."""
        return str(self._inner.get_run_id())

    def is_closed(self) -> bool:
        """Whether the job is over for those who come late."""
        return bool(self._inner.is_closed())

    def set_closed(self) -> None:
        """Let nobody join any more."""
        self._inner.set_closed()

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the other nodes; to be called in a thread.

        Raises:
            InputError: two nodes claim the same place.
            RendezvousError: they have not come in time, the job is over, or its host is gone.
        """
        if self._news is not None:
            self._news.end()
            self._news = None
        # Torch would keep the address of the first round's store, also when its node has gone, and torch
        # 2.11 stops at an assertion when another node has become the first.
        self._inner._bootstrap_store_info = None
        waiting: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._most_nodes > 1:
            waiting = _told(f"waiting for the other nodes at {self.place}", self._say)
        with waiting:
            info: RendezvousInfo = self._inner.next_rendezvous()
        if self._most_nodes > 1:
            ordered, nodes = self._in_order(info)
            self._news = News(self._inner.num_nodes_waiting, info.store, info.rank, nodes)
            self._news.start()
            return ordered
        return info

    def _in_order(self, info: RendezvousInfo) -> tuple[RendezvousInfo, list[str]]:
        """The nodes sorted by --node-rank, where they have one; and what each is called, as torch sorts."""
        name = f"{self.place.local_addr} (host {socket.gethostname()})"
        introduce(info.store, info.rank, json.dumps([self._node_rank, name]))
        claims = [json.loads(text) for text in introductions(info.store, info.world_size)]
        taken = sorted(rank for rank, _ in claims if rank is not None)
        if len(set(taken)) < len(taken):
            raise InputError(f"two nodes have the same --node-rank: those given are {taken}")
        order = sorted(
            range(len(claims)), key=lambda rank: (claims[rank][0] is None, claims[rank][0], rank)
        )
        bootstrap = info.bootstrap_store_info
        assert bootstrap is not None
        ordered = RendezvousInfo(info.store, order.index(info.rank), info.world_size, bootstrap)
        return ordered, [name for _, name in claims]

    def num_nodes_waiting(self) -> int:
        """How many nodes want the ranks to be started again with them."""
        return 0 if self._news is None else self._news.num_waiting

    @property
    def failure(self) -> NodeFailure | None:
        """Of any node, in this round."""
        return None if self._news is None else self._news.failure

    @property
    def is_alone(self) -> bool:
        """This is the only node of the job, now."""
        return self._news is None or self._news.num_nodes == 1

    @property
    def is_cut_off(self) -> bool:
        """There is no hearing from other nodes any more."""
        return self._news is not None and self._news.is_cut_off

    @property
    def lost(self) -> str | None:
        """Who has not been heard of for too long."""
        if self._news is None:
            return None
        if self._news.is_cut_off:
            return f"lost the node that holds the rendezvous, {self.place}"
        return self._news.silent_node

    @property
    def is_over(self) -> bool:
        """Another node's failure has ended the job."""
        return self._news is not None and self._news.is_over

    def publish(self, failure: NodeFailure, *, is_final: bool) -> None:
        """Tell the other nodes why ranks of this one have ended; returns at once."""
        if self._news is not None:
            self._news.publish(failure, is_final=is_final)

    def refresh(self) -> None:
        """Wait for what other nodes have said up to now, for a moment at most."""
        if self._news is not None:
            self._news.refresh()

    def everyone_is_done(self) -> bool:
        """Tell the other nodes that the ranks of this one are through, and hear whether theirs are."""
        if self._news is None:
            return True
        self._news.is_done = True
        return self._news.num_done == self._news.num_nodes

    def shutdown(self) -> bool:
        """Leave; the job is over for all nodes. Takes a few seconds at most.

        Returns:
            Whether torch's rendezvous could be closed.
        """
        is_cut_off = self.is_cut_off
        if self._news is not None and not is_cut_off:
            self._news.say_goodbye()
        try:
            closed = not is_cut_off and bounded(self._inner.shutdown, _CLOSE_S)
        except (RuntimeError, RendezvousError, TimeoutError):
            closed = False
        if self._holds and closed and self._most_nodes > 1:
            time.sleep(_CLOSED_S)
        if self._news is not None:
            if self._holds:
                self._news.wait_for_goodbyes()
            self._news.end()
        return closed
