"""`flambeau train` on data that are held on the device: to the bit what it learns from ImageDataset."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flambeau.data.datasets.device_dataset import DeviceDataset
from flambeau.data.datasets.image_dataset import ImageDataset
from flambeau.data.loading.batch_layout import BatchLayout
from flambeau.data.loading.loader import Loader
from flambeau.data.sources.open_data import open_sources
from flambeau.recipes.data.recordio import IRHeader, RecordWriter, pack
from flambeau.run.run import Run
from flambeau.trainer.fit import Training, fit, set_up
from flambeau.trainer.parts import data
from flambeau.trainer.parts.auto_settings import resolve
from flambeau.trainer.parts.data import DataFacts, Prepared, datasets
from flambeau.trainer.settings.settings import Settings

BAD = 30


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 small images of two classes in a record file, one of them damaged."""
    path, draw = tmp_path_factory.mktemp("data") / "small.rec", np.random.default_rng(0)
    with RecordWriter(path) as writer:
        for index in range(80):
            file = io.BytesIO()
            Image.fromarray(draw.integers(0, 256, (16, 16), dtype=np.uint8)).save(file, "png")
            data = file.getvalue()[: 60 if index == BAD else None]
            writer.write(pack(IRHeader(0, index % 2, index, 0), data))
    return path


def prepare(images: Path, folder: Path, **given: Any) -> Training:
    train, val = open_sources(images, seed=0)
    usual = {
        "data": str(images),
        "precision": "fp32",
        "batch_size": 16,
        "duration": "2ep",
        "device": "cpu",
    }
    settings = Settings(**{**usual, "skip_bad_images": 1, "log_every": 1, **given})
    resolved, facts = resolve(settings, train, val)
    return set_up(Prepared(resolved, facts, train, val), folder=folder, bar=False)


def learn(images: Path, folder: Path, **given: Any) -> Training:
    training = prepare(images, folder, **given)
    fit(training)
    return training


def outcome(folder: Path) -> tuple[Any, ...]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    clock = ("images_per_s", "data_wait")
    figures = [{name: value for name, value in row.items() if name not in clock} for row in rows]
    bad = (folder / "bad_images.txt").read_text(encoding="utf-8")
    return figures, (folder / "model.safetensors").read_bytes(), bad


@pytest.fixture(scope="module")
def usual(images: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """What a run on a CPU gives, which holds nothing."""
    folder = tmp_path_factory.mktemp("runs") / "usual"
    training = learn(images, folder)
    assert {type(training.train), type(training.val)} == {ImageDataset}
    return outcome(folder)


@pytest.fixture
def holding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_HOLDING", {"cpu"})


@pytest.mark.usefixtures("holding")
def test_the_same_losses_weights_and_bad_images(
    images: Path, tmp_path: Path, usual: tuple[Any, ...]
) -> None:
    training = learn(images, tmp_path / "held")
    assert {type(training.train), type(training.val)} == {DeviceDataset}
    assert outcome(tmp_path / "held") == usual
    assert len(usual[0]) == 2 * 5 + 2  # a line a step, and one an evaluation
    assert f"record {BAD}" in usual[2]


@pytest.mark.parametrize("held_first", [True, False])
def test_a_run_goes_on_exactly_held_or_not(
    images: Path,
    tmp_path: Path,
    usual: tuple[Any, ...],
    monkeypatch: pytest.MonkeyPatch,
    held_first: bool,
) -> None:
    step = Run.step

    def stopping(self: Run, loss: torch.Tensor) -> None:
        if self.state.step == 7:  # in the second epoch
            raise KeyboardInterrupt
        step(self, loss)

    for is_first in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(data, "_HOLDING", {"cpu"} if is_first == held_first else set())
            training = prepare(images, tmp_path / "run", checkpoint_every="3st")
            assert isinstance(training.train, DeviceDataset) == (is_first == held_first)
            if is_first:
                patch.setattr(Run, "step", stopping)
                with pytest.raises(KeyboardInterrupt):
                    fit(training)
            else:
                assert training.run.state.step == 6
                fit(training)
    assert outcome(tmp_path / "run") == usual


def kinds(images: Path, **given: Any) -> list[bool]:
    train, val = open_sources(images, seed=0)
    settings = Settings(**{"data": str(images), "device": "cpu", "skip_bad_images": 1, **given})
    resolved, facts = resolve(settings, train, val)
    return [
        isinstance(data, DeviceDataset) for data in datasets(Prepared(resolved, facts, train, val))
    ]


@pytest.mark.usefixtures("holding")
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [True, True]),
        ({"flip": False, "mixup": 0.2, "random_erasing": 0.2}, [True, True]),
        ({"workers": 0}, [True, True]),
        ({"alternate_flip": True}, [True, True]),
        ({"workers": 2}, [False, False]),  # asked for
        ({"augment": "randaugment"}, [False, True]),  # not done in batch
        ({"color_jitter": 0.4}, [False, True]),
        ({"image_size": 24}, [False, False]),  # to be resized
    ],
)
def test_what_is_held(images: Path, given: dict[str, Any], expected: list[bool]) -> None:
    assert kinds(images, **given) == expected


def test_cuda_holds_and_a_cpu_does_not(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kinds(images) == [False, False]
    seen = []

    class Held:
        def __init__(self, *_: Any, device: torch.device, **settings: Any) -> None:
            seen.append((device, settings["train"]))

    monkeypatch.setattr(data, "pick_device", lambda _: torch.device("cuda", 1))
    monkeypatch.setattr(data, "DeviceDataset", Held)
    train, val = open_sources(images, seed=0)
    settings = Settings(data=str(images), workers=0, image_size=16, skip_bad_images=1)
    facts = DataFacts(["0", "1"], 1, [0.5], [0.5], len(train), len(val), "", "", None)
    datasets(Prepared(settings, facts, train, val))
    assert seen == [(torch.device("cuda", 1), True), (torch.device("cuda", 1), False)]


@pytest.mark.usefixtures("holding")
def test_ranks_share_what_each_holds(images: Path) -> None:
    train, val = open_sources(images, seed=0)
    settings, facts = resolve(
        Settings(data=str(images), device="cpu", skip_bad_images=1), train, val
    )
    held, _ = datasets(Prepared(settings, facts, train, val))
    whole, *shares = (
        list(Loader(held, BatchLayout(16, **ranks)).stream(epoch=1, position=16, epochs=1))
        for ranks in ({}, {"rank": 0, "world": 2}, {"rank": 1, "world": 2})
    )
    for all_of_it, *parts in zip(whole, *shares, strict=True):
        for number in range(2):
            joined = torch.cat([part.data[number] for part in parts])
            assert torch.equal(joined, all_of_it.data[number])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_the_same_losses_without_workers(images: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"device": "cuda"}
    training = learn(images, tmp_path / "held", **given)
    assert {type(training.train), type(training.val)} == {DeviceDataset}
    data._HOLDING.discard("cuda")
    try:
        learn(images, tmp_path / "usual", **given)
    finally:
        data._HOLDING.add("cuda")
    assert outcome(tmp_path / "held") == outcome(tmp_path / "usual")
