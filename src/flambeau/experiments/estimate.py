"""What a sweep would take here, by dry runs of its first trials, which leave nothing."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flambeau.errors import InputError
from flambeau.experiments.description import planned_epochs
from flambeau.experiments.proposals import Known, propose
from flambeau.experiments.space import Value, shown
from flambeau.experiments.sweeper import Experiment
from flambeau.run.options.toml_file import as_toml

_MEASURED = 3  # trials, chosen: each takes some seconds


@dataclass(frozen=True)
class Estimate:
    """What the trainings of a sweep would take, by the mean of a few.

    Attributes:
        epoch_s: of each measured trial, without evaluations.
        total_s: of all trainings, one after the other.
        disk_bytes: of all run folders at most.
        failures: of measured trials, with their settings.
    """

    epoch_s: tuple[float, ...]
    total_s: float
    disk_bytes: int
    failures: tuple[str, ...]


def estimate(experiment: Experiment) -> Estimate:
    """Measure the first trials of a sweep of `flambeau train`.

    Raises:
        InputError: all of them have failed.
    """
    costs = list[Mapping[str, Any]]()
    failures = list[str]()
    for settings in _first_choices(experiment):
        found = _measured({**experiment.settings, **settings}, trust=experiment.trust)
        if isinstance(found, str):
            words = " ".join(f"{name}={shown(value)}" for name, value in settings.items())
            failures.append(f"with {words}: {found}" if words else found)
        else:
            costs.append(found)
    if not costs:
        raise InputError(failures[0])
    epoch_s = tuple(cost["step_s"] * cost["steps_per_epoch"] for cost in costs)
    runs = len(experiment.members)
    _, epochs = planned_epochs(experiment.rules)
    if len(experiment.rules.rungs) > 1:
        total_s = epochs * sum(epoch_s) / len(costs)
    else:  # a trial's length may be searched, or be no whole number of epochs
        total_s = experiment.rules.trials * sum(cost["total_s"] for cost in costs) / len(costs)
    largest = max(cost["disk_bytes"] for cost in costs)
    return Estimate(
        epoch_s, total_s * runs, largest * experiment.rules.trials * runs, tuple(failures)
    )


def _first_choices(experiment: Experiment) -> list[dict[str, Value]]:
    """The settings of the first trials, which are chosen before there are results."""
    rules = experiment.rules
    known = list[Known]()
    for _ in range(min(_MEASURED, rules.trials, rules.ahead + 1)):
        settings = propose(
            experiment.space,
            known,
            sampler=experiment.sampler,
            seed=experiment.seed,
            mode=rules.mode,
        )
        known.append(Known(settings, {}, "running"))
    first = experiment.members[0].settings
    return [{**one.settings, **first} for one in known]


def _measured(settings: Mapping[str, Any], *, trust: bool) -> Mapping[str, Any] | str:
    """The cost of a run by `flambeau train --dry-run`, or its error.

    In a process of its own, with memory of its own, that keeps a user's code off their files.
    """
    with tempfile.TemporaryDirectory(prefix="flambeau-trial-") as folder:
        config = Path(folder) / "trial.toml"
        config.write_bytes(as_toml(settings))
        words = ["--config", str(config), "--out", f"{folder}/run", "--dry-run", "--json-lines"]
        done = subprocess.run(
            [sys.executable, "-m", "flambeau", "train", *words, *(["--trust"] if trust else [])],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    lines = done.stdout.splitlines()
    event: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    if event.get("event") == "dry_run":
        return event
    return str(event.get("message", f"flambeau train ended with exit code {done.returncode}"))
