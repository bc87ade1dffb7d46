"""All trackers of a run: made at its start, fed with what the run writes, waited for a while at its end."""

import itertools
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from flambeau.run.folder.published_weights import Result
from flambeau.run.folder.run_folder import RunFolder
from flambeau.run.options.track import LineFunction, Track, options_of, tracker_list
from flambeau.run.trackers.feeder import Feeder
from flambeau.run.trackers.tensorboard_events import TensorboardEvents
from flambeau.run.trackers.tracker import RunFacts, Tracker
from flambeau.sandbox.inside import in_trial

END_WAIT_S = 10.0
"""How long the end of a run waits for its trackers, all together."""
_NUM_IMAGES = 16  # chosen
_FORK_WAIT_S = 2.0  # an import takes less; chosen


class Tracking:
    """The trackers of a run, on the process that writes metrics.jsonl.

    Args:
        track: their names, and functions.
        folder: of the run, with config.toml and metrics.jsonl as they are now.
        size: of metrics.jsonl, in bytes.
        is_sharded: this process has a piece of each weight, so there are no histograms and no graph.
        say: takes a line for the user; called in the training thread.
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
        facts = RunFacts(folder.path, config, folder.metrics, size, self._said.append)
        self._feeders: list[Feeder] = []
        self._tensorboard: tuple[Feeder, Any] | None = None
        self._histograms: tuple[Feeder, Any] | None = None
        self._has_graph = False
        # In a trial of doctor none gets anything: what it sends to a service would stay there.
        for number, item in enumerate([] if in_trial() else tracker_list(track)):
            name = item if isinstance(item, str) else f"track={_called(item)}"
            tracker = self._made(item, number, facts)
            if tracker is None:
                continue
            feeder = Feeder(name, tracker, facts)
            self._feeders.append(feeder)
            if isinstance(tracker, TensorboardEvents):
                self._tensorboard = feeder, tracker
            options = options_of(item)
            if options and is_sharded:
                missing = ", no ".join(options)
                say(f"no {missing}: the model is sharded, and each process has a piece of a weight")
                continue
            if "histograms" in options:
                self._histograms = feeder, tracker
            self._has_graph |= "graph" in options

    def _made(self, item: str | LineFunction, number: int, facts: RunFacts) -> Tracker | None:
        """A tracker; None if it cannot be used, which is said and stops nothing."""
        try:
            return _make(item, number, facts)
        except ImportError as error:
            package = str(item).partition(":")[0]
            self._say(
                f"{item} gets no lines, and the run goes on: {error}\n"
                f"Install it: pip install 'flambeau[{package}]'"
            )
        except Exception as error:  # a package that is there and broken
            self._say(f"{item} gets no lines, and the run goes on: {type(error).__name__}: {error}")
        return None

    def _tell(self) -> None:
        """What the threads have to say."""
        while self._said:
            self._say(self._said.popleft())

    def grow(self, size: int) -> None:
        """A line was written; metrics.jsonl has so many bytes now."""
        for feeder in self._feeders:
            feeder.grow(size)
        self._tell()

    def cut(self, size: int, *, step: int) -> None:
        """The run goes on from the checkpoint of a step; metrics.jsonl was cut back."""
        for feeder in self._feeders:
            feeder.cut(size, step=step)

    def shown(self, model: nn.Module, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches; TensorBoard gets the first one's images, if it has any, and the model's graph."""
        if self._tensorboard is None:
            return batches
        feeder, tracker = self._tensorboard
        first = next(batches)
        images = _images_of(first.data)
        if images is not None:
            feeder.also(0, partial(tracker.images, images))
        if self._has_graph:
            self._add_graph(model, first.data)
        return itertools.chain([first], batches)

    def _add_graph(self, model: nn.Module, batch: Any) -> None:
        from flambeau.run.trackers.model_graph import model_graph

        assert self._tensorboard is not None
        feeder, tracker = self._tensorboard
        try:
            feeder.also(0, partial(tracker.graph, model_graph(model, batch)))
        except Exception as error:  # of any model
            text = " ".join(str(error).split())
            self._say(f"no graph, and the run goes on: {type(error).__name__}: {text:.300}")

    def evaluated(self, model: nn.Module, step: int) -> None:
        """An evaluation was written; where histograms are asked for, the weights are copied for them."""
        if self._histograms is not None:
            feeder, tracker = self._histograms
            feeder.also(step, partial(tracker.histograms, step, _copies(model)))

    def resumed(self, model: nn.Module, step: int, size: int) -> None:
        """The run stands at a checkpoint, with so many bytes of metrics.jsonl, perhaps at an evaluation."""
        if self._histograms is not None and size:
            feeder, tracker = self._histograms
            feeder.also(step, partial(tracker.histograms_again, step, _copies(model), size=size))

    def before_fork(self) -> None:
        """Workers are forked next: return when no tracker is at work, or after a while."""
        deadline = time.monotonic() + _FORK_WAIT_S
        for feeder in self._feeders:
            feeder.before_fork(wait_s=max(0.0, deadline - time.monotonic()))

    def close(self, result: Result | None) -> None:
        """Let them end; what they have not got after `END_WAIT_S` is left out, and said.

        Args:
            result: what the finished run has published; None if it is not finished.
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
        self._feeders = []
        self._tell()
        if late:
            self._say(
                f"{', '.join(late)} had not taken all lines {END_WAIT_S:.0f} s after the last one: "
                "the rest is left out; metrics.jsonl has all of them"
            )


def _make(item: str | LineFunction, number: int, facts: RunFacts) -> Tracker:
    """The tracker of a name, or of a function; imports its package."""
    if not isinstance(item, str):
        from flambeau.run.trackers.line_function import LineCalls

        called = re.sub(r"[^\w.-]", "", _called(item))
        return LineCalls(item, f"function-{number}-{called}", facts)
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


def _images_of(data: Any) -> Tensor | None:
    """The first few images of a batch, on the CPU, where its first tensor holds some: (N, 1 or 3, H, W)."""
    first = data[0] if isinstance(data, (tuple, list)) and data else data
    if isinstance(first, Tensor) and first.ndim == 4 and first.shape[1] in (1, 3):
        return first.detach()[:_NUM_IMAGES].to("cpu", copy=True)
    return None


def _copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().to("cpu", copy=True) for name, value in model.named_parameters()}


def _called(function: LineFunction) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
