"""Batches against decode and augment one by one; bad images in every mode; statistics against NumPy."""

import errno
import io
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flambeau.data.datasets import image_dataset as module
from flambeau.data.datasets.image_dataset import ImageDataset
from flambeau.data.datasets.image_statistics import Probe, mean_std, probe
from flambeau.data.sources.folder import FolderSource
from flambeau.data.transforms.auto_augment import Augmentation
from flambeau.data.transforms.crops import TrainingCrop, eval_image, train_image
from flambeau.errors import InputError
from flambeau.images.decode import decode
from flambeau.recipes.data.batch_crop_flip import batch_crop_flip
from flambeau.recipes.data.sample_order import sample_seeds


class Memory:
    """A source of encoded images; labels count up modulo 3. An OSError in place of bytes is raised."""

    classes = ("a", "b", "c")
    fingerprint = "none"

    def __init__(self, images):
        self.images = images
        self.labels = torch.arange(len(images)) % 3
        self.names = list(map(str, range(len(images))))
        self.reads = 0

    def __len__(self):
        return len(self.images)

    def describe(self, index):
        return f"memory/{index}"

    def read(self, index):
        self.reads += 1
        if isinstance(self.images[index], OSError):
            raise self.images[index]
        return self.images[index]


def encoded(height, width, number, kind="PNG", channels=3):
    noise = np.random.default_rng(number).integers(0, 256, (height, width, channels), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise.squeeze()).save(buffer, kind)
    return buffer.getvalue()


def small(count=12, channels=3):
    return Memory([encoded(16, 16, i, channels=channels) for i in range(count)])


def photos(count=12):
    return Memory([encoded(30 + i, 45 - i, i, "JPEG" if i % 2 else "PNG") for i in range(count)])


def seeds_of(indices, epoch=0):
    return sample_seeds(torch.as_tensor(indices), seed=0, epoch=epoch)


def batch(dataset, indices, epoch=0):
    indices = torch.tensor(indices, dtype=torch.int64)
    return dataset.batch(indices, seeds_of(indices, epoch))


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0)


MODES = ["photos", "small, cached", "small, not cached"]


@pytest.fixture(params=MODES)
def mode(request, monkeypatch):
    if request.param == "small, not cached":
        monkeypatch.setattr(module, "CACHE_BYTES", 0)
    return request.param


def make(mode, images=None, **settings):
    source = photos() if mode == "photos" else small()
    for index, image in (images or {}).items():
        source.images[index] = image
    return ImageDataset(source, **{"image_size": 16, "channels": 3, "train": True} | settings)


# --- good images


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("train", [True, False])
def test_a_batch_has_the_announced_form(mode, train, channels):
    dataset = make(mode, train=train, channels=channels)
    assert len(dataset) == 12
    assert dataset.describe(4) == "memory/4"
    assert dataset.small == (mode != "photos")
    (images, targets), bad = batch(dataset, [7, 0, 4])
    assert images.shape == (3, channels, 16, 16)
    assert images.dtype == torch.uint8
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert targets.dtype == torch.int64
    assert targets.tolist() == [1, 0, 1]
    assert list(bad) == []
    (images, targets), bad = batch(dataset, [])
    assert images.shape == (0, channels, 16, 16)
    assert (len(targets), len(bad)) == (0, 0)


def test_evaluation_is_decode_and_centre_crop(mode):
    dataset = make(mode, train=False)
    (images, _), _ = batch(dataset, [5, 2])
    for image, index in zip(images, [5, 2], strict=True):
        data = dataset.source.images[index]
        expected = eval_image(data, 16, channels=3)
        same(image.permute(1, 2, 0), torch.from_numpy(expected))
    same(batch(dataset, [5, 2], epoch=1)[0][0], images)


def test_training_photos_are_random_crops():
    dataset = make("photos")
    (images, _), _ = batch(dataset, [5, 2])
    for image, index in zip(images, [5, 2], strict=True):
        data = dataset.source.images[index]
        expected = train_image(data, int(seeds_of(index)), 16, channels=3)
        same(image.permute(1, 2, 0), torch.from_numpy(expected))


