"""The files of an export beside its model: export.json, a model card, preprocessing, an example.

export.json has the SHA-256 of every other file, and the logits of two computed images, which are compared
when the export is loaded.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from flambeau.data.sources.source import IN_FILES
from flambeau.data.sources.wide_source import COLORS
from flambeau.data.transforms.crops import shorter_side
from flambeau.exports.examples import example_of, needs_own_class
from flambeau.exports.formats.all_formats import FORMATS
from flambeau.exports.model_card import model_card
from flambeau.exports.standalone import preprocess
from flambeau.exports.step_figures import StepFigures, as_rows, batched_logits
from flambeau.exports.steps import ExportPlan
from flambeau.provenance import made_now, record
from flambeau.recipes import models
from flambeau.recipes.checkpoints.atomic_checkpoint import write_file
from flambeau.recipes.setup.environment import environment
from flambeau.run.options.option import values_of
from flambeau.trainer.parts import pixel_models
from flambeau.trainer.parts.model import OWN_MODELS
from flambeau.trainer.prediction.classify_files import sets_of
from flambeau.trainer.prediction.ensemble import Ensemble, Model
from flambeau.trainer.prediction.sample_images import SampleImages
from flambeau.trainer.settings.settings import teacher_runs
from flambeau.version import __version__

INDEX = "export.json"


def fill_folder(
    folder: Path,
    trained: Model,
    plan: ExportPlan,
    figures: Sequence[StepFigures],
    images: SampleImages,
) -> None:
    """Write every file but the model; the figures were measured on `images`."""
    format_ = FORMATS[plan.format]
    classify = format_.open(folder / format_.file, torch.get_num_threads(), made_now(folder))
    logits = batched_logits(classify, images.pixels)
    pixels = check_images(trained)
    about = {
        "flambeau": __version__,
        "format": plan.format,
        "file": format_.file,
        "plan": asdict(plan),
        **_facts_of_outputs(trained, logits, images),
        **_sets(trained, plan),
        "image_size": trained.image_size,
        "resized_shorter_side": shorter_side(trained.image_size, trained.resize),
        "squash": trained.resize == "squash",
        "interpolation": trained.settings.crop,
        "mean": trained.facts.mean,
        "std": trained.facts.std,
        "pixels": trained.facts.pixels,
        "images": {"measured": len(images), "of": images.total},
        "steps": as_rows(figures),
        "settings": _settings(trained),
        "dataset": asdict(trained.facts),
        **_members(trained),
        "environment": environment(),
        "answers": sampled(classify(pixels, torch.tensor(pixels.shape[1:3]))).tolist(),
    }
    _write_examples(folder, trained, plan)
    write_file(folder / "labels.txt", _label_lines(trained))
    write_file(folder / "README.md", model_card(about, figures, trained.facts.task).encode())
    about["files"] = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }
    index = json.dumps(about, indent=1, ensure_ascii=False).encode() + b"\n"
    write_file(folder / INDEX, index)
    record(index)  # so that what is compiled in it runs without a question, here


def _facts_of_outputs(trained: Model, logits: Tensor, images: SampleImages) -> dict[str, Any]:
    task = trained.facts.task
    if images.labels is not None:
        return {**task.export_facts(logits, images.labels)}
    # Nothing can be calibrated without targets.
    return {**task.export_facts(logits, None)}


def _sets(trained: Model, plan: ExportPlan) -> dict[str, Any]:
    """What makes the prediction sets of a model whose answers are those of the run."""
    calibration = sets_of(trained)
    if calibration is None or plan.changes_answers:
        return {}
    names = ("coverage", "threshold", "adaptive", "images")
    return {"sets": {name: getattr(calibration, name) for name in names}}


def _write_examples(folder: Path, trained: Model, plan: ExportPlan) -> None:
    write_file(folder / "example.py", example_of(plan, trained).encode())
    beside = [Path(preprocess.__file__)]
    reads_files = trained.facts.channels in COLORS and trained.facts.pixels in IN_FILES
    if plan.format == "aoti" and reads_files:  # it reads PGM and PPM
        beside.append(beside[0].with_name("classify.cpp"))
    if plan.format == "safetensors" and needs_own_class(trained):
        beside.append(Path(pixel_models.__file__))
    if plan.format == "safetensors" and trained.settings.model in OWN_MODELS:
        recipe, _, _ = OWN_MODELS[trained.settings.model]
        beside.append(Path(models.__path__[0]) / f"{recipe}.py")
    for file in beside:
        text = file.read_bytes()
        if trained.facts.pixels == "uint16":
            text = text.replace(b"of_16_bits = false", b"of_16_bits = true")
        task = trained.facts.task
        text = text.replace(b"task = CLASSES", b"task = " + task.export_words.cpp_name.encode())
        facts = task.export_facts(torch.empty(0, 1), None)
        for name, key in (("thresholds", "thresholds"), ("values", "mask_values")):
            numbers = ", ".join(map(repr, facts.get(key, ())))
            text = text.replace(f"{name}{{}}".encode(), f"{name}{{{numbers}}}".encode())
        write_file(folder / file.name, text)


def _settings(trained: Model) -> dict[str, Any]:
    """The settings of the run, without folders of this machine: files by their names alone."""
    settings = {**values_of(trained.settings), "data": None}
    if not trained.knows_its_data:  # the others mean nothing
        settings = {name: settings[name] for name in ("model", "image_size", "crop")}
    for name in ("model", "weights", "class_weights"):
        if isinstance(settings.get(name), str):
            settings[name] = PurePath(settings[name]).name
    teachers = [PurePath(run).name for run in teacher_runs(settings.get("teacher"))]
    settings["teacher"] = " + ".join(teachers) or None  # no list any more: names may be the same
    return {name: value for name, value in settings.items() if value is not None}


def _members(model: Model) -> dict[str, Any]:
    """Of an ensemble the settings of each run, and what it was trained on."""
    if not isinstance(model, Ensemble):
        return {}
    return {
        "members": [
            {"settings": _settings(one), "dataset": asdict(one.facts)} for one in model.members
        ]
    }


def _label_lines(trained: Model) -> bytes:
    """A line per class; a line break in a name becomes a space (export.json has the exact names)."""
    return "".join(" ".join(name.split("\n")) + "\n" for name in trained.facts.classes).encode()


def sampled(logits: Tensor) -> Tensor:
    """Logits that export.json keeps for comparison: an image's, or of 64 of its pixels."""
    if logits.ndim == 2:
        return logits
    height, width = logits.shape[2:]
    return logits[:, :, :: max(1, height // 8), :: max(1, width // 8)]


def check_images(trained: Model) -> Tensor:
    """Two computed images to compare logits: (2, S + 9, S + 23, C) uint8, or levels of 16 bits."""
    size, facts = trained.image_size, trained.facts
    n, y, x, c = torch.meshgrid(
        *map(torch.arange, (2, size + 9, size + 23, facts.channels)), indexing="ij"
    )
    levels = (y * (3 + 2 * n) + x * (5 - 3 * n) + 40 * c + y * x // 50) % 256
    if facts.pixels == "uint8":
        return levels.to(torch.uint8)
    # Two standard deviations to either side, as 16 bits have no scale of their own.
    around = torch.tensor(facts.mean) + torch.tensor(facts.std) * (levels - 128) / 64
    return around.round().clamp(0, 65535)
