"""One run of a script, watched from outside for a given number of steps."""

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

from flambeau.errors import InputError
from flambeau.sandbox.sandbox import Sandbox
from flambeau.tune.doctor.machine_watch import MachineWatch
from flambeau.tune.doctor.outside_sampler import OutsideSampler, why_not
from flambeau.tune.watch import startup
from flambeau.tune.watch.plan import Plan

_STARTUP = Path(startup.__file__).parent
_POLL_S = 0.05
_POLL_MACHINE_S = 0.5
_OTHERS_S = 60.0  # wait for the results of other ranks
_EXIT_S = 5.0  # wait for the script to end after its last step; chosen
_KEPT_BYTES = 2**16  # of what a script prints; chosen
_LINES = 12  # of its output in a message; chosen
_LONGEST_LINE = 300
_TRAINERS = "[0-9]*[0-9].json"
_ENDING = signal.SIGTERM, signal.SIGHUP


@dataclass(frozen=True)
class Trial:
    """What one run has recorded.

    Attributes:
        trainers: a dict per rank; see `StepWatch`.
        alone_per_s: batches per second of the loader alone.
        crash: with which code the script ended after some steps, and what it said last; '' if it did not.
        inside_because: why stacks were not read from outside; '' if they were, or none at all.
    """

    trainers: list[dict[str, Any]]
    workers: list[dict[str, Any]] = field(default_factory=list)
    alone_per_s: float | None = None
    machine: MachineWatch | None = None
    whole_s: float = 0.0
    failure: str | None = None
    crash: str = ""
    inside_because: str = ""

    @property
    def step_s(self) -> float:
        """Seconds per step: the mean of all ranks, which wait for each other."""
        return math.fsum(one["step_s"] for one in self.trainers) / len(self.trainers)


@dataclass(frozen=True)
class Script:
    """A command of the user, to be run in trials.

    Attributes:
        limit_s: a trial without its steps fails after it, and at any time if it takes nearly all memory or
            fills the disk.
        peers: network connections of its trials.
    """

    command: Sequence[str]
    sandbox: Sandbox
    limit_s: float
    peers: set[str] = field(default_factory=set)

    def run(self, plan: Plan, *, before_removal: Callable[[Path], None] = lambda _: None) -> Trial:
        """Run it until its steps are counted, then end it.

        `before_removal` gets the trial's folder, with those of runs. InputError: it cannot be started, or its
        Python has no flambeau.
        """
        folder = self.sandbox.new_folder()
        trace = None if plan.trace is None else folder / f"trace-{Path(plan.trace).name}"
        inside_because = why_not() if plan.watches else ""
        is_outside = plan.watches and not inside_because
        trace_there = None if trace is None else f"{trace}"
        dataclasses.replace(plan, trace=trace_there, is_outside=is_outside).write(folder)
        machine = MachineWatch(folder)
        sampler = OutsideSampler(folder) if is_outside else None
        output = ScriptOutput()
        began = time.monotonic()
        with signals_raise():
            try:
                process = self.sandbox.start(
                    self.command, folder, _environment(folder, plan), output
                )
                output.started()
                ended = self._wait(process, folder, machine, sampler, end=began + self.limit_s)
                machine.poll()
                self.peers.update(machine.peers)
                self.sandbox.end_processes(folder)
                output.close()
                trial = _recorded(folder, sampler)
                trial = dataclasses.replace(
                    trial,
                    trainers=self._in_users_words(trial.trainers, folder),
                    workers=self._in_users_words(trial.workers, folder),
                    machine=machine,
                    whole_s=time.monotonic() - began,
                    inside_because=trial.inside_because or inside_because,
                )
                if trace is not None and trace.exists():
                    shutil.copyfile(trace, str(plan.trace))
                before_removal(folder)
                said = self.sandbox.in_users_words(output.last_lines, folder)
                said = f"; it said last:\n{said}" if said else ", and said nothing"
                if usable := [one for one in trial.trainers if one.get("steps")]:
                    code = process.returncode or 0
                    crash = f"the script ended with code {code}{said}" if code > 0 else ""
                    return dataclasses.replace(trial, trainers=usable, crash=crash)
                failure = ended or self.sandbox.failure(folder) or _failure(process, folder)
                failure += said
                return dataclasses.replace(trial, trainers=[], workers=[], failure=failure)
            finally:
                if sampler is not None:
                    sampler.close()
                self.sandbox.end(folder)
                output.close()

    def _in_users_words(self, rows: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
        text = json.dumps(rows, ensure_ascii=False)
        changed: list[dict[str, Any]] = json.loads(self.sandbox.in_users_words(text, folder))
        return changed

    def _wait(
        self,
        process: "subprocess.Popen[bytes]",
        folder: Path,
        machine: MachineWatch,
        sampler: OutsideSampler | None,
        *,
        end: float,
    ) -> str:
        """Wait until all processes that make steps have written theirs; why the wait ended early, or ''."""
        looked = first_done = 0.0
        while process.poll() is None:
            time.sleep(_POLL_S)
            now = time.monotonic()
            if sampler is not None:
                sampler.poll()
            if now - looked > _POLL_MACHINE_S:
                machine.poll()
                looked = now
                if machine.is_out_of_memory:
                    most, limit = _gib(machine.most_bytes), _gib(machine.limit_bytes)
                    return f"{most} of {limit} of memory were in use"
                if reason := self.sandbox.written_too_much():
                    return f"the script was ended: {reason}"
            if now > end:
                return self._limit_reached(folder)
            done = list(folder.glob(_TRAINERS))
            if not done:
                continue
            first_done = first_done or now
            training = len(list(folder.glob("*.trains")))
            world = json.loads(done[0].read_text(encoding="utf-8"))["world"]
            if len(done) >= max(training, min(world, os.cpu_count() or 1)):
                results = _read_all(folder, _TRAINERS)
                is_ending = any(one.get("is_ending") for one in results)
                if is_ending or not any("steps" in one for one in results):  # with an exit code
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(_EXIT_S)
                return ""
            if now - first_done > _OTHERS_S:
                return ""
        return ""

    def _limit_reached(self, folder: Path) -> str:
        few = "too few steps" if list(folder.glob("*.trains")) else "no step of an optimizer"
        return f"the script was ended after {self.limit_s:.0f} s (--limit): it made {few}"


@contextmanager
def signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit inside, so that the script, which has its own session, is ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, _raise_exit)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _raise_exit(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def _environment(folder: Path, plan: Plan) -> dict[str, str]:
    """The script's Python finds the watch; Weights & Biases writes to the disk, which is a sandbox.

    A compiler would compile the watch of learning into the model, or fail at it: the model runs eagerly.
    """
    paths = [f"{_STARTUP}", *filter(None, [os.environ.get("PYTHONPATH")])]
    changed = {"PYTHONPATH": os.pathsep.join(paths), "FLAMBEAU_WATCH": f"{folder}"}
    if plan.learning:
        changed |= {"TORCHDYNAMO_DISABLE": "1", "PYTORCH_JIT": "0"}
    if os.environ.get("WANDB_MODE") != "disabled":
        changed["WANDB_MODE"] = "offline"
    return {**os.environ, **changed}


def _read_all(folder: Path, pattern: str) -> list[dict[str, Any]]:
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob(pattern))]