@pytest.mark.parametrize("mode", MODES[1:], indirect=True)
def test_small_training_images_are_shifted_and_mirrored(mode):
    dataset = make(mode)
    (images, _), _ = batch(dataset, [5, 2])
    plain = torch.stack(
        [torch.from_numpy(decode(dataset.source.images[i], channels=3)) for i in (5, 2)]
    ).permute(0, 3, 1, 2)
    same(images, batch_crop_flip(plain, seeds_of([5, 2]), padding=2))
    assert not torch.equal(images, batch(dataset, [5, 2], epoch=1)[0][0])


def test_pixels_depend_on_index_and_seed_alone(mode):
    dataset, again = make(mode), make(mode)
    (whole, _), _ = batch(dataset, list(range(12)), epoch=3)
    (backwards, _), _ = batch(again, list(range(11, -1, -1)), epoch=3)
    same(backwards.flip(0), whole)
    for index in (0, 5, 11):
        (alone, _), _ = batch(dataset, [index], epoch=3)
        same(alone[0], whole[index])
    (other, _), _ = batch(dataset, list(range(12)), epoch=4)
    assert sum(torch.equal(a, b) for a, b in zip(whole, other, strict=True)) < 6


def test_the_global_generators_are_left_alone(mode):
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    batch(make(mode), [1, 2, 3])
    same(torch.random.get_rng_state(), before[0])
    np.testing.assert_array_equal(np.random.get_state()[1], before[1])


def test_nothing_is_mirrored_if_asked(mode):
    one_sided = np.zeros((16, 16, 3), np.uint8)
    one_sided[:, :8] = 255  # left is bright in every crop that is not mirrored
    buffer = io.BytesIO()
    Image.fromarray(one_sided).save(buffer, "PNG")
    images = dict.fromkeys(range(12), buffer.getvalue())
    for flip in (True, False):
        dataset = make(
            mode, images, crop=TrainingCrop(flip), image_size=16 if "small" in mode else 14
        )
        assert dataset.small == ("small" in mode)
        (images_NCHW, _), _ = batch(dataset, list(range(12)))
        left, right = images_NCHW.float().chunk(2, dim=3)
        mirrored = left.mean(dim=(1, 2, 3)) < right.mean(dim=(1, 2, 3))
        assert mirrored.any() == flip


def test_alternate_flips_mirror_by_the_sign_of_the_seed(mode):
    one_sided = np.zeros((16, 16, 3), np.uint8)
    one_sided[:, :8] = 255
    buffer = io.BytesIO()
    Image.fromarray(one_sided).save(buffer, "PNG")
    dataset = make(
        mode,
        dict.fromkeys(range(12), buffer.getvalue()),
        crop=TrainingCrop("alternate", (1.0, 1.0)),
        image_size=16 if "small" in mode else 14,
    )
    assert dataset.alternates
    seeds = torch.arange(12) * 7**20 * torch.tensor([1, -1] * 6) + torch.tensor([0, -1] * 6)
    (images_NCHW, _), _ = dataset.batch(torch.arange(12), seeds)
    left, right = images_NCHW.float().chunk(2, dim=3)
    mirrored = left.mean(dim=(1, 2, 3)) < right.mean(dim=(1, 2, 3))
    assert mirrored.tolist() == [False, True] * 6


def test_the_cache_reads_each_image_once(monkeypatch):
    dataset = make("small, cached")
    reads = dataset.source.reads
    batch(dataset, [1, 2, 3])
    assert dataset.source.reads == reads
    monkeypatch.setattr(module, "CACHE_BYTES", 12 * 16 * 16 * 3 - 1)
    dataset = make("small, cached")
    reads = dataset.source.reads
    batch(dataset, [1, 2, 3])
    assert dataset.source.reads == reads + 3


def test_images_that_are_read_once_are_not_kept():
    source = small(12)
    dataset = ImageDataset(source, image_size=16, channels=3, train=False, keep=False)
    assert source.reads == 0
    images = batch(dataset, [1, 2, 3])
    assert source.reads == 3
    same(images, batch(ImageDataset(source, image_size=16, channels=3, train=False), [1, 2, 3]))


