"""Event files for TensorBoard in the folder `tensorboard` of a run, by torch's own writer."""

import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from flambeau.run.options.toml_file import as_toml
from flambeau.run.trackers.metrics_lines import ends_with_evaluation, place_after
from flambeau.run.trackers.tracker import Place, RunFacts, flat, stored_place

_RECORD = "tensorboard"
_MOST_WAIT_S = 10.0  # for the clock of another machine, which may be ahead; chosen


class TensorboardEvents:
    """Writes scalars, texts, images, histograms, the graph and the table of hyperparameters; see `Tracker`.

    Args:
    """

    flush_s = 5.0  # how far what one sees is behind; chosen

    def __init__(self, facts: RunFacts) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer_class, self._facts = SummaryWriter, facts
        self._folder = facts.folder / "tensorboard"

    def start(self) -> Place:
        """Go on where both the event files and the run have been, at most."""
        sent = stored_place(self._facts.record(_RECORD))
        last, _ = place_after(self._facts.metrics, self._facts.size)
        begin = min(sent.step, last.step)
        is_new = not self._seconds()
        self._open(begin)
        if is_new:  # of texts, readers drop none
            toml = as_toml(self._facts.config).decode()
            self._writer.add_text("config", f"```toml\n{toml}```", 0)
            self._writer.flush()
        return Place(begin, 0)

    def _open(self, begin: int) -> None:
        """Write into a new file, before which no event from this step on counts any more.

        Readers take files in the order of their names, which begin with the second at which they were made.
        """
        wait_s = max(self._seconds(), default=0) + 1 - time.time()
        if 0 < wait_s < _MOST_WAIT_S:
            time.sleep(wait_s)
        self._writer = self._writer_class(str(self._folder), purge_step=begin)

    def _seconds(self) -> list[int]:
        """When each file of events was made."""
        names = [path.name.split(".") for path in self._folder.glob("events.out.tfevents.*")]
        return [int(parts[3]) for parts in names if parts[3].isdecimal()]

    def line(self, step: int, figures: dict[str, float]) -> None:
        """Its scalars; the epoch is no curve."""
        for name, value in figures.items():
            if name != "epoch":
                self._writer.add_scalar(tag(name), value, step)

    def images(self, x_NCHW: Tensor) -> None:
        """Those of the first batch, as the loop gets them; floats beyond 0 to 1 are stretched to that."""
        if x_NCHW.is_floating_point():
            low = x_NCHW.amin().item()
            high = x_NCHW.amax().item()
            if low < 0 or high > 1:
                x_NCHW = (x_NCHW - low) / max(high - low, 1e-12)
            x_NCHW = x_NCHW.float()
        self._writer.add_images("first_batch", x_NCHW, 0)

    def graph(self, profile: Any) -> None:
        """That of the model, from `model_graph`."""
        writer = self._writer.file_writer
        assert writer is not None  # until it is closed
        writer.add_graph(profile)

    def histograms(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """One for each tensor, on the CPU."""
        for name, values in tensors.items():
            self._writer.add_histogram(f"weights/{name}", values, step)

    def histograms_again(self, step: int, tensors: Mapping[str, Tensor], *, size: int) -> None:
        """Those of the last evaluation, which no longer count, if that is where `size` bytes end."""
        if ends_with_evaluation(self._facts.metrics, size, step=step):
            self.histograms(step, tensors)

    def go_back(self, place: Place) -> Place:
        """What is there from a step on is replaced."""
        self._writer.close()
        self._open(place.step)
        self._facts.note(_RECORD, {"step": place.step})
        return Place(place.step, 0)

    def flush(self, sent: Place) -> None:
        """Into the file."""
        self._writer.flush()
        self._facts.note(_RECORD, {"step": sent.step})

    def end(self, result: Mapping[str, Any] | None) -> None:
        """A finished run goes into the table of hyperparameters with its final figures."""
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
    """The name of a curve: TensorBoard shows those with one word before the slash together.

    Example:
        >>> tag("val_loss"), tag("images_per_s")
        ('loss/val', 'images_per_s')
    """
    part, _, rest = name.partition("_")
    return f"{rest}/{part}" if part in ("train", "val") and rest else name
