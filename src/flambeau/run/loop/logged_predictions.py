"""What a loop logs as `predictions`: confusions, calibration and the images worth looking at, for its report.

N: images, K: classes, C: channels, H: height, W: width.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import SequentialSampler, Subset

from flambeau.data.drop_in.declared_preprocessing import Preprocessing
from flambeau.recipes.checkpoints.atomic_checkpoint import write_file
from flambeau.report.evaluated import evaluated
from flambeau.run.folder.json_file import json_file
from flambeau.run.loop.pictures import data_uri, unit_range
from flambeau.run.loop.sample_results import PICTURES, evaluation_facts, results_of_classes

PREDICTIONS = "predictions"
"""The name by which `Run.log` takes them: a tuple (logits, targets) or (logits, targets, images)."""
_OF_RANK = 40  # bits: images of a loader are counted on each rank
_MAX_KEPT = 8  # evaluations: after a rollback an earlier one is published

_Kept: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Scores (M,), positions (M,) int64 and images (M, C, H, W) of the M images that score most."""


class LoggedPredictions:
    """One of the metrics of a run, with no figures of its own; nothing waits for the device.

    Without names, `classes`, their numbers stand for them.
    """

    any_order = True  # sorted by position

    def __init__(self, classes: Sequence[str] | None, *, rank: int = 0) -> None:
        self._classes = classes
        self._rank = rank
        self._results = results_of_classes()
        self._kept: dict[str, _Kept] = {}
        self._count = 0
        self._num_classes = 0
        self.facts: Callable[..., dict[str, Any]] | None = None
        """Makes the content of evaluation.json of the last complete evaluation, on the first process."""

    def update(
        self, indices: Tensor | None, logits: Tensor, targets: Tensor, images: Tensor | None = None
    ) -> None:
        """Count a batch: logits (N, K), targets (N,), images (N, C, H, W) as the model got them.

        Without `indices` (N,) positions follow the batches. ValueError: other shapes, or another number of
        classes than names.
        """
        num = len(logits)
        if logits.ndim != 2 or targets.shape != (num,) or targets.is_floating_point():
            raise ValueError(
                f"{PREDICTIONS} must be logits (N, K) and targets (N,) of whole numbers, got "
                f"{tuple(logits.shape)} and {tuple(targets.shape)} {targets.dtype}"
            )
        if self._classes is not None and len(self._classes) != logits.shape[1]:
            raise ValueError(
                f"{PREDICTIONS}: there are {logits.shape[1]} logits per image, and classes has "
                f"{len(self._classes)} names"
            )
        if images is not None and (images.ndim != 4 or len(images) != num):
            raise ValueError(
                f"{PREDICTIONS}: images must be ({num}, C, H, W), got {tuple(images.shape)}"
            )
        self._num_classes = logits.shape[1]
        if indices is None:
            first = self._count + (self._rank << _OF_RANK)
            indices = torch.arange(first, first + num)
        self._count += num
        indices = indices.to(logits.device)
        targets = targets.to(logits.device).long()
        self._results.update(indices, targets, logits)
        if images is not None:
            self._keep(indices, targets, logits, images.detach())

    def _keep(self, indices: Tensor, targets: Tensor, logits: Tensor, images: Tensor) -> None:
        shares = logits.detach().float().softmax(1)
        confidence, predicted = shares.max(1)
        right = predicted == targets
        for name, score in (
            ("mistakes", confidence.masked_fill(right, -1)),
            ("unsure", (1 - confidence).masked_fill(~right, -1)),
        ):
            best, rows = score.topk(min(PICTURES, len(score)))
            self._add(name, (best, indices[rows], images.to(rows.device)[rows]))

    def _add(self, name: str, new: _Kept) -> None:
        old = self._kept.get(name)
        if old is None or old[2].shape[1:] != new[2].shape[1:]:  # pictures are of one size
            self._kept.setdefault(name, new)
            return
        scores, indices, images = (
            torch.cat([a, b.to(a.device)]) for a, b in zip(old, new, strict=True)
        )
        best, rows = scores.topk(min(PICTURES, len(scores)))
        self._kept[name] = best, indices[rows], images[rows]

    def compute(self) -> dict[str, float]:
        """Set `facts`; there are no figures."""
        self._results.compute()
        results = self._results.last
        assert results is not None
        classes = self._classes or [str(number) for number in range(self._num_classes)]
        pictures = {
            int(index): image
            for score, indices, images in self._kept.values()
            for better, index, image in zip(
                score.tolist(), indices.tolist(), images.cpu(), strict=True
            )
            if better >= 0
        }

        def facts(
            *, step: int, describe: Callable[[int], str], prepared: Preprocessing | None
        ) -> dict[str, Any]:
            found = evaluation_facts(results, classes, step=step, describe=describe)
            for sample in (*found["mistakes"], *found["unsure"]):
                if sample["index"] in pictures:
                    sample["picture"] = data_uri(_shown(pictures[sample["index"]], prepared))
            return found

        self.facts = facts
        return {}

    def reset(self) -> None:
        self._results.reset()
        self._kept = {}
        self._count = 0

    def state_dict(self) -> dict[str, Any]:
        """What the first process needs of this one."""
        return {
            "results": self._results.state_dict(),
            "kept": {name: list(kept) for name, kept in self._kept.items()},
            "num_classes": self._num_classes,
        }

    def merge(self, state: Mapping[str, Any]) -> None:
        self._results.merge(state["results"])
        self._num_classes = self._num_classes or state["num_classes"]
        for name, (scores, indices, images) in state["kept"].items():
            self._add(name, (scores, indices, images))


