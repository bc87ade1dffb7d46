"""Preemption: a signal ends the command with a checkpoint and exit code 75; the same command goes on.

Two runs of the command are stopped again and again, side by side, then finish and are compared with a run
that nobody stopped. Each stop is one start of the command; the tests look at what the stops have left.
"""

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flambeau.recipes.checkpoints.atomic_checkpoint import verify_checkpoint
from load_script import load_script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it watches processes in /proc")

SAVED = re.compile(r"^(\w+): saved at step (\d+) in .*; the same command goes on from here$", re.M)


@dataclass(frozen=True)
class Stop:
    """What a stopped command has left.

    Attributes:
        name: of the signal.
        code: exit code.
        output: all that it said.
        seen: the step of the last line of metrics.jsonl when the signal was sent, the process standing still.
        step: of the newest checkpoint afterwards, verified.
    """

    name: str
    code: int
    output: str
    seen: int
    step: int


@dataclass(frozen=True)
class Stopped:
    """All stops by what they try, and what the finished runs differ in."""

    stops: Mapping[str, Stop]
    differences: list[str]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script(Path(__file__).parents[2] / "bench" / "kill_storm.py")


@pytest.fixture(scope="module")
def stopped(
    bench: ModuleType, forked_command: Any, tmp_path_factory: pytest.TempPathFactory
) -> Stopped:
    folder = tmp_path_factory.mktemp("preemption")
    arguments = [*bench.make_inputs(folder), "--log-every", "1", "--checkpoint-every", "1ep"]
    cores = (sorted(os.sched_getaffinity(0)) * 2)[:2]

    def life(run: str, workers: int, sleep_s: float = 0.0, start: Any = forked_command) -> Any:
        """On the core of its run: the first of the two does the unstopped run as well."""
        core, environ = cores[run == "b"], {"FORWARD_SLEEP_S": f"{sleep_s}"}
        return bench.Life(
            arguments, folder / run, workers=workers, core=core, environ=environ, start=start
        )

    def first() -> dict[str, Stop]:
        life("unstopped", 0).finish()
        stops = {
            "TERM": stop(life("a", 0), signal.SIGTERM, after_steps=3),
            "TERM to the group": stop(life("a", 2), signal.SIGTERM, after_steps=9, group=True),
            "USR1 to the group": stop(life("a", 2), signal.SIGUSR1, after_steps=5, group=True),
            "INT": stop(life("a", 0), signal.SIGINT, after_steps=27),
            "many TERM while workers start": stop_with_many(life("a", 2), signal.SIGTERM),
        }
        life("a", 0).finish()
        return stops

    def second() -> dict[str, Stop]:
        stops = {
            "TERM while torch loads": stop_at_start(life("b", 2, start=None), signal.SIGTERM),
            "INT to the group": stop(life("b", 2), signal.SIGINT, after_steps=13, group=True),
            "USR1": stop(life("b", 0), signal.SIGUSR1, after_steps=2),
            "INT twice": stop_twice(life("b", 2, sleep_s=300.0)),
        }
        life("b", 2).finish()
        return stops

    with ThreadPoolExecutor(2) as pool:
        halves = [pool.submit(half) for half in (first, second)]
        stops = halves[0].result() | halves[1].result()
    unstopped = folder / "unstopped"
    found = [f"{r}: {text}" for r in "ab" for text in bench.differences(unstopped, folder / r)]
    return Stopped(stops, found)


def stop(life: Any, number: signal.Signals, *, after_steps: int, group: bool = False) -> Stop:
    """Send a signal when some steps are done; the process stands still meanwhile, so that `seen` is exact."""
    assert life.wait_for(
        lambda: life.has_claimed() and last_step(life.run) >= max(0, life.first_step) + after_steps
    )
    os.kill(life.process.pid, signal.SIGSTOP)
    seen = last_step(life.run)
    send(life, number, group=group)
    os.kill(life.process.pid, signal.SIGCONT)
    return outcome(life, number, seen)


def stop_at_start(life: Any, number: signal.Signals) -> Stop:
    """Send a signal to the group while torch is imported."""
    maps = Path(f"/proc/{life.process.pid}/maps")
    assert life.wait_for(lambda: "libtorch" in maps.read_text())
    send(life, number, group=True)
    return outcome(life, number, seen=max(0, life.first_step))


def stop_with_many(life: Any, number: signal.Signals) -> Stop:
    """Send a signal to the group again and again, from the fork of the workers to the end of everything.

    Workers that have just been forked have not yet said what a signal means to them.
    """
    children = Path(f"/proc/{life.process.pid}/task/{life.process.pid}/children")
    assert life.wait_for(lambda: life.has_claimed() and bool(children.read_text()))
    with contextlib.suppress(ProcessLookupError):  # it has ended
        while life.process.poll() is None:
            send(life, number, group=True)
            time.sleep(0.001)
    return outcome(life, number, seen=life.first_step)


def stop_twice(life: Any) -> Stop:
    """SIGINT, and another one when the first was answered, in the middle of a very slow forward pass."""
    assert life.wait_for(lambda: "the forward pass sleeps" in life.output)
    send(life, signal.SIGINT, group=True)
    assert life.wait_for(lambda: "Ctrl-C again stops at once" in life.output)
    send(life, signal.SIGINT, group=True)
    return outcome(life, signal.SIGINT, seen=life.first_step)


def send(life: Any, number: signal.Signals, *, group: bool) -> None:
    (os.killpg if group else os.kill)(life.process.pid, number)


def outcome(life: Any, number: signal.Signals, seen: int) -> Stop:
    """Wait for the end; no process of the group may be left behind."""
    code = life.process.wait(240)
    life.wait_gone()
    newest = max((life.run / "checkpoints").glob("step-*"))
    verify_checkpoint(newest)
    return Stop(number.name, code, life.output, seen, int(newest.name.removeprefix("step-")))


def last_step(run: Path) -> int:
    """The step of the last whole line of metrics.jsonl; -1 where there is none."""
    try:
        steps = re.findall(r'"step": (\d+),.*\n', (run / "metrics.jsonl").read_text())
    except FileNotFoundError:
        return -1
    return int(steps[-1]) if steps else -1


SAVING = (
    "TERM", "TERM to the group", "USR1", "USR1 to the group", "INT", "INT to the group",
    "TERM while torch loads", "many TERM while workers start",
)  # fmt: skip


@pytest.mark.parametrize("name", SAVING)
def test_a_signal_ends_in_a_checkpoint_and_exit_code_75(stopped: Stopped, name: str) -> None:
    stop = stopped.stops[name]
    assert "Traceback" not in stop.output
    assert stop.code == 75, stop.output
    assert SAVED.findall(stop.output) == [(stop.name, f"{stop.step}")]


@pytest.mark.parametrize("name", SAVING)
def test_the_checkpoint_is_within_one_step(stopped: Stopped, name: str) -> None:
    stop = stopped.stops[name]
    assert stop.seen <= stop.step <= stop.seen + 1


def test_sigint_is_answered(stopped: Stopped) -> None:
    for name, stop in stopped.stops.items():
        answers = stop.output.count("stopping after this step and a checkpoint")
        assert answers == name.startswith("INT"), stop.output


def test_a_second_sigint_stops_at_once(stopped: Stopped) -> None:
    stop = stopped.stops["INT twice"]
    assert "Traceback" not in stop.output
    assert stop.code == 130, stop.output
    assert stop.output.endswith("flambeau: interrupted\n")
    assert stop.step == stop.seen  # the newest checkpoint is the one that it started from


def test_the_same_command_goes_on_to_the_same_bits(stopped: Stopped) -> None:
    assert not stopped.differences
