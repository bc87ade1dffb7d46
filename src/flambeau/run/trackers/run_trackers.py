"""All trackers of a run: made at its start, fed while it writes, and waited for at its end."""

import itertools
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from flambeau.run.folder.json_file import json_table
from flambeau.run.folder.published_weights import Result
from flambeau.run.folder.run_folder import RunFolder
from flambeau.run.options.tracker_names import LineFunction, Track, tracker_list, tracker_options
from flambeau.run.trackers.feeder import Feeder
from flambeau.run.trackers.tensorboard_events import TensorboardEvents, model_graph
from flambeau.run.trackers.tracker import Position, TrackedRun, Tracker, stored_position
from flambeau.sandbox.inside_trial import in_trial

END_WAIT_S = 10.0
"""How long the end of a run waits for all its trackers together."""
_ENDED = "ended"  # the record of who has taken everything; no tracker has this name
_NUM_IMAGES = 16  # chosen
_FORK_WAIT_S = 2.0  # an import takes less; chosen


class RunTrackers:
    """The trackers of a run, in the process that writes metrics.jsonl.

    `is_sharded`: no histograms and no graph, because weights are in pieces.
    """

    def __init__(
        self,
        track: Track,
        folder: RunFolder,
        *,
        size: int,
        is_sharded: bool,
        say: Callable[[str], None],
    ) -> None:
        self._say = say
        self._said = deque[str]()
        config = folder.read_config() or {}
        self._facts = facts = TrackedRun(
            folder.path, config, folder.metrics, size, self._said.append
        )
        self._size = size
        self._feeders: list[Feeder] = []
        self._tensorboard: tuple[Feeder, Any] | None = None
        self._histograms: tuple[Feeder, Any] | None = None
        self._has_graph = False
        # None in a trial of `flambeau doctor`: what is sent to a service would stay there.
        for number, item in enumerate([] if in_trial() else tracker_list(track)):
            name = _name(item)
            tracker = self._try_make(item, number, facts)
            if tracker is None:
                continue
            feeder = Feeder(name, tracker, facts)
            self._feeders.append(feeder)
            if isinstance(tracker, TensorboardEvents):
                self._tensorboard = feeder, tracker
            options = tracker_options(item)
            if options and is_sharded:
                missing = ", no ".join(options)
                say(f"no {missing}: the model is sharded, and each process has a piece of a weight")
                continue
            if "histograms" in options:
                self._histograms = feeder, tracker
            self._has_graph |= "graph" in options

    def _try_make(self, item: str | LineFunction, number: int, facts: TrackedRun) -> Tracker | None:
        """A tracker; None with a message if it cannot be used, which does not stop the run."""
        try:
            return _make(item, number, facts)
        except ImportError as error:
            package = str(item).partition(":")[0]
            self._say(
                f"{item} gets no lines, and the run goes on: {error}\n"
                f"Install it: pip install 'flambeau[{package}]'"
            )
        except Exception as error:  # a broken package
            self._say(f"{item} gets no lines, and the run goes on: {type(error).__name__}: {error}")
        return None

    def _say_queued(self) -> None:
        while self._said:
            self._say(self._said.popleft())

    def grow(self, size: int) -> None:
        self._size = size
        for feeder in self._feeders:
            feeder.grow(size)
        self._say_queued()

    def cut(self, size: int, *, step: int) -> None:
        """The run continues from the checkpoint of a step; metrics.jsonl was cut."""
        self._size = size
        for feeder in self._feeders:
            feeder.cut(size, step=step)

    def shown(self, model: nn.Module, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches; TensorBoard gets the images of the first, if any, and the model's graph."""
        if self._tensorboard is None:
            return batches
        feeder, tracker = self._tensorboard
        first = next(batches)
        images = _images_of(first.data)
        if images is not None:
            feeder.run_after(0, partial(tracker.images, images))
        if self._has_graph:
            self._add_graph(model, first.data)
        return itertools.chain([first], batches)

    def _add_graph(self, model: nn.Module, batch: Any) -> None:
        assert self._tensorboard is not None
        feeder, tracker = self._tensorboard
        try:
            feeder.run_after(0, partial(tracker.graph, model_graph(model, batch)))
        except Exception as error:  # any model may fail in its own way
            text = " ".join(str(error).split())
            self._say(f"no graph, and the run goes on: {type(error).__name__}: {text:.300}")

    def evaluated(self, model: nn.Module, step: int) -> None:
        """An evaluation was written; histograms need a copy of the weights now."""
        if self._histograms is not None:
            feeder, tracker = self._histograms
            feeder.run_after(step, partial(tracker.histograms, step, _copies(model)))

    def resumed(self, model: nn.Module, step: int, size: int) -> None:
        """The run is at a checkpoint, perhaps just after an evaluation, with this size of metrics.jsonl."""
        if self._histograms is not None and size:
            feeder, tracker = self._histograms
            feeder.run_after(
                step, partial(tracker.histograms_again, step, _copies(model), size=size)
            )

    def before_fork(self) -> None:
        """Wait briefly until no tracker is working, because workers are forked next."""
        deadline = time.monotonic() + _FORK_WAIT_S
        for feeder in self._feeders:
            feeder.before_fork(wait_s=max(0.0, deadline - time.monotonic()))

    def abandon(self) -> None:
        """Let the trackers do nothing more, not even write what they have taken."""
        for feeder in self._feeders:
            feeder.abandon()

    def close(self, result: Result | None) -> None:
        """End the trackers; what they do not take within `END_WAIT_S` is left out, with a message.

        `result`: what the finished run has published; None if it is not finished.
        """
        deadline = time.monotonic() + END_WAIT_S
        figures = None
        if result is not None:
            figures = {"weights": result.weights, "step": result.step, **result.metrics}
        for feeder in self._feeders:
            feeder.end(figures)
        if self._histograms is not None and self._histograms[0].num_left_out:
            num = self._histograms[0].num_left_out
            self._say(f"the histograms of {num} evaluations are left out: TensorBoard was too slow")
        late = [feeder.name for feeder in self._feeders if not feeder.wait(deadline)]
        if result is not None and self._feeders:
            ended = [feeder.name for feeder in self._feeders if feeder.has_ended]
            self._facts.note(_ENDED, {"names": ended, "metrics_bytes": self._size})
        self._feeders = []
        self._say_queued()
        if late:
            self._say(
                f"{', '.join(late)} had not taken all lines {END_WAIT_S:.0f} s after the last one: "
                "the rest is left out; metrics.jsonl has all of them"
            )


def have_ended(track: Track, run: Path, *, size: int) -> bool:
    """Whether all these trackers have taken this size of metrics.jsonl, and the end of the run.

    A kill after the run's result, or a slow tracker, leaves some out.
    """
    ended = json_table(run / "trackers" / f"{_ENDED}.json")
    names = ended.get("names")
    if not isinstance(names, list) or ended.get("metrics_bytes") != size:
        return False
    return all(_name(item) in names for item in tracker_list(track))


def _name(item: str | LineFunction) -> str:
    return item if isinstance(item, str) else f"track={_function_name(item)}"


def _make(item: str | LineFunction, number: int, facts: TrackedRun) -> Tracker:
    """The tracker of a name or function; imports its package."""
    if not isinstance(item, str):
        name = re.sub(r"[^\w.-]", "", _function_name(item))
        return LineCalls(item, f"function-{number}-{name}", facts)
    if item == "csv":
        from flambeau.run.trackers.csv_file import CsvFile

        return CsvFile(facts)
    if item == "wandb":
        from flambeau.run.trackers.wandb_run import WandbRun

        return WandbRun(facts)
    if item == "mlflow":
        from flambeau.run.trackers.mlflow_run import MlflowRun

        return MlflowRun(facts)
    return TensorboardEvents(facts)


class LineCalls:
    """A user's function as a tracker, called once per line; see `Tracker`."""

    flush_s = 0.0

    def __init__(self, function: LineFunction, name: str, facts: TrackedRun) -> None:
        self._function, self._name, self._facts = function, name, facts

    def start(self) -> Position:
        """Lines that it got before are not passed again, although a resume writes them again."""
        return stored_position(self._facts.record(self._name))

    def line(self, step: int, figures: dict[str, float]) -> None:
        self._function(step, figures)

    def rewind(self, position: Position) -> Position:
        """The next lines have smaller steps than the last ones."""
        return position

    def flush(self, sent: Position) -> None:
        self._facts.note(self._name, sent._asdict())

    def end(self, result: Mapping[str, Any] | None) -> None:
        """Nothing is open."""


def _images_of(data: Any) -> Tensor | None:
    """The first images of a batch, on the CPU, if its first tensor is (N, 1 or 3, H, W)."""
    first = data[0] if isinstance(data, (tuple, list)) and data else data
    if isinstance(first, Tensor) and first.ndim == 4 and first.shape[1] in (1, 3):
        return first.detach()[:_NUM_IMAGES].to("cpu", copy=True)
    return None


def _copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().to("cpu", copy=True) for name, value in model.named_parameters()}


def _function_name(function: LineFunction) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
