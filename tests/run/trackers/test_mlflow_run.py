"""Runs of MLflow in a local store, read back by its client.

It is imported by the first test: that takes seconds, which each process of pytest would spend.
"""

import contextlib
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flambeau.run.trackers.mlflow_run import MlflowRun

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning",  # connections to its database that it leaves open
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore::DeprecationWarning",  # of what it imports
)

Points = list[tuple[int, dict[str, float]]]


@pytest.fixture(autouse=True, scope="module")
def _mlflow() -> None:
    """Here already, and not in each process that is forked."""
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def client_of(uri: str) -> Any:
    import mlflow

    return mlflow.MlflowClient(uri)


def runs(uri: str) -> list[Any]:
    client = client_of(uri)
    experiment = client.get_experiment_by_name("flambeau")
    return list(client.search_runs([experiment.experiment_id]))


def curves(uri: str, run: Any) -> dict[str, list[tuple[int, float]]]:
    client = client_of(uri)
    found = {}
    for name in run.data.metrics:
        if name not in ("images_per_s", "data_wait"):
            history = client.get_metric_history(run.info.run_id, name)
            in_order = sorted(history, key=lambda point: point.timestamp)
            found[name] = [(point.step, point.value) for point in in_order]
    return found


def expected(lines: Points) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for step, figures in lines:
        for name, value in figures.items():
            found.setdefault(name, []).append((step, value))
    return found


def test_after_a_kill_and_a_resume_from_elsewhere_each_point_is_there_once(
    tmp_path: Path,
    train: Callable[..., Any],
    killed: Callable[..., None],
    points: Callable[[Path], Points],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"  # as `mlflow ui` would look for it here
    monkeypatch.setattr(MlflowRun, "flush_s", 0.0)

    def has_points() -> bool:
        """By SQLite itself: MLflow's client would make the tables at the same time as the run does."""
        with (
            contextlib.suppress(sqlite3.Error),
            contextlib.closing(
                sqlite3.connect(f"file:{tmp_path / 'mlflow.db'}?mode=ro", uri=True)
            ) as store,
        ):
            (count,) = store.execute(
                "select count(*) from metrics where key = 'train_loss'"
            ).fetchone()
            return bool(count >= 6)
        return False

    killed(
        tmp_path / "run", "mlflow", kill_at=6, until=has_points, config={"data": {"name": "noise"}}
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run = train(tmp_path / "run", "mlflow", config={"data": {"name": "noise"}})
    (found,) = runs(uri)
    assert curves(uri, found) == expected(points(tmp_path / "run"))
    assert (found.info.run_name, found.info.status) == ("run", "FINISHED")
    assert found.data.params["duration"] == "4ep"
    assert found.data.params["config.data.name"] == "noise"
    assert found.data.tags["result.val_accuracy"] == str(run.result.metrics["val_accuracy"])
    assert "gets no" not in capsys.readouterr().err


def test_the_environment_names_store_and_experiment_and_a_run_that_was_removed_is_made_anew(
    tmp_path: Path, train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"sqlite:///{tmp_path / 'other.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    train(tmp_path / "run", "mlflow", duration="2st")
    (first,) = runs(uri)
    client_of(uri).delete_run(first.info.run_id)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    train(tmp_path / "run", "mlflow", duration="2st", extend="2st")
    assert runs(uri) == []
    client = client_of(uri)
    (again,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert [step for step, _ in curves(uri, again)["train_loss"]] == [1, 2, 3, 4]
    assert not (tmp_path / "mlflow.db").exists()


def test_steps_after_a_rollback_have_a_later_point(
    tmp_path: Path,
    train: Callable[..., Any],
    points: Callable[[Path], Points],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'other.db'}")
    train(tmp_path / "run", "mlflow", bad_at=7, on_nan="rollback")
    uri = os.environ["MLFLOW_TRACKING_URI"]
    (found,) = runs(uri)
    lines = expected(points(tmp_path / "run"))["train_loss"]
    assert dict(curves(uri, found)["train_loss"]) == dict(lines)  # the later one counts
