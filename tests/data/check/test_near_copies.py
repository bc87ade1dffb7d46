"""Copies are found through what is usually done to images, and what is not a copy is not."""

import functools
import io
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from flambeau.data.check import near_copies as module
from flambeau.data.check.fine_detail import detail_agrees
from flambeau.data.check.image_facts import SIDE, STEPS, measure_images
from flambeau.data.check.near_copies import NearPair, near_pairs
from flambeau.data.check.small_pictures import (
    PARTS,
    aligned,
    part_spectra,
    whole_spectra,
)
from flambeau.data.sources.torchvision_sets import PixelSet

Change = Callable[[Image.Image], Image.Image]


def picture(seed: int, size: tuple[int, int] = (160, 120)) -> Image.Image:
    """Noise of several scales, as photographs have it."""
    draw = np.random.default_rng(seed)
    total = np.zeros((size[1], size[0], 3))
    for cells, weight in ((3, 1.0), (7, 0.6), (15, 0.4), (40, 0.2)):
        noise = Image.fromarray(draw.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
        total += weight * np.asarray(noise.resize(size, Image.Resampling.BICUBIC), np.float64)
    return Image.fromarray((total / 2.2).astype(np.uint8))


def part(left: float, top: float, share: float = 0.9) -> Change:
    def cut(image: Image.Image) -> Image.Image:
        width, height = image.width * share, image.height * share
        x, y = left * (image.width - width), top * (image.height - height)
        return image.crop((round(x), round(y), round(x + width), round(y + height)))

    return cut


def saved(quality: int) -> Change:
    def again(image: Image.Image) -> Image.Image:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=quality)
        return Image.open(file).convert("RGB")

    return again


def resized(share: float) -> Change:
    return lambda image: image.resize((round(image.width * share), round(image.height * share)))


