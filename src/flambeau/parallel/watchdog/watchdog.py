"""A thread beside each rank, so that nothing hangs in silence: it names who was killed or makes no progress.

Each rank's watch writes a heartbeat and the stack of its main thread into the job's store every second. It
looks after a neighbour on the same machine, and when its own main thread has made no progress for too long,
it compares all heartbeats (`failure_detector`). Whoever finds a culprit first says so, once for the job; then
all ranks end. It also carries the agreement on where to stop (`stop_agreement`).

    watch = Watch(rank=rank, world=world, host=host, connect=connect, prefix=nonce, stall_timeout_s=60,
                  asked=lambda: FLAG.signal)
    watch.start()
    for batch in batches:
        watch.beat("forward")
        ...
        if watch.reach_point():
            break  # all ranks do, here
    watch.stop()
"""

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from torch.distributed import DistError, HashStore  # type: ignore[attr-defined]  # not in __all__
from torch.distributed.distributed_c10d import Store

from flambeau.parallel.watchdog.failure_detector import PACE, Failure, FailureDetector, Pace
from flambeau.parallel.watchdog.heartbeat import Pulse
from flambeau.parallel.watchdog.stack_dump import STACK_DUMP
from flambeau.parallel.watchdog.stop_agreement import StopAgreement
from flambeau.parallel.watchdog.store_client import StoreClient, StoreLost

LOST_PEER: Final = 76
"""EX_PROTOCOL of sysexits.h: another process of the job failed, and this one only says that it lost it."""

_ENDED_EARLY: Final = "its script ended before the run did"


