"""The loop of a sweep: decides steps, hands their runs to workers, and notes what came of them."""

import contextlib
import math
import queue
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from flambeau.errors import InputError
from flambeau.experiments.job import Answer, Job, fill
from flambeau.experiments.optuna_log import write_optuna_log
from flambeau.experiments.plan import Outcome, Rules, Step, next_step
from flambeau.experiments.proposals import Known, propose
from flambeau.experiments.space import Space, Value, shown
from flambeau.experiments.sweep_folder import DecidedStep, MemberResult, Records, SweepFolder
from flambeau.experiments.worker_handle import Event, WorkerProcess, out_of_memory_kills
from flambeau.parallel.preemption import FLAG
from flambeau.run.folder.summary import saved_place
from flambeau.terminal import clock

Key = tuple[int, int]
"""Of a run of a step: the number of the step, and which of its runs."""
_POLL_S = 0.2
_TAKEN_S = 3.0  # until a run that another process has is asked for again
_OPTUNA_LOG_S = 10.0  # between two versions of optuna.log; it is written at the end, too
_MAX_KILLS = 20  # of a worker there, by signals from outside
_MAX_DEATHS = 3  # of a worker in the same place of a run


@dataclass(frozen=True)
class Member:
    """One of the runs that make a trial.

    Attributes:
        name: in its folder's name; empty if a trial has one run.
        settings: besides those of the trial, such as a seed.
    """

    name: str
    settings: Mapping[str, Value]


@dataclass(frozen=True)
class Experiment:
    """What is searched, and how.

    Attributes:
        settings: of `flambeau train`, for all trials.
        command: of a script, in place of them.
        members: the runs of each trial.
        figure: what is compared.
        trust: run code that only a folder in the settings names.
        folds: of the members' cross-validation; 0 without.
    """

    space: Space
    rules: Rules
    settings: Mapping[str, Any]
    command: tuple[str, ...] | None
    members: tuple[Member, ...]
    sampler: str
    seed: int
    figure: str
    trust: bool = False
    folds: int = 0


