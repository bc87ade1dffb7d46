"""Trials that take no time: what a script's run would have told is computed."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from flambeau.sandbox.inside_trial import RUNS
from flambeau.sandbox.sandbox import Sandbox
from flambeau.tune.doctor.trial import Script, Trial
from flambeau.tune.watch.plan import Plan

Answer = Callable[[Sequence[str], Plan, Path], Trial]
"""Of a command, a plan and the folder of the run that `flambeau train` would have made."""


def replace_trials(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> None:
    """No script runs any more; `answer` says what came of it."""

    def run(
        self: Script, plan: Plan, *, before_removal: Callable[[Path], None] = lambda _: None
    ) -> Trial:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / RUNS / "one"
            folder.mkdir(parents=True)
            trial = answer(self.command, plan, folder)
            before_removal(Path(name))
            return trial

    monkeypatch.setattr(Script, "run", run)
    # Nor does a search wait for other programs of this machine.
    monkeypatch.setattr("flambeau.tune.search.run_tune.busy_cpus", lambda seconds: 0.0)


def script(*command: str) -> Script:
    """A script that is never started."""
    return Script(command, cast(Sandbox, None), 10.0)


def answer_of(trial: Any) -> Answer:
    """Always the same."""
    return lambda command, plan, folder: trial
