"""Torch's elastic agent with flambeau's manners: who failed and how in one line, and nobody left behind."""

import contextlib
import dataclasses
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from logging import NullHandler, getLogger
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)

from flambeau.errors import InputError
from flambeau.parallel.launcher import rank_bootstrap
from flambeau.parallel.launcher.exit_report import cause_of, explained, line_of, name_of
from flambeau.parallel.launcher.node_status import NodeFailure
from flambeau.parallel.launcher.rank_processes import RankProcesses
from flambeau.parallel.launcher.rendezvous import Meeting, bounded
from flambeau.parallel.launcher.signal_forwarding import Asked, Relay
from flambeau.parallel.preemption import EXIT_CODE, INTERRUPTED
from flambeau.parallel.watchdog.watchdog import LOST_PEER

_WRONG_INPUT = 2
_NEVER_AGAIN = (_WRONG_INPUT, EXIT_CODE, INTERRUPTED)
_GRACE_S = 1.5  # between SIGTERM and SIGKILL, once a rank has failed
_SAVE_S = 60.0  # the same where ranks may save first, because a node joins
_ROOT_S = 2.0  # ranks that have lost a peer wait so long for that peer's own report
_LOOK_S = 0.05  # between two looks at the ranks
_LAST_WORDS_S = 0.1  # between the end of a rank and the word of who has ended it
_LOST = 2  # weight of a failure that is that of a peer


class Outcome(NamedTuple):
    """How a job has ended.

    Attributes:
        code: exit code of the launcher.
        line: what the user is told last, if anything.
    """

    code: int
    line: str | None = None


