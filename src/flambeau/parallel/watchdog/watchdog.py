"""A thread per rank that ends a job which cannot continue, and names the rank that was killed or stalled.

Each watchdog writes a heartbeat and the stack of its main thread into the job's store every second. It checks
that a neighbour on the same machine is alive, and compares the heartbeats of all ranks when its own main
thread makes no progress for too long (`failure_detector`). The first to find the cause prints it, once for
the whole job; then all ranks end. The thread also carries the agreement on where to stop (`stop_agreement`).

    watch = Watchdog(
        Member(rank, world, host), connect=connect, prefix=nonce, stall_timeout_s=60,
        stop_signal=lambda: FLAG.signal,
    )
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
import faulthandler
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

from flambeau.parallel.watchdog.failure_detector import PACE, Failure, FailureDetector, Member, Pace
from flambeau.parallel.watchdog.heartbeat import ProgressTracker
from flambeau.parallel.watchdog.stop_agreement import StopAgreement
from flambeau.parallel.watchdog.store_client import StoreClient, StoreLost
from flambeau.terminal import print_text

LOST_PEER: Final = 76
"""EX_PROTOCOL of sysexits.h: another process of the job failed, and this one only lost its peer."""

_ENDED_EARLY: Final = "its script ended before the run did"


class Watchdog:
    """The watchdog of one rank; all ranks have one, with the same settings.

    Args:
        connect: makes a separate connection to the job's store.
        prefix: of its keys, a new one at each start of the group.
        stall_timeout_s: a rank without progress has stalled after it; 0: never.
        stop_signal: the name of the signal that asked this process to stop, if any.
        say: prints a line; must take no lock of a stuck main thread.
    """

    def __init__(
        self,
        member: Member,
        *,
        connect: Callable[[], Store],
        prefix: str,
        stall_timeout_s: float,
        stop_signal: Callable[[], str | None],
        say: Callable[[str], None] | None = None,
        end: Callable[[int], Any] = os._exit,
        pace: Pace = PACE,
    ) -> None:
        self._rank, self._world, self._store_rank = member.rank, member.world, member.store_rank
        self._connect = connect if member.world > 1 else HashStore
        self._prefix = prefix
        self._pace = pace
        self._say = say or _say
        self._end = end
        self.note: Callable[[str], object] = lambda _: None
        self.on_restart_note: Callable[[str], object] = lambda _: None
        self._progress = ProgressTracker(timeout_s=stall_timeout_s, tick_s=pace.beat_s)
        self._stops = StopAgreement(rank=member.rank, world=member.world, stop_signal=stop_signal)
        self._detector = FailureDetector(member, self._progress, pace)
        self._thread = threading.Thread(target=self._run, name="flambeau watchdog", daemon=True)
        self._wake, self._is_explained = threading.Event(), threading.Event()
        self._is_disconnected = threading.Event()
        # Set by the main thread.
        self._has_left = self._has_lost_peer = self._is_paused = False
        self._local_failure: tuple[str, int] | None = None
        self._restart_note = ""
        # Set by the watchdog's thread.
        self._failure: Failure | None = None
        self._num_changes = 0
        self._next_beat = 0.0
        self._others_leave = False

    # Called by the main thread.

    def start(self) -> None:
        """Start to watch the calling thread, which made this object."""
        self._hook, sys.excepthook = sys.excepthook, self._excepthook
        atexit.register(self._at_exit)
        self._thread.start()

    def pause(self) -> None:
        """Expect no progress until `resume`; the process may end without an error."""
        self._is_paused = True
        self._progress.timeout_s = 0.0

    def resume(self, stall_timeout_s: float) -> None:
        self._is_paused = False
        self._progress.timeout_s = stall_timeout_s

    def stop(self) -> None:
        """End the watch of a run that has ended well, and let the others know. Not after a failure."""
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
            phase: what comes next, such as 'saving'. Its first time may take ten times as long.
        """
        self._progress.beat(phase)

    def reach_point(self) -> str | None:
        """The run can stop here, on all ranks: a signal's name if all do."""
        self._progress.reach_point()
        return self._stops.reach_point()

    @property
    def stops_next(self) -> bool:
        """Whether all ranks stop at their next point, so that work can be cut short."""
        return self._stops.stops_next

    def fail(self, cause: str, code: int, *, restart_note: str = "") -> bool:
        """This rank ends with an error: inform the others and torch's agent.

        Args:
            cause: such as 'ValueError: no such file'; its first line counts.
            code: exit code, if the process has not ended after five times `pace.grace_s`.
            restart_note: of rank 0, for the next start; it gets the time to write it.

        Returns:
            Whether to print it; False if another rank has reported the same.
        """
        cause = _first_line(cause)
        first = True
        time_s = int(time.time())
        if self._is_on and self._thread.is_alive():
            self._restart_note = restart_note
            self._local_failure = (cause, code)
            self._wake.set()
            self._is_explained.wait(5)
            failure = self._failure
            if failure is not None and failure.by != self._rank:
                first = not failure.cause.endswith(cause)
                time_s = max(time_s, failure.time_s + 1)
            if self._serves_others or restart_note:
                time.sleep(self._pace.grace_s)  # so that they can read it from this process
        _write_error_file(self._failed_text(cause), time_s)
        return first

    def explain(self, error: BaseException) -> str | None:
        """Another rank's failure, if it caused an error here; waits some seconds to find out.

        Returns:
            A line that is already printed: exit with `LOST_PEER` silently. None: it is this rank's own.
        """
        if not (self._is_on and _is_of_collective(error)):
            return None
        self.beat("finding out which rank is lost")
        self._has_lost_peer = True
        self._is_explained.wait(self._pace.silent_s + self._pace.grace_s)
        return None if self._failure is None else self._failure.cause

    @property
    def _is_on(self) -> bool:
        """Started, not stopped, and not in a forked child."""
        started = self._thread.ident is not None and not self._has_left
        return started and self._detector.me.pid == os.getpid()

    @property
    def _serves_others(self) -> bool:
        """The store is in this process."""
        return self._store_rank == self._rank and self._world > 1

    def _failed_text(self, cause: str) -> str:
        return f"{self._detector.name(self._rank)} failed: {cause}"

    def _excepthook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not self._is_on:
            self._hook(kind, error, trace)
            return
        if self.explain(error) is not None:
            self._exit()
            return
        cause = traceback.format_exception_only(kind, error)[-1]
        if self.fail(cause, 1):
            self._hook(kind, error, trace)
            if self._world > 1:
                self._print(self._failed_text(_first_line(cause)))

    def _at_exit(self) -> None:
        """Stop the thread before the interpreter ends: inside torch, it would abort the process."""
        if not self._is_on:
            return
        if self._local_failure or self._failure is not None:
            self._is_disconnected.wait(self._pace.store_s)
            return
        if self._world == 1 or self._is_paused:
            self.stop()
        elif self.fail(_ENDED_EARLY, 1):
            self._print(self._failed_text(_ENDED_EARLY))

    # Run by the watchdog's thread.

    def _run(self) -> None:
        client = StoreClient(self._connect, prefix=self._prefix, wait_s=self._pace.store_s)
        try:
            while not self._has_left and self._failure is None:
                self._check(client)
                self._wait()
            if self._failure is None:
                self._announce_end(client)
        except StoreLost as error:
            # If some ranks are done, so may be the one that serves the store: watch no longer.
            if not (self._has_left or self._others_leave):
                failure = self._detector.loss_of_store(client.address, str(error))
                # Stay for a while: others on this machine find out now too, and check who is alive.
                self._fail_job(failure, hold_s=4 * self._pace.poll_s)
        finally:
            client.close()
            self._is_disconnected.set()
            self._stops.abandon()
            STACK_DUMP.disarm()
        if self._failure is not None:
            self._end_soon()

    def _wait(self) -> None:
        self._wake.wait(self._pace.poll_s)
        self._wake.clear()

    def _check(self, client: StoreClient) -> None:
        self._progress.update()
        failure: Failure | None
        if self._local_failure is not None:
            cause = self._failed_text(self._local_failure[0])
            restart_note = self._restart_note
            failure = client.call(
                lambda store: self._detector.report(
                    store, [self._rank], cause, restart_note=restart_note
                )
            )
        else:
            failure = (
                client.call(self._exchange)
                or self._detector.missing_neighbour(client)
                or self._detector.stall(client, has_lost_peer=self._has_lost_peer)
            )
        if failure is not None:
            self._fail_job(failure)

    def _exchange(self, store: Store) -> Failure | None:
        """Write the heartbeat if it is due, and read what others have written."""
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + self._pace.beat_s
            self._detector.write_heartbeat(store)
            if self._progress.timeout_s:
                # Later than this thread's or another rank's report, which says more if they still run.
                STACK_DUMP.arm(self._progress.allowed_s + self._pace.store_s + 10)
        num_changes = store.add("changes", 0)
        if num_changes == self._num_changes and not self._stops.has_new_request:
            return None
        self._num_changes = num_changes
        if store.check(["failure"]):
            return Failure(**json.loads(store.get("failure")))
        self._others_leave = store.check(["left"])
        self._stops.exchange(store)
        return None

    def _announce_end(self, client: StoreClient) -> None:
        """Let the others know that this rank is done; if its process serves the store, wait for them."""

        def leave(store: Store) -> int:
            self._detector.write_heartbeat(store, has_left=True)
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

    def _fail_job(self, failure: Failure, *, hold_s: float = 0.0) -> None:
        """The job fails: print the cause if that is this rank's task, then wake the main thread."""
        self._failure = failure
        self._detector.kill_neighbour(failure)
        if self._local_failure is None:
            # Torch's agent reports the earliest.
            later_s = 0 if self._rank in failure.ranks else 1
            _write_error_file(failure.cause, failure.time_s + later_s)
            if failure.restart_note:
                self._in_bounded_time(lambda: self.on_restart_note(failure.restart_note))
            else:
                self._in_bounded_time(lambda: self.note(failure.cause))
            if self._detector.reports_on_host(failure):
                self._print(failure.text if failure.by == self._rank else failure.cause)
        # If this process serves the store, let the others read it there.
        time.sleep(max(hold_s, self._pace.grace_s if self._serves_others else 0.0))
        self._is_explained.set()

    def _end_soon(self) -> None:
        """Give the main thread some time to end by itself, or even to succeed."""
        since = time.monotonic()
        while time.monotonic() < since + self._pace.grace_s * (5 if self._local_failure else 1):
            if self._has_left or (self._local_failure and self._world == 1):
                return
            self._wait()
        self._exit()

    def _exit(self) -> None:
        self._in_bounded_time(lambda: print_text(end=""))
        at_fault = self._failure is not None and self._rank in self._failure.ranks
        self._end(self._local_failure[1] if self._local_failure else 1 if at_fault else LOST_PEER)

    def _print(self, text: str) -> None:
        self._in_bounded_time(lambda: self._say(f"flambeau: {text}"))

    def _in_bounded_time(self, write: Callable[[], object]) -> None:
        """Write, but not forever: the output may have no reader, or a stuck main thread may hold a lock."""

        def attempt() -> None:
            with contextlib.suppress(OSError, ValueError):  # closed by the reader or by us
                write()

        writing = threading.Thread(target=attempt, daemon=True)
        writing.start()
        writing.join(self._pace.grace_s)