@pytest.mark.parametrize("padding", [None, 0, 5])
def test_the_odd_one_among_small_images_is_made_to_fit(monkeypatch, padding):
    source = small(100)
    source.images[2] = encoded(20, 24, 0)  # the probe looks at 64 of 100, not at this one
    for limit in (module.CACHE_BYTES, 0):
        monkeypatch.setattr(module, "CACHE_BYTES", limit)
        for train in (True, False):
            dataset = ImageDataset(
                source,
                image_size=16,
                channels=3,
                train=train,
                crop=TrainingCrop(flip=False, padding=padding),
            )
            assert dataset.small
            (images, _), _ = batch(dataset, [2])
            expected = torch.from_numpy(eval_image(decode(source.images[2], channels=3), 16))
            expected = expected.permute(2, 0, 1)[None]
            if train:
                moved = 2 if padding is None else padding
                expected = batch_crop_flip(expected, seeds_of([2]), padding=moved, flip=False)
            same(images, expected)


def test_images_above_64_or_of_another_size_are_not_small():
    large = Memory([encoded(65, 65, i) for i in range(4)])
    assert not ImageDataset(large, image_size=65, channels=3, train=True).small
    assert large.reads == 0
    assert not ImageDataset(small(), image_size=32, channels=3, train=True).small


def test_a_dataset_survives_pickle(mode):
    dataset = make(mode)
    copy = pickle.loads(pickle.dumps(dataset))
    same(batch(copy, [3, 1])[0], batch(dataset, [3, 1])[0])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # torch has threads of its own
def test_a_dataset_survives_fork(mode):
    dataset = make(mode)
    (expected, _), _ = batch(dataset, [3, 1])
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if torch.equal(batch(dataset, [3, 1])[0][0], expected) else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


# --- threads


def files(count=40):
    """JPEGs large enough to be scaled and cut, and PNGs."""
    return Memory([encoded(90 + i, 140 - i, i, "JPEG" if i % 3 else "PNG") for i in range(count)])


@pytest.mark.parametrize("train", [True, False])
def test_the_number_of_threads_changes_nothing(train):
    indices = list(torch.randperm(40, generator=torch.Generator().manual_seed(0)))
    source = files()
    (expected, targets), _ = batch(
        ImageDataset(source, image_size=24, channels=3, train=train, threads=1), indices
    )
    for threads in (2, 3, 8, 64):
        dataset = ImageDataset(source, image_size=24, channels=3, train=train, threads=threads)
        for _ in range(2):
            (images, found), _ = batch(dataset, indices)
            same(images, expected)
            same(found, targets)
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        ImageDataset(source, image_size=24, channels=3, train=train, threads=0)


def test_of_several_bad_images_the_first_of_the_batch_is_named():
    source = files()
    for index in (31, 7, 20):
        source.images[index] = b"no image"
    dataset = ImageDataset(source, image_size=24, channels=3, train=True, threads=4)
    for _ in range(20):
        with pytest.raises(InputError, match="memory/20: not a JPEG"):
            batch(dataset, [1, 2, 20, 3, 7, 31])


def test_several_threads_may_ask_for_batches():
    dataset = ImageDataset(files(), image_size=24, channels=3, train=True, threads=3)
    parts = [list(range(k, 40, 4)) for k in range(4)]
    expected = [batch(dataset, part)[0][0] for part in parts]
    with ThreadPoolExecutor(4) as executor:
        for _ in range(5):
            found = executor.map(lambda part: batch(dataset, part)[0][0], parts)
            for images, whole in zip(found, expected, strict=True):
                same(images, whole)


def test_pixels_as_a_source_stores_them_are_cropped_as_encoded_ones():
    source = files()
    raw = Memory([decode(data, channels=3) for data in source.images])
    for image in raw.images:
        image.flags.writeable = False
    for settings in ({"train": True}, {"train": False}):
        # At 80 none of them is twice as large as the crop, so nothing is scaled as it is decoded.
        settings |= {"image_size": 80, "channels": 3, "threads": 2}
        expected = batch(ImageDataset(source, **settings), list(range(40)))[0]
        same(batch(ImageDataset(raw, **settings), list(range(40)))[0], expected)


