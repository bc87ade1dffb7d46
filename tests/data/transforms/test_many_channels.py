"""Images of any number of channels are cropped, mirrored and resized channel by channel."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from flambeau.data.transforms.crops import TrainingCrop, eval_image, train_image
from flambeau.recipes.data.batch_crop_flip import batch_crop_flip


def noise(dtype: str, channels: int, sides: tuple[int, int] = (61, 47)) -> NDArray[Any]:
    x_HWC = np.random.default_rng(channels).integers(0, 256, (*sides, channels)).astype("u1")
    return x_HWC if dtype == "u1" else x_HWC.astype(dtype) * 100


@pytest.mark.parametrize("channels", [2, 4, 5, 13, 1024])
@pytest.mark.parametrize("dtype", ["u1", "f4"])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_each_channel_is_that_of_a_grey_image(
    dtype: str, channels: int, interpolation: str
) -> None:
    x_HWC = noise(dtype, channels)
    crop = TrainingCrop(True, (0.25, 1.0), None, interpolation)
    for seed in range(4):
        train = train_image(x_HWC, seed, 24, channels=channels, crop=crop)
        evaluated = eval_image(x_HWC, 24, channels=channels, interpolation=interpolation)
        assert train.shape == evaluated.shape == (24, 24, channels)
        for channel in range(0, channels, max(1, channels // 7)):
            grey = np.ascontiguousarray(x_HWC[:, :, channel : channel + 1])
            for got, wanted in (
                (train, train_image(grey, seed, 24, channels=1, crop=crop)),
                (evaluated, eval_image(grey, 24, channels=1, interpolation=interpolation)),
            ):
                # Sums of floating-point numbers have another order with other strides.
                off = 0 if dtype == "u1" else 0.01
                np.testing.assert_allclose(got[:, :, [channel]], wanted, rtol=0, atol=off)


def test_small_images_are_moved_and_mirrored_alike_in_all_channels() -> None:
    x_NCHW = torch.from_numpy(np.moveaxis(np.stack([noise("u1", 6, (16, 16))] * 8), 3, 1).copy())
    seeds = torch.arange(8)
    moved = batch_crop_flip(x_NCHW, seeds, padding=2, flip=True)
    for channel in range(6):
        alone = batch_crop_flip(x_NCHW[:, [channel]], seeds, padding=2, flip=True)
        torch.testing.assert_close(moved[:, [channel]], alone, rtol=0, atol=0)