def _is_of_collective(error: BaseException | None) -> bool:
    """Whether torch raised it for a broken connection to another rank; gloo raises plain RuntimeErrors."""
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
    """Write the cause of a failure where torch's elastic agent looks for it, in its format."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        message = {"message": cause, "extraInfo": {"timestamp": str(time_s)}}
        with contextlib.suppress(OSError):  # a full disk must not hide the failure itself
            Path(path).write_text(json.dumps({"message": message}))


def _say(text: str) -> None:
    """Write to standard error without its locks, which a stuck main thread may hold."""
    descriptor = sys.__stderr__.fileno() if sys.__stderr__ else 2
    start = "\n" if os.isatty(descriptor) else ""  # after a progress bar
    os.write(descriptor, f"{start}{text}\n".encode())


class StackDump:
    """Prints the stacks of all threads to standard error, unless postponed in time.

    By a timer of C, for when native code holds the GIL. It does not end the process, which may have been
    suspended as long.
    """

    def __init__(self) -> None:
        self._is_armed = self._is_registered = False
        self._lock = threading.Lock()

    def arm(self, after_s: float) -> None:
        """Print after this time, unless `arm` or `disarm` is called before."""
        if not self._is_registered:
            self._is_registered = True
            release = self._lock.release
            os.register_at_fork(
                before=self._before_fork, after_in_parent=release, after_in_child=release
            )
        with self._lock:
            self._is_armed = True
            faulthandler.dump_traceback_later(after_s, file=2)

    def disarm(self) -> None:
        with self._lock:
            self._cancel()

    def _before_fork(self) -> None:
        """At its exit a forked child would wait for the timer's thread, which it does not have."""
        self._lock.acquire()
        self._cancel()

    def _cancel(self) -> None:
        if self._is_armed:
            self._is_armed = False
            faulthandler.cancel_dump_traceback_later()


STACK_DUMP: Final = StackDump()
"""The only one of this process: faulthandler has a single timer."""
