"""Stacks of a trial's processes, read from outside by py-spy, which does not stop them.

A look from inside comes where Python gives a thread its turn, and there is none within `table[index]`,
`key in seen` or `A @ B`: their time would go to whatever is called next. py-spy reads the memory of a process
instead. What a thread waits for in the kernel is still seen from inside, line by line.
"""

import functools
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from flambeau.tune.doctor.script_statements import (
    asks_for_batch,
    evaluation_lines,
    is_in_evaluation,
    is_in_producer,
)
from flambeau.tune.watch.code_origin import origin_of_file
from flambeau.tune.watch.plan import write_whole
from flambeau.tune.watch.ptrace_permission import ANSWER, SHORT, STACKS_READ, WAIT
from flambeau.tune.watch.stack_phases import CodeLocation, activity_of_lines

_RATE = 50  # looks per second, as from inside; chosen
_SHORT_RATE = (
    20  # of very short steps, whose window is twice as long: py-spy takes 1 % of a core less
)
_TRY_S, _END_S = 10.0, 5.0  # chosen
_LINE = re.compile(
    r"(?P<processes>(?:.*;)?)thread \((?P<thread>\d+)\)(?P<name>[^;]*)(?P<frames>.*) (?P<count>\d+)"
)
_PROCESS = re.compile(r"(?:^|;)process (\d+):\"")
_FRAME = re.compile(r"(.*) \((.*):(\d+)\)")
_LONGEST = 200  # of its message that is shown
_CHILD = """
import ctypes
if hasattr(libc := ctypes.CDLL(None), "prctl"):
    libc.prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)  # as `allow_reading`
print(flush=True)
input()
"""
PRODUCER = "producer"
"""Thread of the rows of a script's own threads that make batches for the one that trains."""
COMPANION = "companion"
"""Begins the thread of the rows of a script's other threads that compute; its number follows."""
_RUNS = 0.1  # share of the time for which such a thread computes; chosen
_FEEDER = "QueueFeederThread"
_DENIED = (
    "a process may not read another one here (a container: docker run --cap-add SYS_PTRACE; "
    "a machine: sysctl kernel.yama.ptrace_scope=1)"
)


class _Stack(NamedTuple):
    """One stack of a thread, and how often it was seen; the innermost line first."""

    process: int
    thread: int
    name: str
    lines: tuple[CodeLocation, ...]
    times: int


def program() -> str | None:
    """The path of py-spy, beside this Python or in PATH."""
    return shutil.which("py-spy", path=sysconfig.get_path("scripts")) or shutil.which("py-spy")


@functools.cache
def why_not() -> str:
    """Why stacks cannot be read from outside here, as tried on a small process; '' if they can."""
    if program() is None:
        return "py-spy is not installed"
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with child:
        try:
            if child.stdout is not None:
                child.stdout.readline()  # now it is Python, and no longer a copy of this process
            return _failure_on(child.pid)
        finally:
            child.kill()


