"""One run of a script, watched from outside, for as many steps as are asked for."""

import json
import math
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from flambeau.errors import InputError
from flambeau.tune.doctor.machine_watch import MachineWatch
from flambeau.tune.doctor.marked_processes import end_all
from flambeau.tune.watch import startup
from flambeau.tune.watch.plan import Plan
from flambeau.tune.watch.saved_files import LIST

_STARTUP = Path(startup.__file__).parent
_LAST_LINES = 12
_LOOK_EVERY_S = 0.05
_OTHERS_S = 60.0  # that ranks wait for each other's results
_EXIT_S = 5.0  # that a script takes to end when it has made its last step; chosen
_TRAINERS = "[0-9]*[0-9].json"
_ENDING = signal.SIGTERM, signal.SIGHUP


@dataclass(frozen=True)
class Trial:
    """What one run has told.

    Attributes:
        trainers: a dict per process that made steps, by rank; see `StepWatch`.
        workers: a dict per process of a DataLoader.
        alone_per_s: batches per second of the loader alone; None where that was not asked for.
        machine: what ran short.
        whole_s: seconds of the run from its start.
        failure: why there are no steps; None where there are.
    """

    trainers: list[dict[str, Any]]
    workers: list[dict[str, Any]] = field(default_factory=list)
    alone_per_s: float | None = None
    machine: MachineWatch | None = None
    whole_s: float = 0.0
    failure: str | None = None

    @property
    def step_s(self) -> float:
        """Seconds of a step; of several ranks, which wait for each other, the mean."""
        return math.fsum(one["step_s"] for one in self.trainers) / len(self.trainers)


def run_trial(command: Sequence[str], plan: Plan, *, limit_s: float) -> Trial:
    """Run a command until its steps are counted, and end it.

    Args:
        command: of the user's, as the shell would run it.
        plan: what is watched, and what is different.
        limit_s: of the whole run; what has made no step by then has failed. So has what takes nearly all of
            the memory, before the kernel kills some process or other.

    Raises:
        InputError: the command cannot be started, or its Python has no flambeau.
    """
    with tempfile.TemporaryDirectory(prefix="flambeau-doctor-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        plan.write(folder)
        machine = MachineWatch(folder)
        began = time.monotonic()
        log = folder / "output"
        with log.open("wb") as output, signals_raise():
            process = _start(command, folder, output)
            try:
                _wait(process, folder, machine, end=began + limit_s)
                machine.look()
            finally:
                end_all(folder, process.pid)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                _remove_saved(folder)
        trial = Trial(
            sorted(_read_all(folder, _TRAINERS), key=lambda one: one["rank"]),
            _read_all(folder, "*.worker.json"),
            machine=machine,
            whole_s=time.monotonic() - began,
            alone_per_s=next((one["batches_per_s"] for one in _read_all(folder, "alone.json")), None),
        )  # fmt: skip
        usable = [one for one in trial.trainers if one.get("steps")]
        if usable:
            return Trial(usable, trial.workers, trial.alone_per_s, machine, trial.whole_s)
        failure = _failure(process, folder, log, limit_s)
        if machine.is_out_of_memory:
            failure = (
                f"{_gib(machine.most_bytes)} of {_gib(machine.limit_bytes)} of memory were in use"
            )
        return Trial([], [], trial.alone_per_s, machine, trial.whole_s, failure)


@contextmanager
def signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP end what runs inside, as Ctrl-C does: what has a session of its own gets none."""
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


def _start(command: Sequence[str], folder: Path, output: Any) -> "subprocess.Popen[bytes]":
    paths = [f"{_STARTUP}", *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        "WANDB_MODE": "offline", **os.environ,
        "PYTHONPATH": os.pathsep.join(paths), "FLAMBEAU_WATCH": f"{folder}",
    }  # fmt: skip
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            env=environment, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise InputError(f"{command[0]}: {error.strerror}; what follows -- is a command") from error


def _wait(
    process: "subprocess.Popen[bytes]", folder: Path, machine: MachineWatch, *, end: float
) -> None:
    """Until all that make steps have told theirs, or none can."""
    looked = first_done = 0.0
    while process.poll() is None and (now := time.monotonic()) < end:
        time.sleep(_LOOK_EVERY_S)
        if now - looked > 0.5:
            machine.look()
            looked = now
        if machine.is_out_of_memory:
            return
        done = list(folder.glob(_TRAINERS))
        if not done:
            continue
        first_done = first_done or now
        training = len(list(folder.glob("*.trains")))
        world = json.loads(done[0].read_text(encoding="utf-8"))["world"]
        if len(done) >= max(training, min(world, os.cpu_count() or 1)):
            results = _read_all(folder, _TRAINERS)
            if not any("steps" in one for one in results):  # so it ends, and its code will tell
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_EXIT_S)
            return
        if now - first_done > _OTHERS_S:
            return


def _read_all(folder: Path, pattern: str) -> list[dict[str, Any]]:
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob(pattern))]


def _failure(process: "subprocess.Popen[bytes]", folder: Path, log: Path, limit_s: float) -> str:
    """Why there are no figures, in words."""
    if (python := folder / "no_flambeau").exists():
        raise InputError(
            f"{python.read_text()} runs the script and has no flambeau: install it there, too"
        )
    code = process.returncode
    last = b"\n".join(log.read_bytes().splitlines()[-_LAST_LINES:]).decode(errors="replace")
    said = f"; it said last:\n{last}" if last.strip() else ", and said nothing"
    made = [one["made"] for one in _read_all(folder, _TRAINERS)]
    if made and code in (0, None, -signal.SIGKILL):
        few = f"the script ended after {max(made)} steps, too few to time them"
        return f"{few}: let it train longer"
    if list(folder.glob("*.trains")):
        how = "" if not code else f" with code {code}"
        return f"the script ended{how} before enough steps were made to time them{said}"
    if code in (None, -signal.SIGKILL):
        return f"the script made no step of an optimizer in {limit_s:.0f} s{said}"
    return f"the script ended with code {code} before its first step of an optimizer{said}"


def _gib(number: int) -> str:
    return f"{number / 2**30:.1f} GiB"


def _remove_saved(folder: Path) -> None:
    names = folder / LIST
    if names.exists():
        for name in names.read_text(encoding="utf-8").splitlines():
            with suppress(OSError):
                Path(name).unlink(missing_ok=True)
