"""A run to the folder of an export: its data opened, the steps taken, everything written, or nothing."""

import functools
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flambeau.data.sources.open_data import open_source
from flambeau.data.sources.source import Source
from flambeau.errors import InputError, require_folder
from flambeau.export.export_folder import fill_folder
from flambeau.export.formats.all_formats import FORMATS
from flambeau.export.step_figures import StepFigures
from flambeau.export.steps import ExportPlan, Steps
from flambeau.provenance import named_code
from flambeau.run.folder.run_folder import RunFolder
from flambeau.trainer.parts.data import open_data
from flambeau.trainer.prediction.sample_images import RANGE_IMAGES, SampleImages, read_images
from flambeau.trainer.prediction.trained_model import Trained, load_trained

_OwnData = Callable[[str], tuple[Source, Source]]
"""The data of the run, for training and validation; takes what names others, for messages."""


@dataclass(frozen=True)
class Measuring:
    """The images of an export.

    Attributes:
        data: labelled images that each step is measured on; None for the run's validation data.
        calibrate: images that the ranges of int8 are measured on; None for the run's training data.
        most: how many of each, at most.
    """

    data: Path | None = None
    calibrate: Path | None = None
    most: int = 1000

    def check(self, plan: ExportPlan) -> None:
        """Refuse what cannot be measured on.

        Raises:
            InputError: fewer than one image, or images for ranges that no step measures.
        """
        if self.most < 1:
            raise InputError(f"--images must be at least 1, got {self.most}")
        if self.calibrate is not None and not plan.measures_ranges:
            raise InputError(
                "--calibrate is for the ranges of --quantize int8 or qat: give one of them, or leave it out"
            )


def export_run(
    run: Path,
    out: Path,
    plan: ExportPlan,
    measuring: Measuring = Measuring(),
    *,
    trust: bool = False,
    say: Callable[[str], None],
) -> list[StepFigures]:
    """Export the model of a run.

    Args:
        run: its folder.
        out: the folder to make.
        plan: format and steps.
        measuring: on which images.
        trust: run the code that the run names, also where nothing shows that this user has made it.
        say: takes lines for the user.

    Returns:
        Figures of the run and of each step.

    Raises:
        InputError: a run or data that cannot be used, a folder that exists, a step that is refused, a model
            or a machine that the format cannot take.
    """
    plan.check()
    measuring.check(plan)
    require_folder(out)
    if out.exists() or out.is_symlink():  # also one that leads nowhere
        raise InputError(f"{out} exists: name another folder with --out, or move it away")
    FORMATS[plan.format].require(str(RunFolder(run).read_existing().get("model")))
    trained = load_trained(run, trust=trust, say=say)
    if trained.settings.qat:
        plan.check_rounded(run)
    own = functools.cache(lambda flag: _data_of_run(run, trained, flag, trust=trust, say=say))
    images = read_images(trained, _measured(trained, measuring, own), measuring.most)
    ranges = _ranges(trained, measuring, own) if plan.measures_ranges else None
    sources = own("the run's data back where they were") if plan.trains else None
    with tempfile.TemporaryDirectory(prefix=f".{out.name[:30]}-", dir=out.parent) as name:
        folder = Path(name, "export")
        folder.mkdir()
        figures = Steps(trained, plan, images, ranges, sources, say).write(folder)
        fill_folder(folder, trained, plan, figures, images)
        if out.exists() or out.is_symlink():
            raise InputError(f"{out} has been made meanwhile: nothing is written")
        shutil.move(folder, out)
    return figures


def _measured(trained: Trained, measuring: Measuring, own: _OwnData) -> Source:
    if measuring.data is not None:
        return open_source(measuring.data, trained.facts.classes)
    return own("--data")[1]


def _ranges(trained: Trained, measuring: Measuring, own: _OwnData) -> SampleImages:
    if measuring.calibrate is None:
        source = own("--calibrate")[0]
    else:
        source = open_source(measuring.calibrate, trained.facts.classes)
    return read_images(trained, source, min(RANGE_IMAGES, measuring.most))


def _data_of_run(
    run: Path, trained: Trained, flag: str, *, trust: bool, say: Callable[[str], None]
) -> tuple[Source, Source]:
    stored = vars(trained.settings)
    if "data" in named_code(stored):
        folder = RunFolder(run)
        folder.permission(folder.read_existing(), trust=trust, say=say).ask_for(stored, "data")
    try:
        return open_data(trained.settings)
    except InputError as error:
        raise InputError(
            f"the data of the run cannot be opened: {error}\nName images with {flag} DATA"
        ) from error
