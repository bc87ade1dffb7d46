"""The resizing in a graph gives the pixels of an evaluation, and so does its twin in NumPy."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flambeau.data.transforms.crops import EvalResize, eval_image, shorter_side
from flambeau.exports.resize_in_graph import ResizedCentre
from flambeau.exports.standalone.preprocess import Preprocessing

SIZES = [
    (300, 400), (400, 300), (224, 224), (256, 256), (257, 512), (28, 28), (1, 1), (1, 9), (3, 700), (901, 7),
    (97, 96), (640, 31), (1000, 1003),
]  # fmt: skip


def preprocessing(
    folder: Path,
    size: int,
    channels: int,
    interpolation: str,
    pixels: str = "uint8",
    resize: EvalResize = None,
) -> Preprocessing:
    told = {
        "pixels": pixels,
        "classes": ["a"],
        "image_size": size,
        "resized_shorter_side": shorter_side(size, resize),
        "squash": resize == "squash",
        "interpolation": interpolation,
        "mean": [0.4] * channels,
        "std": [0.2] * channels,
    }
    folder.joinpath("export.json").write_text(json.dumps(told))
    return Preprocessing(folder)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [28, 96, 224])
def test_pixels_are_those_of_an_evaluation(tmp_path: Path, size: int, interpolation: str) -> None:
    """Random pixels, and black and white ones, at which bicubic weights overshoot."""
    generator = np.random.default_rng(size)
    resize = ResizedCentre(size, interpolation)
    prepare = preprocessing(tmp_path, size, 3, interpolation).prepare
    for number, (height, width) in enumerate(SIZES):
        pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
        if number % 2:
            pixels = (pixels > 127).astype(np.uint8) * 255
        expected = eval_image(pixels, size, interpolation=interpolation)
        full = torch.tensor([height, width])
        [got] = resize(torch.from_numpy(pixels)[None], full).permute(0, 2, 3, 1)
        np.testing.assert_array_equal(got.numpy(), expected, err_msg=f"{height} x {width}")
        np.testing.assert_array_equal(prepare(pixels, full), expected)


@pytest.mark.parametrize("resize", ["squash", 28, 35])
def test_pixels_of_another_rule_are_those_of_an_evaluation(
    tmp_path: Path, resize: EvalResize
) -> None:
    generator = np.random.default_rng(0)
    in_graph = ResizedCentre(28, "bilinear", resize)
    prepare = preprocessing(tmp_path, 28, 3, "bilinear", resize=resize).prepare
    for height, width in [*SIZES[::3], (28, 28), (1, 900)]:
        pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
        expected = eval_image(pixels, 28, resize=resize)
        full = torch.tensor([height, width])
        [got] = in_graph(torch.from_numpy(pixels)[None], full).permute(0, 2, 3, 1)
        np.testing.assert_array_equal(got.numpy(), expected, err_msg=f"{height} x {width}")
        np.testing.assert_array_equal(prepare(pixels, full), expected)


@pytest.mark.parametrize("resize", ["squash", 35])
def test_files_of_every_kind_become_the_same_pixels_by_another_rule(
    tmp_path: Path, nasty_images: Any, resize: EvalResize
) -> None:
    reader = preprocessing(tmp_path, 32, 3, "bilinear", resize=resize)
    for name, data in nasty_images(33):
        pixels, full_size = reader.read_image(io.BytesIO(data))
        expected = eval_image(data, 32, channels=3, resize=resize)
        np.testing.assert_array_equal(reader.prepare(pixels, full_size), expected, err_msg=name)


def test_prepared_images_come_out_as_they_are() -> None:
    pixels = torch.randint(0, 256, (3, 64, 64, 1), dtype=torch.uint8)
    got = ResizedCentre(64)(pixels, torch.tensor([64, 64]))
    assert torch.equal(got.permute(0, 2, 3, 1), pixels.float())


def check_files(tmp_path: Path, files: Iterator[tuple[str, bytes]]) -> None:
    readers = {
        (size, channels, interpolation): preprocessing(
            tmp_path, size, channels, interpolation
        )
        for size, channels, interpolation in [(32, 3, "bilinear"), (28, 1, "bilinear"), (64, 3, "bicubic")]
    }  # fmt: skip
    for number, (name, data) in enumerate(files):
        size, channels, interpolation = list(readers)[number % len(readers)]
        reader = readers[size, channels, interpolation]
        expected = eval_image(data, size, channels=channels, interpolation=interpolation)
        pixels, full_size = reader.read_image(io.BytesIO(data))
        np.testing.assert_array_equal(reader.prepare(pixels, full_size), expected, err_msg=name)
        batch = torch.from_numpy(pixels.copy())[None]
        [got] = ResizedCentre(size, interpolation)(batch, torch.from_numpy(full_size))
        np.testing.assert_array_equal(got.permute(1, 2, 0).numpy(), expected, err_msg=name)


def test_files_of_every_kind_become_the_same_pixels(tmp_path: Path, nasty_images: Any) -> None:
    check_files(tmp_path, nasty_images(66))


@pytest.mark.slow
def test_a_thousand_files_become_the_same_pixels(tmp_path: Path, nasty_images: Any) -> None:
    check_files(tmp_path, nasty_images(1000, seed=1))
