"""The evaluations of a training, kept in its folder for the report: evaluation.json, first_batch.jpg."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flambeau.data.check.report_text import ReportItem
from flambeau.data.datasets.device_dataset import DeviceDataset
from flambeau.data.datasets.image_dataset import ImageDataset
from flambeau.data.transforms.crops import TrainingCrop
from flambeau.errors import InputError
from flambeau.recipes.checkpoints.atomic_checkpoint import write_file
from flambeau.report.evaluated import evaluated
from flambeau.run.folder.json_file import json_file
from flambeau.run.loop.pictures import contact_sheet, data_uri, shown_channels, unit_range
from flambeau.trainer.evaluation.sample_history import SampleHistory
from flambeau.trainer.parts.data import EVALUATION
from flambeau.trainer.tasks.task import Task

_MIN_EPOCHS = 3  # before that, a model has learned few labels
_CHECK_SHARE = 0.02  # of the time of a training, to check its data
_CHECK_S = (1.0, 20.0)  # minimum and maximum of it: other processes wait, and stall after a minute
_MAX_KEPT = 8  # evaluations: after a rollback an earlier one is published


class ReportData:
    """Writes what a report shows of the weights that a run would publish; only in the first process.

    A file that cannot be written is reported only.

    Args:
        folder: None writes nothing, as in a replay.
        has_unit: pixels are uint8 or from 0 to 1.
        check_data: what looks wrong with the data, in about `seconds`; called at the end of the run.
    """

    def __init__(
        self,
        folder: Path | None,
        train: ImageDataset | DeviceDataset,
        val: ImageDataset | DeviceDataset,
        task: Task,
        *,
        best: str,
        normalized_by: tuple[list[float], list[float]],
        has_unit: bool,
        check_data: Callable[..., list[ReportItem]],
    ) -> None:
        self._folder, self._train, self._val, self._task = folder, train, val, task
        self._normalized_by, self._has_unit = normalized_by, has_unit
        self._check_data = check_data
        self.metric = task.sample_results(best)
        self._began = time.monotonic()
        self._kept: dict[int, dict[str, Any]] = {}  # by step, the newest last
        self._on_disk: int | None = None  # the step that this process has written

    def add(
        self,
        *,
        step: int,
        published: int,
        end: SampleHistory | None,
        say: Callable[[str], None],
    ) -> None:
        """Note the evaluation that has just ended, and the step of the weights to publish now.

        `end`: the training images' history, if the run ends here.
        """
        folder = self._folder
        if folder is None or self.metric.last is None:
            return
        path = folder / EVALUATION
        try:
            if end is not None:
                end.save(folder)
            if step == published:
                self._kept[step] = self._task.report_facts(
                    self.metric.last, step=step, describe=self._val.describe
                )
                self._on_disk = None
                while len(self._kept) > _MAX_KEPT:
                    del self._kept[next(iter(self._kept))]
            facts = self._kept.get(published) or self._stored(path, published)
            if facts is None:  # the file is of steps that a rollback has undone
                path.unlink(missing_ok=True)
                return
            self._kept[published] = facts
            if end is not None:
                self._end(folder, facts, end, say)
            if end is not None or self._on_disk != published:
                write_file(path, json.dumps(facts, ensure_ascii=False).encode() + b"\n")
                self._on_disk = published
        except OSError as error:
            say(f"{path} could not be written: {error}; the report will lack it")

    def _end(
        self,
        folder: Path,
        facts: dict[str, Any],
        history: SampleHistory,
        say: Callable[[str], None],
    ) -> None:
        """Add what is written once, at the end of the run."""
        passed_s = time.monotonic() - self._began
        seconds = min(max(_CHECK_SHARE * passed_s, _CHECK_S[0]), _CHECK_S[1])
        findings = self._check_data(seconds=seconds)
        grave = [one.title for one in findings if one.kind in ("leaks", "contradictions")]
        if grave:
            say(f"{'; '.join(grave)}: the report names them")
        facts["findings"] = [(one.title, one.lines) for one in findings]
        is_long_enough = history.epochs >= _MIN_EPOCHS
        facts["suspects"] = (
            self._task.suspects(folder, self._train.source) if is_long_enough else []
        )
        self._add_pictures(self._val, [*facts["mistakes"], *facts["unsure"]])
        if facts["suspects"]:
            train = ImageDataset(
                self._train.source,
                image_size=self._val.image_size,
                channels=self._val.channels,
                train=False,
                crop=TrainingCrop(eval_resize=self._task.eval_resize),
                skip_bad=True,
                keep=False,
            )
            self._add_pictures(train, facts["suspects"])

    def _add_pictures(
        self, data: ImageDataset | DeviceDataset, samples: Sequence[dict[str, Any]]
    ) -> None:
        indices = torch.tensor([sample["index"] for sample in samples], dtype=torch.int64)
        if not len(indices):
            return
        try:
            (images, targets), bad = data.batch(indices, torch.zeros_like(indices))
        except InputError:
            return  # readable a moment ago; the report then has no pictures
        if not bad:
            shown = zip(samples, self._in_range(images), targets, strict=True)
            for sample, image, target in shown:
                picture = self._task.picture(image, target, sample)
                side_by_side = picture.shape[2] // picture.shape[1]
                sample["picture"] = data_uri(picture, pictures=side_by_side)

    def _in_range(self, x_NCHW: Tensor) -> Tensor:
        x_NCHW = shown_channels(x_NCHW)
        return x_NCHW if self._has_unit else unit_range(x_NCHW)

    def add_first_batch(self, x_NCHW: Tensor, *, say: Callable[[str], None]) -> None:
        """Keep some normalized training images (N, C, H, W), unless the file exists."""
        if self._folder is None or (path := self._folder / "first_batch.jpg").exists():
            return
        mean, std = (torch.tensor(one).view(1, -1, 1, 1) for one in self._normalized_by)
        try:
            write_file(path, contact_sheet(self._in_range(x_NCHW.float().cpu() * std + mean)))
        except OSError as error:
            say(f"{path} could not be written: {error}; the report will lack it")

    def _stored(self, path: Path, step: int) -> dict[str, Any] | None:
        """What an earlier start has written about the weights of a step; None if it is not plausible."""
        try:
            facts = json_file(path)
        except (OSError, ValueError):
            return None
        if evaluated(facts) is None or facts["step"] != step:
            return None
        indices = [one.get("index") for one in (*facts["mistakes"], *facts["unsure"])]
        known = all(type(index) is int and 0 <= index < len(self._val) for index in indices)
        return dict(facts) if known else None