def test_the_share_of_the_image_that_a_crop_keeps_can_be_set():
    source = files()
    means = {}
    for low, high in ((1.0, 1.0), (0.01, 0.02)):
        dataset = ImageDataset(
            source,
            image_size=24,
            channels=3,
            train=True,
            crop=TrainingCrop(scale=(low, high)),
            threads=1,
        )
        (images, _), _ = batch(dataset, list(range(40)))
        means[low] = images.float().mean((2, 3)).std()
    assert means[0.01] > 2 * means[1.0]  # of noise: small parts have means far from each other


# --- bad images


BAD = {4: b"no image", 5: encoded(16, 16, 5)[:60], 11: FileNotFoundError(2, "No such file")}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", ["ESTALE", "ETIMEDOUT", "EMFILE"])
def test_an_image_is_not_left_out_where_its_disk_fails(mode, train, name):
    number = getattr(errno, name)
    failing = {11: OSError(number, os.strerror(number))}
    with pytest.raises(InputError, match=f"memory/11: {os.strerror(number).lower()}; .* again"):
        batch(make(mode, failing, train=train, skip_bad=True), [10, 11])


@pytest.mark.parametrize("train", [True, False])
def test_a_bad_image_stops_the_run_with_its_name(mode, train):
    with pytest.raises(InputError) as caught:
        batch(make(mode, {4: b"no image"}, train=train), [3, 4])
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("memory/4: not a JPEG, PNG, WebP")
    assert lines[1:] == ["Repair or remove it, or allow N bad images with --skip-bad-images N"]
    with pytest.raises(InputError, match="memory/11: no such file"):
        batch(make(mode, {11: BAD[11]}, train=train), [11])


def test_bad_training_images_are_replaced_by_the_next_readable_one(mode):
    dataset = make(mode, BAD, skip_bad=True)
    good = make(mode)
    (images, targets), bad = batch(dataset, [11, 3, 4, 0, 5])
    assert list(bad) == [11, 4, 5]
    used = torch.tensor([0, 3, 6, 0, 6])
    (expected, _), _ = good.batch(used, seeds_of([11, 3, 4, 0, 5]))  # the seeds of the bad ones
    same(images, expected)
    assert targets.tolist() == [0, 0, 0, 0, 0]
    (alone, _), bad = batch(dataset, [4])
    same(alone[0], images[2])
    assert list(bad) == [4]
    assert list(batch(dataset, [1, 2])[1]) == []


def test_bad_evaluation_images_are_left_out(mode):
    dataset = make(mode, BAD, train=False, skip_bad=True)
    (images, targets), bad = batch(dataset, [11, 3, 4, 10, 5])
    assert list(bad) == [11, 4, 5]
    (expected, _), _ = batch(make(mode, train=False), [3, 10])
    same(images, expected)
    assert targets.tolist() == [0, 1]
    (images, targets), bad = batch(dataset, [4, 5])
    assert images.shape == (0, 3, 16, 16)
    assert (targets.shape, list(bad)) == ((0,), [4, 5])


def test_no_readable_image_at_all(mode):
    truncated = encoded(16, 16, 0)[:-30]  # the probe sees a good header
    images = dict.fromkeys(range(12), truncated)
    with pytest.raises(InputError, match="memory/0 and all 11 other images are bad"):
        batch(make(mode, images, skip_bad=True), [2])
    (images_NCHW, _), bad = batch(make(mode, images, train=False, skip_bad=True), [2])
    assert (len(images_NCHW), list(bad)) == (0, [2])


