"""Finds which rank was killed, is silent or has stalled, as far as one rank can know."""

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
    Heartbeat,
    Heartbeats,
    Process,
    ProgressTracker,
    frames_of,
    outlier_ranks,
    silent_ranks,
    stack_text,
    straggler_ranks,
)
from flambeau.parallel.watchdog.store_client import StoreClient


@dataclass(frozen=True)
class Pace:
    """Seconds, chosen so that the job of a killed rank is gone within 10 s.

    Attributes:
        poll_s: between checks of the store, the neighbour, and a stop request.
        grace_s: for the main thread to end by itself when the job fails.
        store_s: for an answer of the store.
    """

    poll_s: float = 0.25
    beat_s: float = 1.0
    grace_s: float = 2.0
    store_s: float = 30.0

    @property
    def silent_s(self) -> float:
        """A rank that has written no heartbeat for this time is silent."""
        return 3.5 * self.beat_s


PACE: Final = Pace()


@dataclass(frozen=True)
class Failure:
    """Why the job ends.

    Attributes:
        ranks: that caused it, if known.
        by: the rank that found it, and prints it.
        stack: of the first of `ranks`, as text.
        is_silent: their threads do not run, so they cannot end by themselves.
        restart_note: of rank 0, for the next start.
    """

    ranks: list[int]
    cause: str
    by: int
    host: str
    stack: str = ""
    is_silent: bool = False
    time_s: int = field(default_factory=lambda: int(time.time()))
    restart_note: str = ""

    @property
    def text(self) -> str:
        if not self.stack:
            return self.cause
        then = "was then" if self.is_silent else "is"
        return f"{self.cause}; where rank {self.ranks[0]} {then}, newest call last:\n{self.stack}"


@dataclass(frozen=True)
class Member:
    """A process of the job.

    Attributes:
        store_rank: the rank whose process serves the store, if any.
    """

    rank: int
    world: int
    host: str
    store_rank: int | None = None