def mirror(image: Image.Image) -> Image.Image:
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def looked(images: list[Image.Image]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    small = [
        np.asarray(i.resize((SIDE, SIDE), Image.Resampling.BILINEAR).convert("YCbCr"))
        for i in images
    ]
    parts = np.stack(small)
    return np.ascontiguousarray(parts[..., 0]), parts[..., 1:].mean((1, 2)).astype(np.float32)


def pairs_of(images: list[Image.Image]) -> list[NearPair]:
    return near_pairs(*looked(images))


CHANGES: dict[str, list[Change]] = {
    "saved at 30": [saved(30)],
    "a third": [resized(1 / 3)],
    "mirrored": [mirror],
    "the middle": [part(0.5, 0.5)],
    "top left": [part(0, 0)],
    "bottom right": [part(1, 1)],
    "anywhere": [part(0.3, 0.8, 0.93)],
    "mirrored part, half the size, saved at 50": [part(1, 0), mirror, resized(0.5), saved(50)],
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_a_changed_copy_is_found_among_others(changes: list[Change]) -> None:
    originals = [picture(seed) for seed in range(60)]
    copies = []
    for original in originals[:30]:
        copies.append(functools.reduce(lambda image, change: change(image), changes, original))
    images = [*originals, *copies]
    found = pairs_of(images)
    assert {frozenset(pair[:2]) for pair in found} == {frozenset((n, 60 + n)) for n in range(30)}
    assert {pair.is_mirrored for pair in found} == {mirror in changes}
    for pair in found:
        assert detail_agrees(images[pair.first], images[pair.second], pair)


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_another_fine_texture_is_no_copy(changes: list[Change]) -> None:
    """The pictures that are compared when small are the same in both."""
    for seed in range(5):
        coarse = picture(seed, (320, 240))
        one, other = (textured(coarse, k) for k in (seed, 100 + seed))
        copy = functools.reduce(lambda image, change: change(image), changes, one)
        (pair,) = pairs_of([coarse, functools.reduce(lambda i, change: change(i), changes, coarse)])
        images = [one, copy] if pair.first == 0 else [copy, one]
        assert detail_agrees(*images, pair)
        images = [other, copy] if pair.first == 0 else [copy, other]
        assert not detail_agrees(*images, pair)


def textured(image: Image.Image, seed: int) -> Image.Image:
    """With dots of four pixels, 60 levels up or down, as many up as down in each square of eight."""
    draw = np.random.default_rng(seed)
    rows, columns = image.height // 8, image.width // 8
    quarters = draw.permuted(np.tile([1, 1, -1, -1], (rows * columns, 1)), axis=1)
    dots = quarters.reshape(rows, columns, 2, 2).transpose(0, 2, 1, 3).reshape(2 * rows, -1)
    texture = np.kron(dots, np.full((4, 4), 60))[..., None]
    return Image.fromarray((np.asarray(image, int) + texture).clip(0, 255).astype(np.uint8))


def test_the_pair_says_what_was_done() -> None:
    original = picture(0)
    (pair,) = pairs_of([original, picture(1), part(0, 1)(original)])
    assert (pair.first, pair.second, pair.is_mirrored) == (0, 2, False)
    assert pair.cut == pytest.approx(0.19, abs=0.04)
    assert 0.96 < pair.likeness <= 1


@pytest.mark.parametrize(
    "change",
    [
        part(0, 0, 0.6),
        lambda image: image.transpose(Image.Transpose.ROTATE_180),
        lambda image: Image.fromarray(255 - np.asarray(image)),
        lambda image: Image.fromarray(np.roll(np.asarray(image), 1, 2)),
        lambda image: Image.fromarray(np.asarray(image) // 3),
    ],
    ids=["60 %", "rotated", "negative", "other colors", "darker"],
)
def test_another_picture_is_no_copy(change: Change) -> None:
    images = [picture(seed) for seed in range(20)]
    images = [image for image in images for image in (image, change(image))]
    assert pairs_of(images) == []


def test_what_hardly_varies_is_like_everything_and_is_left_out() -> None:
    row = np.linspace(100, 140, 160, dtype=np.float32)
    sky = Image.fromarray(np.tile(row, (120, 1)).astype(np.uint8)).convert("RGB")
    assert (
        pairs_of([sky, resized(0.5)(sky), Image.new("RGB", (50, 50)), Image.new("RGB", (50, 50))])
        == []
    )


def test_things_that_all_look_alike_are_no_copies() -> None:
    """Clothes on black: each is as near to many others; a copy is nearer."""
    draw = np.random.default_rng(0)
    thing = np.asarray(picture(5), np.float64)
    many = [
        Image.fromarray((thing + draw.normal(0, 14, thing.shape)).clip(0, 255).astype(np.uint8))
        for _ in range(30)
    ]
    noisy = [image.resize((SIDE, SIDE), Image.Resampling.NEAREST) for image in many]
    copy = saved(95)(noisy[7].resize((96, 96), Image.Resampling.BICUBIC))
    found = {frozenset(pair[:2]) for pair in pairs_of([*noisy, copy])}
    assert found == {frozenset((7, 30))}


def test_cells_find_what_one_cell_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    images = [picture(seed) for seed in range(120)]
    images += [mirror(part(1, 1)(image)) for image in images[:60]]
    in_one = pairs_of(images)
    monkeypatch.setattr(module, "_PER_CELL", 6)
    monkeypatch.setattr(module, "_BLOCK", 50)
    monkeypatch.setattr(module, "_ROWS", 7)
    in_many = pairs_of(images)
    assert len(in_one) == 60
    assert in_many == in_one


def test_few_images() -> None:
    assert pairs_of([picture(0)]) == []
    assert near_pairs(np.zeros((0, SIDE, SIDE), np.uint8), np.zeros((0, 2), np.float32)) == []
    assert len(pairs_of([picture(0), resized(0.5)(picture(0))])) == 1


def test_each_image_is_counted() -> None:
    done: list[int] = []
    small, chroma = looked([picture(0), picture(1), Image.new("RGB", (9, 9))])
    near_pairs(small, chroma, advance=done.append)
    assert sum(done) == 3


def test_the_spectrum_of_a_part_is_that_of_the_part_alone() -> None:
    """Against a picture that is cut, enlarged and transformed on its own."""
    smooth = picture(3).convert("L").resize((8, 8)).resize((512, 512), Image.Resampling.BICUBIC)
    cuts = PARTS[3]
    top, bottom, left, right = (cut / STEPS * 512 for cut in cuts)
    box = (round(left), round(top), round(512 - right), round(512 - bottom))
    small = [
        torch.from_numpy(np.array(image.resize((SIDE, SIDE), Image.Resampling.BOX), np.float32))
        for image in (smooth, smooth.crop(box), mirror(smooth.crop(box)))
    ]
    all_parts = part_spectra(small[0][None])[0]
    for number, alone in ((6, small[1]), (7, small[2])):
        expected = whole_spectra(alone[None], 8)[0]
        difference = (all_parts[number] - expected).norm() / expected.norm()
        assert difference < 0.01, number
    assert (all_parts[6] - all_parts[0]).norm() / all_parts[0].norm() > 0.03


def test_the_whole_is_a_cosine_transform() -> None:
    image = torch.rand(SIDE, SIDE, dtype=torch.float32)
    n = np.arange(SIDE)
    waves = np.sqrt(2 / SIDE) * np.cos(np.pi * np.outer(n, n + 0.5) / SIDE)
    waves[0] /= np.sqrt(2)
    expected = torch.from_numpy(waves @ image.numpy() @ waves.T)[:12, :12].float()
    torch.testing.assert_close(whole_spectra(image[None], 12)[0], expected, rtol=1e-4, atol=1e-4)


def test_alignment_finds_the_part() -> None:
    original = picture(9, (640, 640))
    cut = original.crop((40, 20, 616, 610))
    images = torch.from_numpy(looked([original, mirror(cut)])[0]).float()
    start = torch.tensor([[2, 2, 2, 2]])
    score, cuts, differences = aligned(images[:1], images[1:], start, torch.tensor([True]))
    assert score > 0.98
    wanted = torch.tensor([20, 30, 40, 24]) / 640 * STEPS
    assert (cuts[0] - wanted).abs().max() <= 1.5
    assert differences.max() < 2


def test_small_images_of_a_source() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 28, 28), dtype=np.uint8)
    facts = measure_images(PixelSet("set", pixels, [0] * 6, ["a"]))
    assert near_pairs(facts.small, facts.chroma) == []
    pixels[4] = pixels[1, :, ::-1]
    facts = measure_images(PixelSet("set", pixels, [0] * 6, ["a"]))
    ((first, second, is_mirrored, *_),) = near_pairs(facts.small, facts.chroma)
    assert ({first, second}, is_mirrored) == ({1, 4}, True)
