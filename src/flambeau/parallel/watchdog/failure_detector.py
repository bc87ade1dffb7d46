"""Who was killed, has fallen silent or makes no progress: what one rank can find out about the others."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

from torch.distributed.distributed_c10d import Store

from flambeau.parallel.watchdog.heartbeat import (
    LEFT,
    Beat,
    Beats,
    Process,
    Pulse,
    frames_of,
    odd_ranks,
    silent_ranks,
    stack_text,
    straggler_ranks,
)
from flambeau.parallel.watchdog.store_client import StoreClient


@dataclass(frozen=True)
class Pace:
    """Seconds; chosen so that the job of a killed rank is gone within 10 s.

    Attributes:
        poll_s: between two looks at the store, at the neighbour, and at whether this process is to stop.
        beat_s: between two heartbeats.
        grace_s: for the main thread to end by itself when the job fails.
        store_s: after which a store that does not answer is lost.
    """

    poll_s: float = 0.25
    beat_s: float = 1.0
    grace_s: float = 2.0
    store_s: float = 30.0

    @property
    def silent_s(self) -> float:
        """A rank that has written no heartbeat for so long is silent."""
        return 3.5 * self.beat_s


PACE: Final = Pace()


@dataclass(frozen=True)
class Failure:
    """Why the job ends.

    Attributes:
        ranks: whose fault it is; empty if it is nobody's.
        cause: one line.
        by: the rank that has found it, and tells people.
        host: of that rank.
        stack: of the first culprit, as text.
        is_silent: their threads do not run, so they cannot end by themselves.
        time_s: since 1970.
    """

    ranks: list[int]
    cause: str
    by: int
    host: str
    stack: str = ""
    is_silent: bool = False
    time_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def text(self) -> str:
        """All of it, for people."""
        if not self.stack:
            return self.cause
        return f"{self.cause}; where rank {self.ranks[0]} is, newest call last:\n{self.stack}"


class FailureDetector:
    """What one rank knows of the others. Made in the thread that it watches, used by another one.

    Args:
        rank: of this process.
        world: number of ranks.
        host: name of this machine.
        pulse: of the thread to be watched.
        store_rank: the rank whose process serves the store, if one of them does.
        pace: how often this looks.
    """

    def __init__(
        self, *, rank: int, world: int, host: str, pulse: Pulse, store_rank: int | None, pace: Pace
    ) -> None:
        self._rank, self._world, self._pulse, self._pace = rank, world, pulse, pace
        self._store_rank = None if store_rank == rank else store_rank
        self.me = Process.this(host)
        self._main = threading.get_ident()
        self._peers: list[Process] = []
        self._left: int | None = None
        self._before: tuple[float, Beats] | None = None
        self._store_rank_frames = "[]"

    def name(self, rank: int) -> str:
        """A rank, for people."""
        process = self._peers[rank] if self._peers else self.me if rank == self._rank else None
        where = "" if process is None else f" (host {process.host}, process {process.pid})"
        return f"rank {rank} of {self._world}{where}"

    def tells_host(self, failure: Failure) -> bool:
        """It falls to this rank to tell the people who read the output of this machine."""
        here = [rank for rank, peer in enumerate(self._peers) if peer.host == self.me.host]
        elsewhere = failure.host != self.me.host
        return failure.by == self._rank or (elsewhere and here[:1] == [self._rank])

    def tell(self, store: Store, *, has_left: bool = False) -> None:
        """Write a heartbeat; the first time, this also makes the rank known. Learn who the others are."""
        store.set(f"stack/{self._rank}", frames_of(self._main))
        store.set(f"beat/{self._rank}", json.dumps(self._pulse.take(has_left=has_left)))
        if not self._peers:
            store.set(f"who/{self._rank}", json.dumps(self.me))
            self._meet(store)
        elif self._store_rank is not None and not has_left:
            # When that rank stops, so does the store, and what it has told cannot be read any more.
            self._store_rank_frames = store.get(f"stack/{self._store_rank}").decode()

    def report(
        self,
        store: Store,
        ranks: list[int],
        cause: str,
        *,
        stack: str = "",
        is_silent: bool = False,
    ) -> Failure:
        """Tell all ranks why the job ends.

        Returns:
            What the first one has reported, which may have been another.
        """
        failure = Failure(ranks, cause, self._rank, self.me.host, stack, is_silent)
        own = json.dumps(asdict(failure))
        first = store.compare_set("failure", "", own)
        store.add("changes", 1)
        return Failure(**json.loads(first))

    def missing_neighbour(self, client: StoreClient) -> Failure | None:
        """The next rank to the left on this machine has gone without having left."""
        left = self._left
        if left is None or not self._peers[left].is_gone:
            return None
        if client.call(lambda store: _read_beat(store, left)).phase == LEFT:
            self._left = None
            return None
        return client.call(lambda store: self.report(store, [left], self._killed(left)))

    def kill_neighbour(self, failure: Failure) -> None:
        """End the rank to the left if it is a culprit and cannot end itself, being stopped, say."""
        left = self._left
        if left is not None and failure.is_silent and left in failure.ranks:
            process = self._peers[left]
            if not process.is_gone:
                with contextlib.suppress(ProcessLookupError):  # gone by now
                    os.kill(process.pid, signal.SIGKILL)

    def stall(self, client: StoreClient, *, has_lost_peer: bool) -> Failure | None:
        """Why this rank makes no progress, if for too long: who is silent or, if nobody, who is behind.

        Args:
            client: of the store.
            has_lost_peer: a connection to another rank is broken, which is reason enough to look who is
                silent.
        """
        still_s, silent_s = self._pulse.still_s, self._pace.silent_s
        allowed_s = 0.0 if has_lost_peer else self._pulse.allowed_s
        if not has_lost_peer and (allowed_s == 0 or still_s + silent_s < allowed_s):
            self._before = None
            return None
        if self._before is None or still_s < self._before[0]:
            self._before = still_s, client.call(self._read_beats)
            return None
        since_s, before = self._before
        if still_s < max(since_s + silent_s, allowed_s):
            return None
        client.call(self.tell)  # with the time until now, in case that this rank is behind
        after = client.call(self._read_beats)
        self._before = still_s, after
        ranks = silent_ranks(before, after)
        if ranks:
            cause = self._silence(ranks, after[ranks[0]])
            return client.call(self._accuse(ranks, cause, is_silent=True))
        ranks = [] if has_lost_peer else straggler_ranks(after)
        if len(ranks) > 1:
            ranks = odd_ranks(client.call(lambda store: {r: _read_frames(store, r) for r in ranks}))
        beat = after[ranks[0]] if ranks else None
        if beat is None:
            return None
        return client.call(self._accuse(ranks, self._no_progress(ranks, beat), is_silent=False))

    def loss_of_store(self, address: str, error: str) -> Failure:
        """What it means that the store is gone. Each machine finds out for itself."""
        here = [self._rank]
        if self.me.place:
            here = [r for r, peer in enumerate(self._peers) if peer.place == self.me.place] or here
        gone: list[int] = []
        for _ in range(5):  # a process closes its connections before it is seen to be gone
            gone = gone or [rank for rank in here if self._peers and self._peers[rank].is_gone]
            time.sleep(0.1)
        loss, server, stack = (
            f"lost the rendezvous store at {address}: {error}",
            self._store_rank,
            "",
        )
        if gone:
            cause = self._killed(server if server is not None and server in gone else gone[0])
        elif server is not None:
            gone, stack = [server], stack_text(self._store_rank_frames)
            cause = f"{self.name(server)}, which serves the store, is gone or stopped: {loss}"
        else:
            cause = loss
        by = next((rank for rank in here if rank not in gone), self._rank)
        return Failure(gone, cause, by, self.me.host, stack, is_silent=True)

    def _meet(self, store: Store) -> None:
        """Learn who the others are, once all have shown themselves."""
        keys = [f"who/{rank}" for rank in range(self._world)]
        if not store.check(keys):
            return
        self._peers = [Process(*json.loads(value)) for value in store.multi_get(keys)]
        to_the_left = [(self._rank - step) % self._world for step in range(1, self._world)]
        place = self.me.place
        self._left = next((r for r in to_the_left if place and self._peers[r].place == place), None)

    def _accuse(
        self, ranks: list[int], cause: str, *, is_silent: bool
    ) -> Callable[[Store], Failure]:
        def accuse(store: Store) -> Failure:
            known = store.check([f"stack/{ranks[0]}"])
            stack = stack_text(_read_frames(store, ranks[0])) if known else ""
            return self.report(store, ranks, cause, stack=stack, is_silent=is_silent)

        return accuse

    def _read_beats(self, store: Store) -> Beats:
        keys = [f"beat/{rank}" for rank in range(self._world)]
        if store.check(keys):
            return [Beat(*json.loads(value)) for value in store.multi_get(keys)]
        return [_read_beat(store, r) if store.check([key]) else None for r, key in enumerate(keys)]

    def _killed(self, rank: int) -> str:
        return f"{self.name(rank)} was killed"

    def _silence(self, ranks: Sequence[int], beat: Beat | None) -> str:
        who = self._names(ranks)
        if beat is None:
            return f"{who} not shown up at all"
        return f"{who} been silent for {self._pace.silent_s:.0f} s, last seen {beat.phase}"

    def _no_progress(self, ranks: Sequence[int], beat: Beat) -> str:
        return f"{self._names(ranks)} made no progress for {beat.still_s:.0f} s while {beat.phase}"

    def _names(self, ranks: Sequence[int]) -> str:
        if len(ranks) == 1:
            return f"{self.name(ranks[0])} has"
        if len(ranks) == self._world:
            return f"all {self._world} ranks have"
        return f"ranks {', '.join(map(str, ranks))} of {self._world} have"


def _read_beat(store: Store, rank: int) -> Beat:
    return Beat(*json.loads(store.get(f"beat/{rank}")))


def _read_frames(store: Store, rank: int) -> str:
    return store.get(f"stack/{rank}").decode()
