"""A process of a sweep: trains the runs that it is given, one after the other.

Reads jobs as lines of JSON from standard input and answers each with a line on standard output. What a
training prints goes to its log.
"""

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import NoReturn, TextIO

from flambeau.errors import InputError
from flambeau.experiments.claim import Claim
from flambeau.experiments.job import Answer, Job
from flambeau.experiments.trained_value import figure_in, has_paused, last_words
from flambeau.optional_packages import large_import
from flambeau.parallel.preemption import EXIT_CODE, PAUSE_AFTER, Preempted
from flambeau.run.folder.lock import is_locked
from flambeau.run.folder.pause_file import paused_after
from flambeau.run.folder.summary import summarize
from flambeau.run.options.portable_bits import hold
from flambeau.terminal import say

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LONGEST_REASON = 500
_RUN_COMMAND = (
    "import sys; from flambeau.experiments.worker_main import run_command; "
    "run_command(sys.argv[1:])"
)


def serve() -> None:
    """Answer until standard input ends."""
    _end_with_parent()
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as answers:
        while line := sys.stdin.readline():
            answers.write(_done(Job.of_line(line)).to_line() + "\n")
            answers.flush()


def _done(job: Job) -> Answer:
    claim = Claim(job.claim)
    fd = claim.take()
    if fd is None:
        return Answer("taken")
    started = time.perf_counter()
    try:
        with job.log.open("a", encoding="utf-8", errors="backslashreplace") as log:
            if job.command is None:
                answer = _trained(job, log)
            else:
                answer = _script_run(job, job.command, log, claim_fd=fd)
    finally:
        claim.release()
    return dataclasses.replace(answer, seconds=round(time.perf_counter() - started, 3))


def _trained(job: Job, log: TextIO) -> Answer:
    """Train as `flambeau train` does, in this process."""
    with _output_to(log):
        try:
            hold(job.settings.get("portable_bits"))
            with large_import():
                from flambeau.trainer.api import train
            _set_pause(job.epochs)
            train(out=job.run, bar=False, trust=job.trust, **job.settings)
        except Preempted:
            if not has_paused(job.run, job.epochs):
                return Answer("stopped")
        except InputError as error:
            if is_locked(job.run):
                return Answer("taken")
            say(f"flambeau: {error}")
            has_begun = (job.run / "metrics.jsonl").exists()
            return _failed(
                str(error), is_refused=not has_begun and "out of memory" not in str(error)
            )
        except Exception as error:
            traceback.print_exc()
            return _failed(f"{type(error).__name__}: {error}")
    trained = summarize(job.run, name=job.run.name)
    if trained.best is None:
        return _failed("no evaluation has a finite figure to choose by")
    return Answer("done", trained.best, trained.state == "finished")


def _script_run(job: Job, command: tuple[str, ...], log: TextIO, *, claim_fd: int) -> Answer:
    """Run a script of the user's, which a signal to this process reaches, too."""
    _set_pause(job.epochs)
    if shutil.which(command[0]) is None:
        return _failed(f"{command[0]} is no program that can be run", is_refused=True)
    process = subprocess.Popen(
        [sys.executable, "-c", _RUN_COMMAND, *command],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        pass_fds=[claim_fd],
        start_new_session=True,
    )
    with _forwarding(signal.SIGTERM, process) as was_forwarded:
        code = process.wait()
    is_stopped = code == EXIT_CODE and not has_paused(job.run, job.epochs)
    if is_stopped or (was_forwarded() and code not in (0, EXIT_CODE)):
        return Answer(
            "stopped"
        )  # however a script ends that knows no checkpoint, it has not failed
    if code not in (0, EXIT_CODE):
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        has_begun = paused_after(job.run) > 0 or code < 0
        return _failed(f"{ended}: {last_words(job.log)}", is_refused=not has_begun)
    return _figure_of_script(job, is_whole=code == 0)


def _figure_of_script(job: Job, *, is_whole: bool) -> Answer:
    """That of its Run, else of a line that it has printed."""
    has_run = (job.run / "config.toml").exists()
    if has_run:
        trained = summarize(job.run, name=job.run.name)
        if trained.best is not None and trained.metric != job.figure:
            return _failed(
                f"its Run chooses by {trained.metric}, and the sweep compares {job.figure}: give --figure "
                f"{trained.metric}",
                is_refused=True,
            )
        if trained.best is not None:
            return Answer("done", trained.best, is_whole)
    value = figure_in(job.log, job.figure)
    if value is not None:
        return Answer("done", value, is_whole)
    printed = f'it has printed no line of JSON with a finite "{job.figure}"'
    evaluated = f"the run in {job.run} has evaluated no finite {job.figure} in run.evaluate(), and "
    return _failed((evaluated if has_run else "") + printed, is_refused=not has_run)


def _failed(why: str, *, is_refused: bool = False) -> Answer:
    reason = " ".join(why.split())[:_LONGEST_REASON]
    return Answer("failed", reason=reason or "it failed without a message", refused=is_refused)


def _set_pause(epochs: int | None) -> None:
    if epochs is None:
        os.environ.pop(PAUSE_AFTER, None)
    else:
        os.environ[PAUSE_AFTER] = str(epochs)


@contextlib.contextmanager
def _output_to(log: TextIO) -> Iterator[None]:
    """Lead standard output and standard error, also those of C, to a file."""
    kept = [os.dup(number) for number in (1, 2)]
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        for number in (1, 2):
            os.dup2(log.fileno(), number)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)


@contextlib.contextmanager
def _forwarding(
    number: signal.Signals, process: "subprocess.Popen[bytes]"
) -> Iterator[Callable[[], bool]]:
    """Meanwhile a signal to this process goes to the script; yields a function that says whether one has."""
    times = 0

    def forward(_: int, __: FrameType | None) -> None:
        nonlocal times
        times += 1
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    before = signal.signal(number, forward)
    try:
        yield lambda: times > 0
    finally:
        signal.signal(number, before)


def run_command(command: Sequence[str]) -> NoReturn:
    """Become the command, which gets SIGTERM when the process that started this one dies."""
    _end_with_parent()
    os.execvp(command[0], [*command])


def _end_with_parent() -> None:
    """Get SIGTERM when the parent dies: nobody would read the answer, and a new one trains on."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
