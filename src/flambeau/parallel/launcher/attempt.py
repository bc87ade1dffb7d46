"""One start of the ranks, watched from this machine: when it is over, and what to tell the user."""

import dataclasses
import json
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from flambeau.parallel.launcher.rank_processes import RankProcesses
from flambeau.parallel.launcher.rendezvous_store import NEVER_AGAIN, AttemptStatus, Ending
from flambeau.parallel.preemption import EXIT_CODE, INTERRUPTED, OUT_OF_MEMORY
from flambeau.parallel.watchdog.watchdog import LOST_PEER

_GRACE_S = 1.5  # between SIGTERM and SIGKILL, once a rank has failed
_SAVE_S = 60.0  # the same if ranks may save first, because a node joins
_ROOT_S = 2.0  # to wait for the report of a lost peer itself
_REPORT_S = 0.1  # between the end of a rank and the report of the watchdog that ended it
_STOPPED_S = 10.0  # a rank stopped for this time is named, and killed if it is to end
_MAX_PASSED_S = 1.0  # counted between two polls: this process may have been stopped as well
_BY_SIGNAL = "by SIGSTOP or another such signal"
_CAUSE_CHARS = 300
_LOST = 2  # weight of a failure that a peer has caused


class Outcome(NamedTuple):
    code: int
    line: str | None = None


class Attempt:
    """Watches this machine's ranks, and ends all if one fails, here or elsewhere.

    Args:
        num_restarts: how often ranks have failed before, and how often they may.
        can_halve: running out of memory is no failure: ranks go on in smaller micro-batches.
    """

    def __init__(
        self,
        ranks: RankProcesses,
        status: AttemptStatus | None,
        *,
        rendezvous: str,
        signals: Sequence[signal.Signals],
        num_restarts: tuple[int, int],
        can_halve: bool = True,
        say: Callable[[str], None],
    ) -> None:
        self.outcome: Outcome | None = None
        self.ending: Ending | None = None
        self._ranks, self._status, self._rendezvous, self._say = ranks, status, rendezvous, say
        self._signals = signals
        self._num_sent = 0
        self._num_restarts = num_restarts
        self._can_halve = can_halve
        self._failures: list[Ending] = []
        self._noted = set[int]()
        self._lost_at: float | None = None
        self._looked_at = time.monotonic()
        self._stopped_s: dict[int, float] = {}
        self._said_stopped: set[int] = set()
        self._host = socket.gethostname()

    def poll(self) -> bool:
        """Do what is due; returns whether the attempt is over."""
        self._ranks.poll()
        for number in sorted(self._ranks.codes.keys() - self._noted):
            self._noted.add(number)
            self._note(number, self._ranks.codes[number])
        codes = list(self._ranks.codes.values())
        is_running = self._ranks.is_running
        if self._signals.count(signal.SIGINT) > 1:
            if is_running:  # for a moment
                self._ranks.kill()  # again, because some may have been starting
                return False
            ending = Ending(f"interrupted on host {self._host}", INTERRUPTED, 0)
            return self._end(ending, Outcome(INTERRUPTED, "interrupted"))
        while self._num_sent < len(self._signals):
            self._ranks.send(self._signals[self._num_sent])
            self._num_sent += 1
            self._stopped_s.clear()
        stopped = self._stopped_ranks()
        if is_running and (self._signals or EXIT_CODE in codes):
            if not stopped:
                return False  # they save; the user can press Ctrl-C again
            self._failures += map(self._could_not_end, stopped)
        else:
            self._say_stopped(stopped)
        if not is_running and not self._failures:
            return self._all_ended_well(codes)
        root = self._root()
        if root is None or (root.weight >= _LOST and self._may_learn_more()):
            return False
        return self._fail(root)

    def _stopped_ranks(self) -> list[int]:
        """The ranks that have been stopped for too long, counted anew after each forwarded signal."""
        now = time.monotonic()
        before = self._stopped_s
        passed_s, self._looked_at = min(now - self._looked_at, _MAX_PASSED_S), now
        self._stopped_s = {n: before.get(n, 0.0) + passed_s for n in self._ranks.stopped()}
        return [n for n, stopped_s in self._stopped_s.items() if stopped_s >= _STOPPED_S]

    def _say_stopped(self, numbers: Sequence[int]) -> None:
        for number in set(numbers) - self._said_stopped:
            pid = self._ranks.started[number].pid
            self._say(
                f"flambeau: {self._name(number)} has been stopped for {_STOPPED_S:.0f} s, {_BY_SIGNAL}: "
                f"kill -CONT {pid} lets it go on"
            )
        self._said_stopped = set(numbers)

    def _could_not_end(self, number: int) -> Ending:
        """A rank that should save and leave, but reacts only to SIGKILL."""
        name = self._name(number)
        return Ending(f"{name} was stopped, {_BY_SIGNAL}, and had to be killed", 1, 0)

    def _name(self, number: int) -> str:
        rank = self._ranks.started[number]
        return _name_of(rank.rank, rank.world, self._host, rank.pid)

    def _all_ended_well(self, codes: Sequence[int]) -> bool:
        """The ranks of this machine have ended as they should; the job ends when those of all nodes have."""
        outcome = stopped(codes) if any(codes) else Outcome(0)
        if not {0, EXIT_CODE}.issuperset(codes):
            # A signal has ended them, without agreeing with the ranks of other nodes.
            reason = f"stopped by {self._signals[0].name} on host {self._host}"
            return self._end(Ending(reason, outcome.code, 0), outcome)
        if self._status is not None:
            self._status.is_done = True
            if not self._status.everyone_is_done and self._lost() is None:
                ending = self._status.ending
                return ending is not None and self._fail(ending)
        return self._end(None, outcome)

    def _lost(self) -> str | None:
        """The node that has been silent for too long, in words."""
        if self._status is None:
            return None
        if self._status.is_cut_off:
            return f"lost the node that holds the rendezvous, {self._rendezvous}"
        return self._status.silent_node

    def _root(self) -> Ending | None:
        """What is wrong, as far as known here."""
        if self._failures:
            return min(self._failures, key=lambda failure: failure.weight)
        if self._status is not None and self._status.ending is not None:
            return self._status.ending
        lost = self._lost()
        return None if lost is None else Ending(lost, 1, _LOST + 1)

    def _may_learn_more(self) -> bool:
        """Whether a peer that other ranks have lost may still report the cause itself."""
        self._lost_at = self._lost_at or time.monotonic()
        known = None if self._status is None else self._status.ending
        is_only_node = self._status is None or self._status.num_nodes == 1
        alone = not self._ranks.is_running and is_only_node
        waited = time.monotonic() - self._lost_at
        return waited < _ROOT_S and not alone and (known is None or known.weight >= _LOST)

    def _fail(self, root: Ending) -> bool:
        """End the ranks because one failed, here or on another node, or because a node joins."""
        is_local = root in self._failures
        if is_local and root.code == -signal.SIGKILL:
            time.sleep(_REPORT_S)
            causes = [self._cause(number) for number in self._ranks.started]
            root = dataclasses.replace(root, line=_explained(root.line, causes))
        root = dataclasses.replace(root, is_final=self._is_final(root))
        ending = self._publish(root)
        # After running out of memory they wait in vain for the lost rank.
        may_save = not ending.is_failure and ending.code != OUT_OF_MEMORY
        self._ranks.end(_SAVE_S if may_save else _GRACE_S)
        if self._status is not None:
            self._status.refresh()
            ending = self._status.ending or ending
        self.ending = ending
        if self._signals and _is_stop(ending.code, self._signals):
            # The signal reached a rank first: some schedulers send it to all processes of a job.
            self.outcome = stopped([ending.code])
        elif self._is_final(ending):
            was_reported = is_local and ending == root and root.code in NEVER_AGAIN
            self.outcome = Outcome(ending.final_code, None if was_reported else ending.line)
        else:
            count, most = self._num_restarts
            again = f" (restart {count + 1} of {most})" if ending.is_failure else ""
            self._say(f"flambeau: {ending.line}; starting the ranks again{again}")
        return True

    def _publish(self, ending: Ending) -> Ending:
        """Publish it; returns the one that counts among all nodes."""
        if self._status is None:
            return ending
        self._status.publish(ending)
        return self._status.ending or ending

    def _is_final(self, ending: Ending) -> bool:
        count, most = self._num_restarts
        return bool(
            ending.is_final
            or (ending.is_failure and (count == most or ending.code in NEVER_AGAIN))
            or self._signals
            or (self._status is not None and self._status.is_cut_off)
        )

    def _end(self, ending: Ending | None, outcome: Outcome) -> bool:
        if ending is not None:
            self._publish(dataclasses.replace(ending, is_final=True))
        self.ending, self.outcome = ending, outcome
        return True

    def _note(self, number: int, code: int) -> None:
        """A rank has ended by itself: note it if that is a failure."""
        if code in (0, EXIT_CODE) or _is_stop(code, self._signals):
            return
        line = _line_of(self._name(number), code, self._cause(number))
        # A rank aborts itself (SIGABRT), perhaps because of another one.
        weight = 0 if code < 0 and -code != signal.SIGABRT else _LOST if code == LOST_PEER else 1
        is_failure = code != OUT_OF_MEMORY or not self._can_halve
        self._failures.append(Ending(line, code, weight, is_failure=is_failure))

    def _cause(self, number: int) -> str:
        """The first line of a rank's error file, which has torch's format; empty if there is none."""
        try:
            content = (self._ranks.folder / f"{number}.error").read_bytes()
            message = json.loads(content)["message"]
            text = message if isinstance(message, str) else message["message"]
            first = str(text).strip().splitlines()[0]
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            return ""
        return first if len(first) <= _CAUSE_CHARS else first[:_CAUSE_CHARS] + "..."


