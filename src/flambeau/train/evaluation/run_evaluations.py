"""The evaluations of a training, kept in its folder for the report: evaluation.json, first_batch.jpg."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flambeau.data.datasets.device_dataset import DeviceDataset
from flambeau.data.datasets.image_dataset import ImageDataset
from flambeau.errors import InputError
from flambeau.recipes.checkpoints.atomic_checkpoint import write_file
from flambeau.train.checkpoints.json_file import json_file
from flambeau.train.evaluation.pictures import contact_sheet, data_uri, unit_range
from flambeau.train.evaluation.sample_history import SampleHistory, label_suspects
from flambeau.train.evaluation.sample_results import SampleResultsMetric, evaluation_facts

_MOST_SUSPECTS = 12  # labels that look wrong, as pictures
_LEAST_EPOCHS = 3  # before that, a model believes few labels


class RunEvaluations:
    """Writes what a report shows of the weights that a run would publish; only in the first process.

    A file that cannot be written is told, and ends no training.

    Args:
        folder: of the run; None writes nothing, as in a replay.
        train: what is trained on.
        val: what is evaluated.
        classes: names.
        normalized_by: mean and standard deviation of each channel of the model's input.
        has_unit: pixels are uint8 or from 0 to 1, and not of an unknown unit.
        find: gives what looks wrong with the data, titles with lines; asked at the end of the run.

    Attributes:
        metric: for `Run(metrics={...})`.
    """

    def __init__(
        self,
        folder: Path | None,
        train: ImageDataset | DeviceDataset,
        val: ImageDataset | DeviceDataset,
        classes: list[str],
        *,
        normalized_by: tuple[list[float], list[float]],
        has_unit: bool,
        find: Callable[[], list[tuple[str, list[str]]]],
    ) -> None:
        self._folder, self._train, self._val, self._classes = folder, train, val, classes
        self._normalized_by, self._has_unit, self._find = normalized_by, has_unit, find
        self.metric = SampleResultsMetric()
        self._facts: dict[str, Any] | None = None

    def add(
        self,
        *,
        step: int,
        published: int,
        end: SampleHistory | None,
        say: Callable[[str], None],
    ) -> None:
        """Take note of the evaluation that has just ended.

        Args:
            step: of the run.
            published: step of the weights that the run would publish now.
            end: what was noted of the training images, where the run ends here.
            say: takes a line for the user.
        """
        if self._folder is None or self.metric.last is None:
            return
        path = self._folder / "evaluation.json"
        try:
            if end is not None:
                end.save(self._folder)
            if step == published:
                self._facts = evaluation_facts(
                    self.metric.last, self._classes, step=step, describe=self._val.describe
                )
            elif end is not None:
                facts = self._facts or _stored(path)  # a resume: the best one was before
                # Of a step that was taken back, nothing is known of the weights that are published.
                self._facts = facts if facts is not None and facts["step"] == published else None
                if self._facts is None:
                    path.unlink(missing_ok=True)
            if self._facts is None:
                return
            if end is not None:
                self._facts |= {"findings": self._find(), "suspects": self._suspects(end)}
                self._add_pictures(self._val, [*self._facts["mistakes"], *self._facts["unsure"]])
                train = ImageDataset(
                    self._train.source, image_size=self._val.image_size, channels=self._val.channels,
                    train=False, skip_bad=True, keep=False,
                )  # fmt: skip
                self._add_pictures(train, self._facts["suspects"])
            if end is not None or step == published:
                write_file(path, json.dumps(self._facts, ensure_ascii=False).encode() + b"\n")
        except OSError as error:
            say(f"{path} could not be written: {error}; the report will lack it")

    def _suspects(self, history: SampleHistory) -> list[dict[str, Any]]:
        """Training images whose labels look wrong, as evaluation.json holds them."""
        if self._folder is None or history.epochs < _LEAST_EPOCHS:
            return []
        number = {name: k for k, name in enumerate(self._classes)}
        return [
            {
                "index": one.number, "image": one.image, "label": number[one.label],
                "predicted": number.get(one.suggested, number[one.label]), "probability": 0.0,
                "of_label": math.exp(-one.loss),
            }
            for one in (label_suspects(self._folder, self._train.source) or [])[:_MOST_SUSPECTS]
        ]  # fmt: skip

    def _add_pictures(
        self, data: ImageDataset | DeviceDataset, samples: Sequence[dict[str, Any]]
    ) -> None:
        indices = torch.tensor([sample["index"] for sample in samples], dtype=torch.int64)
        if not len(indices):
            return
        try:
            (images, _), bad = data.batch(indices, torch.zeros_like(indices))
        except InputError:
            return  # it could be read a moment ago; a report without pictures is one, too
        if not bad:
            for sample, image in zip(samples, self._in_range(images), strict=True):
                sample["picture"] = data_uri(image)

    def _in_range(self, x_NCHW: Tensor) -> Tensor:
        return x_NCHW if self._has_unit else unit_range(x_NCHW)

    def add_first_batch(self, x_NCHW: Tensor, *, say: Callable[[str], None]) -> None:
        """Keep some training images as the model saw them, unless there are such.

        Args:
            x_NCHW: (N, C, H, W) floating, normalized.
            say: takes a line for the user.
        """
        if self._folder is None or (path := self._folder / "first_batch.jpg").exists():
            return
        mean, std = (torch.tensor(one).view(1, -1, 1, 1) for one in self._normalized_by)
        try:
            write_file(path, contact_sheet(self._in_range(x_NCHW.float().cpu() * std + mean)))
        except OSError as error:
            say(f"{path} could not be written: {error}; the report will lack it")


def _stored(path: Path) -> dict[str, Any] | None:
    try:
        facts = json_file(path)
    except (OSError, ValueError):
        return None
    return (
        facts
        if isinstance(facts, dict) and {"step", "mistakes", "unsure"} <= facts.keys()
        else None
    )
