import numpy as np
import pytest
import torch
from PIL import Image

from flambeau.recipes.training.progressive_resizing import image_side, resize_images


def test_small_then_larger_then_full() -> None:
    sides = [image_side(step, 1000, start=112, end=224) for step in range(1000)]
    assert sides[0] == 224  # so that what does not fit shows at once
    assert set(sides[1:301]) == {112}
    assert sides[1:] == sorted(sides[1:])
    assert set(sides) == {112, 128, 160, 192, 224}
    assert set(sides[700:]) == {224}
    # The mean of the rounded sides is that of the line between them.
    assert np.mean(sides[300:700]) == pytest.approx(168, abs=2)


@pytest.mark.parametrize("total", [1, 2, 3, 7, 1001])
def test_short_trainings_end_at_full_size(total: int) -> None:
    sides = [image_side(step, total, start=64, end=128) for step in range(total)]
    assert sides[0] == 128
    assert sides[1:] == sorted(sides[1:])
    assert all(64 <= side <= 128 for side in sides)
    assert total < 5 or sides[-1] == 128


def test_phases_and_multiples_are_the_callers() -> None:
    def sides(**more: float) -> list[int]:
        return [image_side(step, 8, start=10, end=20, **more) for step in range(1, 8)]

    assert sides(multiple=1, small_until=0, full_from=1) == [11, 12, 14, 15, 16, 18, 19]
    assert sides(small_until=0.25, full_from=0.25) == [10] + 6 * [20]  # the last share counts first
    assert sides(small_until=1, full_from=1) == 7 * [10]
    assert image_side(5, 8, start=20, end=20) == 20


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"step": -1}, "step must be at least 0"),
        ({"total_steps": 0}, "total_steps 1, got 0 and 0"),
        ({"start": 0}, "1 <= start <= end, got 0 and 8"),
        ({"start": 9}, "1 <= start <= end, got 9 and 8"),
        ({"small_until": 0.9}, "got 0.9 and 0.7"),
        ({"full_from": 1.1}, "got 0.3 and 1.1"),
        ({"multiple": 0}, "multiple must be at least 1, got 0"),
    ],
)
def test_numbers_out_of_range(given: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        image_side(**{"step": 0, "total_steps": 2, "start": 4, "end": 8, **given})  # type: ignore[arg-type]


def test_resizing_is_that_of_pillow_and_keeps_the_format() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (48, 48, 3), dtype=np.uint8)
    expected = np.asarray(Image.fromarray(pixels).resize((20, 20), Image.Resampling.BILINEAR))
    x_NCHW = (
        torch.tensor(np.stack([pixels, pixels])).permute(0, 3, 1, 2).float()
    )  # in channels_last
    small = resize_images(x_NCHW, 20)
    np.testing.assert_allclose(small[0].permute(1, 2, 0), expected, atol=1)
    assert small.is_contiguous(memory_format=torch.channels_last)
    assert resize_images(x_NCHW, 48) is x_NCHW
    assert resize_images(x_NCHW.double(), 20).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_resized_in_float32(dtype: torch.dtype) -> None:
    x_NCHW = torch.randn(2, 3, 16, 16).to(dtype)
    small = resize_images(x_NCHW, 8)
    assert small.dtype == dtype
    assert torch.equal(small, resize_images(x_NCHW.float(), 8).to(dtype))


def test_each_image_is_resized_as_if_alone() -> None:
    x_NCHW = torch.randn(5, 3, 64, 64).to(memory_format=torch.channels_last)
    together = resize_images(x_NCHW, 32)
    assert all(
        torch.equal(together[k : k + 1], resize_images(x_NCHW[k : k + 1], 32)) for k in range(5)
    )


@pytest.mark.parametrize(
    ("images", "side", "error", "message"),
    [
        (torch.zeros(1, 3, 8, 9), 4, ValueError, r"\(N, C, S, S\), got \(1, 3, 8, 9\)"),
        (torch.zeros(3, 8, 8), 4, ValueError, "got"),
        (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), 4, TypeError, "normalize them first"),
        (torch.zeros(1, 3, 8, 8), 0, ValueError, "side must be at least 1, got 0"),
    ],
)
def test_wrong_images(
    images: torch.Tensor, side: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        resize_images(images, side)