class Watch:
    """The watch of one rank; all ranks have one, with the same settings.

    Args:
        rank: of this process.
        world: number of ranks.
        host: name of this machine.
        connect: makes a connection to the job's store, for the watch alone; not called if `world` is 1.
        prefix: of its keys, another one each time that the group is started.
        stall_timeout_s: no progress for longer is a stall; 0 is never one.
        asked: the name of the signal that asked this process to stop, or None.
        say: prints lines for people; takes no lock that a stuck main thread may hold.
        end: ends the process with a code.
        store_rank: the rank whose process serves the store, if one of them does.
        pace: how often it looks.
    """

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        host: str,
        connect: Callable[[], Store],
        prefix: str,
        stall_timeout_s: float,
        asked: Callable[[], str | None],
        say: Callable[[str], None] | None = None,
        end: Callable[[int], Any] = os._exit,
        store_rank: int | None = None,
        pace: Pace = PACE,
    ) -> None:
        self._rank, self._world, self._store_rank, self._pace = rank, world, store_rank, pace
        self._connect, self._prefix = connect if world > 1 else HashStore, prefix
        self._say, self._end = say or _say, end
        self._pulse = Pulse(timeout_s=stall_timeout_s, tick_s=pace.beat_s)
        self._stops = StopAgreement(rank=rank, world=world, asked=asked)
        self._detector = FailureDetector(
            rank=rank, world=world, host=host, pulse=self._pulse, store_rank=store_rank, pace=pace
        )
        self._thread = threading.Thread(target=self._run, name="flambeau watch", daemon=True)
        self._wake, self._settled = threading.Event(), threading.Event()
        # Written by the main thread.
        self._has_left = self._has_lost_peer = self._rests = False
        self._own: tuple[str, int] | None = None
        # Written by the other.
        self._failure: Failure | None = None
        self._num_changes = 0
        self._next_beat = 0.0
        self._others_leave = False

    # What the main thread does.

    def start(self) -> None:
        """From now on; in the thread that made it."""
        self._hook, sys.excepthook = sys.excepthook, self._excepthook
        atexit.register(self._at_exit)
        self._thread.start()

    def rest(self) -> None:
        """Nothing runs, and nobody is to make progress: the process may end as it likes."""
        self._rests, self._pulse.timeout_s = True, 0.0

    def wake(self, stall_timeout_s: float) -> None:
        """Something runs again."""
        self._rests, self._pulse.timeout_s = False, stall_timeout_s

    def stop(self) -> None:
        """This rank's run is over as it should be, and the others are told. Not for a run that failed."""
        if not self._is_on:
            return
        self._has_left = True
        self._wake.set()
        self._thread.join(2 * self._pace.store_s)
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._hook
        atexit.unregister(self._at_exit)

    def beat(self, phase: str) -> None:
        """The main thread makes progress; all ranks call it at the same places.

        Args:
            phase: what comes next, such as 'waiting for data' or 'saving'. The first time that a rank does
                it may take ten times as long.
        """
        self._pulse.beat(phase)

    def reach_point(self) -> str | None:
        """The main thread is where the run may stop; all ranks pass the same points.

        Returns:
            The name of a signal when all ranks stop here, else None.
        """
        self._pulse.reach_point()
        return self._stops.reach_point()

    @property
    def stops_next(self) -> bool:
        """It is settled that all ranks stop at their next point: what comes before it may be cut short."""
        return self._stops.stops_next

    def fail(self, cause: str, code: int) -> bool:
        """This rank dies of an error: tell the others, and write what torch's elastic agent reads.

        Args:
            cause: such as 'ValueError: no such file'; of several lines, the first.
            code: the exit code; the watch ends the process with it after five times the grace.

        Returns:
            Whether to print it; False when another rank has failed with the same words before.
        """
        cause = _first_line(cause)
        first, time_s = True, int(time.time())
        if self._is_on and self._thread.is_alive():
            self._own = (cause, code)
            self._wake.set()
            self._settled.wait(5)
            failure = self._failure
            if failure is not None and failure.by != self._rank:
                first = not failure.cause.endswith(cause)
                time_s = max(time_s, failure.time_s + 1)
            if self._store_rank == self._rank and self._world > 1:
                time.sleep(self._pace.grace_s)  # the others read it from this process
        _write_error_file(self._words(cause), time_s)
        return first

    def explain(self, error: BaseException) -> str | None:
        """Whether an error only comes of the loss of another rank; waits some seconds to learn what happened.

        Args:
            error: of the main thread.

        Returns:
            What happened, in a line that is printed already: leave with `LOST_PEER` and say nothing. None if
            the error is this rank's own.
        """
        if not (self._is_on and _is_of_collective(error)):
            return None
        self.beat("asking why a rank is lost")
        self._has_lost_peer = True
        self._settled.wait(self._pace.silent_s + self._pace.grace_s)
        return None if self._failure is None else self._failure.cause

    @property
    def _is_on(self) -> bool:
        """Started and not stopped, and not in a process that was forked from this one."""
        started = self._thread.ident is not None and not self._has_left
        return started and self._detector.me.pid == os.getpid()

    def _words(self, cause: str) -> str:
        return f"{self._detector.name(self._rank)} failed: {cause}"

    def _excepthook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not self._is_on:
            self._hook(kind, error, trace)
            return
        if self.explain(error) is not None:
            self._leave()
            return
        cause = traceback.format_exception_only(kind, error)[-1]
        if self.fail(cause, 1):
            self._hook(kind, error, trace)
            if self._world > 1:
                self._tell(self._words(_first_line(cause)))

    def _at_exit(self) -> None:
        """The interpreter ends; a thread that is inside torch then would abort it."""
        if not self._is_on or self._own or self._failure is not None:
            return
        if self._world == 1 or self._rests:
            self.stop()
        elif self.fail(_ENDED_EARLY, 1):
            self._tell(self._words(_ENDED_EARLY))

    # What the other thread does.

    def _run(self) -> None:
        client = StoreClient(self._connect, prefix=self._prefix, wait_s=self._pace.store_s)
        try:
            while not self._has_left and self._failure is None:
                self._look(client)
                self._pause()
            if self._failure is None:
                self._take_leave(client)
        except StoreLost as error:
            # When some are done, whoever serves the store may be: the rest of the run goes unwatched.
            if not (self._has_left or self._others_leave):
                failure = self._detector.loss_of_store(client.address, str(error))
                # Others on this machine find out now, too, and look who is alive: so stay for a while.
                self._settle(failure, hold_s=4 * self._pace.poll_s)
        finally:
            client.close()
            self._stops.abandon()
            STACK_DUMP.disarm()
        if self._failure is not None:
            self._end_soon()

    def _pause(self) -> None:
        self._wake.wait(self._pace.poll_s)
        self._wake.clear()

    def _look(self, client: StoreClient) -> None:
        """All that is to be done now and then."""
        self._pulse.keep_time()
        failure: Failure | None
        if self._own is not None:
            cause = self._words(self._own[0])
            failure = client.call(lambda store: self._detector.report(store, [self._rank], cause))
        else:
            failure = (
                client.call(self._talk)
                or self._detector.missing_neighbour(client)
                or self._detector.stall(client, has_lost_peer=self._has_lost_peer)
            )
        if failure is not None:
            self._settle(failure)

    def _talk(self, store: Store) -> Failure | None:
        """Tell what is due, and learn what is new."""
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + self._pace.beat_s
            self._detector.tell(store)
            if self._pulse.timeout_s:
                # Later than whoever can still say more: this thread, or another rank's.
                STACK_DUMP.arm(self._pulse.allowed_s + self._pace.store_s + 10)
        changes = store.add("changes", 0)
        if changes == self._num_changes and not self._stops.has_changes:
            return None
        self._num_changes = changes
        if store.check(["failure"]):
            return Failure(**json.loads(store.get("failure")))
        self._others_leave = store.check(["left"])
        self._stops.exchange(store)
        return None

    def _take_leave(self, client: StoreClient) -> None:
        """Tell the others that this rank is done. If its process serves the store, they leave it first."""

        def leave(store: Store) -> int:
            self._detector.tell(store, has_left=True)
            self._stops.leave(store)
            num_left = store.add("left", 1)
            store.add("changes", 1)
            return num_left

        num_left = client.call(leave)
        deadline = time.monotonic() + self._pace.store_s
        while self._store_rank == self._rank and num_left < self._world:
            if time.monotonic() > deadline or client.call(lambda store: store.check(["failure"])):
                break
            time.sleep(self._pace.poll_s)
            num_left = client.call(lambda store: store.add("left", 0))

    def _settle(self, failure: Failure, *, hold_s: float = 0.0) -> None:
        """The job fails: tell people if that falls to this rank, then the main thread."""
        self._failure = failure
        self._detector.kill_neighbour(failure)
        if self._own is None:
            # The agent takes the earliest for the reason of all.
            later_s = 0 if self._rank in failure.ranks else 1
            _write_error_file(failure.cause, failure.time_s + later_s)
            if self._detector.tells_host(failure):
                self._tell(failure.text if failure.by == self._rank else failure.cause)
        time.sleep(hold_s)
        self._settled.set()

    def _end_soon(self) -> None:
        """The main thread may end by itself, or even succeed, for a while."""
        since = time.monotonic()
        while time.monotonic() < since + self._pace.grace_s * (5 if self._own else 1):
            if self._has_left or (self._own and self._world == 1):
                return
            self._pause()
        self._leave()

    def _leave(self) -> None:
        """End the process, with what it has printed."""
        self._in_time(lambda: print(end="", flush=True))
        at_fault = self._failure is not None and self._rank in self._failure.ranks
        self._end(self._own[1] if self._own else 1 if at_fault else LOST_PEER)

    def _tell(self, text: str) -> None:
        self._in_time(lambda: self._say(f"flambeau: {text}"))

    def _in_time(self, write: Callable[[], None]) -> None:
        """Not for ever, should nobody read this process's output, or a stuck main thread hold a lock."""

        def attempt() -> None:
            with contextlib.suppress(OSError, ValueError):  # closed, by whoever reads it or by us
                write()

        writing = threading.Thread(target=attempt, daemon=True)
        writing.start()
        writing.join(self._pace.grace_s)


def _is_of_collective(error: BaseException | None) -> bool:
    """An error that torch raises when a connection to another rank breaks; gloo's are plain RuntimeErrors."""
    while error is not None:
        if isinstance(error, DistError):
            return True
        if isinstance(error, RuntimeError) and ("gloo/" in str(error) or "NCCL" in str(error)):
            return True
        error = error.__cause__
    return False


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:500]


def _write_error_file(cause: str, time_s: int) -> None:
    """Where torch's elastic agent looks for the reason of a failure, in its format."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        message = {"message": cause, "extraInfo": {"timestamp": str(time_s)}}
        with contextlib.suppress(OSError):  # a full disk, when there is something worse to tell
            Path(path).write_text(json.dumps({"message": message}))


def _say(text: str) -> None:
    """Standard error, without its locks: a main thread that is stuck may hold them."""
    descriptor = sys.__stderr__.fileno() if sys.__stderr__ else 2
    start = "\n" if os.isatty(descriptor) else ""  # a progress bar may stand there
    os.write(descriptor, f"{start}{text}\n".encode())
