"""Starting ranks: exit codes, last lines, signals, restarts and several nodes, with ranks that need no torch.

Each launcher is a fork of this process, which has torch already; 'nodes' are launchers on this machine.
"""

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from flambeau.errors import InputError
from flambeau.parallel.launcher import attempt, job, rendezvous_address, rendezvous_store
from flambeau.parallel.launcher import launch as launch_module
from flambeau.parallel.launcher.job_spec import JobSpec
from flambeau.parallel.launcher.launch import launch

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="ranks are tied by prctl, seen in /proc"
)

PRELUDE = """
import json, os, signal, sys, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

def on(number, work):
    signal.signal(number, lambda *_: work())

def report(message):
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        file.write(message)

def cause(text, extra=""):
    report(json.dumps({"message": {"message": text + extra, "extraInfo": {"timestamp": "1"}}}))

def name(rank, process):
    return f"rank {rank} of {world} (host {os.uname().nodename}, process {process})"

def kill(number=signal.SIGKILL):
    os.kill(os.getpid(), number)

def ready():
    with open(f"ready-{rank}.part", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"ready-{rank}.part", f"ready-{rank}")

def wait():
    ready()
    while True:
        time.sleep(0.1)  # a signal that comes just before the system call is heard after it

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


class Ended(NamedTuple):
    """What a launcher has left."""

    code: int
    out: list[str]
    err: list[str]
    seconds: float
    waiting: list[str]  # lines that only say what it waits for


@dataclass
class Launcher:
    """A launcher in a process of its own, in a folder of its own."""

    folder: Path
    process: Any
    began: float = field(default_factory=time.monotonic)

    def pids(self, num_ranks: int = 2, first: int = 0) -> list[int]:
        """Processes of the ranks, once all of them wait."""
        paths = [self.folder / f"ready-{rank}" for rank in range(first, first + num_ranks)]
        deadline = time.monotonic() + 300
        while not all(path.exists() for path in paths):
            assert time.monotonic() < deadline, (self.folder / "err").read_text()
            assert self.process.is_alive(), (self.folder / "err").read_text()
            time.sleep(0.01)
        return [int(path.read_text()) for path in paths]

    def send(self, number: signal.Signals) -> "Launcher":
        """Send a signal to the launcher."""
        self.began = time.monotonic()
        os.kill(self.process.pid, number)
        return self

    def where_it_hangs(self) -> str:
        """What it has printed, what its ranks have reported, and what each process here waits in."""
        lines = [(self.folder / "err").read_text()]
        for path in sorted(self.folder.rglob("*")):
            if path.suffix in (".started", ".ended", ".error") or path.name == "released":
                lines.append(f"{path.relative_to(self.folder)}: {path.read_text()}")
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                state, parent, _, session = stat.read_text().rpartition(")")[2].split()[:4]
                words = (stat.parent / "cmdline").read_text().replace("\0", " ")[-200:]
                waits = (stat.parent / "wchan").read_text()
                if f"{self.folder}" in words or session == f"{self.process.pid}":
                    lines.append(f"{stat.parent.name} of {parent}: {state} in {waits}: {words}")
        return "\n".join(lines)

    def end(self, timeout: float = 300.0) -> Ended:
        """Wait for it."""
        self.process.join(timeout)
        assert self.process.exitcode is not None, self.where_it_hangs()
        out, err = ((self.folder / name).read_text().splitlines() for name in ("out", "err"))
        # On a busy machine nodes may take seconds to meet.
        waiting = [line for line in err if line.startswith("flambeau: waiting for")]
        err = [line for line in err if line not in waiting]
        mark = self.folder / "ended"  # nobody may have looked for a while
        at = float(mark.read_text()) if mark.exists() else time.monotonic()
        return Ended(self.process.exitcode, sorted(out), err, at - self.began, waiting)


Start = Callable[..., Launcher]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start a script on ranks: `start("say(rank)", procs=2)`; `patch` sets constants of the launcher."""
    launchers = []

    def begin(
        body: str, *arguments: str, patch: Mapping[Any, Any] | None = None, **settings: Any
    ) -> Launcher:
        folder = tmp_path_factory.mktemp("launch")
        script = folder / "script.py"
        script.write_text(PRELUDE + body)
        command = [sys.executable, "-S", str(script), *arguments]

        def work() -> None:
            os.setsid()
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
            os.chdir(folder)
            tempfile.tempdir = str(folder)
            for descriptor, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
            for (module, name), value in (patch or {}).items():
                setattr(module, name, value)
            faulthandler.dump_traceback_later(55, file=2)  # where it hangs, for the one who waits
            code = _launch(command, settings)
            Path("ended").write_text(str(time.monotonic()))
            os._exit(code)

        process = multiprocessing.get_context("fork").Process(target=work)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: fork beside threads
            process.start()
        launchers.append(Launcher(folder, process))
        return launchers[-1]

    yield begin
    for launcher in launchers:
        if launcher.process.is_alive():
            launcher.process.kill()
        launcher.process.join()