def _recorded(folder: Path, sampler: OutsideSampler | None) -> Trial:
    """What the processes of a trial have written, and what was seen of them from outside."""
    trainers = sorted(_read_all(folder, _TRAINERS), key=lambda one: one["rank"])
    workers = _read_all(folder, "*.worker.json")
    failure = ""
    if sampler is not None:
        sampler.add_to([one for one in trainers if one.get("steps")], workers)
        failure = sampler.failure
    alone = next((one["batches_per_s"] for one in _read_all(folder, "alone.json")), None)
    return Trial(trainers, workers, alone_per_s=alone, inside_because=failure)


def _failure(process: "subprocess.Popen[bytes]", folder: Path) -> str:
    if (python := folder / "no_flambeau").exists():
        raise InputError(
            f"{python.read_text()} runs the script and has no flambeau: install it there, too"
        )
    code = process.returncode
    made = [one["made"] for one in _read_all(folder, _TRAINERS)]
    if made and code in (0, None, -signal.SIGKILL):
        few = f"the script ended after {max(made)} steps, too few to time them"
        return f"{few}: let it train longer"
    how = "" if not code else f" with code {code}"
    if list(folder.glob("*.trains")):
        return f"the script ended{how} before enough steps were made to time them"
    return f"the script ended{how or ' with code 0'} before its first step of an optimizer"


def _gib(number: int) -> str:
    return f"{number / 2**30:.1f} GiB"


class ScriptOutput:
    """A pipe for a script's prints, read as fast as they come; `close` it at the script's end."""

    def __init__(self) -> None:
        reading, self._writing = os.pipe()
        self._kept = b""
        self._pipe: IO[bytes] = os.fdopen(reading, "rb", buffering=0)
        self._thread = threading.Thread(target=self._read, name="flambeau-output", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._writing

    def started(self) -> None:
        """Close our writing end, now that the script has its own; else the pipe would never end."""
        os.close(self._writing)
        self._writing = -1

    def close(self) -> None:
        """Wait at most two seconds for the last bytes: a process that still runs may hold the pipe open."""
        if self._writing >= 0:
            self.started()
        self._thread.join(2.0)

    @property
    def last_lines(self) -> str:
        """The last lines, long ones without their middle."""
        lines = self._kept.decode(errors="replace").splitlines()[-_LINES:]
        return "\n".join(_shortened(line) for line in lines).strip()

    def _read(self) -> None:
        with self._pipe as pipe:
            while some := pipe.read(_KEPT_BYTES):
                self._kept = (self._kept + some)[-_KEPT_BYTES:]


def _shortened(line: str) -> str:
    if len(line) <= _LONGEST_LINE:
        return line
    half = (_LONGEST_LINE - 5) // 2
    return f"{line[:half]} ... {line[-half:]}"
