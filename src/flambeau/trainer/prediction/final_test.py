"""The looks at the images that a run keeps for a test: each is recorded, and a second one is said to be one.

A figure of test images is free of bias only once: whoever chooses again after a look chooses by them, too.
The record of a run that a sweep has trained is that of the sweep, whose trials all keep the same images.
"""

import contextlib
import dataclasses
import datetime
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flambeau.data.stores.address import is_address
from flambeau.errors import InputError
from flambeau.recipes.checkpoints.atomic_checkpoint import write_file
from flambeau.run.folder.json_file import json_table
from flambeau.run.folder.run_folder import RunFolder
from flambeau.run.folder.summary import sweep_of
from flambeau.trainer.evaluation.evaluation_result import Evaluation
from flambeau.trainer.evaluation.label_evaluation import LabelEvaluation
from flambeau.trainer.evaluation.label_figures import average_precisions, mean_of_known
from flambeau.trainer.evaluation.number_evaluation import NumberEvaluation
from flambeau.trainer.tasks.task import AnyEvaluation

FILE = "test.json"
_Z = 1.959964  # of the normal distribution: 95 % lie between -z and z
_ALONE = "as if each image were drawn by itself; several of one patient or place make it too narrow"
_RESAMPLES = 400  # of the bootstrap; chosen
_FEW = 30  # images for which an interval by the normal distribution says little


@dataclass(frozen=True)
class Estimate:
    """A figure of some images, and what it may be of all of their kind.

    Attributes:
        low, high: ends of the 95 % interval; None if unknown.
        how: how it was made.
    """

    figure: str
    value: float
    low: float | None
    high: float | None
    how: str


def run_to_test(run: str | Path) -> Path:
    """The run folder in which a look is recorded.

    Raises:
        InputError: an address, or no run folder.
    """
    if is_address(run) or not RunFolder(Path(run)).config.is_file():
        raise InputError(
            f"{run} is no folder of a run here, and a look at test images is recorded in that: name the run"
        )
    return Path(run)


def looks_file(run: Path) -> Path:
    """Where looks at a run's test images are recorded: in its folder, or its sweep's."""
    folder = run.resolve()
    return (sweep_of(folder) or folder) / FILE


def looks_in(path: Path) -> list[dict[str, Any]]:
    """The looks that a file records; none without the file.

    Raises:
        InputError: it is damaged.
    """
    if not path.exists():
        return []
    looks = json_table(path).get("looks")
    if not isinstance(looks, list) or not looks or not all(map(_is_look, looks)):
        raise InputError(
            f"{path} is damaged, and says how often the test images were looked at: restore it"
        )
    return looks


def _is_look(look: object) -> bool:
    if not isinstance(look, Mapping):
        return False
    numbers = [look.get(name) for name in ("value", "images")]
    texts = [look.get(name) for name in ("when", "figure", "how")]
    runs = look.get("runs")
    return (
        all(type(one) in (int, float) for one in numbers)
        and all(isinstance(one, str) for one in texts)
        and isinstance(runs, list)
        and all(isinstance(one, str) for one in runs)
        and all(isinstance(look.get(name), float | None) for name in ("low", "high"))
    )


@contextlib.contextmanager
def only_look(path: Path) -> Iterator[None]:
    """Keep other processes from looking before this look is recorded.

    Raises:
        InputError: another process looks now.
    """
    try:
        import fcntl
    except ImportError:  # Windows: no lock, so the user must avoid two looks at the same moment
        yield
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        raise InputError(
            f"another process looks at the test images of {path.parent} now: wait until its look is recorded"
        ) from None
    except OSError:
        pass  # a mount without locks of folders, such as NFS: there two may look at the same moment
    try:
        yield
    finally:
        os.close(folder)


def check_look(path: Path, *, again: bool) -> None:
    """Refuse a second look that nobody has asked for.

    Raises:
        InputError: a second one without `again`, or the first with it.
    """
    looks = looks_in(path)
    if looks and not again:
        last = looks[-1]
        raise InputError(
            f"the test images were looked at on {last['when']}: {last['figure']} {last['value']:.4f} of "
            f"{', '.join(last['runs'])} (in {path})\n"
            "What is chosen after a look is chosen by these images, too, and its figure is too good. --again "
            f"looks all the same, and records look {len(looks) + 1}"
        )
    if again and not looks:
        raise InputError(
            "--again has no effect: the test images were not looked at yet; leave it out"
        )


