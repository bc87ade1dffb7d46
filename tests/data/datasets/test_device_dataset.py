"""Against ImageDataset, batch by batch: the same pixels, targets and bad images."""

import io
import multiprocessing
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

from flambeau.data.datasets import image_dataset as module
from flambeau.data.datasets.device_dataset import DeviceDataset, can_hold
from flambeau.data.datasets.image_dataset import ImageDataset
from flambeau.data.loading.batch_layout import BatchLayout
from flambeau.data.loading.loader import Loader
from flambeau.data.transforms.crops import TrainingCrop
from flambeau.errors import InputError
from flambeau.recipes.data.batch_crop_flip import batch_crop_flip
from flambeau.recipes.data.sample_order import sample_seeds
from flambeau.run.run import Run


class Pictures:
    """A source of PNG files in memory; labels count up modulo 3. An OSError among them is raised."""

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
        return f"pictures/{index}"

    def read(self, index):
        self.reads += 1
        if isinstance(self.images[index], OSError):
            raise self.images[index]
        return self.images[index]


def pictures(count=40, side=16, channels=3, bad=()):
    images = []
    for number in range(count):
        noise = np.random.default_rng(number).integers(0, 256, (side, side, channels), np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(noise.squeeze()).save(buffer, "PNG", compress_level=0)
        images.append(buffer.getvalue())
    for number in bad:
        images[number] = OSError("gone") if number % 2 else b"no image"
    return Pictures(images)


def both(source, *, train=True, flip=True, skip_bad=False, channels=3, device="cpu"):
    settings = {
        "image_size": 16, "channels": channels, "train": train, "crop": TrainingCrop(flip),
        "skip_bad": skip_bad,
    }  # fmt: skip
    return DeviceDataset(source, device=device, **settings), ImageDataset(source, **settings)


def same(ours, theirs):
    (x, targets), bad = ours
    (expected, expected_targets), expected_bad = theirs
    assert (x.dtype, targets.dtype) == (torch.uint8, torch.int64)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(x.cpu(), expected)
    assert torch.equal(targets.cpu(), expected_targets)
    assert list(bad) == list(expected_bad)


def batches(length, epoch=0):
    order = torch.randperm(length, generator=torch.Generator().manual_seed(epoch))
    for indices in [*order.split(7), torch.empty(0, dtype=torch.int64)]:
        yield indices, sample_seeds(indices, seed=5, epoch=epoch)


@pytest.mark.parametrize("chunk", [4096, 6])
@pytest.mark.parametrize("bad", [(), (3, 4, 5), (0, 39), tuple(range(1, 40))])
@pytest.mark.parametrize("train", [True, False])
def test_batches_are_those_of_an_image_dataset(train, bad, chunk, monkeypatch):
    monkeypatch.setattr(module, "_DECODED_AT_ONCE", chunk)
    held, reference = both(pictures(bad=bad), train=train, skip_bad=True)
    assert len(held) == len(reference)
    assert held.describe(7) == reference.describe(7)
    for epoch in (0, 1):
        for indices, seeds in batches(40, epoch):
            same(held.batch(indices, seeds), reference.batch(indices, seeds))


@pytest.mark.parametrize(("channels", "flip"), [(1, True), (3, False), (1, False)])
def test_grey_and_unmirrored_ones_too(channels, flip):
    held, reference = both(pictures(channels=channels), channels=channels, flip=flip)
    for indices, seeds in batches(40):
        same(held.batch(indices, seeds), reference.batch(indices, seeds))


def test_each_image_is_read_once_and_then_never_again():
    source = pictures(count=100)
    held = DeviceDataset(source, image_size=16, channels=3, train=True, device="cpu")
    after = source.reads
    assert after <= 100 + 2 * 64  # and what two probes look at
    for indices, seeds in batches(100):
        held.batch(indices, seeds)
    assert source.reads == after


def test_cutout_is_the_recipes():
    source = pictures()
    plain, _ = both(source)
    held = DeviceDataset(source, image_size=16, channels=3, train=True, device="cpu", cutout=6)
    indices = torch.arange(40)
    seeds = sample_seeds(indices, seed=5, epoch=0)
    (cut, _), _ = held.batch(indices, seeds)
    raw, _ = both(source, train=False)
    (x, _), _ = raw.batch(indices, seeds)
    assert torch.equal(cut, batch_crop_flip(x, seeds, padding=2, cutout=6))
    (whole, _), _ = plain.batch(indices, seeds)
    assert 0.05 < (cut != whole).float().mean() < 0.2


def test_augmenting_changes_nothing_that_is_held():
    held, _ = both(pictures())
    indices = torch.arange(40)
    first = held.batch(indices, sample_seeds(indices, seed=0, epoch=0))
    first[0][0].zero_()
    first[0][1].zero_()
    again = held.batch(indices, sample_seeds(indices, seed=0, epoch=0))
    assert again[0][0].any()
    assert again[0][1].any()


def child(held, indices, seeds, answer):
    answer.put(pickle.dumps(held.batch(indices, seeds)))


def test_after_a_fork_a_pickle_and_in_threads_the_batches_are_the_same():
    held, reference = both(pictures(bad=(3,)), skip_bad=True)
    indices = torch.arange(40)
    seeds = sample_seeds(indices, seed=1, epoch=2)
    expected = reference.batch(indices, seeds)
    same(pickle.loads(pickle.dumps(held)).batch(indices, seeds), expected)
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda _: held.batch(indices, seeds), range(12)):
            same(result, expected)
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    process = context.Process(target=child, args=(held, indices, seeds, answer))
    process.start()
    same(pickle.loads(answer.get()), expected)
    process.join()