@dataclass
class Sweeper:
    """Args: procs, how many runs this process trains at once; budget_s, after which it stops."""

    folder: SweepFolder
    experiment: Experiment
    procs: int
    say: Callable[[str], None]
    budget_s: float | None = None
    _workers: list[WorkerProcess] = field(default_factory=list)
    _events: "queue.Queue[Event]" = field(default_factory=queue.Queue)
    _ask_again: dict[Key, float] = field(default_factory=dict)
    _deaths: dict[Key, tuple[object, int]] = field(default_factory=dict)
    _refused: dict[Key, Answer] = field(default_factory=dict)
    _log_written: float = -math.inf
    _memory_kills: int = field(default_factory=out_of_memory_kills)

    def run(self) -> bool:
        """Work until the sweep is over; False if the budget ended first.

        Raises:
            Preempted: a signal came, and all runs have saved themselves.
            InputError: every trial is refused, or the folder is no sweep's.
        """
        began = time.monotonic()
        with self._ended_workers():
            while not self._is_over():
                if FLAG.signal is not None:
                    self._stop()
                if self.budget_s is not None and time.monotonic() - began > self.budget_s:
                    self._stop_workers()
                    return False
                self._hand_out()
                with contextlib.suppress(queue.Empty):
                    self._take(self._events.get(timeout=_POLL_S))
        return True

    def _is_over(self) -> bool:
        """Decide all steps that can be decided; whether there are none, and none is open."""
        with self.folder.locked():
            is_over = self._decide()
        return is_over and not any(True for _ in self._open())

    def _decide(self) -> bool:
        rules = self.experiment.rules
        records = self.folder.records
        while True:
            steps = [Step(step.trial, step.rung) for step in records.steps]
            decided = next_step(rules, steps, outcomes(records, len(self.experiment.members)))
            if isinstance(decided, str):
                return decided == "over"
            step, seen = decided
            settings = None
            if step.rung == 0:
                settings = propose(
                    self.experiment.space,
                    known_trials(self.experiment, records, seen),
                    sampler=self.experiment.sampler,
                    seed=self.experiment.seed,
                    mode=rules.mode,
                )
            self.folder.append(DecidedStep(len(steps), step.trial, step.rung, seen, settings))

    def _open(self) -> Iterator[Key]:
        """The runs that have no result, in their order; none of a trial of which one has failed."""
        results = self.folder.records.results
        members = range(len(self.experiment.members))
        for number in range(len(self.folder.records.steps)):
            found = [results[number, member] for member in members if (number, member) in results]
            if all(result.value is not None for result in found):
                yield from (
                    (number, member) for member in members if (number, member) not in results
                )

    def _hand_out(self) -> None:
        """Give open runs to idle workers, which are started as they are needed."""
        now = time.monotonic()
        busy = {worker.key for worker in self._workers if worker.job is not None}
        for key in self._open():
            if key in busy or key in self._refused or self._ask_again.get(key, 0) > now:
                continue
            worker = next((one for one in self._workers if one.is_idle), None)
            if worker is None:
                numbers = {one.number for one in self._workers}
                free = next((n for n in range(self.procs) if n not in numbers), None)
                if free is None:
                    return
                worker = WorkerProcess(free, self.procs, self._events)
                self._workers.append(worker)
            worker.give(key, self._job(key))

    def _job(self, key: Key) -> Job:
        experiment = self.experiment
        folder = self.folder
        records = folder.records
        step = records.steps[key[0]]
        member = experiment.members[key[1]]
        is_last = step.rung == len(experiment.rules.rungs) - 1
        run = folder.run(step.trial, member.name)
        settings = {**records.settings(step.trial), **member.settings}
        command = experiment.command
        if command is not None:
            words = {"seed": experiment.seed, **settings, "trial": step.trial, "out": run}
            command = fill(command, {**words, "epochs": experiment.rules.rungs[-1]})
        return Job(
            run=run,
            claim=folder.claim(*key),
            log=folder.log(step.trial, member.name),
            settings={**experiment.settings, **settings},
            command=command,
            epochs=None if is_last else experiment.rules.rungs[step.rung],
            figure=experiment.figure,
            trust=experiment.trust,
        )

    def _take(self, event: Event) -> None:
        worker = event.worker
        key, job = worker.key, worker.job
        if event.exit_code is not None:
            if worker in self._workers:
                self._workers.remove(worker)
            worker.end(patience_s=5.0)
            if job is not None and key is not None:
                self._begin_again(key, job, event.exit_code)
            return
        answer = event.answer
        worker.job = worker.key = None
        if answer is None or key is None or job is None:
            return
        if answer.state == "stopped":
            self._begin_again(key, job, None)
        elif answer.state == "taken":
            self._ask_again[key] = time.monotonic() + _TAKEN_S
        elif answer.state == "done":
            for held, refused in self._refused.items():
                self._record(held, refused)
            self._refused.clear()
            self._record(key, answer)
        elif answer.state == "failed":
            if job.command is None:  # what failed may have left memory or threads
                worker.end(patience_s=5.0)
            if answer.refused and not self._has_success:
                self._hold(key, answer)
            else:
                self._record(key, answer)

    @property
    def _has_success(self) -> bool:
        return any(result.value is not None for result in self.folder.records.results.values())

    def _hold(self, key: Key, answer: Answer) -> None:
        """Keep a refusal back while no trial has succeeded: all may be refused for one wrong setting."""
        self._refused[key] = answer
        if all(one in self._refused for one in self._open()):
            first = min(self._refused)
            raise InputError(f"{self._title(first)}: {self._refused[first].reason}")

    def _begin_again(self, key: Key, job: Job, exit_code: int | None) -> None:
        """Let a run go on where it was saved; one whose process always ends at the same place has failed.

        A kill from outside says nothing of the run, unless Linux killed for want of memory meanwhile.

        Args:
            exit_code: of the process; negative for a signal; None if it was stopped by one, and saved.
        """
        place = saved_place(job.run)
        before, times = self._deaths.get(key, (None, 0))
        times = times + 1 if before == place else 1
        self._deaths[key] = place, times
        is_outside = exit_code in (None, -signal.SIGKILL, -signal.SIGTERM)
        has_no_memory = exit_code == -signal.SIGKILL and out_of_memory_kills() > self._memory_kills
        if times >= (_MAX_KILLS if is_outside and not has_no_memory else _MAX_DEATHS):
            how = "by a signal" if exit_code is None else f"with exit code {exit_code}"
            how = "because memory ran out" if has_no_memory else how
            why = f"its process ended {times} times at the same place, {how}; see {job.log}"
            self._record(key, Answer("failed", reason=why))

    def _record(self, key: Key, answer: Answer) -> None:
        with self.folder.locked():
            records = self.folder.records
            if key in records.results:
                return
            best = self._best_value(records.steps[key[0]].rung)
            self.folder.append(
                MemberResult(*key, answer.value, answer.reason, answer.is_whole, answer.seconds)
            )
            self._write_optuna_log(every_s=_OPTUNA_LOG_S)
        self.say(self._line(key, answer, best))

    def _write_optuna_log(self, *, every_s: float = 0.0) -> None:
        """Write it within `locked`, if the last time is long enough ago."""
        now = time.monotonic()
        if now - self._log_written < every_s:
            return
        self._log_written = now
        records = self.folder.records
        write_optuna_log(
            self.folder.path / "optuna.log",
            self.experiment.space,
            known_trials(self.experiment, records, len(records.steps)),
            mode=self.experiment.rules.mode,
        )

    def _best_value(self, rung: int) -> float | None:
        """The best figure of a single run at a rung so far."""
        records = self.folder.records
        values = [
            result.value
            for (step, _), result in records.results.items()
            if result.value is not None and records.steps[step].rung == rung
        ]
        choose = max if self.experiment.rules.mode == "max" else min
        return choose(values, default=None)

    def _line(self, key: Key, answer: Answer, best: float | None) -> str:
        words = [self._title(key)]
        rules = self.experiment.rules
        if len(rules.rungs) > 1:
            rung = self.folder.records.steps[key[0]].rung
            words.append(f"{rules.rungs[rung]} of {rules.rungs[-1]} epochs")
        if answer.value is None:
            words.append(f"failed: {answer.reason}")
        else:
            is_best = best is None or rules.is_better(answer.value, best)
            words.append(
                f"{self.experiment.figure} {answer.value:.4f}{' * best' if is_best else ''}"
            )
        seconds = answer.seconds
        words.append(f"{seconds:.1f} s" if seconds < 60 else clock(seconds))
        return "  ".join(words)

    def _title(self, key: Key) -> str:
        step = self.folder.records.steps[key[0]]
        settings = self.folder.records.settings(step.trial)
        name = self.experiment.members[key[1]].name
        values = " ".join(f"{name}={shown(value)}" for name, value in settings.items())
        return "  ".join(filter(None, (f"trial {step.trial}", name, values)))

    def _stop(self) -> NoReturn:
        """Answer a signal: all runs save themselves, and the process ends."""
        self._stop_workers()
        with self.folder.locked():
            self._write_optuna_log()
        self.say(f"stopped; the same command goes on with the sweep in {self.folder.path}")
        raise FLAG.answer()

    def _stop_workers(self) -> None:
        """Let the runs save themselves; what they have finished meanwhile is noted."""
        for worker in self._workers:
            worker.stop()
        while any(worker.job is not None for worker in self._workers):
            event = self._events.get()
            if event.exit_code is not None:
                self._workers.remove(event.worker)
                event.worker.end(patience_s=5.0)
            elif event.answer is not None and event.answer.state in ("done", "failed"):
                self._take(event)
            else:
                event.worker.job = event.worker.key = None

    @contextlib.contextmanager
    def _ended_workers(self) -> Iterator[None]:
        try:
            yield
        finally:
            for worker in self._workers:
                worker.stop()
            for worker in self._workers:
                worker.end(patience_s=60.0)
        with self.folder.locked():
            self._write_optuna_log()


