"""`fast` around data sets that read through fsspec, in the ways people write them: a plain loader's bits."""

import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from PIL import Image, ImageFile, ImageOps
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from flambeau import fast
from object_server import ObjectServer, serving

NUM = 12
READING = "reading, Resize, CenterCrop, ToTensor, Normalize"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bucket")
    generator = np.random.default_rng(0)
    for number in range(NUM):
        pixels = generator.integers(0, 255, (6, 7, 3), np.uint8)
        image = Image.fromarray(pixels).resize((60 + number, 50 + number))
        image.save(folder / f"{number:02}.{('jpg', 'png')[number % 2]}", quality=92)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ObjectServer]:
    with serving(folder, lists=True) as serves:
        yield serves


def within(url: str) -> Image.Image:
    with fsspec.open(url, "rb") as file:
        return Image.open(file).convert("RGB")


def of_cat_file(url: str) -> Image.Image:
    system, path = fsspec.core.url_to_fs(url)
    return Image.open(io.BytesIO(system.cat_file(path))).convert("RGB")


def of_an_open_file(url: str) -> Image.Image:
    system, path = fsspec.core.url_to_fs(url)
    return Image.open(system.open(path)).convert("RGB")


def unconverted(url: str) -> Image.Image:
    system, path = fsspec.core.url_to_fs(url)
    return Image.open(system.open(path))


def within_both(url: str) -> Image.Image:
    with fsspec.open(url) as file, Image.open(file) as image:
        return image.convert("RGB")


def of_bytes(url: str) -> Image.Image:
    with fsspec.open(url) as file:
        content = file.read()
    return Image.open(io.BytesIO(content)).convert("RGB")


def by_blocks(url: str) -> Image.Image:
    with fsspec.open(url, block_size=1000) as file:
        return Image.open(file).convert("RGB")


def of_formats(url: str) -> Image.Image:
    with fsspec.open(url) as file:
        return Image.open(file, formats=["jpeg", "PNG"]).convert("RGB")


def verified(url: str) -> Image.Image:
    with fsspec.open(url) as file:
        Image.open(file).verify()
        file.seek(0)
        return Image.open(file).convert("RGB")


def loaded(url: str) -> Image.Image:
    """Of a file that is closed by then: `load` has taken all of it."""
    with fsspec.open(url) as file:
        image = Image.open(file)
        image.load()
    return image.convert("RGB")


def loaded_within_both(url: str) -> Image.Image:
    with fsspec.open(url) as file, Image.open(file) as image:
        image.load()
    assert image.info is not None
    return image.convert("RGB")


def parsed(url: str) -> Image.Image:
    parser = ImageFile.Parser()
    with fsspec.open(url) as file:
        while content := file.read(700):
            parser.feed(content)
    return parser.close().convert("RGB")


def transposed(url: str) -> Image.Image:
    with fsspec.open(url) as file:
        return ImageOps.exif_transpose(Image.open(file)).convert("RGB")


def loaded_and_turned(url: str) -> Image.Image:
    with fsspec.open(url) as file:
        image = Image.open(file)
        image.load()
    return image.rotate(3).convert("RGB")


def loaded_and_pickled(url: str) -> Image.Image:
    with fsspec.open(url) as file:
        image = Image.open(file)
        image.load()
    copied: Image.Image = pickle.loads(pickle.dumps(image))
    return copied.convert("RGB")


def loaded_and_changed(url: str) -> Image.Image:
    with fsspec.open(url) as file:
        image = Image.open(file)
        pixels = image.load()
    assert pixels is not None
    pixels[3, 4] = (1, 2, 3)
    return image.convert("RGB")


TAKEN = (
    within,
    of_cat_file,
    of_an_open_file,
    unconverted,
    within_both,
    of_bytes,
    by_blocks,
    of_formats,
    verified,
    loaded,
    loaded_within_both,
    parsed,
    transposed,
)
LEFT = (loaded_and_turned, loaded_and_pickled, loaded_and_changed)


