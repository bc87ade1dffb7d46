"""`fast(loader)`: what comes out is what came out of torch's DataLoader, only made in another way."""

import gc
import io
import math
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import timm.data
import torch
from PIL import Image
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
)
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.models import ResNet50_Weights
from torchvision.transforms import v2

from flambeau.data.drop_in import interception
from flambeau.data.fast import fast
from flambeau.data.transforms.resizing import resized_part
from flambeau.errors import InputError
from flambeau.images.decode import Picture
from flambeau.images.native import kernel as native

# On one CPU torch warns of two workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
NUMBERS = [v1.ToTensor(), v1.Normalize(MEAN, STD)]
V2_NUMBERS = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
TRAINING = v1.Compose([v1.RandomResizedCrop(24), v1.RandomHorizontalFlip(), *NUMBERS])


def picture(height: int, width: int) -> Image.Image:
    """Red grows to the right, green downwards, from 0 to 255; blue is smooth noise."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, :, 0] = np.linspace(0, 255, width).round()
    pixels[:, :, 1] = np.linspace(0, 255, height).round()[:, None]
    noise = np.random.default_rng(height * width).integers(0, 256, (5, 5), dtype=np.uint8)
    pixels[:, :, 2] = np.asarray(Image.fromarray(noise).resize((width, height), Image.BICUBIC))
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 files of every kind that ImageFolder reads in two classes."""
    root = tmp_path_factory.mktemp("fast")
    lying = Image.Exif()
    lying[0x0112] = 6
    kinds: list[Callable[[Image.Image, Path], None]] = [
        lambda image, path: image.save(path.with_suffix(".jpg"), quality=92),
        lambda image, path: image.save(path.with_suffix(".png")),
        lambda image, path: image.save(path.with_suffix(".jpg"), progressive=True, subsampling=0),
        lambda image, path: image.convert("L").save(path.with_suffix(".jpeg"), quality=95),
        lambda image, path: image.convert("CMYK").save(path.with_suffix(".jpg")),
        lambda image, path: image.convert("RGBA").save(path.with_suffix(".webp"), lossless=True),
        lambda image, path: image.quantize(40).save(path.with_suffix(".png")),
        lambda image, path: image.save(path.with_suffix(".jpg"), exif=lying),
    ]
    for number in range(24):
        place = root / "ab"[number % 2] / f"{number:02}"
        place.parent.mkdir(exist_ok=True)
        kinds[number % len(kinds)](picture(40 + 3 * number, 90 - 2 * number), place)
    return root


def batches_of(loader: Any, *, seed: int = 0) -> list[Any]:
    torch.manual_seed(seed)
    return list(loader)