def outcomes(records: Records, num_members: int) -> dict[int, Outcome]:
    """The mean figures of the steps whose runs have all ended, or one failed."""
    found: dict[int, Outcome] = {}
    for number in range(len(records.steps)):
        results = [records.results.get((number, member)) for member in range(num_members)]
        values = [result.value for result in results if result is not None]
        if None in values:
            found[number] = Outcome(None)
        elif len(values) == num_members:
            found[number] = Outcome(sum(v for v in values if v is not None) / num_members)
    return found


def known_trials(experiment: Experiment, records: Records, seen: int) -> list[Known]:
    """The trials of all steps, with the results of the first `seen` steps."""
    known = outcomes(records, len(experiment.members))
    rungs = experiment.rules.rungs
    by_trial: dict[int, list[DecidedStep]] = {}
    for step in records.steps:
        by_trial.setdefault(step.trial, []).append(step)
    return [
        _known(records.settings(trial), steps, known, rungs, seen)
        for trial, steps in sorted(by_trial.items())
    ]


def _known(
    settings: Mapping[str, Value],
    steps: Sequence[DecidedStep],
    known: Mapping[int, Outcome],
    rungs: Sequence[int],
    seen: int,
) -> Known:
    values: dict[int, float] = {}
    for step in steps:
        if step.step >= seen or step.step not in known:
            return Known(settings, values, "running")
        value = known[step.step].value
        if value is None:
            return Known(settings, values, "failed")
        values[rungs[step.rung]] = value
    is_whole = steps[-1].rung == len(rungs) - 1
    return Known(settings, values, "whole" if is_whole else "halved")
