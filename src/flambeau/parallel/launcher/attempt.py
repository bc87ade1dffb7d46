"""One start of the ranks, watched from this machine: when it is over, and what to tell the user."""

import dataclasses
import json
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from flambeau.parallel.launcher.job_status import NEVER_AGAIN, Ending, RoundStatus
from flambeau.parallel.launcher.rank_processes import RankProcesses
from flambeau.parallel.preemption import EXIT_CODE, INTERRUPTED, OUT_OF_MEMORY
from flambeau.parallel.watchdog.watchdog import LOST_PEER

_GRACE_S = 1.5  # between SIGTERM and SIGKILL, once a rank has failed
_SAVE_S = 60.0  # the same where ranks may save first, because a node joins
_ROOT_S = 2.0  # ranks that have lost a peer wait so long for that peer's own report
_LAST_WORDS_S = 0.1  # between the end of a rank and the word of who has ended it
_STOPPED_S = 10.0  # a rank that was stopped so long is named, and killed if it ought to end
_LOOK_AWAY_S = 1.0  # counted at most between two looks: this process may have been stopped as well
_BY_SIGNAL = "by SIGSTOP or another such signal"
_CAUSE_CHARS = 300
_LOST = 2  # weight of a failure that is that of a peer


class Outcome(NamedTuple):
    """How a job has ended.

    Attributes:
        code: exit code of the launcher.
        line: the last line for the user, if any.
    """

    code: int
    line: str | None = None


class Round:
    """Watches the ranks of this machine, and ends all of them for one that failed, here or elsewhere.

    Args:
        ranks: of this machine.
        status: of the other machines, if there are any.
        place: where the machines meet, for people.
        signals: grows by what the ranks are to be sent.
        num_restarts: how often ranks have failed before, and how often they may.
        can_halve: a rank that has run out of memory is no failure, for it trains in smaller parts then.
        say: prints a line.

    Attributes:
        outcome: of the job; None while it goes on.
        ending: why the ranks have ended, unless they were done.
    """

    def __init__(
        self,
        ranks: RankProcesses,
        status: RoundStatus | None,
        *,
        place: str,
        signals: Sequence[signal.Signals],
        num_restarts: tuple[int, int],
        can_halve: bool = True,
        say: Callable[[str], None],
    ) -> None:
        self.outcome: Outcome | None = None
        self.ending: Ending | None = None
        self._ranks, self._status, self._place, self._say = ranks, status, place, say
        self._signals = signals
        self._num_sent = 0
        self._num_restarts = num_restarts
        self._can_halve = can_halve
        self._failures: list[Ending] = []
        self._noted = set[int]()
        self._lost_at: float | None = None
        self._looked_at = time.monotonic()
        self._stopped_s: dict[int, float] = {}
        self._told_stopped: set[int] = set()
        self._host = socket.gethostname()

    def look(self) -> bool:
        """Do what is due; whether the round is over."""
        self._ranks.poll()
        for number in sorted(self._ranks.codes.keys() - self._noted):  # some before the first look
            self._noted.add(number)
            self._note(number, self._ranks.codes[number])
        codes = list(self._ranks.codes.values())
        is_running = self._ranks.is_running
        if self._signals.count(signal.SIGINT) > 1:
            if is_running:  # for a moment
                self._ranks.kill()  # again: some may have been starting
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
                return False  # they save; whoever has asked for it may lose patience
            self._failures += map(self._could_not_end, stopped)
        else:
            self._tell_stopped(stopped)
        if not is_running and not self._failures:
            return self._all_ended_well(codes)
        root = self._root()
        if root is None or (root.weight >= _LOST and self._may_learn_more()):
            return False
        return self._fail(root)

    def _stopped_ranks(self) -> list[int]:
        """Who has stood still for too long, or has since it was sent a signal."""
        now = time.monotonic()
        before = self._stopped_s
        passed_s, self._looked_at = min(now - self._looked_at, _LOOK_AWAY_S), now
        self._stopped_s = {n: before.get(n, 0.0) + passed_s for n in self._ranks.stopped()}
        return [n for n, stopped_s in self._stopped_s.items() if stopped_s >= _STOPPED_S]

    def _tell_stopped(self, numbers: Sequence[int]) -> None:
        for number in set(numbers) - self._told_stopped:
            pid = self._ranks.started[number].pid
            self._say(
                f"flambeau: {self._name(number)} has been stopped for {_STOPPED_S:.0f} s, {_BY_SIGNAL}: "
                f"kill -CONT {pid} lets it go on"
            )
        self._told_stopped = set(numbers)

    def _could_not_end(self, number: int) -> Ending:
        """A rank that ought to save and leave, and takes no signal but SIGKILL."""
        name = self._name(number)
        return Ending(f"{name} was stopped, {_BY_SIGNAL}, and had to be killed", 1, 0)

    def _name(self, number: int) -> str:
        rank = self._ranks.started[number]
        return _name_of(rank.rank, rank.world, self._host, rank.pid)

    def _all_ended_well(self, codes: Sequence[int]) -> bool:
        """The ranks of this machine have ended as they should; the job ends when all have."""
        outcome = stopped(codes) if any(codes) else Outcome(0)
        if not {0, EXIT_CODE}.issuperset(codes):
            # A signal has ended them, without an agreement with the ranks of other nodes.
            reason = f"stopped by {self._signals[0].name} on host {self._host}"
            return self._end(Ending(reason, outcome.code, 0), outcome)
        if self._status is not None:
            self._status.is_done = True
            if not self._status.everyone_is_done and self._lost() is None:
                ending = self._status.ending
                return ending is not None and self._fail(ending)
        return self._end(None, outcome)

    def _lost(self) -> str | None:
        """Who has not been heard of for too long."""
        if self._status is None:
            return None
        if self._status.is_cut_off:
            return f"lost the node that holds the rendezvous, {self._place}"
        return self._status.silent_node

    def _root(self) -> Ending | None:
        """What is wrong, as far as it is known here."""
        if self._failures:
            return min(self._failures, key=lambda failure: failure.weight)
        if self._status is not None and self._status.ending is not None:
            return self._status.ending
        lost = self._lost()
        return None if lost is None else Ending(lost, 1, _LOST + 1)

    def _may_learn_more(self) -> bool:
        """Ranks that have lost a peer are no cause: the peer is, and may still be ending."""
        self._lost_at = self._lost_at or time.monotonic()
        known = None if self._status is None else self._status.ending
        is_only_node = self._status is None or self._status.num_nodes == 1
        alone = not self._ranks.is_running and is_only_node
        waited = time.monotonic() - self._lost_at
        return waited < _ROOT_S and not alone and (known is None or known.weight >= _LOST)

    def _fail(self, root: Ending) -> bool:
        """End the ranks for the failure of one, here or on another node, or because a node joins."""
        is_own = root in self._failures
        if is_own and root.code == -signal.SIGKILL:
            time.sleep(_LAST_WORDS_S)
            causes = [self._cause(number) for number in self._ranks.started]
            root = dataclasses.replace(root, line=_explained(root.line, causes))
        root = dataclasses.replace(root, is_final=self._is_final(root))
        found = self._tell(root)
        may_save = (
            not found.is_failure and found.code != OUT_OF_MEMORY
        )  # those wait for the lost rank
        self._ranks.end(_SAVE_S if may_save else _GRACE_S)
        if self._status is not None:
            self._status.refresh()
            found = self._status.ending or found
        self.ending = found
        if self._signals and _is_stop(found.code, self._signals):
            # The signal has come to a rank first: it is sent to all processes of a job by some.
            self.outcome = stopped([found.code])
        elif self._is_final(found):
            was_reported = is_own and found == root and root.code in NEVER_AGAIN
            self.outcome = Outcome(found.final_code, None if was_reported else found.line)
        else:
            count, most = self._num_restarts
            again = f" (restart {count + 1} of {most})" if found.is_failure else ""
            self._say(f"flambeau: {found.line}; starting the ranks again{again}")
        return True

    def _tell(self, ending: Ending) -> Ending:
        """Publish it; what counts among the nodes may be another."""
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
        """The job is over."""
        if ending is not None:
            self._tell(dataclasses.replace(ending, is_final=True))
        self.ending, self.outcome = ending, outcome
        return True

    def _note(self, number: int, code: int) -> None:
        """A rank has ended on its own: keep it in mind if that is a failure."""
        if code in (0, EXIT_CODE) or _is_stop(code, self._signals):
            return
        line = _line_of(self._name(number), code, self._cause(number), lost_peer=LOST_PEER)
        # SIGABRT is what a rank gives itself, perhaps because of another one.
        weight = 0 if code < 0 and -code != signal.SIGABRT else _LOST if code == LOST_PEER else 1
        is_failure = code != OUT_OF_MEMORY or not self._can_halve
        self._failures.append(Ending(line, code, weight, is_failure=is_failure))

    def _cause(self, number: int) -> str:
        return _cause_of(self._ranks.folder / f"{number}.error")