class FailureDetector:
    """What one rank knows about the others, made in the watched thread, used in another."""

    def __init__(self, member: Member, progress: ProgressTracker, pace: Pace) -> None:
        self._rank, self._world = member.rank, member.world
        self._progress, self._pace = progress, pace
        self._store_rank = None if member.store_rank == member.rank else member.store_rank
        self.me = Process.this(member.host)
        self._main = threading.get_ident()
        self._peers: list[Process] = []
        self._neighbour: int | None = None
        self._before: tuple[float, Heartbeats] | None = None
        self._store_rank_frames = "[]"

    def name(self, rank: int) -> str:
        process = self._peers[rank] if self._peers else self.me if rank == self._rank else None
        where = "" if process is None else f" (host {process.host}, process {process.pid})"
        return f"rank {rank} of {self._world}{where}"

    def reports_on_host(self, failure: Failure) -> bool:
        """Whether this rank is the one on its machine that prints the failure."""
        here = [rank for rank, peer in enumerate(self._peers) if peer.host == self.me.host]
        elsewhere = failure.host != self.me.host
        return failure.by == self._rank or (elsewhere and here[:1] == [self._rank])

    def write_heartbeat(self, store: Store, *, has_left: bool = False) -> None:
        """Write a heartbeat and the stack; at first also register, and look up the others."""
        store.set(f"stack/{self._rank}", frames_of(self._main))
        store.set(f"beat/{self._rank}", json.dumps(self._progress.heartbeat(has_left=has_left)))
        if not self._peers:
            store.set(f"who/{self._rank}", json.dumps(self.me))
            self._find_peers(store)
        elif self._store_rank is not None and not has_left:
            # If that rank stops, so does the store, and its stack can no longer be read.
            self._store_rank_frames = store.get(f"stack/{self._store_rank}").decode()

    def report(
        self,
        store: Store,
        ranks: list[int],
        cause: str,
        *,
        stack: str = "",
        is_silent: bool = False,
        restart_note: str = "",
    ) -> Failure:
        """Publish why the job ends; returns the first failure, perhaps another rank's."""
        failure = Failure(
            ranks, cause, self._rank, self.me.host, stack, is_silent, restart_note=restart_note
        )
        first = store.compare_set("failure", "", json.dumps(asdict(failure)))
        store.add("changes", 1)
        return Failure(**json.loads(first))

    def missing_neighbour(self, client: StoreClient) -> Failure | None:
        """The failure of the neighbour on this machine, if it has ended before its run did."""
        neighbour = self._neighbour
        if neighbour is None or not self._peers[neighbour].is_gone:
            return None
        if client.call(lambda store: _read_beat(store, neighbour)).phase == LEFT:
            self._neighbour = None
            return None
        return client.call(lambda store: self.report(store, [neighbour], self._killed(neighbour)))

    def kill_neighbour(self, failure: Failure) -> None:
        """Kill the neighbour if it caused the failure and cannot end by itself."""
        neighbour = self._neighbour
        if neighbour is not None and failure.is_silent and neighbour in failure.ranks:
            process = self._peers[neighbour]
            if not process.is_gone:
                with contextlib.suppress(ProcessLookupError):  # gone by now
                    os.kill(process.pid, signal.SIGKILL)

    def stall(self, client: StoreClient, *, has_lost_peer: bool) -> Failure | None:
        """Why this rank makes no progress for too long: a silent rank, or else the slowest.

        With a lost peer a silent rank is looked for at once.
        """
        stalled_s = self._progress.stalled_s
        silent_s = self._pace.silent_s
        allowed_s = 0.0 if has_lost_peer else self._progress.allowed_s
        if not has_lost_peer and (allowed_s == 0 or stalled_s + silent_s < allowed_s):
            self._before = None
            return None
        if self._before is None or stalled_s < self._before[0]:
            self._before = stalled_s, client.call(self._read_beats)
            return None
        since_s, before = self._before
        if stalled_s < max(since_s + silent_s, allowed_s):
            return None
        client.call(self.write_heartbeat)  # up to date, in case this rank is the slowest
        after = client.call(self._read_beats)
        self._before = stalled_s, after
        ranks = silent_ranks(before, after)
        if ranks:
            cause = self._silence_text(ranks, after[ranks[0]], after[self._rank])
            return client.call(self._reporting(ranks, cause, is_silent=True))
        ranks = [] if has_lost_peer else straggler_ranks(after)
        if len(ranks) > 1:
            ranks = outlier_ranks(
                client.call(lambda store: {r: _read_frames(store, r) for r in ranks})
            )
        beat = after[ranks[0]] if ranks else None
        if beat is None:
            return None
        return client.call(self._reporting(ranks, self._stall_text(ranks, beat), is_silent=False))

    def loss_of_store(self, address: str, error: str) -> Failure:
        """The failure to report when the store is lost; each machine finds out by itself."""
        namespace = self.me.pid_namespace
        here = [self._rank]
        if namespace:
            here = [
                r for r, peer in enumerate(self._peers) if peer.pid_namespace == namespace
            ] or here
        gone: list[int] = []
        for _ in range(5):  # a process closes its connections a moment before it is gone
            gone = gone or [rank for rank in here if self._peers and self._peers[rank].is_gone]
            time.sleep(0.1)
        loss = f"lost the rendezvous store at {address}: {error}"
        server = self._store_rank
        stack = ""
        if gone:
            cause = self._killed(server if server is not None and server in gone else gone[0])
        elif server is not None:
            gone = [server]
            stack = stack_text(self._store_rank_frames)
            cause = f"{self.name(server)}, which serves the store, is gone or stopped: {loss}"
        else:
            cause = loss
        by = next((rank for rank in here if rank not in gone), self._rank)
        return Failure(gone, cause, by, self.me.host, stack, is_silent=True)

    def _find_peers(self, store: Store) -> None:
        keys = [f"who/{rank}" for rank in range(self._world)]
        if not store.check(keys):
            return
        self._peers = [Process(*json.loads(value)) for value in store.multi_get(keys)]
        to_the_left = [(self._rank - step) % self._world for step in range(1, self._world)]
        namespace = self.me.pid_namespace
        self._neighbour = next(
            (r for r in to_the_left if namespace and self._peers[r].pid_namespace == namespace),
            None,
        )

    def _reporting(
        self, ranks: list[int], cause: str, *, is_silent: bool
    ) -> Callable[[Store], Failure]:
        def report(store: Store) -> Failure:
            known = store.check([f"stack/{ranks[0]}"])
            stack = stack_text(_read_frames(store, ranks[0])) if known else ""
            return self.report(store, ranks, cause, stack=stack, is_silent=is_silent)

        return report

    def _read_beats(self, store: Store) -> Heartbeats:
        keys = [f"beat/{rank}" for rank in range(self._world)]
        if store.check(keys):
            return [Heartbeat(*json.loads(value)) for value in store.multi_get(keys)]
        return [_read_beat(store, r) if store.check([key]) else None for r, key in enumerate(keys)]

    def _killed(self, rank: int) -> str:
        return f"{self.name(rank)} was killed"

    def _silence_text(
        self, ranks: Sequence[int], beat: Heartbeat | None, mine: Heartbeat | None
    ) -> str:
        who = self._names(ranks)
        if beat is None:
            return f"{who} not started at all"
        text = f"{who} been silent for {self._pace.silent_s:.0f} s, last seen {beat.phase}"
        # Its last heartbeat may be a second old, while this rank, which waits for it, is further.
        if mine is None or (further := mine.point - beat.point) <= 0:
            return text
        steps = f"{further} step{'s' * (further > 1)} further"
        return f"{text}; rank {self._rank}, which waits for it, is {steps} ({mine.phase})"

    def _stall_text(self, ranks: Sequence[int], beat: Heartbeat) -> str:
        return (
            f"{self._names(ranks)} made no progress for {beat.stalled_s:.0f} s while {beat.phase}"
        )

    def _names(self, ranks: Sequence[int]) -> str:
        if len(ranks) == 1:
            return f"{self.name(ranks[0])} has"
        if len(ranks) == self._world:
            return f"all {self._world} ranks have"
        return f"ranks {', '.join(map(str, ranks))} of {self._world} have"


def _read_beat(store: Store, rank: int) -> Heartbeat:
    return Heartbeat(*json.loads(store.get(f"beat/{rank}")))


def _read_frames(store: Store, rank: int) -> str:
    return store.get(f"stack/{rank}").decode()