def record_look(path: Path, runs: Sequence[Path], evaluation: AnyEvaluation) -> dict[str, Any]:
    """Add a look to the file, before anybody sees its figures."""
    found = estimate(evaluation)
    if not math.isfinite(found.value):
        raise InputError(f"the {evaluation.num_images} test images have no {found.figure}")
    looks = looks_in(path)
    numbers = {
        name: value
        for name, value in evaluation.as_dict().items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    look = {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "runs": [_beside(run.resolve(), path.parent) for run in runs],
        "images": evaluation.num_images,
        **dataclasses.asdict(found),
        "figures": numbers,
    }
    content = {"touched": len(looks) + 1, "looks": [*looks, look]}
    write_file(path, json.dumps(content, indent=1).encode() + b"\n")
    return look


def _beside(run: Path, folder: Path) -> str:
    is_below = run.is_relative_to(folder) and run != folder
    return str(run.relative_to(folder)) if is_below else run.name


def look_lines(path: Path) -> list[str]:
    """The last look, for the user."""
    looks = looks_in(path)
    if not looks:
        return []
    last = looks[-1]
    interval = ""
    if last["low"] is not None and last["high"] is not None:
        interval = f", 95 % interval {last['low']:.4f} to {last['high']:.4f}"
    lines = [
        f"test: {last['figure']} {last['value']:.4f} on {last['images']} images{interval}",
        f"interval: {last['how']}",
    ]
    if len(looks) == 1:
        lines.append(f"the test images were looked at once, on {last['when']}: {path}")
    else:
        lines.append(
            f"the test images were looked at {len(looks)} times ({path}): only the first figure, "
            f"{looks[0]['value']:.4f}, is free of choices made after a look"
        )
    return lines


def estimate(evaluation: AnyEvaluation) -> Estimate:
    """An evaluation's figure with its interval, of images drawn one by one."""
    count = evaluation.num_images
    if isinstance(evaluation, Evaluation):
        low, high = wilson(evaluation.accuracy, count)
        how = f"by Wilson, {_ALONE}"
        return Estimate("accuracy", evaluation.accuracy, low, high, how)
    if isinstance(evaluation, LabelEvaluation):
        said = evaluation.predictions
        return _mean_average_precision(said.probabilities, said.labels)
    if isinstance(evaluation, NumberEvaluation):
        numbers = evaluation.predictions
        errors = (numbers.predicted - numbers.numbers).abs()[:, 0].double()
        return _mean(f"mae_{numbers.names[0]}", errors)
    shares = torch.tensor([iou for _, iou, _ in evaluation.predictions], dtype=torch.float64)
    return _mean("iou_of_images", shares)


def wilson(share: float, count: int) -> tuple[float, float]:
    """The interval of 95 % of a share, by Wilson (JASA 1927).

    Example:
        >>> [round(end, 4) for end in wilson(0.9, 100)]
        [0.8256, 0.9448]
    """
    middle = (share + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    half = math.sqrt(share * (1 - share) / count + (_Z / (2 * count)) ** 2)
    half *= _Z / (1 + _Z**2 / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def _mean(figure: str, values: Tensor) -> Estimate:
    """The mean of a figure of each image."""
    known = values[values.isfinite()]
    mean = float(known.mean())
    if len(known) < 2:
        return Estimate(figure, mean, None, None, f"none: {len(known)} images have the figure")
    half = _Z * float(known.std()) / math.sqrt(len(known))
    few = f"; {len(known)} images are few for it" if len(known) < _FEW else ""
    how = f"of a mean, {_ALONE}{few}"
    return Estimate(figure, mean, mean - half, mean + half, how)


def _mean_average_precision(probabilities: Tensor, labels: Tensor) -> Estimate:
    value = mean_of_known(average_precisions(probabilities, labels))
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(_RESAMPLES):
        drawn = torch.randint(len(labels), (len(labels),), generator=generator)
        found.append(mean_of_known(average_precisions(probabilities[drawn], labels[drawn])))
    ends = torch.tensor(found, dtype=torch.float64).nanquantile(
        torch.tensor([0.025, 0.975]).double()
    )
    low, high = ends.tolist()
    how = f"the middle 95 % of {_RESAMPLES} resamples (bootstrap), {_ALONE}"
    return Estimate("map", value, low, high, how)
