"""An evaluation that calibrates its run: `flambeau evaluate --calibrate`."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from flambeau.errors import InputError
from flambeau.run.folder.published_weights import published
from flambeau.run.folder.run_folder import RunFolder
from flambeau.run.folder.store_run import mirror_again
from flambeau.trainer.prediction.calibration import FILE, Calibration, fitted
from flambeau.trainer.prediction.ensemble import Ensemble, Model, calibration_key
from flambeau.trainer.prediction.trained_model import Trained


@dataclass
class Calibrating:
    """Keeps an evaluation's logits, and writes what is fitted on them into the run.

    Attributes:
        trained: the model, or several as one, not calibrated.
        run: the folder for it.
        weights_sha256: of several models their key.
        name: of the file.
        coverage, adaptive: of prediction sets, if asked for.
    """

    trained: Model
    run: Path
    weights_sha256: str
    coverage: float | None
    adaptive: bool = False
    name: str = FILE
    _batches: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def of(
        cls, model: Model, folder: str, coverage: float | None, *, adaptive: bool = False
    ) -> "Calibrating":
        """For the model of a folder.

        Raises:
            InputError: no finished run of classes in a local folder.
        """
        if isinstance(model, Ensemble):
            return cls._of_several(model, coverage, adaptive=adaptive)
        run = RunFolder(Path(folder))
        if not isinstance(model, Trained) or model.has_fixed_size or not run.config.is_file():
            raise InputError(
                f"{folder} is no folder of a run here, and --calibrate writes its temperature into that: "
                "calibrate the run, and export it then"
            )
        if not model.knows_its_data or model.facts.task_name != "classification":
            raise InputError(
                f"{folder} is not a run of `flambeau train` on classes, and --calibrate is for those: its "
                "temperature divides the logits of one softmax"
            )
        result = published(run)
        if result is None or result.sha256 is None:
            raise InputError(
                f"{folder} is not finished, and its weights change still: calibrate it afterwards"
            )
        plain = dataclasses.replace(model, calibration=None)
        return cls(plain, run.path, result.sha256, coverage, adaptive)

    @classmethod
    def _of_several(
        cls, model: Ensemble, coverage: float | None, *, adaptive: bool
    ) -> "Calibrating":
        """Each member keeps its own temperature; what is fitted is that of all together."""
        for one, name in zip(model.members, model.names, strict=True):
            alone = cls.of(one, name, coverage)  # refuses what cannot be calibrated
            assert alone.run == one.folder
        key = calibration_key(model)
        first = model.members[0].folder
        assert key is not None
        assert first is not None
        plain = dataclasses.replace(model, calibration=None)
        return cls(plain, first, key[1], coverage, adaptive, name=key[0])

    def keep(self, logits: Tensor, targets: Tensor) -> None:
        """Keep a batch."""
        self._batches.append((logits.cpu(), targets.cpu()))

    def write(self, *, say: Callable[[str], None]) -> Calibration:
        """Fit on all batches, and write the run's file, also to its mirror.

        Raises:
            InputError: too few images for the coverage.
        """
        logits, labels = (torch.cat(parts) for parts in zip(*self._batches, strict=True))
        found = fitted(
            logits,
            labels,
            weights_sha256=self.weights_sha256,
            coverage=self.coverage,
            adaptive=self.adaptive,
        )
        found.write(self.run, name=self.name)
        mirror_again(self.run, say=say)
        return found


def keep_nothing(logits: Tensor, targets: Tensor) -> None:
    """For an evaluation that calibrates nothing."""