def _launch(command: list[str], settings: Mapping[str, Any]) -> int:
    """As the command does it."""

    def say(text: str) -> None:
        os.write(2, f"{text}\n".encode())

    def note_lost_rank(run: Path, line: str) -> None:
        with Path("lost").open("ab") as file:
            file.write(os.fsencode(f"{run}: {line}\n"))

    try:
        spec = JobSpec(command=command, **{"procs": 2, **settings})
        return launch(spec, say=say, note_lost_rank=note_lost_rank)
    except InputError as error:
        say(f"flambeau: {error}")
        return 2


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the latter between opening and reading
        return True
    return state == "Z"


def until_gone(pids: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not all(map(is_gone, pids)):
        assert time.monotonic() < deadline, f"still there: {[p for p in pids if not is_gone(p)]}"
        time.sleep(0.01)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


WHO = rf"flambeau: rank {{}} of {{}} \(host {re.escape(socket.gethostname())}, process \d+\)"


def last_line(ended: Ended, rank: int, world: int, how: str) -> None:
    assert ended.err, ended
    assert re.fullmatch(WHO.format(rank, world) + " " + how, ended.err[-1]), ended


# ---------------------------------------------------------------- jobs that run side by side

KILLED_BY_WATCH = """
if rank == 1:
    wait()
while rank == 0 and not os.path.exists("ready-1"):
    time.sleep(0.01)
if rank == 0:
    with open("ready-1") as file:
        process = int(file.read())
    os.kill(process, signal.SIGKILL)
    cause(name(1, process) + " has been silent for 4 s")
wait()
"""

ENDS = {  # what ranks do, the exit code, and how the last line says that rank 1 has ended; None: no line
    "all done": ("", 0, None),
    "all preempted": ("sys.exit(75)", 75, None),
    "wrong input": ("if rank == 1: sys.exit(2)\nwait()", 2, None),
    "exit code": ("if rank == 1: sys.exit(3)\nwait()", 1, "ended with exit code 3"),
    "killed": ("if rank == 1: kill()\nwait()", 1, "was killed by SIGKILL"),
    "reported": (
        "if rank == 1:\n    cause('ValueError: no', chr(10) + 'more')\n    sys.exit(1)\nwait()",
        1,
        "ended with exit code 1: ValueError: no",
    ),
    "made no progress": (
        "if rank == 1:\n    cause(name(1, os.getpid()) + ' has made no progress')\n    sys.exit(1)\nwait()",
        1,
        "has made no progress",
    ),
    "the peer's report comes later": (
        "if rank != 1: sys.exit(76)\ntime.sleep(0.7)\ncause('ValueError: no')\nsys.exit(1)",
        1,
        "ended with exit code 1: ValueError: no",
    ),
    "preempted, and one was done": ("sys.exit(75 * (rank > 0))", 75, None),
    "preempted one after the other": ("time.sleep(rank); sys.exit(75)", 75, None),
    "interrupted": ("if rank == 1: sys.exit(130)\nwait()", 130, None),
    "segfault": ("if rank == 1: kill(signal.SIGSEGV)\nwait()", 1, "was killed by SIGSEGV"),
    "real-time": ("if rank == 1: kill(40)\nwait()", 1, "was killed by signal 40"),
    "reported by its watch": (
        "if rank == 1:\n    cause(name(1, os.getpid()) + ' failed: ValueError: no')\n    sys.exit(1)\nwait()",
        1,
        "ended with exit code 1: ValueError: no",
    ),
    "killed by its watch": (KILLED_BY_WATCH, 1, "has been silent for 4 s"),
    "named by those who have lost it": (
        "if rank == 1: wait()\ncause(name(1, 7) + ' was killed')\nsys.exit(76)",
        1,
        "was killed",
    ),
    "a long report": (
        "if rank == 1:\n    cause('x' * 1000)\n    sys.exit(1)\nwait()",
        1,
        "ended with exit code 1: x{300}\\.\\.\\.",
    ),
    "report of another kind": (
        "if rank == 1:\n    report('{\"message\": \"plain\"}')\n    sys.exit(1)\nwait()",
        1,
        "ended with exit code 1: plain",
    ),
    "torn report": (
        "if rank == 1:\n    report('{\"message\": {')\n    sys.exit(1)\nwait()",
        1,
        "ended with exit code 1",
    ),
    "a peer is killed later": (
        "if rank != 1: sys.exit(76)\ntime.sleep(0.7)\nkill()",
        1,
        "was killed by SIGKILL",
    ),
    "only a lost peer": ("sys.exit(76 if rank == 1 else 0)", 1, "ended with exit code 76"),
    "a failure among the preempted": (
        "sys.exit(75) if rank != 1 else (time.sleep(0.5), sys.exit(4))",
        1,
        "ended with exit code 4",
    ),
}  # fmt: skip

QUICK: dict[Any, Any] = {  # what else takes half a minute
    (job, "_LAST_CALL_S"): 1,
    # Torch's store looks up the name of whom it accepts; a lost packet to the name server blocks it for 5 s.
    (rendezvous_store, "_SILENT_S"): 8.0,
}
NOT_HERE: dict[Any, Any] = {(rendezvous_address, "_is_of_this_machine"): lambda *_: False}

Scene = Generator[None, None, list[Ended]]
Scenes = dict[str, list[Ended]]


def nodes_of_a_job(start: Start, *bodies: str, **settings: Any) -> list[Launcher]:
    """One launcher a body."""
    common = {"nodes": (2, 2), "procs": 1, "rendezvous": f"localhost:{free_port()}", **settings}
    return [start(body, **{"node_rank": n, **common}) for n, body in enumerate(bodies)]


def until_held(place: str) -> None:
    """Until somebody listens there."""
    deadline = time.monotonic() + 300
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection(("localhost", int(place.rpartition(":")[2]))).close()
            return
        assert time.monotonic() < deadline
        time.sleep(0.01)


def undisturbed(launchers: list[Launcher]) -> Scene:
    yield
    return [launcher.end() for launcher in launchers]


def lost_holder(start: Start, number: signal.Signals) -> Scene:
    """Stopped, it answers no more, and torch's store waits for it whatever its timeout."""
    settings = {"rendezvous": f"localhost:{free_port()}", "max_restarts": 3, "patch": QUICK}
    launchers = nodes_of_a_job(start, "wait()", **settings)
    until_held(settings["rendezvous"])  # or the other one would hold it
    launchers += nodes_of_a_job(start, "wait()", node_rank=1, **settings)
    yield
    pids = [launcher.pids(1, rank)[0] for rank, launcher in enumerate(launchers)]
    launchers[0].send(number)
    launchers[1].began = time.monotonic()
    if number == signal.SIGKILL:
        until_gone(pids[:1], 2)
    yield
    ended = launchers[1].end()
    assert is_gone(pids[1])
    return [ended]


def stopped_holder(start: Start) -> Scene:
    """While the others still wait for a third one; then who asks the store gets no answer for ever."""
    settings = {"nodes": (3, 3), "rendezvous": f"localhost:{free_port()}"}
    holder = nodes_of_a_job(start, "", **settings)[0]
    until_held(settings["rendezvous"])
    (waits,) = nodes_of_a_job(start, "", node_rank=1, **settings)
    yield
    holder.send(signal.SIGSTOP)
    yield
    waits.send(signal.SIGTERM)
    return [waits.end()]


def lost_node(start: Start) -> Scene:
    """The one that is lost was the first in torch's order, which the job must survive, too."""
    body = """
import socket
if world == 2:
    wait()
socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))).close()
say(rank, world)
"""
    common = {
        "nodes": (1, 2),
        "procs": 1,
        "rendezvous": f"localhost:{free_port()}",
        "max_restarts": 1,
    }
    # One node would be enough, and the other one may come 5 s later, for a name server (QUICK).
    quick = QUICK | {(job, "_LAST_CALL_S"): 6}
    stays = start(body, local_addr="localhost", patch=quick, **common)
    lost = start(body, local_addr="127.0.0.1", patch=quick | NOT_HERE, **common)
    yield
    pids = stays.pids(1, 1) + lost.pids(1, 0)
    lost.send(signal.SIGKILL)
    yield
    ended = stays.end()
    assert all(map(is_gone, pids))
    return [ended]


def late_node(start: Start) -> Scene:
    """The ranks that run save first."""
    body = """
def save():
    say("saved")
    sys.exit(75)

on(signal.SIGTERM, save)
if world == 1:
    wait()
say(rank, world)
"""
    settings = {"nodes": (1, 2), "rendezvous": f"localhost:{free_port()}", "patch": QUICK}
    first = nodes_of_a_job(start, body, **settings)[0]
    yield
    first.pids(1)
    second = start(body, procs=1, node_rank=1, **settings)
    yield
    return [first.end(), second.end()]


def no_agreement(start: Start, number: signal.Signals) -> Scene:
    """Of plain scripts on two nodes, one of which is told to stop."""
    body = "signal.signal(signal.SIGINT, signal.SIG_DFL)\nwait()"
    launchers = nodes_of_a_job(start, body, body, max_restarts=3)
    yield
    pids = [launcher.pids(1, rank)[0] for rank, launcher in enumerate(launchers)]
    launchers[0].send(number)
    yield
    ended = [launcher.end() for launcher in launchers]
    assert all(map(is_gone, pids))
    return ended


def spare_node(start: Start, go: Path) -> Scene:
    body = f"ready()\nwhile not os.path.exists({str(go)!r}):\n    time.sleep(0.05)"
    settings = {"nodes": (2, 2), "rendezvous": f"localhost:{free_port()}"}
    launchers = nodes_of_a_job(start, body, body, node_rank=None, **settings)
    yield
    for rank, launcher in enumerate(launchers):
        launcher.pids(1, rank)
    launchers.append(start(body, procs=1, **settings))
    time.sleep(2)
    go.touch()
    yield
    return [launcher.end() for launcher in launchers]


@pytest.fixture(scope="module")
def scenes(
    start: Start, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Scenes:
    """What each has left; they mostly wait, so they do it together. Of ENDS, those that tests ask for."""
    callspecs = [getattr(item, "callspec", None) for item in request.session.items]
    chosen = {spec.params.get("name") for spec in callspecs if spec}
    killed = "kill() if rank == {} else wait()"
    # Only a start after an own failure counts in TORCHELASTIC_RESTART_COUNT, so this looks for a file.
    again = "first = not os.path.exists(f'ready-{rank}')\nready()\n"
    again += "if first: kill() if rank == 1 else wait()\nsay(rank, world)"
    late = ("sys.exit(76)", "time.sleep(0.5)\nkill()")
    greets = "say(rank, os.environ['GROUP_RANK'], world)"
    saves = "time.sleep(2.5 * rank)\nsay(rank)\nsys.exit(75)"
    refuses = "sys.exit(2) if rank == 1 else wait()"
    place = {"nodes": (2, 2), "rendezvous": f"localhost:{free_port()}", "join_timeout_s": 6}
    others = {
        "nobody comes": undisturbed(
            [start("", **place), start("", **place, patch=NOT_HERE, job_id="other")]
        ),
        "done": undisturbed(nodes_of_a_job(start, greets, greets, procs=2)),
        "killed 0": undisturbed(nodes_of_a_job(start, *[killed.format(0)] * 2)),
        "killed 1": undisturbed(nodes_of_a_job(start, *[killed.format(1)] * 2)),
        "killed late": undisturbed(nodes_of_a_job(start, *late)),
        "refused": undisturbed(nodes_of_a_job(start, refuses, refuses, max_restarts=3)),
        "preempted": undisturbed(nodes_of_a_job(start, saves, saves, max_restarts=3)),
        "again": undisturbed(nodes_of_a_job(start, again, again, max_restarts=1)),
        "same place": undisturbed(nodes_of_a_job(start, "", "", node_rank=0)),
        "SIGKILL for the holder": lost_holder(start, signal.SIGKILL),
        "SIGSTOP for the holder": lost_holder(start, signal.SIGSTOP),
        "stopped holder": stopped_holder(start),
        "lost node": lost_node(start),
        "late node": late_node(start),
        "SIGTERM for one": no_agreement(start, signal.SIGTERM),
        "SIGINT for one": no_agreement(start, signal.SIGINT),
        "spare node": spare_node(start, tmp_path_factory.mktemp("spare") / "go"),
    }
    left: Scenes = {}
    take_turns(others, left, num_turns=1)
    names = [name for name in ENDS if name in chosen]
    for part in range(0, len(names), 6):
        take_turns(
            {name: undisturbed([start(ENDS[name][0], procs=3)]) for name in names[part : part + 6]},
            left,
        )
    take_turns(others, left)
    return left


def take_turns(scenes: dict[str, Scene], left: Scenes, num_turns: int = 3) -> None:
    """Let each go on to its next wait."""
    for _ in range(num_turns):
        for name, scene in list(scenes.items()):
            try:
                next(scene)
            except StopIteration as stop:
                left[name] = stop.value
                del scenes[name]


# ---------------------------------------------------------------- one machine


def test_ranks_get_what_torchrun_gives(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR TORCHELASTIC_RUN_ID"
    body = f"""
import socket
socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))).close()
threads = int(os.environ["OMP_NUM_THREADS"])
say(*[os.environ[name] for name in {names.split()}], 0 < threads <= 2, sys.argv[1:])
"""
    arguments = ["a$$b", "$HOME", "${x}", "--local_rank=${local_rank}"]
    ended = start(body, *arguments, procs=3, job_id="job-7").end()
    assert (ended.code, ended.err) == (0, [])
    assert ended.out == [
        f"{rank} 3 {rank} 3 0 127.0.0.1 job-7 True {[*arguments[:3], f'--local_rank={rank}']}"
        for rank in range(3)
    ]


def test_threads_that_the_user_has_chosen_stay(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert start("say(os.environ['OMP_NUM_THREADS'])").end().out == ["5", "5"]


@pytest.mark.parametrize("name", ENDS)
def test_exit_code_and_last_line(name: str, scenes: Scenes) -> None:
    _, code, how = ENDS[name]
    (ended,) = scenes[name]
    assert ended.code == code
    assert ended.seconds < 10
    if how is None:
        assert ended.err == []
    else:
        last_line(ended, 1, 3, how)
        assert len(ended.err) == 1


def test_the_ranks_that_are_left_have_seconds(start: Start) -> None:
    """One ignores SIGTERM, and its child as well; those of the rank that fails go with it."""
    body = """
on(signal.SIGTERM, lambda: say("asked"))
child = os.fork()
if not child:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
with open(f"child-{rank}", "w") as file:
    file.write(str(child))
ready()
while rank == 1 and not os.path.exists("go"):
    time.sleep(0.01)
if rank == 1:
    kill()
while True:
    time.sleep(60)
"""
    launcher = start(body)
    pids = launcher.pids()
    pids += [int((launcher.folder / f"child-{rank}").read_text()) for rank in range(2)]
    assert not any(map(is_gone, pids))
    launcher.began = time.monotonic()
    (launcher.folder / "go").touch()
    ended = launcher.end()
    assert all(map(is_gone, pids))
    assert (ended.code, ended.out) == (1, ["asked"])
    assert ended.seconds < 10
    last_line(ended, 1, 2, "was killed by SIGKILL")


def test_ranks_start_again_after_a_failure(start: Start) -> None:
    often = start("if rank == 1: kill()\nwait()", max_restarts=2)
    body = "if first and rank == 1: kill()\nif first: wait()\nsay(rank, sys.argv[1:])"
    once = start(body, "--flag", max_restarts=1).end()
    assert (once.code, once.out) == (0, ["0 ['--flag']", "1 ['--flag']"])
    how = r"was killed by SIGKILL; starting the ranks again \(restart 1 of {}\)"
    last_line(once, 1, 2, how.format(1))
    assert len(once.err) == 1
    ended = often.end()
    assert ended.code == 1
    last_line(ended, 1, 2, "was killed by SIGKILL")
    last_line(ended._replace(err=ended.err[:1]), 1, 2, how.format(2))
    assert len(ended.err) == 3


NAMES_RUN = """
if rank == 0:
    with open(os.environ["FLAMBEAU_RUN_FILE"], "wb") as file:
        file.write(os.fsencode("runs/caf\\udce9"))
ready()
name = os.path.join(os.path.dirname(os.environ["FLAMBEAU_RUN_FILE"]), "0.run")  # of rank 0
while not (os.path.exists(name) and os.path.getsize(name)):
    time.sleep(0.01)
while not os.path.exists("ready-0") or not os.path.exists("ready-1"):
    time.sleep(0.01)
"""


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_rank_is_noted_for_its_run(start: Start, lost: int) -> None:
    body = f"{NAMES_RUN}if rank == {lost}: kill() if first else sys.exit(3)\nwait()"
    launcher = start(body, max_restarts=1)
    assert launcher.end().code == 1
    lines = (launcher.folder / "lost").read_bytes().decode(errors="surrogateescape").splitlines()
    which = rf"runs/caf\udce9: rank {lost} of 2 \(host .*, process \d+\) "
    assert [re.sub(which, "", line) for line in lines] == [
        "was killed by SIGKILL", "ended with exit code 3",
    ]  # fmt: skip


@pytest.mark.parametrize("how", ["sys.exit(2)", "sys.exit(70)", "sys.exit(75)", "sys.exit(0)"])
def test_a_rank_that_has_ended_itself_is_not_lost(start: Start, how: str) -> None:
    launcher = start(f"{NAMES_RUN}{how}")
    launcher.end()
    assert not (launcher.folder / "lost").exists()


@pytest.mark.parametrize("code", [2, 70, 75, 130])
def test_some_codes_are_final(code: int, start: Start) -> None:
    ended = start(f"say(rank); sys.exit({code})", procs=1, max_restarts=3).end()
    assert (ended.code, ended.out, ended.err) == (code, ["0"], [])


def test_it_leaves_its_process_as_it_was(tmp_path: Path) -> None:
    """In a fork, where a failure does no harm."""
    (tmp_path / "script.py").write_text("")

    def work() -> None:
        logger = logging.getLogger("torch.distributed.elastic")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

        def state() -> Any:
            numbers = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP
            handlers = [signal.getsignal(number) for number in numbers]
            return (
                dict(os.environ),
                handlers,
                logger.propagate,
                list(logger.handlers),
                list(tmp_path.iterdir()),
            )

        tempfile.tempdir = str(tmp_path)
        before = state()
        code = launch(
            JobSpec(command=[sys.executable, str(tmp_path / "script.py")], procs=1), say=print
        )
        os._exit(code if state() == before else 9)

    process = multiprocessing.get_context("fork").Process(target=work)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    process.join(60)
    assert process.exitcode == 0


def test_the_folder_of_a_killed_launcher_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def be_killed() -> None:
        with launch_module._folder() as folder:
            (folder / "stdout").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=be_killed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    process.join(60)
    (left,) = tmp_path.iterdir()
    with launch_module._folder() as first:
        (first / "stdout").touch()
        with launch_module._folder() as second:
            assert {first, second} == set(tmp_path.iterdir())
    assert not left.exists()
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- signals


def test_a_signal_goes_to_each_rank_once_and_all_have_time(start: Start) -> None:
    """More of it than the ranks of a failed job get."""
    body = """
def save():
    say(rank, "asked")
    time.sleep(0.1 + 2.5 * rank)
    say(rank, "saved")
    os._exit(75)

on(signal.{}, save)
wait()
"""
    names = {signal.SIGTERM: "SIGTERM", signal.SIGUSR1: "SIGUSR1", signal.SIGHUP: "SIGTERM"}
    launchers = {number: start(body.format(name), max_restarts=3) for number, name in names.items()}
    for launcher in launchers.values():
        launcher.pids()
    for number, launcher in launchers.items():
        launcher.send(number)
    for launcher in launchers.values():
        ended = launcher.end()
        assert (ended.code, ended.err) == (75, [])
        assert ended.out == ["0 asked", "0 saved", "1 asked", "1 saved"]
        assert 2.5 < ended.seconds < 10


def test_a_signal_that_comes_while_signals_are_taken_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Between the handlers of the first and of the last of them."""
    install = signal.signal

    def interrupted(number: int, handler: Any) -> Any:
        before = install(number, handler)
        if number == signal.SIGINT and not said:
            said.append("installed")
            signal.raise_signal(signal.SIGINT)
        return before

    said: list[str] = []
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr(signal, "signal", interrupted)
    assert launch(JobSpec(command=[sys.executable, "-c", ""], procs=1), say=said.append) == 130
    assert said == ["installed", "flambeau: interrupted"]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


@pytest.mark.parametrize(
    ("number", "code", "err"),
    [
        (signal.SIGTERM, 75, []),
        (signal.SIGUSR1, 75, []),
        (signal.SIGINT, 130, ["flambeau: interrupted"]),
    ],
)
def test_a_script_without_an_answer_ends(
    number: signal.Signals, code: int, err: list[str], start: Start
) -> None:
    launcher = start("signal.signal(signal.SIGINT, signal.SIG_DFL)\nwait()", max_restarts=1)
    pids = launcher.pids()
    ended = launcher.send(number).end()
    assert (ended.code, ended.err) == (code, err)
    assert ended.seconds < 10
    assert all(map(is_gone, pids))


def test_one_ctrl_c_asks_and_the_second_kills(start: Start) -> None:
    launcher = start("on(signal.SIGINT, lambda: say('asked'))\nwait()")
    pids = launcher.pids()
    launcher.send(signal.SIGINT)
    time.sleep(2)  # longer than a failed job would live
    assert not any(map(is_gone, pids))
    ended = launcher.send(signal.SIGINT).end()
    assert (ended.code, ended.out, ended.err) == (130, ["asked"] * 2, ["flambeau: interrupted"])
    assert ended.seconds < 10
    assert all(map(is_gone, pids))


def test_a_rank_that_fails_while_others_save_is_named(start: Start) -> None:
    body = """
def save():
    time.sleep(2.5 * (rank == 0))
    say(rank, "saved")
    os._exit(75 if rank == 0 else 9)

on(signal.SIGTERM, save)
wait()
"""
    launcher = start(body, max_restarts=3)
    launcher.pids()
    ended = launcher.send(signal.SIGTERM).end()
    assert (ended.code, ended.out) == (1, ["0 saved", "1 saved"])
    last_line(ended, 1, 2, "ended with exit code 9")


STOPS = """
if rank == 0:
    kill(signal.SIGSTOP)
wait()
"""


def test_a_rank_that_is_stopped_is_named_and_killed_when_the_job_is_to_end(start: Start) -> None:
    """SIGTERM does not reach it: the job waited for ever, and said nothing."""
    launcher = start(STOPS, patch={(attempt, "_STOPPED_S"): 1.0})
    (pid,) = launcher.pids(1, first=1)
    deadline = time.monotonic() + 300
    while not (said := (launcher.folder / "err").read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert re.fullmatch(
        WHO.format(0, 2)
        + r" has been stopped for 1 s, by SIGSTOP or another such signal: kill -CONT \d+ lets it go on\n",
        said,
    )
    ended = launcher.send(signal.SIGTERM).end()
    assert ended.code == 1
    assert 1 < ended.seconds < 10
    how = "was stopped, by SIGSTOP or another such signal, and had to be killed"
    last_line(ended, 0, 2, how)
    assert len(ended.err) == 2
    assert is_gone(pid)


@pytest.mark.parametrize("whose", ["rank", "supervisor"])
def test_a_job_whose_other_ranks_have_saved_does_not_wait_for_a_stopped_one(
    start: Start, whose: str
) -> None:
    body = f"""
ready()
while not os.path.exists("ready-1"):
    time.sleep(0.01)
if rank == 0:
    os.kill(os.getpid() if {whose == "rank"} else os.getppid(), signal.SIGSTOP)
sys.exit(75)
"""
    ended = start(body, patch={(attempt, "_STOPPED_S"): 1.0}).end()
    assert ended.code == 1
    last_line(ended, 0, 2, "was stopped, by SIGSTOP or another such signal, and had to be killed")


def test_a_rank_that_goes_on_again_saves(start: Start) -> None:
    body = "on(signal.SIGTERM, lambda: sys.exit(75))\nwait()"
    launcher = start(body, patch={(attempt, "_STOPPED_S"): 2.0})
    pids = launcher.pids()
    os.kill(pids[0], signal.SIGSTOP)
    launcher.send(signal.SIGTERM)
    time.sleep(0.5)
    os.kill(pids[0], signal.SIGCONT)
    ended = launcher.end()
    assert (ended.code, ended.err) == (75, [])


def test_ranks_do_not_outlive_the_launcher(start: Start) -> None:
    launcher = start("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwait()")
    pids = launcher.pids()
    launcher.send(signal.SIGKILL)
    until_gone(pids, 2)


def test_a_rank_whose_supervisor_is_killed_counts_as_killed(start: Start) -> None:
    launcher = start("wait()")
    pids = launcher.pids()
    stat = Path(f"/proc/{pids[1]}/stat").read_text()
    os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
    ended = launcher.end()
    assert ended.code == 1
    last_line(ended, 1, 2, "was killed by SIGKILL")
    assert all(map(is_gone, pids))


# ---------------------------------------------------------------- several nodes


def test_nodes_are_in_the_order_of_their_ranks(scenes: Scenes) -> None:
    first, second = scenes["done"]
    assert (first.code, first.err, second.code, second.err) == (0, [], 0, [])
    assert first.out == ["0 0 4", "1 0 4"]
    assert second.out == ["2 1 4", "3 1 4"]


@pytest.mark.parametrize(("name", "rank"), [("killed 0", 0), ("killed 1", 1), ("killed late", 1)])
def test_every_node_names_the_rank_that_failed(name: str, rank: int, scenes: Scenes) -> None:
    for ended in scenes[name]:
        assert ended.code == 1
        assert ended.seconds < 10
        last_line(ended, rank, 2, "was killed by SIGKILL")
        assert len(ended.err) == 1


def test_a_node_waits_for_one_that_still_saves(scenes: Scenes) -> None:
    first, second = scenes["preempted"]
    assert (first.code, first.out, first.err) == (75, ["0"], [])
    assert (second.code, second.out, second.err) == (75, ["1"], [])
    assert first.seconds > 2.5


def test_wrong_input_ends_all_nodes(scenes: Scenes) -> None:
    first, second = scenes["refused"]
    assert (first.code, second.code, second.err) == (2, 2, [])
    last_line(first, 1, 2, "ended with exit code 2")  # it was printed on the other machine


def test_all_nodes_start_again(scenes: Scenes) -> None:
    first, second = scenes["again"]
    assert (first.code, first.out, second.code, second.out) == (0, ["0 2"], 0, ["1 2"])
    for ended in (first, second):
        last_line(
            ended, 1, 2, r"was killed by SIGKILL; starting the ranks again \(restart 1 of 1\)"
        )


def test_two_nodes_cannot_have_one_place(scenes: Scenes) -> None:
    line = "flambeau: two nodes have the same --node-rank: 0"
    assert [(ended.code, ended.err) for ended in scenes["same place"]] == [(2, [line])] * 2


def has_handlers(pid: int) -> bool:
    """Whether a process catches SIGTERM."""
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert caught is not None
    return bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


NOT_HERE: dict[Any, Any] = {(rendezvous_address, "_is_of_this_machine"): lambda *_: False}


@pytest.mark.parametrize("patch", [{}, NOT_HERE], ids=["holds the rendezvous", "looks for it"])
@pytest.mark.parametrize(
    ("number", "code", "err"),
    [(signal.SIGTERM, 75, []), (signal.SIGINT, 130, ["flambeau: interrupted"])],
)
def test_a_signal_ends_the_wait_for_other_nodes(
    number: signal.Signals, code: int, err: list[str], patch: Any, start: Start
) -> None:
    launcher = start("", nodes=(2, 2), rendezvous=f"localhost:{free_port()}", patch=patch)
    while not has_handlers(launcher.process.pid):
        time.sleep(0.01)
    time.sleep(0.3)
    ended = launcher.send(number).end()
    assert (ended.code, ended.err) == (code, err)
    assert ended.seconds < 10


def test_nobody_holds_the_rendezvous(start: Start) -> None:
    place = f"localhost:{free_port()}"
    ended = start("", nodes=(2, 2), rendezvous=place, join_timeout_s=1, patch=NOT_HERE).end()
    assert ended.code == 2
    assert len(ended.err) == 1
    assert re.match(
        rf"flambeau: nobody has answered at {place} for 1 s \(.*refused\): ", ended.err[0]
    )


@pytest.mark.parametrize(
    ("num_nodes", "words"), [(1, "cannot be the rendezvous"), (2, "is no rendezvous")]
)
def test_a_port_of_another_program_is_named(num_nodes: int, words: str, start: Start) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        place = f"localhost:{other.getsockname()[1]}"
        patch = {(rendezvous_store, "STORE_S"): 2}
        ended = start("", nodes=(num_nodes,) * 2, rendezvous=place, patch=patch).end()
    assert ended.code == 2
    assert len(ended.err) == 1
    assert place in ended.err[0]
    assert words in ended.err[0]


def test_who_does_not_come_is_waited_for_and_no_longer(scenes: Scenes) -> None:
    in_vain = r"not enough nodes have come to localhost:\d+ in time"
    given_up = rf"({in_vain}|the job at localhost:\d+ is over, or was given up there)"
    same = "start `flambeau launch` on each node, with the same --rdzv, --nnodes and --job-id"
    for ended, reason in zip(scenes["nobody comes"], (in_vain, given_up), strict=True):
        assert ended.code == 2
        assert re.fullmatch(
            r"flambeau: waiting for the other nodes at localhost:\d+", ended.waiting[0]
        )
        assert re.fullmatch(rf"flambeau: {reason}: {same}", ended.err[-1])
        assert 6 < ended.seconds < 15


@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
def test_a_lost_holder_of_the_rendezvous_is_named(number: str, scenes: Scenes) -> None:
    (ended,) = scenes[f"{number} for the holder"]
    assert ended.code == 1
    line = r"flambeau: lost the node that holds the rendezvous, localhost:\d+"
    assert re.fullmatch(line, ended.err[-1])
    assert ended.seconds < 15


def test_a_signal_ends_the_wait_for_a_store_that_stands_still(scenes: Scenes) -> None:
    (ended,) = scenes["stopped holder"]
    assert ended.code == 75
    assert ended.seconds < 10


def test_a_job_goes_on_without_a_lost_node(scenes: Scenes) -> None:
    (ended,) = scenes["lost node"]
    assert (ended.code, ended.out) == (0, ["0 1"])
    assert ended.err[0] == (
        f"flambeau: the node at 127.0.0.1 (host {socket.gethostname()}) has been silent for 8 s; "
        "starting the ranks again (restart 1 of 1)"
    )
    assert ended.err[-1] == "flambeau: now 1 rank on 1 node"


def test_a_node_that_comes_later_is_taken_in(scenes: Scenes) -> None:
    first, second = scenes["late node"]
    # Nodes of one host are ranked by process id, which begins again at some point.
    assert {first.out[0], second.out[0]} == {"0 2", "1 2"}
    assert (first.code, first.out[1:]) == (0, ["saved"])
    assert first.err == [
        "flambeau: another node has joined; starting the ranks again",
        "flambeau: now 2 ranks on 2 nodes",
    ]
    assert (second.code, second.out[1:], second.err) == (0, [], [])


@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 75), ("SIGINT", 130)])
def test_ranks_that_cannot_agree_end_on_all_nodes(number: str, code: int, scenes: Scenes) -> None:
    first, second = scenes[f"{number} for one"]
    assert [first.code, second.code] == [code, code]
    assert second.err == [f"flambeau: stopped by {number} on host {socket.gethostname()}"]


def test_a_node_too_many_waits_as_a_spare(scenes: Scenes) -> None:
    first, second, spare = scenes["spare node"]
    assert [first.code, second.code, spare.code] == [0, 0, 0]
    line = "flambeau: the job is over; it had as many nodes as it takes without this one"
    assert spare.err[-1] == line  # torch's C++ code may have told of the lost store before


# ---------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"procs": 0}, "at least one process; got 0"),
        ({"max_restarts": -1}, "counts from 0; got -1"),
        ({"nodes": (0, 1)}, "got 0:1"),
        ({"nodes": (3, 2), "rendezvous": "a:1"}, "got 3:2"),
        ({"nodes": (1, 2)}, "--rdzv HOST:PORT"),
        ({"nodes": (1, 2), "rendezvous": "host"}, "got 'host'"),
        ({"nodes": (1, 2), "rendezvous": "host:"}, "got 'host:'"),
        ({"nodes": (1, 2), "rendezvous": ":29500"}, "got ':29500'"),
        ({"nodes": (1, 2), "rendezvous": "host:0"}, "got 'host:0'"),
        ({"nodes": (1, 2), "rendezvous": "host:65536"}, "got 'host:65536'"),
        ({"nodes": (1, 2), "rendezvous": "no-such-host.invalid:29500"}, "'no-such-host.invalid'"),
        ({"nodes": (1, 2), "rendezvous": "a..b:29500"}, "'a..b'"),
        (
            {"nodes": (1, 2), "rendezvous": "localhost:1", "local_addr": "no-such-host.invalid"},
            "'no-such-host.invalid'",
        ),
        ({"local_addr": "localhost"}, "--rdzv"),
        ({"node_rank": 1}, "from 0 to 0; got 1"),
        ({"node_rank": -1}, "got -1"),
        ({"job_id": "a/b"}, "got 'a/b'"),
        ({"job_id": ""}, "got ''"),
        ({"join_timeout_s": 0}, "got 0"),
    ],
)
def test_wrong_arguments_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        launch(JobSpec(command=[sys.executable, "-c", ""], **{"procs": 1, **settings}), say=print)
    assert len(str(caught.value).splitlines()) <= 2


@pytest.mark.parametrize("command", [[], ["no-such-program"], ["./no/such"]])
def test_a_program_that_is_not_there_is_named(command: list[str]) -> None:
    with pytest.raises(InputError, match=repr("".join(command))):
        launch(JobSpec(command=command, procs=1), say=print)


def test_a_host_is_found_by_its_addresses() -> None:
    """A name, an address of version 4 or 6; another machine's address is no place to hold it."""
    place = rendezvous_address.find_rendezvous("localhost:29500")
    assert (place.is_here, place.local_addr, place.interface) == (True, "localhost", "lo")
    assert str(place) == "localhost:29500"
    assert rendezvous_address.find_rendezvous("127.0.0.1:1").interface == "lo"
    assert (
        rendezvous_address.find_rendezvous("localhost:1", local_addr="127.0.0.1").local_addr
        == "127.0.0.1"
    )
    if Path("/proc/sys/net/ipv6/conf/lo/disable_ipv6").exists():
        place = rendezvous_address.find_rendezvous("[::1]:29500")
        assert (place.host, str(place)) == ("::1", "[::1]:29500")


def test_a_host_behind_a_name_that_leads_elsewhere_says_so_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous_address, "_is_of_this_machine", lambda *_: False)
    assert [
        rendezvous_address.find_rendezvous("localhost:29500", node_rank=rank).is_here
        for rank in (0, 1, None)
    ] == [True, False, False]