EVALUATIONS = {
    "v1": v1.Compose([v1.Resize(40), v1.CenterCrop(32), *NUMBERS]),
    "v1 bicubic": v1.Compose(
        [v1.Resize(40, v1.InterpolationMode.BICUBIC), v1.CenterCrop(32), *NUMBERS]
    ),
    "v2 bicubic": v2.Compose(
        [v2.ToImage(), v2.Resize(40, v2.InterpolationMode.BICUBIC), v2.CenterCrop(32), *V2_NUMBERS]
    ),
    "torchvision's of weights": ResNet50_Weights.IMAGENET1K_V2.transforms(
        crop_size=32, resize_size=40
    ),
    "v1 both sides": v1.Compose([v1.Resize((30, 44)), v1.ToTensor()]),
    "v1 levels": v1.Compose([v1.Resize(40), v1.CenterCrop(50), v1.PILToTensor()]),
    "v1 without a size": v1.Compose([v1.CenterCrop(36), v1.ToTensor()]),
    "v2": v2.Compose([v2.ToImage(), v2.Resize(40), v2.CenterCrop(32), *V2_NUMBERS]),
    "v2 of PIL": v2.Compose([v2.Resize(40), v2.CenterCrop(32), v2.ToImage(), *V2_NUMBERS]),
    "timm": timm.data.create_transform(32),
    "nested": v1.Compose([v1.Compose([v1.Resize(40), v1.CenterCrop(32)]), v1.ToTensor()]),
}


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize("name", EVALUATIONS)
def test_evaluations_are_the_same_to_the_bit(
    folder: Path, name: str, has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernel:
        monkeypatch.setattr(native, "kernel", lambda: None)
    dataset = ImageFolder(folder, EVALUATIONS[name])
    loader = DataLoader(dataset, batch_size=5)
    quick = fast(loader)
    assert quick.takeover.is_complete, quick.report()
    assert len(quick) == len(loader)
    for (images, labels), (expected, numbers) in zip(quick, loader, strict=True):
        assert type(images) is type(expected)
        assert (images.dtype, images.shape, images.stride()) == (
            expected.dtype, expected.shape, expected.stride(),
        )  # fmt: skip
        assert torch.equal(images, expected)
        assert torch.equal(labels, numbers)
        assert labels.dtype == numbers.dtype


@pytest.mark.parametrize("workers", [0, 2])
def test_order_and_the_state_of_the_generator_are_those_of_torch(
    folder: Path, workers: int
) -> None:
    dataset = ImageFolder(folder, EVALUATIONS["v1"])
    for settings in (
        {"batch_size": 5, "shuffle": True}, {"batch_size": 5, "shuffle": True, "drop_last": True},
        {"batch_sampler": BatchSampler([3, 1, 1, 20, 7], 2, drop_last=False)},
    ):  # fmt: skip
        loader: Any = DataLoader(dataset, **settings)  # type: ignore[arg-type]
        quick: Any = fast(loader, workers=workers or None)
        expected = [labels.tolist() for _, labels in batches_of(loader, seed=7)]
        state = torch.get_rng_state()
        assert [labels.tolist() for _, labels in batches_of(quick, seed=7)] == expected
        assert torch.equal(torch.get_rng_state(), state)
        assert [labels.tolist() for _, labels in batches_of(quick, seed=8)] != expected or (
            "shuffle" not in settings
        )


def test_sampler_of_several_processes_is_used(folder: Path) -> None:
    dataset = ImageFolder(folder, EVALUATIONS["v1"])
    sampler = DistributedSampler(dataset, num_replicas=3, rank=1, shuffle=True)
    quick = fast(DataLoader(dataset, batch_size=3, sampler=sampler))
    found = []
    for epoch in range(2):
        quick.sampler.set_epoch(epoch)
        expected = [dataset.targets[index] for index in sampler]
        found.append([int(label) for _, labels in quick for label in labels])
        assert found[-1] == expected
    assert quick.batch_size == 3


def test_samples_do_not_depend_on_who_reads_them(folder: Path) -> None:
    dataset = ImageFolder(folder, TRAINING)
    loader = DataLoader(dataset, batch_size=5, shuffle=True)
    ways = [
        fast(loader, threads=1), fast(loader, threads=3), fast(loader, workers=1),
        fast(loader, workers=2), fast(DataLoader(dataset, batch_size=8, shuffle=True)),
    ]  # fmt: skip
    found = [torch.cat([images for images, _ in batches_of(way)]) for way in ways]
    for other in found[1:]:
        assert torch.equal(found[0], other)
    again = torch.cat([images for images, _ in batches_of(ways[0], seed=1)])
    assert not torch.equal(found[0], again)
    epochs = [torch.cat([images for images, _ in ways[0]]) for _ in range(2)]
    assert not torch.equal(*epochs)


class Paths(Dataset[Any]):
    """As people write it: their own reading, their own random numbers, a dictionary."""

    def __init__(self, root: Path, transform: Any) -> None:
        self.paths = sorted(root.glob("*/*.j*"))
        self.transform = transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        with Image.open(self.paths[index]) as opened:
            image = opened.convert("RGB")
        size = image.size
        chance = random.random(), float(np.random.random()), float(torch.rand(()))
        return {"image": self.transform(image), "size": size, "chance": chance, "name": str(index)}


def test_data_set_of_ones_own(folder: Path) -> None:
    dataset = Paths(folder, EVALUATIONS["v1"])
    loader = DataLoader(dataset, batch_size=4)
    quick = fast(loader)
    assert "the code of Paths runs as it is; read by the training process" in quick.report()
    before = random.getstate(), torch.get_rng_state()
    found, expected = batches_of(quick), list(loader)
    for a, b in zip(found, expected, strict=True):
        assert a.keys() == b.keys()
        assert a["name"] == b["name"]
        assert all(torch.equal(x, y) for x, y in zip(a["size"], b["size"], strict=True))
        assert torch.equal(a["image"], b["image"])
    chances = [torch.stack(batch["chance"]) for batch in found]
    by_workers = batches_of(fast(loader, workers=2))
    for mine, batch in zip(chances, by_workers, strict=True):
        assert torch.equal(mine, torch.stack(batch["chance"]))
    assert len({float(value) for chance in chances for value in chance[0]}) == len(dataset)
    random.setstate(before[0])
    list(quick)
    assert random.getstate() == before[0], "the generators of the training stay as they are"


def test_pixels_are_there_for_whoever_looks(folder: Path) -> None:
    class Looking(Paths):
        def __getitem__(self, index: int) -> Any:
            file = io.BytesIO(self.paths[index].read_bytes())
            file.read(10)  # PIL begins at the beginning
            image = Image.open(file)
            with Image.open(io.BytesIO(self.paths[index].read_bytes())) as opened:
                access = opened.load()
                corner = access[3, 2]
                opened.convert("RGB").putpixel((0, 0), (1, 2, 3))
            values = [
                np.asarray(image.convert("RGB")), np.asarray(image.convert("L")), np.asarray(image),
                np.asarray(image.resize((9, 7))), np.asarray(image.copy().rotate(90)),
                np.array(image.getexif().get(0x0112, 1)), np.array(corner),
                np.array(sorted(map(str, image.info))), np.array([image.format, image.mode]),
                np.array([str(image.convert("RGB").format), str(image.copy().format)]),
            ]  # fmt: skip
            return [value.tolist() for value in values]

    loader = DataLoader(Looking(folder, None), batch_size=1, collate_fn=list)
    assert list(fast(loader, threads=1)) == list(loader)


def test_two_views_and_parts_of_data_sets(folder: Path) -> None:
    class TwoViews:
        def __call__(self, image: Image.Image) -> Any:
            return TRAINING(image), TRAINING(image)

    both = ConcatDataset([ImageFolder(folder, TwoViews())] * 2)
    loader = DataLoader(Subset(both, range(3, 30)), batch_size=9)
    for (one, other), labels in fast(loader, threads=2):
        assert one.shape == other.shape == (9, 3, 24, 24)
        assert not torch.equal(one, other)
        assert labels.shape == (9,)
    plain = ConcatDataset([ImageFolder(folder, TRAINING)] * 2)
    quick = fast(DataLoader(Subset(plain, range(3, 30)), batch_size=9))
    assert quick.takeover.is_complete
    assert quick.report() == (
        "to be taken over: reading, RandomResizedCrop, RandomHorizontalFlip, ToTensor, Normalize; "
        "read by threads"
    )
    [first, *_] = batches_of(quick)
    assert first[0].untyped_storage().nbytes() == first[0].nbytes, "the memory of the batch itself"


def test_a_transform_that_cannot_be_copied_is_taken_over(folder: Path) -> None:
    crop = v1.CenterCrop(24)
    crop.lock = threading.Lock()
    batches = fast(DataLoader(ImageFolder(folder, v1.Compose([crop, *NUMBERS])), batch_size=6))
    assert [len(x) for x, _ in batches] == [6] * 4
    assert "CenterCrop" in batches.report()


def test_what_is_not_known_runs_as_it_is(folder: Path) -> None:
    transform = v1.Compose(
        [
            v1.Resize(40),
            v1.CenterCrop(32),
            v1.Grayscale(3),
            v1.ToTensor(),
            v1.Lambda(lambda x: 2 * x),
        ]
    )
    loader = DataLoader(ImageFolder(folder, transform), batch_size=6)
    quick = fast(loader)
    assert quick.report() == (
        "to be taken over: reading, Resize, CenterCrop, ToTensor; as they are: Grayscale, Lambda; "
        "read by the training process"
    )
    for (images, _), (expected, _) in zip(quick, loader, strict=True):
        assert float((images - expected).abs().max()) < 2.5 / 255
    unknown = DataLoader(ImageFolder(folder, v1.Compose([v1.Lambda(np.asarray)])), collate_fn=list)
    for (a,), (b,) in zip(fast(unknown), unknown, strict=True):
        assert np.array_equal(a[0], b[0])


@pytest.mark.parametrize("device", [None, "cpu"])
def test_code_behind_the_transforms_sees_what_they_give(folder: Path, device: str | None) -> None:
    """Also where it gives a view of an image that lies in the memory of the batch."""

    class Turned(ImageFolder):
        def __getitem__(self, index: int) -> Any:
            image, label = super().__getitem__(index)
            assert image.dtype == torch.float32
            return image.transpose(1, 2), image.mean(), image, label

    loader = DataLoader(Turned(folder, EVALUATIONS["v1"]), batch_size=6)
    quick = fast(loader, threads=2, device=device)
    for found, expected in zip(quick, loader, strict=True):
        for mine, other in zip(found, expected, strict=True):
            assert mine.shape == other.shape
            assert torch.equal(mine, other)
        assert torch.equal(found[0].transpose(2, 3), found[2])


def test_the_order_of_the_transforms_is_kept(folder: Path) -> None:
    """What is erased to 0 before it is normalized has another value than what is erased behind it."""
    erasing = v1.RandomErasing(1, (0.8, 0.8), (1, 1))
    for transforms in ([v1.ToTensor(), erasing, NUMBERS[1]], [*NUMBERS, erasing]):
        transform = v1.Compose([v1.Resize((40, 41)), *transforms])
        loader = DataLoader(ImageFolder(folder, transform), batch_size=24)
        quick = fast(loader, threads=1)
        assert quick.takeover.is_complete
        [(images, _)], [(expected, _)] = batches_of(quick), batches_of(loader)
        found, wanted = (x.flatten(2).median(2).values for x in (images, expected))
        torch.testing.assert_close(found, wanted)


def test_transforms_that_give_several_images(folder: Path) -> None:
    transform = v1.Compose([
        v1.Resize((40, 44)), v1.FiveCrop(24),
        v1.Lambda(lambda crops: torch.stack([v1.ToTensor()(crop) for crop in crops])),
    ])  # fmt: skip
    loader = DataLoader(ImageFolder(folder, transform), batch_size=6)
    quick = fast(loader)
    assert "as they are: FiveCrop, Lambda" in quick.report()
    for (images, _), (expected, _) in zip(quick, loader, strict=True):
        assert images.shape == expected.shape == (6, 5, 3, 24, 24)
        assert torch.equal(images, expected)


def test_transforms_that_change_between_epochs_or_are_made_anew(folder: Path) -> None:
    dataset = ImageFolder(folder, v1.Compose([v1.RandomResizedCrop(24), v1.ToTensor()]))
    quick = fast(DataLoader(dataset, batch_size=24))
    for side in (24, 32):
        dataset.transform.transforms[0].size = (side, side)
        [(images, _)] = quick
        assert images.shape[2:] == (side, side)
    dataset.transform.transforms[0] = v1.Resize((20, 22))
    [(images, _)] = quick
    assert images.shape[2:] == (20, 22)

    class Anew(ImageFolder):
        def __getitem__(self, index: int) -> Any:
            self.transform = v1.Compose([v1.Resize((8, 9)), v1.ToTensor()])
            return super().__getitem__(index)

    gc.collect()
    before = len(interception._plans)
    list(fast(DataLoader(Anew(folder), batch_size=5), threads=1))
    gc.collect()
    assert len(interception._plans) <= before + 1, "a plan ends with its Compose"


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_over_several_epochs(folder: Path, persistent: bool) -> None:
    loader: Any = DataLoader(
        Paths(folder, EVALUATIONS["v1"]), batch_size=4, shuffle=True, num_workers=1,
        persistent_workers=persistent,
    )  # fmt: skip
    quick = fast(loader)
    assert quick.report().endswith("read by 1 worker process")
    torch.manual_seed(0)
    expected = [[batch["name"] for batch in loader] for _ in range(3)]
    torch.manual_seed(0)
    assert [[batch["name"] for batch in quick] for _ in range(3)] == expected


def test_hugging_face_data_set(folder: Path) -> None:
    datasets = pytest.importorskip("datasets")
    files = sorted(map(str, folder.glob("*/*.jpg")))
    table = datasets.Dataset.from_dict({"image": files, "label": list(range(len(files)))})
    table = table.cast_column("image", datasets.Image())

    def transform(rows: dict[str, Any]) -> dict[str, Any]:
        images = [EVALUATIONS["v1"](image.convert("RGB")) for image in rows["image"]]
        return {"x": images, "label": rows["label"]}

    loader = DataLoader(table.with_transform(transform), batch_size=5)
    quick = fast(loader)
    assert "the code of Dataset runs as it is" in quick.report()
    for found, expected in zip(quick, loader, strict=True):
        assert found["label"].tolist() == expected["label"].tolist()
        assert torch.equal(found["x"], expected["x"])


@pytest.mark.parametrize("name", ["v1", "v2", "v1 levels"])
def test_batches_that_are_lists_keep_their_own_images(folder: Path, name: str) -> None:
    loader = DataLoader(
        ImageFolder(folder, EVALUATIONS[name]), batch_size=7, collate_fn=lambda samples: samples
    )
    for samples, expected in zip(fast(loader), loader, strict=True):
        for (image, label), (other, number) in zip(samples, expected, strict=True):
            assert type(image) is type(other)
            assert label == number
            assert torch.equal(image, other)
            assert image.stride() == other.stride()
            assert image.untyped_storage().nbytes() == image.nbytes


@pytest.mark.parametrize("channels_last", [False, True])
def test_levels_that_are_normalized_on_the_device(folder: Path, channels_last: bool) -> None:
    loader = DataLoader(ImageFolder(folder, TRAINING), batch_size=6)
    plain = batches_of(fast(loader, channels_last=channels_last))
    device = batches_of(fast(loader, channels_last=channels_last, device="cpu"))
    for (a, labels), (b, numbers) in zip(plain, device, strict=True):
        assert a.is_contiguous(memory_format=torch.channels_last) is channels_last
        assert a.stride() == b.stride()
        assert torch.equal(labels, numbers)
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    [(images, labels), *_] = fast(loader, device="meta")
    assert images.is_meta
    assert labels.is_meta
    assert (images.dtype, images.shape) == (torch.float32, (6, 3, 24, 24))


def test_damaged_file_is_told_as_before(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    whole = next(folder.glob("a/*.jpg")).read_bytes()
    (tmp_path / "a/cut.jpg").write_bytes(whole[: len(whole) // 2])
    loader = DataLoader(ImageFolder(tmp_path, TRAINING), batch_size=1)
    messages = []
    for way in (loader, fast(loader), fast(loader, workers=1)):
        with pytest.raises(OSError, match="truncated") as caught:
            list(way)
        messages.append(str(caught.value).splitlines()[-1].split("OSError: ")[-1])
    assert len(set(messages)) == 1


def test_elsewhere_nothing_has_changed(folder: Path) -> None:
    path = folder / "a" / "00.jpg"
    list(fast(DataLoader(ImageFolder(folder, TRAINING), batch_size=6)))
    data = path.read_bytes()
    assert type(Image.open(io.BytesIO(data))).__name__ == "JpegImageFile"
    found: list[Any] = []

    class Reading(Paths):
        def __getitem__(self, index: int) -> Any:
            thread = threading.Thread(target=lambda: found.append(Image.open(io.BytesIO(data))))
            thread.start()
            thread.join()
            return type(Image.open(io.BytesIO(data))).__name__

    loader = DataLoader(Reading(folder, None), batch_size=99)
    assert set(next(iter(fast(loader)))) == {"LazyImage"}
    assert next(iter(loader))[0] == "JpegImageFile"
    assert {type(image).__name__ for image in found} == {"JpegImageFile"}
    torch.manual_seed(3)
    image = PIL.Image.open(io.BytesIO(data)).convert("RGB")
    one = TRAINING(image)
    torch.manual_seed(3)
    step: Any = image
    for transform in TRAINING.transforms:
        step = transform(step)
    assert torch.equal(one, step)


def test_loaders_that_are_not_taken_over() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(5))

    quick = fast(DataLoader(Stream(), batch_size=2))
    assert [batch.tolist() for batch in quick] == [[0, 1], [2, 3], [4]]
    assert quick.report().startswith("nothing is taken over")
    single: Any = DataLoader([1, 2, 3], batch_size=None)  # type: ignore[arg-type]
    assert [int(value) for value in fast(single)] == [1, 2, 3]


def test_memory_is_used_again_when_nobody_holds_the_batch(folder: Path) -> None:
    loader = DataLoader(ImageFolder(folder, TRAINING), batch_size=4)
    quick = fast(loader, threads=2)
    kept = batches_of(quick)
    copies = [images.clone() for images, _ in kept]
    for _ in range(3):
        list(quick)
    for (images, _), copy in zip(kept, copies, strict=True):
        assert torch.equal(images, copy), "a batch that somebody holds is not overwritten"
    places = set()
    for _ in range(4):
        for images, _ in quick:
            places.add(images.data_ptr())
            part = images[0, 0]
            del images
            copy = part.clone()
        assert torch.equal(part, copy)
    assert len(places) <= 8, "of 24 batches"


def test_refusals(folder: Path) -> None:
    loader = DataLoader(ImageFolder(folder, TRAINING))
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: fast([1, 2]), "takes a torch.utils.data.DataLoader, got list"),  # type: ignore[arg-type]
        (lambda: fast(fast(loader)), "called on this loader already"),  # type: ignore[arg-type]
        (lambda: fast(loader, threads=0), "threads must be at least 1, got 0"),
        (lambda: fast(loader, workers=-1), "workers must be at least 0, got -1"),
        (lambda: fast(loader, threads=1, workers=1), "contradict each other"),
    ]
    for call, message in cases:
        with pytest.raises(InputError, match=message):
            call()


# ---------------------------------------------------------------- distributions

COUNT = 600


def differ(ours: list[float], theirs: list[float], *, near: float = 0.01) -> bool:
    """Kolmogorov and Smirnov's test of two samples, at an error of 1e-4; values so near are the same."""
    places = np.array(theirs)
    share = np.searchsorted(np.sort(places), places, side="right") / len(places)
    low, high = (
        np.searchsorted(np.sort(ours), places + by, side="right") / len(ours)
        for by in (-near, near)
    )
    limit = math.sqrt(-math.log(1e-4 / 2) / 2 * (1 / len(ours) + 1 / len(theirs)))
    return bool((low - share > limit).any() or (share - high > limit).any())


class OnePicture(Dataset[Any]):
    def __init__(self, transform: Any, encoded: bytes) -> None:
        self.transform, self.encoded = transform, encoded

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return self.transform(Image.open(io.BytesIO(self.encoded)).convert("RGB"))


def figures(images: torch.Tensor) -> dict[str, list[float]]:
    """What a crop, a flip, a change of color and an erasure leave in pictures of two ramps."""
    x, y, noise = images[:, 0], images[:, 1], images[:, 2]
    left, right = x[:, :, 0].median(1).values, x[:, :, -1].median(1).values
    top, bottom = y[:, 0].median(1).values, y[:, -1].median(1).values
    return {
        "left": torch.minimum(left, right).tolist(), "right": torch.maximum(left, right).tolist(),
        "top": torch.minimum(top, bottom).tolist(), "bottom": torch.maximum(top, bottom).tolist(),
        "turned": (right < left).float().tolist(), "upside": (bottom < top).float().tolist(),
        "mean": images.flatten(1).mean(1).tolist(), "blue": noise.flatten(1).mean(1).tolist(),
        "contrast": images.flatten(1).std(1).tolist(),
        "empty": (images == 0).all(1).flatten(1).float().mean(1).tolist(),
    }  # fmt: skip


TRAININGS = {
    "crop": [v1.RandomResizedCrop(20, scale=(0.2, 0.7)), v1.RandomHorizontalFlip(0.3), v1.ToTensor()],
    "crop v2": [v2.ToImage(), v2.RandomResizedCrop(20), v2.RandomVerticalFlip(0.4), V2_NUMBERS[0]],
    "shifted": [v1.RandomCrop(52, padding=(6, 9)), v1.RandomHorizontalFlip(), v1.ToTensor()],
    "shifted v2": [v2.RandomCrop(40, padding=(20, 2)), v2.ToImage(), V2_NUMBERS[0]],
    "shifted to a side": [v2.RandomCrop(40, padding=(1, 30, 3, 4)), v2.ToImage(), V2_NUMBERS[0]],
    "jitter": [v1.Resize((20, 24)), v1.ColorJitter(0.4, (0.2, 1.1), 0.7, 0.1), v1.ToTensor()],
    "choice": [
        v1.Resize((20, 24)),
        v1.RandomChoice([v1.ColorJitter(0.9), v1.RandomVerticalFlip(1)], p=[0.3, 0.7]),
        v1.RandomApply([v1.RandomHorizontalFlip(1)], p=0.2), v1.ToTensor(),
    ],
    "randaugment": [v1.Resize((48, 48)), v1.RandAugment(2, 13), v1.ToTensor()],
    "autoaugment": [v1.Resize((48, 48)), v1.AutoAugment(), v1.ToTensor()],
    "autoaugment v2": [
        v2.Resize((48, 48)), v2.AutoAugment(v1.AutoAugmentPolicy.SVHN), v2.ToImage(), V2_NUMBERS[0],
    ],
    "trivial": [v1.Resize((48, 48)), v1.TrivialAugmentWide(), v1.ToTensor()],
    "erasing": [v1.Resize((32, 32)), v1.ToTensor(), v1.RandomErasing(0.6, (0.1, 0.4))],
    "noise": [v1.Resize((32, 32)), v1.ToTensor(), v1.RandomErasing(1, (0.5, 0.9), value="random")],
}  # fmt: skip


def check_distributions(transform: Any) -> None:
    data = io.BytesIO()
    picture(60, 64).save(data, "JPEG", quality=100, subsampling=0)
    loader = DataLoader(OnePicture(transform, data.getvalue()), batch_size=COUNT)
    quick = fast(loader, threads=1)
    assert not quick.takeover.left, quick.report()
    [ours], [theirs] = batches_of(quick), batches_of(loader)
    found, expected = figures(ours), figures(theirs)
    assert [name for name in found if differ(found[name], expected[name])] == []


@pytest.mark.parametrize("name", TRAININGS)
def test_distributions_are_torchvisions(name: str) -> None:
    check_distributions(v1.Compose(TRAININGS[name]))


@pytest.mark.parametrize(
    "settings",
    [
        {"color_jitter": None}, {"color_jitter": 0.4, "hflip": 0.2, "vflip": 0.6},
        {"color_jitter": None, "re_prob": 0.5, "re_count": 3},
        {"color_jitter": None, "re_prob": 0.9, "re_mode": "pixel", "interpolation": "bicubic"},
    ],
)  # fmt: skip
def test_distributions_are_timms(settings: dict[str, Any]) -> None:
    check_distributions(timm.data.create_transform(32, is_training=True, **settings))


def test_a_wrong_distribution_is_found() -> None:
    generator = np.random.default_rng(0)
    values = generator.random(COUNT).tolist()
    assert not differ(values, generator.random(COUNT).tolist())
    assert differ(values, (generator.random(COUNT) * 0.8).tolist())


@pytest.mark.parametrize("side", [224, 64])
def test_crops_are_as_sharp_as_pils(side: int) -> None:
    """64 dB here; decoded at half of its size first, the picture would be at 40 and 53."""
    rng = np.random.default_rng(0)
    waves = np.cumsum(np.cumsum(rng.normal(0, 2, (375, 500, 3)), axis=0), axis=1)
    texture = rng.normal(0, 12, (375, 500, 3))
    pixels = np.clip(waves / np.abs(waves).max() * 90 + 128 + texture, 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=92)
    box = (10, 40, 330, 420)
    ours = resized_part(Picture(file.getvalue()), box, (side, side), channels=3)
    top, left, height, width = box
    whole = Image.open(file).resize(
        (side, side), Image.Resampling.BILINEAR, (left, top, left + width, top + height)
    )
    square = float(((ours.astype(float) - np.asarray(whole)) ** 2).mean())
    assert 10 * math.log10(255**2 / square) > 60
