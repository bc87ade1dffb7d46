"""Event files for TensorBoard in the folder `tensorboard` of a run, by torch's writer."""

import contextlib
import copy
import io
import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flambeau.recipes.setup.seeding import rng_state, set_rng_state
from flambeau.run.options.toml_file import as_toml
from flambeau.run.trackers.line_reader import ends_with_evaluation, position_after
from flambeau.run.trackers.tracker import Position, TrackedRun, flat, stored_position

_RECORD = "tensorboard"
_MAX_WAIT_S = 10.0  # if the clock of another machine was ahead; chosen


class TensorboardEvents:
    """Writes scalars, texts, images, histograms, the graph and the hyperparameters; see `Tracker`."""

    flush_s = 5.0  # delay of the display; chosen

    def __init__(self, facts: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer_class, self._facts = SummaryWriter, facts
        self._folder = facts.folder / "tensorboard"

    def start(self) -> Position:
        """Continue where both the event files and the run have been."""
        sent = stored_position(self._facts.record(_RECORD))
        last, _ = position_after(self._facts.metrics, self._facts.size)
        begin = min(sent.step, last.step)
        is_new = not self._seconds()
        self._open(begin)
        if is_new:  # readers would keep a second text
            toml = as_toml(self._facts.config).decode()
            self._writer.add_text("config", f"```toml\n{toml}```", 0)
            self._writer.flush()
        return Position(begin, 0)

    def _open(self, begin: int) -> None:
        """Start a new file, which makes readers drop earlier events from this step on.

        Readers sort files by name, which begins with the second in which a file was made.
        """
        wait_s = max(self._seconds(), default=0) + 1 - time.time()
        if 0 < wait_s < _MAX_WAIT_S:
            time.sleep(wait_s)
        self._writer = self._writer_class(str(self._folder), purge_step=begin)

    def _seconds(self) -> list[int]:
        """The second in which each event file was made."""
        names = [path.name.split(".") for path in self._folder.glob("events.out.tfevents.*")]
        return [int(parts[3]) for parts in names if parts[3].isdecimal()]

    def line(self, step: int, figures: dict[str, float]) -> None:
        """Write its scalars, except the epoch."""
        for name, value in figures.items():
            if name != "epoch":
                self._writer.add_scalar(tag(name), value, step)

    def images(self, x_NCHW: Tensor) -> None:
        """Write the images of the first batch; floats outside 0 to 1 are scaled to that range."""
        if x_NCHW.is_floating_point():
            low = x_NCHW.amin().item()
            high = x_NCHW.amax().item()
            if low < 0 or high > 1:
                x_NCHW = (x_NCHW - low) / max(high - low, 1e-12)
            x_NCHW = x_NCHW.float()
        self._writer.add_images("first_batch", x_NCHW, 0)

    def graph(self, profile: Any) -> None:
        writer = self._writer.file_writer
        assert writer is not None  # not closed yet
        writer.add_graph(profile)

    def histograms(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Write one per tensor; the tensors are on the CPU."""
        for name, values in tensors.items():
            self._writer.add_histogram(f"weights/{name}", values, step)

    def histograms_again(self, step: int, tensors: Mapping[str, Tensor], *, size: int) -> None:
        """Repeat the last evaluation's, which a rewind dropped, if `size` bytes end with it."""
        if ends_with_evaluation(self._facts.metrics, size, step=step):
            self.histograms(step, tensors)

    def rewind(self, position: Position) -> Position:
        self._writer.close()
        self._open(position.step)
        self._facts.note(_RECORD, {"step": position.step})
        return Position(position.step, 0)

    def flush(self, sent: Position) -> None:
        self._writer.flush()
        self._facts.note(_RECORD, {"step": sent.step})

    def end(self, result: Mapping[str, Any] | None) -> None:
        """Write a finished run and its final figures into the table of hyperparameters."""
        if result is not None:
            figures = {
                f"result/{name}": value
                for name, value in result.items()
                if isinstance(value, (int, float)) and name != "step"
            }
            self._writer.add_hparams(
                flat(self._facts.config), figures, run_name=".", global_step=result["step"]
            )
        self._writer.close()


def tag(name: str) -> str:
    """The name of a curve; TensorBoard groups curves by the word before the slash."""
    part, _, rest = name.partition("_")
    return f"{rest}/{part}" if part in ("train", "val") and rest else name


def model_graph(model: nn.Module, batch: Any) -> Any:
    """The argument of torch's `FileWriter.add_graph`, traced with one sample on a copy of the model.

    A copy, so that the run keeps its bits. The batch is a tensor (N, ...), or a sequence that starts with
    one; 8-bit images are scaled to 0 to 1. It raises what copying or tracing raises.
    """
    from torch.utils.tensorboard._pytorch_graph import graph

    first = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if not isinstance(first, Tensor) or not first.ndim:
        raise TypeError("a batch does not begin with a tensor")
    sample = first[:1].detach().to("cpu", copy=True)
    generators = rng_state()
    try:
        twin = copy.deepcopy(model).cpu().eval()
        if sample.dtype == torch.uint8:
            sample = sample / 255
        if sample.is_floating_point():
            numbers = (p.dtype for p in twin.parameters() if p.is_floating_point())
            sample = sample.to(next(numbers, torch.float32))
        # TorchScript warns that it is deprecated, and torch prints errors before it raises them.
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            warnings.simplefilter("ignore")
            return graph(twin, sample)
    finally:
        set_rng_state(generators)
