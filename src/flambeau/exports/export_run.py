"""Exports a run: opens its data, takes the steps and writes the folder whole or not at all."""

import functools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flambeau.data.sources.open_data import open_source
from flambeau.data.sources.source import Source
from flambeau.data.sources.wide_source import of_kind
from flambeau.errors import InputError, require_folder
from flambeau.exports.export_folder import fill_folder
from flambeau.exports.formats.all_formats import FORMATS
from flambeau.exports.served_model import why_not_one_graph
from flambeau.exports.step_figures import StepFigures
from flambeau.exports.steps import ExportPlan, Steps
from flambeau.provenance import named_code
from flambeau.recipes.checkpoints.atomic_checkpoint import Disk, replacing
from flambeau.run.folder.run_folder import RunFolder
from flambeau.run.folder.store_run import run_here
from flambeau.trainer.parts.data import open_data
from flambeau.trainer.prediction.classify_files import sets_of
from flambeau.trainer.prediction.ensemble import Ensemble, Model, ensemble_of
from flambeau.trainer.prediction.sample_images import RANGE_IMAGES, SampleImages, read_images
from flambeau.trainer.prediction.trained_model import Trained, load_trained

_RunData = Callable[[str], tuple[Source, Source]]
"""Opens training and validation data of the run; takes the flag that names others, for error messages."""


@dataclass(frozen=True)
class Measuring:
    """Which images an export is measured on.

    Attributes:
        data: labelled images for the figures of each step; None for the run's validation data.
        calibrate: images for the ranges of int8; None for the run's training data.
        most: of each, at most so many.
    """

    data: Path | None = None
    calibrate: Path | None = None
    most: int = 1000

    def check(self, plan: ExportPlan) -> None:
        """InputError for less than one image, or images of ranges that no step measures."""
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
    others: Sequence[str] = (),
    trust: bool = False,
    say: Callable[[str], None],
) -> list[StepFigures]:
    """Export the model of a run, or of several (`others`) as one; returns the figures of the run and each
    step.

    `trust`: as for `load_model`. InputError: the run or its data cannot be used, `out` exists, a step is
    refused, or the format cannot be written for this model or here.
    """
    plan.check()
    measuring.check(plan)
    check_out(out)
    name = str(run)
    if others:
        plan.check_of_several()
    run = run_here(run, say)
    stored = RunFolder(run).read_existing()
    FORMATS[plan.format].require(str(stored.get("model", stored.get("builder"))))
    trained = load_trained(run, trust=trust, say=say)
    if not trained.knows_its_data:
        _check_own_loop(run, plan, measuring)
    if trained.settings.qat:
        plan.check_rounded(run)
    if trained.calibration is not None:
        say(
            f"probabilities are calibrated: temperature {trained.calibration.temperature:.4g} is in the graph"
        )
    model = _together(name, trained, others, trust=trust, say=say)
    if sets_of(model) is not None and plan.changes_answers:
        say(
            "the sets of classes are left out: their coverage was measured with the answers of the run, and "
            "--prune and --quantize change these"
        )
    run_data = functools.cache(lambda flag: _data_of_run(run, trained, flag, trust=trust, say=say))
    if measuring.data is None:
        _say_of_parts(model, say)
    images = read_images(trained, _measured(trained, measuring, run_data), measuring.most)
    ranges = _ranges(trained, measuring, run_data) if plan.measures_ranges else None
    sources = run_data("the run's data back where they were") if plan.trains else None
    subject = "ensemble" if others else "run"
    return write_export(Steps(model, plan, images, ranges, sources, say, subject), out)


def _together(
    name: str,
    trained: Trained,
    others: Sequence[str],
    *,
    trust: bool,
    say: Callable[[str], None],
) -> Model:
    """The model of a run with those of others, for one graph."""
    more = [(one, load_trained(run_here(one, say), trust=trust, say=say)) for one in others]
    model = ensemble_of([(name, trained), *more])
    why = why_not_one_graph(model) if isinstance(model, Ensemble) else None
    if why is not None:
        raise InputError(
            f"these runs do not fit into one graph: {why}\nExport each of them, or train them with the same "
            "--image-size and --crop; `flambeau predict` and `evaluate` take them together as they are"
        )
    return model


def _say_of_parts(model: Model, say: Callable[[str], None]) -> None:
    """Say that a member may have learned what the export is measured on."""
    if isinstance(model, Ensemble):
        held_out = [one.facts.val_fingerprint for one in model.members]
        odd = [name for name, one in zip(model.names, held_out, strict=True) if one != held_out[0]]
        if odd:
            say(
                f"measured on what {model.names[0]} was evaluated on; {odd[0]} has held out other images, "
                "and may have learned these"
            )


def check_out(out: Path) -> None:
    """Raise InputError for a folder that exists, or cannot be made."""
    require_folder(out)
    if out.exists() or out.is_symlink():  # also one that leads nowhere
        raise InputError(f"{out} exists: name another folder with --out, or move it away")


def write_export(steps: Steps, out: Path) -> list[StepFigures]:
    """Take the steps, and write the folder whole or not at all; InputError as of `Steps.write`."""
    with replacing(out, disk=Disk()) as folder:
        scratch = folder / "training"
        scratch.mkdir(parents=True)
        figures = steps.write(folder, scratch=scratch)
        shutil.rmtree(scratch)
        fill_folder(folder, steps.trained, steps.plan, figures, steps.images)
        if out.exists() or out.is_symlink():
            raise InputError(f"{out} has been made meanwhile: nothing is written")
    return figures


def _check_own_loop(run: Path, plan: ExportPlan, measuring: Measuring) -> None:
    """Refuse what needs the data of a run of which none are known."""
    why = f"{run} is of a training loop of your own, which has not noted its data: "
    if plan.trains:
        step = "--prune" if plan.prune is not None else "--quantize qat"
        raise InputError(
            f"{why}{step} would have to train on them\nLeave it out, or do it in your loop: "
            "flambeau.recipes.compress has prune_channels and fake_quantize"
        )
    if measuring.data is None:
        raise InputError(f"{why}name labelled images to measure on with --data DATA")
    if plan.measures_ranges and measuring.calibrate is None:
        raise InputError(f"{why}name images for the ranges of int8 with --calibrate DATA")


def _measured(trained: Trained, measuring: Measuring, run_data: _RunData) -> Source:
    if measuring.data is not None:
        return open_source(measuring.data, trained.facts.classes, choice=trained.choice)
    return run_data("--data")[1]


def _ranges(trained: Trained, measuring: Measuring, run_data: _RunData) -> SampleImages:
    if measuring.calibrate is None:
        source = run_data("--calibrate")[0]
    else:
        source = open_source(measuring.calibrate, trained.facts.classes, choice=trained.choice)
    return read_images(trained, source, min(RANGE_IMAGES, measuring.most))


def _data_of_run(
    run: Path, trained: Trained, flag: str, *, trust: bool, say: Callable[[str], None]
) -> tuple[Source, Source]:
    stored = vars(trained.settings)
    if "data" in named_code(stored):
        folder = RunFolder(run)
        folder.permission(folder.read_existing(), trust=trust, say=say).ask_for(stored, "data")
    try:
        train, val = (
            of_kind(source, trained.facts.pixels, trained.facts.channels)
            for source in open_data(trained.settings)
        )
        return train, val
    except InputError as error:
        raise InputError(
            f"the data of the run cannot be opened: {error}\nName images with {flag} DATA"
        ) from error