def _failure_on(process: int) -> str:
    """Why py-spy cannot read the stacks of a process; ''."""
    command = [f"{program()}", "dump", "--nonblocking", "--pid", f"{process}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TRY_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"py-spy: {error}"
    if done.returncode == 0:
        return ""
    said = done.stderr.strip().partition("\n")[0].removeprefix("Error: ")
    is_denied = any(word in done.stderr for word in ("Permission denied", "not permitted"))
    return _DENIED if is_denied else f"py-spy: {said[:_LONGEST]}"


class OutsideSampler:
    """Reads the stacks of each training process and its workers, while its window is open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._answers: dict[str, str] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.failure = ""
        """Why a process could not be read."""

    def poll(self) -> None:
        """Answer processes that are about to be watched; begin and end with their windows."""
        for file in self._folder.glob("[0-9]*.trains"):
            process = file.stem
            if process not in self._answers:
                failure = self._answers[process] = _failure_on(int(process))
                self.failure = self.failure or failure
                write_whole(self._folder / f"{process}{ANSWER}", failure)
        open_windows = {file.stem for file in self._folder.glob("[0-9]*.window")}
        for process in open_windows - self._running.keys():
            if self._answers.get(process) == "":
                self._running[process] = self._start(process)
        for process in self._running.keys() - open_windows:
            self._end(process)

    def _start(self, process: str) -> "subprocess.Popen[bytes]":
        rate = _RATE
        with suppress(OSError):  # it has ended already
            is_short = (self._folder / f"{process}.window").read_text(encoding="utf-8") == SHORT
            rate = _SHORT_RATE if is_short else _RATE
        words = "--nonblocking --subprocesses --idle --threads --full-filenames --format raw"
        command = [f"{program()}", "record", "--pid", process, "--rate", f"{rate}", *words.split()]
        return subprocess.Popen(
            [*command, "--output", f"{self._stacks(process)}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _end(self, process: str) -> None:
        mark = self._folder / f"{process}{STACKS_READ}"
        if mark.exists():
            return
        running = self._running[process]
        running.send_signal(signal.SIGINT)
        try:
            running.wait(_END_S)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
        mark.touch()

    def close(self) -> None:
        for process in self._running:
            self._end(process)

    def _stacks(self, process: str) -> Path:
        return self._folder / f"{process}.stacks"

    def add_to(self, trainers: Sequence[dict[str, Any]], workers: list[dict[str, Any]]) -> None:
        """Put the rows of these stacks in the place of those from inside, where there are any."""
        by_process = {one["process"]: one for one in workers}
        for trainer in trainers:
            text = ""
            with suppress(OSError):
                text = self._stacks(f"{trainer['process']}").read_text(errors="replace")
            rows = rows_of_stacks(text, trainer)
            for process, seen in rows.items():
                if process == trainer["process"]:
                    trainer["seen"] = _with_waits(seen, trainer["seen"])
                elif process in by_process:
                    one = by_process[process]
                    one["seen"] = _with_waits(seen, one["seen"])
                else:  # it has ended before it could tell anything itself
                    workers.append({"process": process, "seen": seen, "process_threads": 1})


def rows_of_stacks(text: str, trainer: Mapping[str, Any]) -> dict[int, list[list[Any]]]:
    """py-spy's raw output as `as_rows` has it, by process: the thread that trains, threads of workers."""
    stacks = list(_parsed(text, trainer["process"]))
    own = [one for one in stacks if one.thread == trainer["thread"]]
    own = [one for one in own if not any(_is_wait(line) for line in one.lines)]
    count = sum(one.times for one in own)
    if not count:
        return {}
    seconds = trainer["seconds"] / count
    training = {(file, function) for file, _, function in trainer["training_lines"]}
    texts = _phases_by_text(own, trainer)
    rows = {trainer["process"]: _rows("main", own, seconds, training, texts)}
    producers = [one for one in stacks if _is_producer(one, trainer)]
    rows[trainer["process"]] += [
        [PRODUCER, "data", *row[2:]] for row in _rows(PRODUCER, producers, seconds)
    ]
    for one in stacks:
        if _is_companion(one, trainer) and one not in producers:
            rows[trainer["process"]] += _rows(f"{COMPANION}{one.thread}", [one], seconds)
    for one in stacks:
        if one.process == trainer["process"]:
            continue
        is_main = one.thread == one.process
        is_worker = is_main and activity_of_lines(one.lines).phase == "worker"
        if is_worker or one.name.strip(": ").startswith(_FEEDER):
            name = "main" if is_main else _FEEDER
            rows.setdefault(one.process, []).extend(_rows(name, [one], seconds))
    # A feeder alone is that of another program with a queue.
    return {process: seen for process, seen in rows.items() if any(r[0] == "main" for r in seen)}


def _phases_by_text(
    stacks: Sequence[_Stack], trainer: Mapping[str, Any]
) -> dict[tuple[CodeLocation, ...], str]:
    """What the text of a script says of its stacks: they evaluate, or ask its own generator for a batch."""
    trained: dict[str, set[int]] = defaultdict(set)
    for file, line, _ in trainer["training_lines"]:
        trained[file].add(line)
    steps = {file: frozenset(lines) for file, lines in trained.items()}
    by_loader = evaluation_lines(trainer["evaluations"], trainer["training_lines"])
    # Batches of a DataLoader are clocked, and a generator around them is none of its time.
    is_clocked = trainer["batches"] * 2 >= trainer["steps"]

    def phase_of(lines: Sequence[CodeLocation]) -> str:
        is_called = False
        asks = False
        for file, number, _ in lines:
            if origin_of_file(file).owner == "user":
                at = file, number, steps.get(file, frozenset())
                if number in by_loader.get(file, ()) or is_in_evaluation(*at):
                    return "evaluation"
                asks = asks or (is_called and asks_for_batch(*at))
            is_called = True
        return "data" if asks and not is_clocked else ""

    return {one.lines: phase_of(one.lines) for one in stacks}


def _is_producer(stack: _Stack, trainer: Mapping[str, Any]) -> bool:
    """Whether it is another thread of the script in the process that trains, which makes batches for it."""
    if stack.process != trainer["process"] or stack.thread == trainer["thread"]:
        return False
    return any(
        line.file.endswith("concurrent/futures/thread.py")
        or (origin_of_file(line.file).owner == "user" and is_in_producer(line.file, line.line))
        for line in stack.lines
    )


def _is_companion(stack: _Stack, trainer: Mapping[str, Any]) -> bool:
    """Whether it is of another thread of the script, in the process that trains, which computes."""
    if stack.process != trainer["process"] or stack.thread == trainer["thread"]:
        return False
    runs = dict(trainer.get("runs", ())).get(stack.thread, 0.0)
    return runs > _RUNS and any(origin_of_file(one.file).owner == "user" for one in stack.lines)


def _is_wait(line: CodeLocation) -> bool:
    return line.function == WAIT and line.file.endswith("flambeau/tune/watch/ptrace_permission.py")


def _parsed(text: str, process: int) -> Iterator[_Stack]:
    for line in text.splitlines():
        found = _LINE.fullmatch(line)
        if found is None:
            continue
        frames = (_FRAME.fullmatch(one) for one in found["frames"].split(";") if one)
        lines = [
            CodeLocation(one[2], int(one[3]), one[1].rpartition(".")[2])
            for one in frames
            if one is not None
        ]
        processes = _PROCESS.findall(found["processes"])
        yield _Stack(
            int(processes[-1]) if processes else process,
            int(found["thread"]),
            found["name"],
            tuple(reversed(lines)),
            int(found["count"]),
        )


def _rows(
    name: str,
    stacks: Sequence[_Stack],
    seconds: float,
    training: Collection[tuple[str, str]] = (),
    texts: Mapping[tuple[CodeLocation, ...], str] = MappingProxyType({}),
) -> list[list[Any]]:
    total: Counter[tuple[str, str, CodeLocation]] = Counter()
    for one in stacks:
        phase, kind, location = activity_of_lines(one.lines, training)
        text = texts.get(one.lines, "")
        if not phase or (text == "evaluation" and phase not in ("checkpoint", "compile")):
            phase = text or phase
        total[phase, kind, location or CodeLocation("", 0, "")] += one.times
    return [
        [name, phase, kind, "", *location, count * seconds]
        for (phase, kind, location), count in total.items()
    ]


def _with_waits(rows: list[list[Any]], inside: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The rows, divided by what their lines wait for in the kernel, as it was seen from inside."""
    waits: dict[tuple[Any, ...], Counter[str]] = defaultdict(Counter)
    for thread, _, _, state, file, line, _, seconds in inside:
        waits[thread[:4], file, line][state] += seconds
    result = []
    for row in rows:
        states = waits.get((row[0][:4], row[4], row[5])) or Counter({"": 1.0})
        total = sum(states.values()) or 1.0
        result += [
            [*row[:3], state, *row[4:7], row[7] * part / total] for state, part in states.items()
        ]
    return result