def test_an_unreadable_file_of_a_folder(tmp_path):
    for name in ("a/1.png", "b/1.png"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(encoded(40, 40, 0))
    dataset = ImageDataset(FolderSource(tmp_path), image_size=32, channels=3, train=False)
    (tmp_path / "a" / "1.png").write_bytes(b"")
    with pytest.raises(InputError, match=f"{tmp_path}/a/1.png: the file is empty\n"):
        batch(dataset, [0])
    (tmp_path / "a" / "1.png").unlink()
    with pytest.raises(InputError, match=f"{tmp_path}/a/1.png: no such file or directory\n"):
        batch(dataset, [0])


# --- what the data are like


def test_a_probe_tells_size_and_colour():
    assert probe(small(channels=1)) == Probe(16, (16, 16), grey=True)
    assert probe(small()) == Probe(16, (16, 16), grey=False)
    mixed = photos()
    shorter = sorted(min(30 + i, 45 - i) for i in range(12))
    assert probe(mixed) == Probe((shorter[5] + shorter[6]) // 2, None, grey=False)


def test_a_probe_looks_at_evenly_spaced_images_and_passes_over_bad_ones():
    source = small(1000)
    probe(source, limit=10)
    assert source.reads == 10
    source.images[100] = encoded(20, 20, 0)  # number 1 of the ten
    assert probe(source, limit=10).same_size is None
    source.images[100] = b"bad"
    assert probe(source, limit=10).same_size == (16, 16)
    source.images[100] = OSError(5, "Input/output error")
    assert probe(source, limit=10).same_size == (16, 16)


@pytest.mark.parametrize("look", [probe, lambda source: mean_std(source, channels=3)])
def test_nothing_to_look_at(look):
    with pytest.raises(InputError, match=r"no image can be read.*memory/0"):
        look(Memory([b"bad", b"worse"]))


@pytest.mark.parametrize("channels", [1, 3])
def test_mean_and_deviation_of_each_channel(channels):
    source = small(50)
    pixels = np.stack([decode(data, channels=channels) for data in source.images]) / 255
    mean, std = mean_std(source, channels=channels)
    np.testing.assert_allclose(mean, pixels.mean((0, 1, 2)), atol=6e-5, rtol=0)
    np.testing.assert_allclose(std, pixels.std((0, 1, 2)), atol=6e-5, rtol=0)
    assert [round(x, 4) for x in (*mean, *std)] == [*mean, *std]
    source.images[0] = b"bad"
    few = mean_std(source, channels=channels, limit=5)
    pixels = np.stack([decode(source.images[i], channels=channels) for i in (10, 20, 30, 40)]) / 255
    np.testing.assert_allclose(few[0], pixels.mean((0, 1, 2)), atol=6e-5, rtol=0)


def test_each_image_counts_the_same_for_the_mean():
    black, white = np.zeros((4, 4), np.uint8), np.full((40, 40), 255, np.uint8)
    images = []
    for pixels in (black, white):
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        images.append(buffer.getvalue())
    assert mean_std(Memory(images), channels=1) == ([0.5], [0.5])
    assert mean_std(Memory(images[:1]), channels=1) == ([0.0], [0.0039])  # may be divided by


@pytest.mark.parametrize("size", [24, 40])  # small images, cropped all at once, and others
def test_an_augmentation_sees_each_training_image_with_its_seed(
    make_images: Callable[..., Path], tmp_path: Path, size: int
) -> None:
    """After crop and flip; the pixels do not depend on the batch or on threads."""
    source = FolderSource(make_images(tmp_path / "data", size=24))
    settings: dict[str, Any] = {"image_size": size, "channels": 1}
    augmentation = Augmentation("randaugment", 0.4)
    indices = torch.tensor([3, 9, 0, 12, 5])
    seeds = sample_seeds(indices, seed=0, epoch=2)
    (plain, _), _ = ImageDataset(source, train=True, **settings).batch(indices, seeds)
    expected = np.stack(
        [
            augmentation(x.permute(1, 2, 0).numpy(), s)
            for x, s in zip(plain, seeds.tolist(), strict=True)
        ]
    )
    for threads in (1, 3):
        dataset = ImageDataset(
            source, train=True, augmentation=augmentation, threads=threads, **settings
        )
        (images, _), _ = dataset.batch(indices, seeds)
        assert (images.permute(0, 2, 3, 1).numpy() == expected).all()
        (images, _), _ = dataset.batch(indices[3:], seeds[3:])
        assert (images.permute(0, 2, 3, 1).numpy() == expected[3:]).all()
    assert not torch.equal(plain, torch.from_numpy(expected).permute(0, 3, 1, 2))
    evaluated = ImageDataset(source, train=False, augmentation=augmentation, **settings)
    bare = ImageDataset(source, train=False, **settings)
    torch.testing.assert_close(
        evaluated.batch(indices, seeds)[0][0], bare.batch(indices, seeds)[0][0], rtol=0, atol=0
    )