class RankAgent(LocalElasticAgent):
    """Watches its ranks, and ends all of them for one that failed.

    It overrides what torch's agent does with processes: torch takes any exit code but 0 for a failure, gives
    the other ranks SIGTERM, which asks for a checkpoint that they cannot agree on any more, and 30 seconds;
    and it raises in a signal handler, wherever Python happens to be.

    Args:
        spec: of torch's agent.
        folder: for the error files of ranks.
        meeting: `spec.rdzv_handler`.
        relay: of signals.
        say: prints a line.

    Attributes:
        outcome: of the job; None while it goes on.
        last_failure: the one that ranks have been started again for, if any.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        folder: Path,
        *,
        meeting: Meeting,
        relay: Relay,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(spec=spec, logs_specs=DefaultLogsSpecs(log_dir=str(folder)))
        self.outcome: Outcome | None = None
        self._meeting, self._relay, self._say = meeting, relay, say
        self._ranks = relay.ranks = RankProcesses()
        self.last_failure: NodeFailure | None = None
        self._failures: list[NodeFailure] = []
        self._has_failed = False
        self._lost_at: float | None = None
        self._host = socket.gethostname()
        self._shape: tuple[int, int] | None = None

    # ---------------------------------------------------------------- ranks

    @property
    def has_started(self) -> bool:
        """Whether there have been ranks."""
        return self._shape is not None

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """In a thread: its calls to the store hear no signal and may last."""
        self._relay.check()
        bounded(lambda: super(RankAgent, self)._rendezvous(worker_group), None)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._say_shape(worker_group)
        self._relay.check()
        self._failures, self._lost_at = [], None
        with self._ranks.starting():
            ids: dict[int, Any] = super()._start_workers(worker_group)
            assert self._pcontext is not None
            handlers: Mapping[int, Any] = self._pcontext.subprocess_handlers  # type: ignore[attr-defined]
            self._ranks.adopt({rank: handler.proc for rank, handler in handlers.items()})
        return ids

    def _say_shape(self, worker_group: WorkerGroup) -> None:
        """After a restart, how many there are, if that is another number."""
        shape = worker_group.workers[0].world_size, int(worker_group.group_world_size or 1)
        if self._shape is not None and self._shape != shape:
            ranks, nodes = (
                f"{n} {what}{'s' * (n != 1)}"
                for n, what in zip(shape, ("rank", "node"), strict=True)
            )
            self._say(f"flambeau: now {ranks} on {nodes}")
        self._shape = shape

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 0) -> None:
        """Whoever still lives: torch calls it at the end, and before a restart."""
        self._ranks.end(_GRACE_S)
        super()._shutdown(signal.SIGKILL)

    # ---------------------------------------------------------------- the state of the job

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """What torch's loop shall do: go on, end, or start the ranks again, if restarts are left."""
        for local_rank in self._ranks.reap():
            self._note(local_rank, self._ranks.codes[local_rank])
        ranks = [worker.global_rank for worker in worker_group.workers]
        return RunResult(self._state(), return_values=dict.fromkeys(ranks))

    def _state(self) -> WorkerState:
        codes, is_running = list(self._ranks.codes.values()), self._ranks.is_running
        if self._relay.interrupted:
            if is_running:  # for a moment
                self._ranks.kill()  # again: it may have come while they were started
                return WorkerState.HEALTHY
            failure = NodeFailure(f"interrupted on host {self._host}", INTERRUPTED, 0)
            return self._end(failure, Outcome(INTERRUPTED, "interrupted"))
        if is_running and (self._relay.asked or EXIT_CODE in codes):
            return WorkerState.HEALTHY  # they save; whoever has asked for it may lose patience
        if not is_running and not self._failures:
            return self._through(codes)
        root = self._root()
        if root is None or (root.weight >= _LOST and self._may_learn_more()):
            return WorkerState.HEALTHY
        return self._fail(root)

    def _through(self, codes: Sequence[int]) -> WorkerState:
        """All ranks of this node have ended as they should; the job ends when they have on all nodes."""
        outcome = _stopped(codes) if any(codes) else Outcome(0)
        if not {0, EXIT_CODE}.issuperset(codes):
            # A signal has ended them, without an agreement with the ranks of other nodes.
            reason = f"stopped by {self._relay.asked[0].name} on host {self._host}"
            return self._end(NodeFailure(reason, outcome.code, 0), outcome)
        if not self._meeting.everyone_is_done() and self._meeting.lost is None:
            return self._fail(None) if self._meeting.is_over else WorkerState.HEALTHY
        if outcome.code:
            return self._end(None, outcome)
        self.outcome = outcome
        return WorkerState.SUCCEEDED

    def _root(self) -> NodeFailure | None:
        """What is wrong, as far as it is known here."""
        if self._failures:
            return min(self._failures, key=lambda failure: failure.weight)
        if self._meeting.is_over:
            return self._meeting.failure
        lost = self._meeting.lost
        return None if lost is None else NodeFailure(lost, 1, _LOST + 1)

    def _may_learn_more(self) -> bool:
        """Ranks that have lost a peer are no cause: the peer is, and may still be dying."""
        self._lost_at = self._lost_at or time.monotonic()
        known = self._meeting.failure
        alone = not self._ranks.is_running and self._meeting.is_alone
        waited = time.monotonic() - self._lost_at
        return waited < _ROOT_S and not alone and (known is None or known.weight >= _LOST)

    def _fail(self, root: NodeFailure | None) -> WorkerState:
        """End the ranks for the failure of one, here or on another node."""
        own = root is not None and root in self._failures
        if root is not None:
            if own and root.code == -signal.SIGKILL:
                time.sleep(_LAST_WORDS_S)
                causes = [self._cause(rank) for rank in self._ranks.local_ranks]
                root = dataclasses.replace(root, line=explained(root.line, causes))
            self._meeting.publish(root, is_final=self._is_final(root))
        self._ranks.end(_GRACE_S)
        self._meeting.refresh()
        found = self._meeting.failure or root
        assert found is not None
        self.last_failure = found
        if self._relay.asked and _is_stop(found.code, self._relay.asked):
            # The signal has come to a rank first: it is sent to all processes of a job by some.
            return self._end(None, _stopped([found.code]))
        if not self._is_final(found):
            number = self._worker_group.spec.max_restarts - self._remaining_restarts + 1
            of = self._worker_group.spec.max_restarts
            self._say(
                f"flambeau: {found.line}; starting the ranks again (restart {number} of {of})"
            )
            self._has_failed = True
            return WorkerState.FAILED
        told = own and found == root and root.code in _NEVER_AGAIN
        code = found.code if found.code in _NEVER_AGAIN else 1
        return self._end(None, Outcome(code, None if told else found.line))

    def _is_final(self, failure: NodeFailure) -> bool:
        return bool(
            self._remaining_restarts == 0
            or failure.code in _NEVER_AGAIN
            or self._relay.asked
            or self._meeting.is_over
            or self._meeting.is_cut_off
        )

    def _end(self, failure: NodeFailure | None, outcome: Outcome) -> WorkerState:
        """No restart any more."""
        if failure is not None:
            self._meeting.publish(failure, is_final=True)
        self._remaining_restarts = 0
        self.outcome = outcome
        return WorkerState.FAILED

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """After a failure here, or because another node has started again or come."""
        if self._relay.asked:
            return  # the ranks are leaving
        if not self._has_failed:
            self._meeting.refresh()
            failure = self._meeting.failure
            reason = "another node has come" if failure is None else failure.line
            self._say(f"flambeau: {reason}; starting the ranks again")
            self._ranks.end(_SAVE_S if failure is None else _GRACE_S)
        self._has_failed = False
        super()._restart_workers(worker_group)

    def _exit_barrier(self) -> None:
        """Nodes have waited for each other already, without torch's limit of 300 s."""

    def _note(self, local_rank: int, code: int) -> None:
        """A rank has ended on its own: keep it in mind if that is a failure."""
        if code in (0, EXIT_CODE) or _is_stop(code, self._relay.asked):
            return
        worker = self._worker_group.workers[local_rank]
        name = name_of(worker.global_rank, worker.world_size, self._host, worker.id)
        line = line_of(name, code, self._cause(local_rank), lost_peer=LOST_PEER)
        # SIGABRT is what a rank gives itself, perhaps because of another one.
        weight = 0 if code < 0 and -code != signal.SIGABRT else _LOST if code == LOST_PEER else 1
        self._failures.append(NodeFailure(line, code, weight))

    def _cause(self, local_rank: int) -> str:
        assert self._pcontext is not None
        return cause_of(Path(self._pcontext.error_files[local_rank]))


