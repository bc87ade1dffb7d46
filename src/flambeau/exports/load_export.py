"""Loads an export as the same object as a run's model, `Trained`, and verifies one without running it."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flambeau.data.transforms.crops import EvalResize
from flambeau.errors import InputError, json_object, unreadable, why_no_json
from flambeau.exports.export_folder import INDEX, check_images, sampled
from flambeau.exports.formats.all_formats import FORMATS
from flambeau.exports.formats.classifier import Classifier, ModelFormat
from flambeau.provenance import Permission, is_recorded
from flambeau.run.folder.json_file import checked_facts, finite_number
from flambeau.run.options.option import values_of
from flambeau.trainer.parts.data import DataFacts
from flambeau.trainer.prediction.calibration import Calibration
from flambeau.trainer.prediction.ensemble import Model, ensemble_of
from flambeau.trainer.prediction.trained_model import Trained, load_trained
from flambeau.trainer.settings.resolved_settings import ResolvedSettings, settings_for_use
from flambeau.trainer.settings.settings import FIELDS
from flambeau.trainer.settings.stored_settings import from_stored

_LARGEST_INDEX = 64 << 20  # bytes of export.json: a hundred thousand classes take ten times less
_LONGEST_SIDE = 2 * 16384  # pixels: more than S / 0.875 of the largest S
_EQUAL = 1e-3
"""How far a logit may be from the one in export.json: other processors add in another order."""


class ExportedNetwork(nn.Module):
    """The model of an export as a network: (N, C, S, S) of its dtype to logits."""

    classify: Classifier
    """The model itself, which takes pixels of any size."""

    def __init__(self, classify: Classifier, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.classify, self._size, self.dtype = classify, size, dtype

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[-2:] != (self._size, self._size):
            raise ValueError(f"an export takes images of {self._size} pixels")
        if images.dtype != self.dtype:
            raise InputError(
                "this export takes the 8 bits of image files, and these pixels are floating-point numbers\n"
                "Ask the run itself, or return 8-bit pixels"
            )
        pixels = images.permute(0, 2, 3, 1).contiguous()
        return self.classify(pixels, torch.tensor([self._size, self._size]))


def is_export(path: Path) -> bool:
    return (path / INDEX).is_file()


def load_model(path: Path, *, trust: bool = False, say: Callable[[str], None]) -> Trained:
    """The model in the folder of a run or of an export.

    `trust`: run code that the folder names or holds, even if nothing shows that this user has made it.
    """
    if is_export(path):
        return load_export(path, trust=trust, say=say)
    return load_trained(path, trust=trust, say=say)


def load_models(names: Sequence[str], *, trust: bool = False, say: Callable[[str], None]) -> Model:
    """The model of a run or export; of several, which must have learned the same, one."""
    return ensemble_of([(name, load_model(Path(name), trust=trust, say=say)) for name in names])


def load_export(
    path: Path, *, trust: bool = False, say: Callable[[str], None] = lambda _: None
) -> Trained:
    """Load an export on the CPU; see `load_model` for the arguments.

    InputError: damaged or of another version, or its runtime is not installed.
    """
    about, content = _index(path)
    format_, settings, facts, size = _facts(about, path / INDEX)
    if not (path / format_.file).is_file():
        raise InputError(f"{path / format_.file} is missing: export the run again")
    hashes = about.get("files")
    permission = Permission(
        path, is_recorded(content), trust, say, hashes if isinstance(hashes, dict) else {}
    )
    classify = format_.open(path / format_.file, torch.get_num_threads(), permission)
    dtype = torch.uint8 if facts.pixels == "uint8" else torch.float32
    trained = Trained(
        ExportedNetwork(classify, size, dtype).eval(),
        settings,
        facts,
        torch.device("cpu"),
        normalize=lambda images: images,  # which the graph does
        has_fixed_size=True,
    )
    _check_fits(trained, dtype, path / INDEX)
    trained = dataclasses.replace(
        trained,
        resize=_resize(about, size, path / INDEX),
        others=_others(about, path / INDEX),
        calibration=_sets(about, path / INDEX),
    )
    _report_differences(trained, about.get("answers"), say)
    return trained


def _facts(
    about: Mapping[str, Any], index: Path
) -> tuple[ModelFormat, ResolvedSettings, DataFacts, int]:
    try:
        # The precision and device of the training do not apply to the exported graph.
        stored = {**about["settings"], "precision": "fp32", "device": "cpu"}
        size = about["image_size"]
        if "lr" not in stored:  # of a model of which no training is known
            known = settings_for_use(str(stored["model"]), image_size=size)
            stored = {k: v for k, v in values_of(known).items() if v is not None} | stored
        if type(size) is not int or size not in FIELDS["image_size"].metadata["range"]:
            raise InputError(f"{index} was edited: no image has {str(size)[:40]} pixels a side")
        return (
            FORMATS[about["format"]],
            from_stored(stored, index),
            DataFacts(**checked_facts(about["dataset"])),
            size,
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{index} is of another version of flambeau: {error!r}\n"
            "example.py beside it needs no flambeau"
        ) from error


def _resize(about: Mapping[str, Any], size: int, index: Path) -> EvalResize:
    if about.get("squash"):
        return "squash"
    shorter = about.get("resized_shorter_side")
    if shorter is None:
        return None
    if type(shorter) is not int or not size <= shorter <= _LONGEST_SIDE:
        raise InputError(f"{index} was edited: no image is resized to {str(shorter)[:40]} pixels")
    return shorter


def _sets(about: Mapping[str, Any], index: Path) -> Calibration | None:
    """What makes prediction sets of the answers, whose temperature is in the graph.

    Raises:
        InputError: it was edited.
    """
    sets = about.get("sets")
    if sets is None:
        return None
    names = ("coverage", "threshold", "images")
    numbers = {name: finite_number(sets.get(name)) for name in names if isinstance(sets, dict)}
    is_adaptive = sets.get("adaptive") if isinstance(sets, dict) else None
    if None in numbers.values() or type(is_adaptive) is not bool:
        raise InputError(f"{index} was edited: its sets of classes cannot be read")
    return Calibration(
        "",
        1.0,
        int(numbers["images"] or 0),
        *(math.nan,) * 4,
        coverage=numbers["coverage"],
        threshold=numbers["threshold"],
        adaptive=is_adaptive,
    )


def _others(about: Mapping[str, Any], index: Path) -> tuple[DataFacts, ...]:
    try:
        return tuple(DataFacts(**checked_facts(one["dataset"])) for one in about.get("members", ()))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{index} was edited: its members cannot be read") from error


def _check_fits(trained: Trained, dtype: torch.dtype, index: Path) -> None:
    """Call the model once: export.json may have been edited, so that it does not fit."""
    facts, size = trained.facts, trained.image_size
    try:
        images = torch.zeros(1, facts.channels, size, size, dtype=dtype)
        sides = (size, size) if facts.task.per_pixel else ()
        fits = trained.logits(images).shape == (1, len(facts.classes), *sides)
    except InputError:  # what is asked for does not fit the memory
        raise
    except Exception as error:  # of three runtimes
        raise InputError(_no_fit(index)) from error
    if not fits:
        raise InputError(_no_fit(index))


def _report_differences(trained: Trained, answers: object, say: Callable[[str], None]) -> None:
    """Say if the check images get other logits than when the run was exported."""
    assert isinstance(trained.model, ExportedNetwork)
    pixels = check_images(trained)
    got = trained.model.classify(pixels, torch.tensor(pixels.shape[1:3]))
    try:
        off = float((sampled(got) - torch.tensor(answers)).abs().max())
    except (TypeError, ValueError, RuntimeError):  # no numbers, or not as many
        say(f"{INDEX} has no answers of this model to compare with")
        return
    if not off <= _EQUAL:
        say(
            f"a logit is {off:.2g} off the one that {INDEX} has: another processor, or another model"
        )


def _no_fit(index: Path) -> str:
    return f"{index} does not fit the model beside it: it was edited\nExport the run again"


@dataclass(frozen=True)
class ExportReport:
    """The result of `verify_export`.

    Attributes:
        wrong: a line for each file that is missing, changed, or holds more than it should.
        file: of the model.
        is_code: it is a compiled library; only its hash can be verified.
    """

    wrong: Sequence[str]
    file: str
    is_code: bool


def verify_export(path: Path) -> ExportReport:
    """Compare an export with its list of hashes and read its model without running it.

    Who changes a file can change the list, so a match does not prove the origin.
    """
    about, _ = _index(path)
    if about["format"] not in FORMATS:
        raise InputError(
            f"{path / INDEX} is of another version of flambeau: {about['format']!r:.80}"
        )
    format_ = FORMATS[about["format"]]
    files = about.get("files")
    if not isinstance(files, dict) or format_.file not in files:
        wrong = [f"{INDEX}: it lists no hash of {format_.file}"]
    else:
        wrong = [line for name, digest in files.items() for line in _changed(path, name, digest)]
    if not wrong and format_.check is not None:
        why = format_.check(path / format_.file)
        wrong += [] if why is None else [f"{format_.file}: NOT READ: {why}"]
    return ExportReport(wrong, format_.file, format_.is_code)


def _changed(path: Path, name: str, sha256: object) -> Iterator[str]:
    """What is wrong with a file of the list; nothing if it is whole."""
    if name in ("", ".", "..") or Path(name).name != name:
        yield f"{name[:80]!r}: no file of this folder"
        return
    file = path / name
    if not file.is_file():
        yield f"{name}: missing"
        return
    try:
        with file.open("rb") as opened:
            same = hashlib.file_digest(opened, "sha256").hexdigest() == sha256
    except OSError as error:
        raise unreadable(file, error) from error
    if not same:
        yield f"{name}: DAMAGED, or changed since the export"


def _index(path: Path) -> tuple[dict[str, Any], bytes]:
    """The content of export.json, parsed and as bytes."""
    file = path / INDEX
    try:
        with file.open("rb") as opened:
            content = opened.read(_LARGEST_INDEX + 1)
        if len(content) > _LARGEST_INDEX:
            raise InputError(f"{file} is larger than any export writes it: it was changed")
        about = json.loads(content.decode(), object_pairs_hook=json_object)
    except OSError as error:
        raise unreadable(file, error) from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{file} cannot be read: {why_no_json(error)}") from error
    if not isinstance(about, dict) or not isinstance(about.get("format"), str):
        raise InputError(f"{file} is not of an export")
    return about, content