def _is_stop(code: int, signals: Sequence[signal.Signals]) -> bool:
    """Whether a forwarded signal has ended a rank that did not handle it."""
    return any(code in (-number, 128 + number) for number in signals)


def stopped(codes: Sequence[int]) -> Outcome:
    """The outcome of ranks that were asked to stop, from their exit codes, or negative signals."""
    if {INTERRUPTED, -signal.SIGINT} & set(codes):
        return Outcome(INTERRUPTED, "interrupted")
    return Outcome(EXIT_CODE)


# ---------------------------------------------------------------- messages about a rank that has ended


def _name_of(rank: int, world: int, host: str, process: int) -> str:
    """The name of a rank in messages, the same as in `flambeau.parallel.watchdog.failure_detector`."""
    return f"rank {rank} of {world} (host {host}, process {process})"


def _line_of(name: str, code: int, cause: str) -> str:
    """How a rank has ended (its exit code, negative for a signal), and why, as far as known.

    `cause` is the first line of its error file; the rank's watchdog may have written the whole line there.
    """
    cause = cause.removeprefix(f"{name} failed: ")
    if cause.startswith(f"{name} ") or (code == LOST_PEER and cause.startswith("rank")):
        return cause
    how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    return f"{name} {how}: {cause}" if cause else f"{name} {how}"


def _explained(line: str, causes: Sequence[str]) -> str:
    """The line of a killed rank, or the report of others if their watchdog killed it."""
    name = line.partition(" was killed by ")[0]
    for cause in causes:
        if cause.startswith(f"{name} ") and not cause.endswith(" was killed"):
            return cause
    return line


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