class Far(Dataset[tuple[Any, int]]):
    def __init__(self, root: str, names: list[str], read: Callable[[str], Image.Image]) -> None:
        self.root, self.names, self.read = root, names, read
        self.transform = transforms.Compose(
            [
                transforms.Resize(40),
                transforms.CenterCrop(32),
                transforms.ToTensor(),
                transforms.Normalize([0.5] * 3, [0.25] * 3),
            ]
        )

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(self.read(f"{self.root}/{self.names[index]}")), index


class InBulk(Far):
    """Asks for all objects of a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[tuple[Any, int]]:
        system, path = fsspec.core.url_to_fs(self.root)
        paths = [f"{path}/{self.names[index]}" for index in indices]
        content = system.cat(paths)
        return [
            (self.transform(Image.open(io.BytesIO(content[one])).convert("RGB")), index)
            for one, index in zip(paths, indices, strict=True)
        ]


def same(dataset: Dataset[Any], **reading: Any) -> str:
    """What `fast` reports after it has given the batches of the plain loader."""
    plain = list(DataLoader(dataset, batch_size=5))
    loader = fast(DataLoader(dataset, batch_size=5), **reading)
    found = list(loader)
    assert len(found) == len(plain)
    for (images, numbers), (expected, expected_numbers) in zip(found, plain, strict=True):
        assert torch.equal(images, expected)
        assert torch.equal(numbers, expected_numbers)
    return loader.report()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("read", [*TAKEN, *LEFT], ids=lambda read: read.__name__)
@pytest.mark.parametrize("kind", ["memory", "file", "http"])
def test_the_bits_of_the_plain_loader(
    folder: Path, server: ObjectServer, kind: str, read: Callable[[str], Image.Image]
) -> None:
    root = {"memory": "memory://bucket", "http": server.url, "file": f"file://{folder}"}[kind]
    if kind == "memory":
        for name in names(folder):
            fsspec.filesystem("memory").pipe_file(f"/bucket/{name}", (folder / name).read_bytes())
    report = same(Far(root, names(folder), read))
    assert (f"taken over in {NUM} samples: {READING};" in report) == (read in TAKEN), report


@pytest.mark.parametrize("reading", [{"threads": 3}, {"workers": 2}])
@pytest.mark.parametrize("kind", [Far, InBulk])
def test_threads_and_workers(folder: Path, kind: type[Far], reading: dict[str, int]) -> None:
    report = same(kind(f"file://{folder}", names(folder), within), **reading)
    assert READING.split(",")[0] in report


def test_objects_of_a_batch_at_once(folder: Path, server: ObjectServer) -> None:
    report = same(InBulk(server.url, names(folder), within))
    assert f"taken over in {NUM} samples: {READING};" in report


def test_threads_ask_at_the_same_moment(folder: Path, server: ObjectServer) -> None:
    report = same(Far(server.url, names(folder), of_cat_file), threads=4)
    assert report.endswith("read by threads")


def test_a_file_that_is_closed_before_it_is_loaded_fails_as_by_pil(folder: Path) -> None:
    def closed(url: str) -> Image.Image:
        with fsspec.open(url) as file:
            image = Image.open(file)
        return image.convert("RGB")

    dataset = Far(f"file://{folder}", names(folder), closed)
    with pytest.raises(ValueError, match="closed file") as expected:
        next(iter(DataLoader(dataset, batch_size=5)))
    with pytest.raises(ValueError, match="closed file") as found:
        next(iter(fast(DataLoader(dataset, batch_size=5))))
    assert str(found.value) == str(expected.value)


def test_a_format_that_is_not_asked_for_is_refused_as_by_pil(folder: Path) -> None:
    def jpeg(url: str) -> Image.Image:
        with fsspec.open(url) as file:
            return Image.open(file, formats=("JPEG",)).convert("RGB")

    dataset = Far(f"file://{folder}", ["01.png"], jpeg)
    for loader in (DataLoader(dataset), fast(DataLoader(dataset))):
        with pytest.raises(OSError, match="cannot identify image file"):
            next(iter(loader))
