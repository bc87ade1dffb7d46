"""An export, loaded: the same object as a run's model, so that whatever takes the one takes the other."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flambeau.errors import InputError, json_object, unreadable, why_no_json
from flambeau.export.export_folder import INDEX, asked_again
from flambeau.export.formats.all_formats import FORMATS
from flambeau.export.formats.classifier import Classifier
from flambeau.train.build.data import DataFacts
from flambeau.train.prediction.trained_model import Trained, load_trained
from flambeau.train.settings.config_file import from_stored

_LARGEST_INDEX = 64 << 20  # bytes of export.json: a hundred thousand classes take ten times less
_EQUAL = 1e-3
"""How far a logit may be from the one in export.json: other processors add in another order."""


class ExportedNetwork(nn.Module):
    """A file of an export as a network of prepared images: (N, C, S, S) uint8 to logits (N, K)."""

    classify: Classifier
    """As the file takes it: pixels of any size."""

    def __init__(self, classify: Classifier, size: int) -> None:
        super().__init__()
        self.classify, self._size = classify, size

    def forward(self, images: Tensor) -> Tensor:
        """Ask the file."""
        if images.shape[-2:] != (self._size, self._size):
            raise ValueError(f"an export takes images of {self._size} pixels")
        pixels = images.to(torch.uint8).permute(0, 2, 3, 1).contiguous()
        return self.classify(pixels, torch.tensor([self._size, self._size]))


def is_export(path: Path) -> bool:
    """Whether the folder holds an export."""
    return (path / INDEX).is_file()


def load_model(path: Path, *, say: Callable[[str], None]) -> Trained:
    """The model of a run or of an export.

    Raises:
        InputError: neither of them, or one that cannot be loaded.
    """
    return load_export(path) if is_export(path) else load_trained(path, say=say)


def load_export(path: Path) -> Trained:
    """Load an export; on the CPU.

    Raises:
        InputError: damaged, of another version, or its runtime is not installed.
    """
    told = _index(path)
    try:
        format_ = FORMATS[told["format"]]
        stored = {**told["settings"], "precision": "fp32", "device": "cpu"}  # the graph has its own
        settings = from_stored(stored, path / INDEX)
        facts = DataFacts(**told["dataset"])
        size = int(told["image_size"])
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{path / INDEX} is of another version of flambeau: {error!r}\n"
            "example.py beside it needs no flambeau"
        ) from error
    if not (path / format_.file).is_file():
        raise InputError(f"{path / format_.file} is missing: export the run again")
    classify = format_.open(path / format_.file, torch.get_num_threads())
    trained = Trained(
        ExportedNetwork(classify, size).eval(),
        settings,
        facts,
        torch.device("cpu"),
        normalize=lambda images: images,  # which the graph does
        has_fixed_size=True,
    )
    _check_fits(trained, path / INDEX)
    return trained


def _check_fits(trained: Trained, index: Path) -> None:
    """Ask the file once: what export.json says of it may have been edited."""
    facts, size = trained.facts, trained.image_size
    try:
        images = torch.zeros(1, facts.channels, size, size, dtype=torch.uint8)
        fits = trained.logits(images).shape == (1, len(facts.classes))
    except Exception as error:  # of three runtimes
        raise InputError(_no_fit(index)) from error
    if not fits:
        raise InputError(_no_fit(index))


def _no_fit(index: Path) -> str:
    return f"{index} does not fit the model beside it: it was edited\nExport the run again"


def verify_export(path: Path) -> list[str]:
    """What is wrong with an export: files that are missing or changed, answers that are not the ones it gave.

    Raises:
        InputError: export.json cannot be read, or the model cannot be opened here.
    """
    told = _index(path)
    wrong = []
    files = told.get("files")
    for name, sha256 in files.items() if isinstance(files, dict) else ():
        file = path / Path(str(name)).name
        try:
            with file.open("rb") as opened:
                same = hashlib.file_digest(opened, "sha256").hexdigest() == sha256
        except FileNotFoundError:
            wrong.append(f"{name}: missing")
        except OSError as error:
            raise unreadable(file, error) from error
        else:
            wrong += [] if same else [f"{name}: DAMAGED, or changed since the export"]
    if wrong:
        return wrong
    trained = load_export(path)
    pixels = asked_again(trained.image_size, trained.facts.channels)
    expected = told.get("answers")
    assert isinstance(trained.model, ExportedNetwork)
    got = trained.model.classify(pixels, torch.tensor(pixels.shape[1:3]))
    try:
        off = float((got - torch.tensor(expected)).abs().max())
    except (TypeError, ValueError, RuntimeError):  # no numbers, or not as many
        return [f"{INDEX}: its answers are not of this model"]
    return (
        [] if off <= _EQUAL else [f"{told['file']}: a logit is {off:.2g} off the one of the export"]
    )


def _index(path: Path) -> dict[str, Any]:
    file = path / INDEX
    try:
        if file.stat().st_size > _LARGEST_INDEX:
            raise InputError(f"{file} is larger than any export writes it: it was changed")
        told = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=json_object)
    except OSError as error:
        raise unreadable(file, error) from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{file} cannot be read: {why_no_json(error)}") from error
    if not isinstance(told, dict) or not isinstance(told.get("format"), str):
        raise InputError(f"{file} is not of an export")
    return told