def test_the_loader_gives_the_same_stream_from_any_point():
    held, reference = both(pictures(bad=(3,)), skip_bad=True)
    streams = [
        Loader(data, BatchLayout(8), seed=4).stream(epoch=1, position=16, epochs=2)
        for data in (held, reference)
    ]
    number = 0
    for ours, theirs in zip(*streams, strict=True):
        same((ours.data, ours.bad), (theirs.data, theirs.bad))
        assert (ours.position, ours.size) == (theirs.position, theirs.size)
        number += 1
    assert number == 3 + 5


def test_a_run_learns_the_same_weights(tmp_path):
    weights = []
    for name, data in zip(("held", "reference"), both(pictures()), strict=True):
        torch.manual_seed(0)
        model = torch.nn.Linear(16 * 16 * 3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run = Run(tmp_path / name, model, optimizer, data, duration="2ep", batch_size=8, bar=False)
        for _ in run.epochs():
            for x, targets in run.batches():
                logits = model(x.float().div(255).flatten(1))
                run.step(torch.nn.functional.cross_entropy(logits, targets))
        weights.append(model.weight.detach())
    assert torch.equal(*weights)


def test_a_bad_image_is_refused_unless_allowed():
    with pytest.raises(InputError, match=r"pictures/3: gone\n.*--skip-bad-images"):
        both(pictures(bad=(3,)))


def test_all_images_bad_behind_good_headers_are_refused():
    source = pictures(count=3)
    source.images = [data[:200] for data in source.images]
    with pytest.raises(InputError, match="pictures/0 and all 2 other images are bad"):
        DeviceDataset(source, image_size=16, channels=3, train=True, device="cpu", skip_bad=True)
    held = DeviceDataset(
        source, image_size=16, channels=3, train=False, device="cpu", skip_bad=True
    )
    (x, targets), bad = held.batch(torch.arange(3), torch.arange(3))
    assert (x.shape, targets.shape, list(bad)) == ((0, 3, 16, 16), (0,), [0, 1, 2])


@pytest.mark.parametrize(
    ("source", "size", "limit_bytes"),
    [
        (pictures(), 17, 1 << 30),  # another size
        (pictures(), 16, 40 * 16 * 16 * 3 - 1),  # one byte too many
        (pictures(count=2, side=65), 65, 1 << 30),  # not small
        (Pictures(pictures(3).images + pictures(1, side=8).images), 16, 1 << 30),  # two sizes
    ],
)
def test_what_cannot_be_held_is_refused(source, size, limit_bytes):
    assert not can_hold(source, image_size=size, channels=3, limit_bytes=limit_bytes)
    with pytest.raises(
        InputError, match=f"images of {size} x {size} x 3 cannot be held on cpu: .*"
    ):
        DeviceDataset(
            source, image_size=size, channels=3, train=True, device="cpu", limit_bytes=limit_bytes
        )


def test_what_fits_to_the_byte_is_held():
    assert can_hold(pictures(), image_size=16, channels=3, limit_bytes=40 * 16 * 16 * 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("train", [True, False])
def test_on_cuda_the_same_batches_without_a_wait(train):
    held, reference = both(pictures(), train=train, device="cuda")
    every = list(batches(40))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        from_host = [held.batch(indices, seeds) for indices, seeds in every]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    on_device = [(indices.cuda(), seeds.cuda()) for indices, seeds in every]
    torch.cuda.set_sync_debug_mode("error")
    try:
        from_device = [held.batch(indices, seeds) for indices, seeds in on_device]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for ours, also_ours, (indices, seeds) in zip(from_host, from_device, every, strict=True):
        assert ours[0][0].is_cuda
        same(ours, reference.batch(indices, seeds))
        same(also_ours, reference.batch(indices, seeds))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_bad_images_are_replaced():
    held, reference = both(pictures(bad=(3, 4)), skip_bad=True, device="cuda")
    for indices, seeds in batches(40):
        same(held.batch(indices, seeds), reference.batch(indices, seeds))
        same(held.batch(indices.cuda(), seeds.cuda()), reference.batch(indices, seeds))
