"""A second look on one thread, where other programs take the CPUs: simulated runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flambeau.tune.doctor.causes import findings_of
from flambeau.tune.doctor.machine_watch import MachineWatch
from flambeau.tune.doctor.remedies import remedies_for
from flambeau.tune.doctor.run_doctor import watched_on_one_thread
from flambeau.tune.doctor.shares import shares_of
from flambeau.tune.doctor.trial import Trial
from flambeau.tune.watch.plan import Plan
from replaced_trials import replace_trials, script

FILE = "/home/me/train.py"


def row(phase: str, seconds: float, line: int = 7) -> list[Any]:
    return ["main", phase, "", "", FILE, line, "main", seconds]


def trainer(*rows: list[Any], step_s: float, **other: Any) -> dict[str, Any]:
    """Sampled for ten seconds, of which it waited for data for two."""
    return {
        "steps": round(10 / step_s), "seconds": 10.0, "step_s": step_s, "batches": 100, "waited_s": 2.0,
        "started_s": 0.0, "seen": list(rows), "rank": 0, "world": 1, "anomaly": False, "threads": 2,
        "process_threads": 4, "device": "cpu", "loader": {}, "optimizer": {}, "times": [step_s],
        "operations": {"count": 100, "seconds": 0.01, "small_s": 0.0, "memory_bound": 0.0},
        "waiting_calls": [[FILE, 21, ".item()", 60.0, 0.001, 0]],
        **other,
    }  # fmt: skip


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Trial, list[Any]]]:
    """Of a run whose backward is held up by other programs, and takes a fifth of it on one thread."""

    def run(
        others_cpus: float = 1.0, *, fails: bool = False, **other: Any
    ) -> tuple[Trial, list[Any]]:
        machine = MachineWatch(Path("/nowhere"))
        machine.others_cpus = others_cpus
        busy = trainer(row("backward", 7.5), row("", 0.5, 21), step_s=0.5, **other)
        alone = trainer(row("backward", 2.0), row("", 6.0, 21), step_s=0.05, waited_s=9.0)
        changes: list[Any] = []

        def again(_: Any, plan: Plan, __: Path) -> Trial:
            changes.append(plan.change)
            return Trial([], failure="it died") if fails else Trial([alone])

        replace_trials(monkeypatch, again)
        trial = Trial([busy], machine=machine)
        found = watched_on_one_thread(script(), Plan(), trial, say=lambda text: None)
        return found, changes

    return run


def test_the_parts_of_a_step_are_those_on_one_thread(watch: Any) -> None:
    found, changes = watch()
    assert changes == [{"threads": 1}]
    shares = shares_of(found.trainers[0])
    assert shares["data"] == pytest.approx(0.2)  # clocked in the run as it is
    assert shares["backward"] == pytest.approx(0.8 * 2 / 8)
    assert (found.step_s, found.trainers[0]["threads"]) == (0.5, 2)
    threads, cause, *_ = findings_of(found).causes
    assert (threads.kind, threads.share) == ("threads", pytest.approx(0.9))
    assert found.machine is not None
    assert threads.text.startswith(
        f"other programs keep {found.machine.others_cpus:.1f} CPUs busy, and "
        "torch's 2 threads wait for each other: a step was 10.0 times as fast on one"
    )
    remedies = {one.name: one for one in remedies_for(findings_of(found))}
    assert remedies["threads=1"].predicted == pytest.approx(10)
    assert "OMP_NUM_THREADS=1" in remedies["threads=1"].how
    assert (cause.kind, cause.where) == ("sync", f"{FILE}:21")
    assert cause.share == pytest.approx(0.6)


@pytest.mark.parametrize(
    "as_it_is", [{"others_cpus": 0.1}, {"device": "cuda"}, {"threads": 1}, {"fails": True}]
)
def test_the_run_stays_as_it_was(watch: Any, as_it_is: dict[str, Any]) -> None:
    found, changes = watch(**as_it_is)
    assert shares_of(found.trainers[0])["backward"] == pytest.approx(0.8 * 7.5 / 8)
    assert len(changes) == ("fails" in as_it_is)