def _is_stop(code: int, signals: Sequence[signal.Signals]) -> bool:
    """Whether a signal that was passed on has ended a rank, which had no answer to it."""
    return any(code in (-number, 128 + number) for number in signals)


def stopped(codes: Sequence[int]) -> Outcome:
    """The outcome of ranks that were asked to stop; `codes` are theirs, or negative signals."""
    if {INTERRUPTED, -signal.SIGINT} & set(codes):
        return Outcome(INTERRUPTED, "interrupted")
    return Outcome(EXIT_CODE)


# ---------------------------------------------------------------- what is said of a rank that has ended


def _name_of(rank: int, world: int, host: str, process: int) -> str:
    """A rank for people; `flambeau.parallel.watchdog.failure_detector` uses the same words."""
    return f"rank {rank} of {world} (host {host}, process {process})"


def _line_of(name: str, code: int, cause: str, *, lost_peer: int) -> str:
    """How a rank has ended, and why, as far as that is known.

    Args:
        name: of the rank, see `_name_of`.
        code: its exit code, negative for a signal.
        cause: what it has left, see `_cause_of`; a rank's watch may have said it all there already.
        lost_peer: the code of those who only say that they have lost another one.
    """
    cause = cause.removeprefix(f"{name} failed: ")
    if cause.startswith(f"{name} ") or (code == lost_peer and cause.startswith("rank")):
        return cause
    how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    return f"{name} {how}: {cause}" if cause else f"{name} {how}"


def _explained(line: str, causes: Sequence[str]) -> str:
    """The line of a killed rank, or what others have left if their watch has ended it."""
    name = line.partition(" was killed by ")[0]
    for cause in causes:
        if cause.startswith(f"{name} ") and not cause.endswith(" was killed"):
            return cause
    return line


def _cause_of(error_file: Path) -> str:
    """The first line of what a rank has left in torch's format; nothing if it had no time to."""
    try:
        message = json.loads(error_file.read_bytes())["message"]
        text = message if isinstance(message, str) else message["message"]
        first = str(text).strip().splitlines()[0]
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return ""
    return first if len(first) <= _CAUSE_CHARS else first[:_CAUSE_CHARS] + "..."


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
