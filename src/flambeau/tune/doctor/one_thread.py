"""A second look at a script on one thread, where other programs take the CPUs.

Threads that compute together wait for each other. One that has no CPU holds up all of them, so what several
threads compute becomes many times as long while the rest of a step becomes somewhat longer. On one thread all
parts become longer alike, and their shares are nearly those on a machine that is quiet.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from flambeau.tune.doctor.trial import Script, Trial
from flambeau.tune.watch.plan import Plan

BUSY = 0.25
"""CPUs that other programs keep busy, from which on they are worth a word; chosen."""


def watched_on_one_thread(
    script: Script, plan: Plan, trial: Trial, *, say: Callable[[str], None]
) -> Trial:
    """A watched run as it was, but what was seen in it comes from another one, if the machine was busy.

    Args:
        script: that was watched.
        plan: by which it was watched.
        trial: what came of it.
        say: takes a line that tells of it.
    """
    others = 0.0 if trial.machine is None else trial.machine.others_cpus
    first = trial.trainers[0]
    if others < BUSY or first["device"] != "cpu" or first["threads"] == 1:
        return trial
    say(f"other programs keep {others:.1f} CPUs busy: watching once more, on one thread")
    again = script.run(dataclasses.replace(plan, change={"threads": 1}, trace=None))
    if len(again.trainers) != len(trial.trainers):
        return trial
    pairs = zip(trial.trainers, again.trainers, strict=True)
    return dataclasses.replace(trial, trainers=[with_looks_of(*pair) for pair in pairs])


def with_looks_of(trainer: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """A process with its own clocks, in which the looks and operations of another one were seen.

    Args:
        trainer: whose steps and waiting were clocked; see `StepWatch`.
        other: in which was looked.
    """
    longer = trainer["seconds"] / other["seconds"]
    slower = trainer["step_s"] / other["step_s"]
    return trainer | {
        "seen": [[*row[:-1], row[-1] * longer] for row in other["seen"]],
        "waiting_calls": [
            [file, line, what, calls, seconds * slower, copied]
            for file, line, what, calls, seconds, copied in other.get("waiting_calls", ())
        ],
        "operations": other.get("operations", {}),
        "times": other.get("times", []),
    }
