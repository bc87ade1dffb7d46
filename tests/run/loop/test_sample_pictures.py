"""Small pictures: their size, their colors, their range."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from flambeau.run.loop.pictures import contact_sheet, data_uri, unit_range


def opened(uri: str) -> Image.Image:
    head, _, content = uri.partition(",")
    assert head == "data:image/jpeg;base64"
    return Image.open(io.BytesIO(base64.b64decode(content)))


@pytest.mark.parametrize(
    ("size", "shown"), [((28, 28), (112, 112)), ((224, 112), (56, 112)), ((60, 60), (60, 60))]
)
@pytest.mark.parametrize("channels", [1, 3])
def test_sizes(size: tuple[int, int], shown: tuple[int, int], channels: int) -> None:
    image = opened(data_uri(torch.zeros(channels, *size, dtype=torch.uint8)))
    assert image.size == shown
    assert image.mode == ("RGB" if channels == 3 else "L")


@pytest.mark.parametrize("value", [torch.tensor(200, dtype=torch.uint8), torch.tensor(200 / 255)])
def test_a_color_stays(value: Tensor) -> None:
    x_CHW = torch.zeros(3, 32, 32, dtype=value.dtype)
    x_CHW[0] = value
    pixels = np.asarray(opened(data_uri(x_CHW))).astype(int)
    assert np.abs(pixels - [200, 0, 0]).max() < 8


def test_what_is_no_number_is_black_and_what_is_too_much_is_white() -> None:
    x_CHW = torch.full((1, 16, 16), float("nan"))
    x_CHW[:, 8:] = 7.0
    pixels = np.asarray(opened(data_uri(x_CHW)))
    assert pixels[:40].max() < 8
    assert pixels[-40:].min() > 247


def test_a_sheet_has_eight_in_a_row() -> None:
    sheet = Image.open(io.BytesIO(contact_sheet(torch.zeros(9, 3, 32, 32))))
    assert sheet.size == (8 * 100, 2 * 100)  # three times as large, and a margin
    pixels = np.asarray(sheet)
    assert pixels[150, 50].max() < 8  # the ninth
    assert pixels[150, 150:].min() > 247  # and no tenth


def test_an_unknown_unit_is_shown_from_least_to_greatest() -> None:
    x_NCHW = torch.stack([torch.tensor([[[-3.0, 1.0]]]), torch.full((1, 1, 2), 5.0)])
    assert unit_range(x_NCHW).flatten().tolist() == [0.0, 1.0, 0.0, 0.0]