def _is_stop(code: int, asked: Sequence[signal.Signals]) -> bool:
    """Whether a signal that was passed on has ended a rank, which had no answer to it."""
    return any(code in (-number, 128 + number) for number in asked)


def _stopped(codes: Sequence[int]) -> Outcome:
    """The outcome of ranks that were asked to stop."""
    if {INTERRUPTED, -signal.SIGINT} & set(codes):
        return Outcome(INTERRUPTED, "interrupted")
    return Outcome(EXIT_CODE)


def run_ranks(
    command: Sequence[str],
    *,
    procs: int,
    meeting: Meeting,
    folder: Path,
    max_restarts: int,
    relay: Relay,
    say: Callable[[str], None],
) -> Outcome:
    """Run a command on ranks here, together with the other nodes of the job.

    Args:
        command: program and arguments; `${local_rank}` becomes the number of the rank on this node.
        procs: how many ranks.
        meeting: with the other nodes.
        folder: an empty one, for error files.
        max_restarts: how often ranks are started again after a failure.
        relay: of signals, entered.
        say: prints a line.

    Raises:
        InputError: other nodes have not come, or claim the same place.
        Asked: a signal has come while there were no ranks.
    """
    spec = _spec(command, procs, meeting, max_restarts)
    agent = RankAgent(spec, folder, meeting=meeting, relay=relay, say=say)
    lost: Exception | None = None
    with _quiet():
        try:
            agent.run()
        except Asked:
            if agent.outcome is None:
                raise
        except (InputError, RendezvousError, DistError) as error:
            lost = error
        finally:
            relay.ranks = None
        with contextlib.suppress(Asked):  # a signal that comes so late changes nothing
            meeting.shutdown()
    if isinstance(lost, InputError):
        raise lost
    if lost is not None:
        return _without_rendezvous(lost, agent, meeting)
    if agent.outcome is None:  # torch's agent returns when the job ends without this node
        return Outcome(0, "the job is over; it had as many nodes as it takes without this one")
    return agent.outcome


def _spec(command: Sequence[str], procs: int, meeting: Meeting, max_restarts: int) -> WorkerSpec:
    """What torch's agent is to run: each rank by way of `ranked`."""
    tied = "import runpy, sys; runpy.run_path(sys.argv[1])['become'](sys.argv[2:])"
    # The agent takes each argument for a template, in which $$ is $.
    kept = [word.replace("$", "$$").replace("$${local_rank}", "${local_rank}") for word in command]
    return WorkerSpec(
        role="default",
        local_world_size=procs,
        entrypoint=sys.executable,
        args=("-I", "-S", "-c", tied, rank_bootstrap.__file__, str(os.getpid()), *kept),
        rdzv_handler=meeting,
        max_restarts=max_restarts,
        monitor_interval=_LOOK_S,
    )


def _without_rendezvous(error: Exception, agent: RankAgent, meeting: Meeting) -> Outcome:
    """What it means that the nodes cannot meet, or not any more."""
    in_vain = isinstance(error, RendezvousTimeoutError)
    if not agent.has_started:
        what = (
            f"not enough nodes have come to {meeting.place} in time"
            if in_vain
            else f"the job at {meeting.place} is over, or was given up there"
        )
        raise InputError(
            f"{what}: start `flambeau launch` on each node, with the same --rdzv, --nnodes and --job-id"
        ) from error
    reason = f"lost the node that holds the rendezvous, {meeting.place}"
    if in_vain:
        reason = f"not enough nodes have come back to {meeting.place} in time"
    elif isinstance(error, RendezvousClosedError):
        reason = "another node does not start again"
    failure = agent.last_failure
    return Outcome(1, reason if failure is None else f"{failure.line}; {reason}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's own log lines from the user, unless LOGLEVEL asks for them."""
    logger = getLogger("torch.distributed.elastic")
    handler, propagate = NullHandler(), logger.propagate
    logger.addHandler(handler)
    logger.propagate = "LOGLEVEL" in os.environ
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
