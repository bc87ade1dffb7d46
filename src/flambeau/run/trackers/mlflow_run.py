"""A run of MLflow: in MLFLOW_TRACKING_URI, else where MLflow would put it by default.

A resume continues the same run. MLflow keeps every point ever logged, so the existing ones are read first,
and no line is logged twice.
"""

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flambeau.run.trackers.tracker import START, Position, TrackedRun, flat

_RECORD = "mlflow"
_EXPERIMENT = "flambeau"
# MLflow's limits:
_POINTS_PER_CALL = 1000
_PARAMS_PER_CALL = 100
_PARAM_CHARS = 6000
_MARK = "epoch"  # a figure of every line: its points tell which lines MLflow has


class MlflowRun:
    """Logs into one run of MLflow; see `Tracker`."""

    flush_s = 1.0

    def __init__(self, facts: TrackedRun) -> None:
        # Otherwise the import sends usage data to MLflow's makers.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        import mlflow
        from mlflow.entities import Metric, Param

        self._mlflow = mlflow
        self._facts = facts
        self._metric = Metric
        self._param = Param
        self._points: list[Any] = []  # not sent yet
        self._time_ms = 0

    def start(self) -> Position:
        """Start a run, or continue the recorded one after the lines that it has."""
        record = self._facts.record(_RECORD)
        uri = os.environ.get("MLFLOW_TRACKING_URI") or record.get("uri")
        uri = uri or _in_full(self._mlflow.get_tracking_uri())
        # It logs each table of a new mlflow.db.
        logging.getLogger("mlflow.store.db").setLevel(logging.WARNING)
        self._client = self._mlflow.MlflowClient(uri)
        noted = record.get("run") if record.get("uri") == uri else None
        if isinstance(noted, str) and self._is_there(noted):
            self._run = noted
            self._client.update_run(noted, status="RUNNING")
            return self._position()
        self._run = self._new_run()
        self._facts.note(_RECORD, {"run": self._run, "uri": uri})
        return START

    def _is_there(self, run: str) -> bool:
        try:
            return str(self._client.get_run(run).info.lifecycle_stage) == "active"
        except self._mlflow.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False

    def _new_run(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _EXPERIMENT
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        run = str(self._client.create_run(number, run_name=self._facts.name).info.run_id)
        params = [
            self._param(name, str(value)[:_PARAM_CHARS])
            for name, value in flat(self._facts.config).items()
        ]
        for begin in range(0, len(params), _PARAMS_PER_CALL):
            self._client.log_batch(run, params=params[begin : begin + _PARAMS_PER_CALL])
        return run

    def _position(self) -> Position:
        """The last line that MLflow has, in the order of arrival."""
        position = START
        points = self._client.get_metric_history(self._run, _MARK)
        for point in sorted(points, key=lambda point: point.timestamp):
            self._time_ms = point.timestamp
            lines = position.lines + 1 if point.step == position.step else 1
            position = Position(point.step, lines)
        return position

    def line(self, step: int, figures: dict[str, float]) -> None:
        """Log its points, all with one timestamp, later than that of the previous line."""
        self._time_ms = max(int(time.time() * 1000), self._time_ms + 1)
        if len(self._points) + len(figures) > _POINTS_PER_CALL:
            self._send()
        self._points += [
            self._metric(name, float(value), self._time_ms, step) for name, value in figures.items()
        ]

    def _send(self) -> None:
        if self._points:
            self._client.log_batch(self._run, metrics=self._points)
            self._points = []

    def rewind(self, position: Position) -> Position:
        """MLflow removes nothing: the steps after a rollback have a second, later point each."""
        self._send()
        return position

    def flush(self, sent: Position) -> None:
        self._send()

    def end(self, result: Mapping[str, Any] | None) -> None:
        if result is not None:
            for name, value in result.items():
                self._client.set_tag(self._run, f"result.{name}", str(value))
        self._client.set_terminated(self._run, "KILLED" if result is None else "FINISHED")


def _in_full(uri: str) -> str:
    """The absolute address of a local store, so that a resume from another folder finds it."""
    scheme, sep, path = uri.partition(":///")
    if scheme == "sqlite" and sep:
        return f"sqlite:///{Path(path).absolute()}"
    return uri if ":" in uri else str(Path(uri).absolute())