def _shown(image: Tensor, prepared: Preprocessing | None) -> Tensor:
    """An image as it was before normalization, or, if that is not known, stretched from black to white."""
    if image.dtype == torch.uint8:
        return image
    image = image.float()
    if prepared is None or prepared.channels != len(image) or prepared.pixels != "uint8":
        return unit_range(image[None])[0]
    mean, std = (torch.tensor(one).view(-1, 1, 1) for one in (prepared.mean, prepared.std))
    return image * std + mean


def namer(data: Any, *, world: int) -> Callable[[int], str]:
    """The name of the image at a position of an evaluated data set or loader."""
    dataset = data if hasattr(data, "__getitem__") else None
    sampler = getattr(data, "sampler", None)
    if dataset is None and world == 1 and type(sampler) is SequentialSampler:
        dataset = getattr(data, "dataset", None)

    def describe(index: int) -> str:
        here: Any = dataset
        while isinstance(here, Subset):
            here, index = here.dataset, int(here.indices[index])
        samples = getattr(here, "samples", None)  # of torchvision's folders
        if isinstance(samples, list) and 0 <= index < len(samples):
            sample = samples[index]
            path = sample[0] if isinstance(sample, tuple) and sample else sample
            if isinstance(path, str | Path):
                return str(path)
        rank, number = divmod(index, 1 << _OF_RANK)
        return f"image {number}" + (f" of rank {rank}" if rank else "")

    return describe


class EvaluationFile:
    """evaluation.json of a run: the predictions of the weights that it would publish."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: dict[int, dict[str, Any]] = {}  # by step, the newest last
        self._on_disk: int | None = None  # the step that this process has written
        self._has_said = False

    def note(self, facts: dict[str, Any], *, published: int, say: Callable[[str], object]) -> None:
        """Note an evaluation, and write that of the step whose weights the run would publish now."""
        self._kept.pop(facts["step"], None)
        self._kept[facts["step"]] = facts
        needed = {published, self._on_disk}  # a rollback may publish the one before again
        while len(self._kept) > _MAX_KEPT:
            del self._kept[next(step for step in self._kept if step not in needed)]
        if self._on_disk == facts["step"]:
            self._on_disk = None
        self.write(published, say=say)

    def write(self, published: int, *, say: Callable[[str], object]) -> None:
        """Write a step's evaluation, or remove another step's; a failure does not end the run.

        A file of that name from elsewhere is left alone.
        """
        facts = self._kept.get(published)
        try:
            if self._path.exists():
                step = self._step_on_disk()
                if step is None:
                    if facts is not None and not self._has_said:
                        self._has_said = True
                        say(
                            f"{self._path} is not of this run, and is left as it is: the report lacks it"
                        )
                    return
                if facts is None and step != published:  # of steps that a rollback has undone
                    self._path.unlink()
            if facts is not None and self._on_disk != published:
                write_file(self._path, json.dumps(facts, ensure_ascii=False).encode() + b"\n")
                self._on_disk = published
        except OSError as error:
            say(f"{self._path} could not be written: {error}; the report will lack it")

    def _step_on_disk(self) -> int | None:
        """The step of the file; None if it is not an evaluation of a run."""
        try:
            facts = evaluated(json_file(self._path))
        except (OSError, ValueError):
            return None
        return None if facts is None else facts.step
