"""A job on this machine: torch's elastic launch starts its ranks, as often as needed.

Each start of the ranks, together with the other nodes, is one `elastic_launch`, because torch loses nodes
when ranks are restarted within one (docs/en/design.md, 'Starting ranks', has the reasons).
"""

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from logging import NullHandler, getLogger
from pathlib import Path
from typing import Any

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from flambeau.errors import InputError
from flambeau.parallel.launcher import rank_supervisor, rendezvous_store
from flambeau.parallel.launcher.attempt import Attempt, Outcome, stopped
from flambeau.parallel.launcher.job_spec import JobSpec
from flambeau.parallel.launcher.rank_processes import RankProcesses
from flambeau.parallel.launcher.rendezvous_address import Rendezvous
from flambeau.parallel.launcher.rendezvous_store import AttemptStatus, Background, Ending
from flambeau.parallel.preemption import OUT_OF_MEMORY

_POLL_S = 0.05
_LAST_CALL_S = 10  # for more nodes, once the minimum is there; torch's default is 30
_AGENT_S = 5.0  # for torch's agent to end after its processes; a lost store blocks it
_MAX_HALVINGS = 32  # of a batch: more can only happen if no rank records them
_PATIENCE_S = 5.0  # of waiting for other nodes, before the user is warned


class Job:
    """Runs a job, attempt by attempt; `signals` grows by those to forward to the ranks.

    `note_lost_rank` takes a run folder, and how a rank was lost.
    """

    def __init__(
        self,
        spec: JobSpec,
        rendezvous: Rendezvous,
        folder: Path,
        *,
        signals: Sequence[signal.Signals],
        say: Callable[[str], None],
        note_lost_rank: Callable[[Path, str], object],
    ) -> None:
        self._spec, self._rendezvous, self._folder = spec, rendezvous, folder
        self._signals, self._say, self._note_loss = signals, say, note_lost_rank
        self._store: Store | None = None
        self._is_host = True
        self._num_attempts = self._num_restarts = self._num_halvings = 0
        self._shape: tuple[int, int] | None = None
        self._last_line = ""

    def run(self) -> Outcome:
        """Run the job to its end; InputError: other nodes have not come, or claim the same rank."""
        with _quiet():
            outcome = self._stopped()
            if outcome is None and self._rendezvous.port:
                outcome = self._open_store()
            while outcome is None:
                outcome = self._next_attempt()
            return outcome

    def _stopped(self) -> Outcome | None:
        """The outcome if a signal comes while there are no ranks."""
        return stopped([-number for number in self._signals]) if self._signals else None

    def _open_store(self) -> Outcome | None:
        """Open the store that all launchers of the job use; returns an outcome if a signal comes first."""
        spec = self._spec
        if not self._rendezvous.is_here:
            self._wait_for_host()
        opening = Background(
            lambda: rendezvous_store.open_store(self._rendezvous, spec.nodes[1], spec.job_id)
        )
        if not self._wait_for(opening, rendezvous_store.STORE_S / 2):
            return self._stopped()
        if opening.is_alive():
            raise InputError(rendezvous_store.not_ours(self._rendezvous))
        self._store, self._is_host = opening.result()
        return None

    def _wait_for_host(self) -> None:
        """Wait until somebody listens at the rendezvous, or a signal has come."""
        rendezvous = self._rendezvous
        timeout_s = self._spec.join_timeout_s
        started_at = time.monotonic()
        has_warned = False
        while not self._signals and (reason := rendezvous.refuses()):
            waited_s = time.monotonic() - started_at
            if waited_s > timeout_s:
                raise InputError(
                    f"nobody has answered at {rendezvous} for {timeout_s} s ({reason}): start "
                    "`flambeau launch` there too, with the same --rdzv and --job-id"
                )
            if waited_s > _PATIENCE_S and not has_warned:
                has_warned = True
                self._say(
                    f"flambeau: waiting for the node at {rendezvous}, for {timeout_s} s at most"
                )
            time.sleep(0.2)

    def _wait_for(self, call: Background[Any], timeout_s: float = math.inf) -> bool:
        """Wait for the end of a call, at most this long; False if a signal has come first."""
        deadline = time.monotonic() + timeout_s
        while call.is_alive() and not self._signals and time.monotonic() < deadline:
            call.join(_POLL_S)
        return not self._signals

    # ---------------------------------------------------------------- an attempt

    def _next_attempt(self) -> Outcome | None:
        """Start the ranks and wait for their end; None if they are to be started again."""
        number = self._num_attempts
        spec = self._spec
        status = None
        if self._store is not None:
            store = self._store
            node_rank = spec.node_rank if spec.is_ordered else None
            joining = Background(
                lambda: rendezvous_store.join_attempt(store, spec.nodes[1], node_rank)
            )
            if not self._wait_for(joining):
                return self._stopped()
            if isinstance(joining.error, RuntimeError):
                return self._without_rendezvous(joining.error)
            joined = joining.result()
            if joined is None:
                line = "the job is over; it had as many nodes as it takes without this one"
                return Outcome(0, line)
            number = joined
            status = AttemptStatus(self._store, joined)
        self._num_attempts += 1
        # Not named after the attempt: a node that was left behind may join the same one again.
        folder = self._folder / f"{self._num_attempts}"
        variables = {"TORCHELASTIC_RESTART_COUNT": f"{number}", "TORCHELASTIC_RUN_ID": spec.job_id}
        ranks = RankProcesses(folder, spec.procs, variables)
        agent = Background(lambda: self._launch(number, folder))
        try:
            outcome = self._wait_for_start(ranks, status, agent)
            if outcome is None and ranks.started:
                outcome = self._watch(ranks, status, agent)
            if status is not None and outcome is not None:
                status.leave(is_host=self._is_host)
        finally:
            ranks.release(1)  # even ranks that torch's agent starts late
            if status is not None:
                status.end()
        return outcome

    def _wait_for_start(
        self, ranks: RankProcesses, status: AttemptStatus | None, agent: Background[None]
    ) -> Outcome | None:
        """Wait until there are ranks, or it is known why there will be none."""
        started_at = time.monotonic()
        has_warned = False
        while not ranks.started:
            agent.join(_POLL_S)
            ranks.poll()
            if ranks.started:
                break
            if self._signals:
                return self._stopped()
            if status is not None and not agent.is_alive():
                status.refresh()
            ending = None if status is None else status.ending
            if ending is not None:
                return Outcome(ending.final_code, ending.line) if ending.is_final else None
            if not agent.is_alive() or (status is not None and status.is_cut_off):
                return self._without_rendezvous(agent.error)
            if status is not None and status.is_left_behind:
                return None
            if not has_warned and time.monotonic() > started_at + _PATIENCE_S:
                has_warned = True
                self._say(f"flambeau: waiting for the other nodes at {self._rendezvous}")
        return None

    def _watch(
        self, ranks: RankProcesses, status: AttemptStatus | None, agent: Background[None]
    ) -> Outcome | None:
        first = next(iter(ranks.started.values()))
        if status is not None:
            status.ranks_started(first.node, first.num_nodes, self._rendezvous.local_name)
        self._say_shape((first.world, first.num_nodes))
        watched = Attempt(
            ranks,
            status,
            rendezvous=str(self._rendezvous),
            signals=self._signals,
            num_restarts=(self._num_restarts, self._spec.max_restarts),
            can_halve=self._num_halvings < _MAX_HALVINGS,
            say=self._say,
        )
        while not watched.poll():
            time.sleep(_POLL_S)
        self._note_ending(watched.ending, ranks.run)
        is_done = watched.outcome is not None and watched.outcome.code == 0
        ranks.release(0 if is_done else 1)  # with 0 torch's agent waits for the other nodes
        agent.join(_AGENT_S)
        return watched.outcome

    def _note_ending(self, ending: Ending | None, run: Path | None) -> None:
        if ending is not None and ending.code == OUT_OF_MEMORY:
            self._num_halvings += 1
        if ending is not None and ending.is_failure:
            self._num_restarts += 1
            self._last_line = ending.line
            if run is not None and ending.code not in rendezvous_store.NEVER_AGAIN:
                self._note_loss(run, ending.line)

    def _say_shape(self, shape: tuple[int, int]) -> None:
        """After a restart, say the number of ranks and nodes if it has changed."""
        if self._shape not in (None, shape):
            ranks, nodes = (
                f"{n} {what}{'s' * (n != 1)}"
                for n, what in zip(shape, ("rank", "node"), strict=True)
            )
            self._say(f"flambeau: now {ranks} on {nodes}")
        self._shape = shape

    def _launch(self, number: int, folder: Path) -> None:
        """Torch's launch of one attempt; `RankProcesses.release` ends its processes."""
        spec, rendezvous = self._spec, self._rendezvous
        supervise = (
            "import runpy, sys; sys.exit(runpy.run_path(sys.argv[1])['supervise'](sys.argv[2:]))"
        )
        # Torch treats each argument as a template, in which $$ is $.
        command = [word.replace("$", "$$") for word in spec.command]
        command = [word.replace("$${local_rank}", "${local_rank}") for word in command]
        settings: dict[str, Any] = {
            "is_host": self._is_host,
            "join_timeout": spec.join_timeout_s,
            "last_call_timeout": min(_LAST_CALL_S, spec.join_timeout_s),
            "read_timeout": rendezvous_store.STORE_S,
        }
        if spec.is_ordered:
            settings = {"rank": spec.node_rank, "timeout": spec.join_timeout_s}
        config = LaunchConfig(
            min_nodes=spec.nodes[0],
            max_nodes=spec.nodes[1],
            nproc_per_node=spec.procs,
            logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
            run_id=f"{spec.job_id}-{number}",
            rdzv_endpoint=str(rendezvous),
            rdzv_backend="static" if spec.is_ordered else "c10d",
            rdzv_configs=settings,
            max_restarts=0,
            monitor_interval=_POLL_S,
            local_addr=rendezvous.local_addr,
        )
        elastic_launch(config, sys.executable)(
            *("-I", "-S", "-c", supervise, rank_supervisor.__file__),
            *(str(os.getpid()), str(folder), *command),
        )

    def _without_rendezvous(self, error: Exception | None) -> Outcome:
        """The outcome if the nodes cannot meet, or no longer."""
        rendezvous = self._rendezvous
        if isinstance(error, ChildFailedError):
            rank, failure = error.get_first_failure()
            return Outcome(1, f"rank {rank} could not be started: {failure.message}")
        in_vain = isinstance(error, (RendezvousTimeoutError, DistStoreError))
        if self._shape is None:
            what = (
                f"not enough nodes have come to {rendezvous} in time"
                if in_vain
                else f"the job at {rendezvous} is over, or was given up there"
            )
            raise InputError(
                f"{what}: start `flambeau launch` on each node, with the same --rdzv, --nnodes and --job-id"
            ) from error
        reason = f"lost the node that holds the rendezvous, {rendezvous}"
        if in_vain:
            reason = f"not enough nodes have come back to {rendezvous} in time"
        return Outcome(1, f"{self._last_line}; {reason}" if self._last_line else reason)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide torch's own log lines, unless LOGLEVEL is set."""
    loggers = [getLogger(f"torch.distributed.{name}") for name in ("elastic", "launcher")]
    before = [logger.propagate for logger in loggers]
    handler = NullHandler()
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = "LOGLEVEL" in os.environ
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagate
