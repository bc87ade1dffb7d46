"""The outcome of a finished run: model.safetensors, and result.json, which describes it."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from flambeau.errors import InputError
from flambeau.html_table import html_table
from flambeau.parallel.shard_layout import unsharded
from flambeau.recipes.checkpoints.atomic_checkpoint import (
    CheckpointDamaged,
    read_checkpoint,
    remove_leftovers,
    write_file,
)
from flambeau.run.folder.checkpointer import check_name
from flambeau.run.folder.json_file import json_file
from flambeau.run.folder.metrics_log import json_numbers
from flambeau.run.folder.report_file import write_run_report
from flambeau.run.folder.run_folder import RunFolder
from flambeau.run.options.better_figure import DEFAULT_BEST


@dataclass(frozen=True)
class Result:
    """The outcome of a run.

    Attributes:
        weights: what model.safetensors holds: averaged, best, or last; or a mean of several runs (`flambeau
            soup`).
        metrics: of the last evaluation of these weights; None where one was not finite.
        sha256: of model.safetensors; None in version 0.1.
    """

    weights: Literal["ema", "best", "last", "soup"]
    step: int
    metrics: Mapping[str, float | None]
    sha256: str | None = field(default=None, repr=False)

    def _repr_html_(self) -> str:
        return html_table(
            "finished run", {"weights": self.weights, "step": self.step, **self.metrics}
        )


class Best:
    """The best value of one metric so far, and its step.

    Args:
        mode: 'max' or 'min'. NaN is never better; of equal values the later one is.
    """

    def __init__(self, metric: str, mode: Literal["max", "min"]) -> None:
        self.metric = metric
        self._sign = 1.0 if mode == "max" else -1.0
        self._value: float | None = None
        self._others: dict[str, float] = {}
        self._said_missing = False
        self._seen_at: int | None = None
        self._is_twice = False
        self._said_twice = False
        self.step: int | None = None
        self.improved_at: int | None = None
        """The step of the last evaluation that was strictly better than all before."""
        self.metrics: dict[str, float] = {}

    def see(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._others |= metrics
        value = metrics.get(self.metric)
        if value is None or value != value:
            return
        self._is_twice |= self._seen_at == step
        self._seen_at = step
        if self._value is None or value * self._sign > self._value * self._sign:
            self.improved_at = step
        if self._value is None or value * self._sign >= self._value * self._sign:
            self._value = value
            self.step = step
            self.metrics = dict(metrics)

    def end_epoch(
        self, *, say: Callable[[str], None], training: Container[str] = (), is_last: bool = False
    ) -> None:
        """Say once if the metric is missing in all evaluations so far, or was logged twice at one step.

        `training`: names logged outside of evaluations. At the end of the run (`is_last`) a `best` of the
        user is also missed without evaluations.
        """
        if self._is_twice and not self._said_twice:
            self._said_twice = True
            say(
                f"best = {self.metric!r} was logged by two evaluations of one epoch, and either may choose "
                "the checkpoint: log the other one's by another name, such as test_accuracy"
            )
        if self._said_missing or self.step is not None or self.metric in self._others:
            return
        what = f"best = {self.metric!r} was not logged within run.evaluate(), so it chooses no checkpoint"
        if self.metric in training:
            say(f"{what}: call run.log inside `for ... in run.evaluate(...)`, batch by batch")
        elif self._others:
            names = ", ".join(self._others)
            say(f"{what}: give Run the name of what was logged ({names})")
        elif is_last and self.metric != DEFAULT_BEST:
            say(f"{what}: nothing was logged there")
        else:
            return
        self._said_missing = True

    def state_dict(self) -> dict[str, Any]:
        return {
            "value": self._value,
            "step": self.step,
            "improved_at": self.improved_at,
            "metrics": self.metrics,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._value = state["value"]
        self.step = state["step"]
        self.metrics = dict(state["metrics"])
        self.improved_at = state.get("improved_at", self.step)  # missing in version 0.1
        self._seen_at = None


def publish(
    folder: RunFolder,
    results: Sequence[Result],
    *,
    name_of: Callable[[int], str],
    say: Callable[[str], None],
) -> Result:
    """Copy a checkpoint's verified weights to model.safetensors, then write result.json.

    The first whole one of `results`; damaged ones are reported.
    """
    for result in results:
        try:
            checkpoint = read_checkpoint(folder.checkpoints / name_of(result.step))
            check_name(checkpoint.folder, checkpoint.meta)
            files = unsharded(checkpoint.files)
        except CheckpointDamaged as error:
            say(f"the {result.weights} weights cannot be published: {error}")
            continue
        weights = "ema.safetensors" if result.weights == "ema" else "model.safetensors"
        write_file(folder.weights, files[weights])
        digest = hashlib.sha256(files[weights]).hexdigest()
        content = asdict(replace(result, metrics=json_numbers(result.metrics), sha256=digest))
        write_file(folder.result, json.dumps(content, indent=2).encode() + b"\n")
        return Result(**content)
    raise InputError(
        "no weights could be published; run the same command again to repeat the last steps"
    )


def are_whole(folder: RunFolder, result: Result) -> bool | None:
    """Whether model.safetensors is what the run wrote; None if unknown."""
    if result.sha256 is None:
        return None
    if folder.weights.exists() and not folder.weights.is_file():  # a pipe or device has no end
        return False
    with folder.weights.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == result.sha256


def published(folder: RunFolder) -> Result | None:
    """The result of a finished run, else None; InputError: result.json is not what a run writes."""
    try:
        return _result(json_file(folder.result))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(
            f"{folder.result} cannot be read: {error}; remove it and run the training again"
        ) from error


def finished(folder: RunFolder, *, say: Callable[[str], None]) -> Result | None:
    """Like `published`; a run that was killed before its report was written gets one."""
    result = published(folder)
    # A report older than the result was written by a process that was stopped before.
    if result is not None and not _is_newer(folder.path / "report.html", folder.result):
        with contextlib.suppress(OSError):
            remove_leftovers(folder.path)  # of a killed write
        write_run_report(folder.path, say=say)
    return result


def _is_newer(path: Path, other: Path) -> bool:
    return path.exists() and path.stat().st_mtime_ns >= other.stat().st_mtime_ns


def _result(facts: Any) -> Result:
    given = facts if isinstance(facts, dict) else {}
    figures, digest = given.get("metrics"), given.get("sha256")
    is_whole = (
        given.keys() - {"sha256"} == {"weights", "step", "metrics"}
        and given["weights"] in ("ema", "best", "last", "soup")
        and type(given["step"]) is int
        and isinstance(figures, dict)
        and all(value is None or type(value) in (int, float) for value in figures.values())
        and (digest is None or isinstance(digest, str))
    )
    if not is_whole:
        raise ValueError("it is not what a run writes")
    return Result(**given)
